"""Index from raw ids to rows, for serving code without torchrec: :class:`RawIdIndex` and its base class.

Notation: ``R`` is the number of rows of a mapping, ``N`` the number of ids of a call.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from delta_tracker.arguments import check_count
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.raw_ids.raw_id_map import NO_OWNER, RawIdMap, check_owners, default_rows, defaults_of
from delta_tracker.rows import copy_from_host, to_device
from delta_tracker.types import Bucket, Identity

_NO_ROW = -1
_NUM_DIMS = {"owners": 1, "hash_size": 1, "buckets": 2}  # number of dimensions of the tensors of a saved index


class SortedMap(RawIdMap):
    """Base class of mappings with two tensors: the raw ids in ascending order, and the row of each raw id.

    Rows without an owner come last, with the raw id :data:`~delta_tracker.raw_ids.raw_id_map.NO_OWNER`. :meth:`unmap`
    maps a raw id to the default row of its bucket instead of removing it. The tensors are modified in place.
    """

    @property
    @abstractmethod
    def identity(self) -> Identity | None:
        """Rule that assigns raw ids to buckets; None before the first version."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the raw ids in ascending order, ``[R]`` int64, and the global row id of each raw id, ``[R]`` int64.

        The row of an unmapped raw id is the default row of its bucket, or -1 if the bucket has no default row.
        """

    @property
    def memory(self) -> Tensor:
        """Global ids of the rows, ``[R]`` int64, in the order of the raw ids."""
        return self.tensors()[1]

    def owners(self) -> Tensor:
        """Return the raw id of each row, ``[R]`` int64 on the CPU; :data:`NO_OWNER` for a row without a raw id."""
        first, end = self.rows
        raw_ids, slots = (each.cpu() for each in self.tensors())
        if len(slots) and not first <= int(slots.min()) <= int(slots.max()) < end:
            is_inside = (slots >= first) & (slots < end)
            raw_ids, slots = raw_ids[is_inside], slots[is_inside]
        found = torch.full((end - first,), NO_OWNER, device="cpu")
        found[slots - first] = raw_ids
        for default in self._defaults():
            if first <= default < end:
                found[default - first] = NO_OWNER
        return found

    def slots_of(self, raw_ids: Tensor) -> Tensor:
        """Return the global id of each raw id's row, on the CPU. See :meth:`RawIdMap.slots_of`."""
        return self.find(to_device(raw_ids, self.memory.device)).cpu()

    def find(self, raw_ids: Tensor) -> Tensor:
        """Return the row of each raw id, in the shape of ``raw_ids``; -1 for ids that are not in the mapping.

        ``raw_ids`` must be int64 and on the device of the mapping.
        """
        known_ids, slots = self.tensors()
        indices = torch.searchsorted(known_ids[:-1], raw_ids)
        is_known = (known_ids[indices] == raw_ids) & (raw_ids != NO_OWNER)
        return torch.where(is_known, slots[indices], _NO_ROW)

    def unmap(self, slots: Tensor, owners: Tensor) -> None:  # noqa: ARG002
        """Map the raw ids ``owners`` to the default rows of their buckets. See :meth:`RawIdMap.unmap`."""
        if self.identity is not None:  # otherwise the mapping is empty
            known_ids, held = self.tensors()
            owners = to_device(owners, held.device)
            held[torch.searchsorted(known_ids[:-1], owners)] = self._local_defaults(self.identity, owners)

    def reroute(self, identity: Identity) -> None:
        """Map the raw ids that :meth:`unmap` has unmapped to the default rows of their buckets in ``identity``.

        Takes O(``R``) time.
        """
        first, end = self.rows
        raw_ids, slots = self.tensors()
        is_former = torch.zeros(end - first + 1, dtype=torch.bool, device="cpu")  # the last: ids without a row
        is_former[[-1, *(slot - first for slot in self._defaults() if first <= slot < end)]] = True
        at = torch.where(slots < first, end - first, slots - first)
        indices = (to_device(is_former, at.device)[at] & (raw_ids != NO_OWNER)).nonzero().flatten()
        slots[indices] = self._local_defaults(identity, raw_ids[indices])

    def prepare(self, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sorted raw ids and their rows, on the CPU. Rows without an owner come last."""
        raw_ids, indices = owners.sort(stable=True)
        return raw_ids, indices + self.rows[0]

    def map(self, ready: object) -> None:
        """Replace the mapping with the result of :meth:`prepare`. An interrupted call may leave all raw ids unknown."""
        raw_ids, slots = cast(tuple[Tensor, Tensor], ready)
        known_ids, held = self.tensors()
        known_ids.fill_(NO_OWNER)
        copy_from_host(held, slots)
        copy_from_host(known_ids, raw_ids)

    def _local_defaults(self, identity: Identity, raw_ids: Tensor) -> Tensor:
        """Return the default row of each raw id. Use the last row of :attr:`rows` for default rows outside ``rows``."""
        first, end = self.rows
        found = defaults_of(identity, raw_ids)
        return torch.where((found == _NO_ROW) | ((found >= first) & (found < end)), found, end - 1)

    def _defaults(self) -> tuple[int, ...]:
        """Return the default rows of the current :attr:`identity`. A default row may be outside :attr:`rows`."""
        return () if self.identity is None else self.identity.defaults


class RawIdIndex(SortedMap):
    """Index from the raw ids of a table to its rows, on the CPU, for serving code without torchrec.

    Pass it in ``raw_ids`` of a :class:`~delta_tracker.predictor.served_model.ModelTarget`. The predictor updates the
    index. Look up row ids and read the rows in one ``with predictor.reading()`` block. Serving code may call
    :meth:`rows_of`, :meth:`state_dict` and :meth:`load_state_dict`; the predictor calls the other methods. The index
    takes 16 bytes per row, and up to 60 more while a version that changes the owners of all rows is applied.

    Args:
        num_rows: number of rows of the table.

    Raises:
        InvalidArgumentError: if ``num_rows`` is not an integer of 1 or more.

    Example:
        >>> index = RawIdIndex(4)
        >>> index.rows_of(torch.tensor([7, 8]))  # before the first version
        tensor([-1, -1])
    """

    def __init__(self, num_rows: int) -> None:
        check_count("num_rows", num_rows)
        self.rows = (0, num_rows)
        self._slots = torch.arange(num_rows, device="cpu")
        self._raw_ids = torch.full_like(self._slots, NO_OWNER)
        self._identity: Identity | None
        self._route_by(None)

    @property
    def identity(self) -> Identity | None:
        """Rule that assigns raw ids to buckets; None before the first version."""
        return self._identity

    def rows_of(self, raw_ids: Tensor) -> Tensor:
        """Return the row of each raw id. Call it inside ``predictor.reading()``.

        Args:
            raw_ids: int64 raw ids of any shape, on the CPU. If the trainer's collision module has an
                ``input_hash_func``, apply it first.

        Returns:
            int64 row ids in the shape of ``raw_ids``. The row of an unknown id is the default row of its bucket, or -1
            if the trainer's collision module has no default rows. Before the first version, all row ids are -1. Filter
            out -1 before you index a tensor, where -1 would select the last row.

        Raises:
            InvalidArgumentError: if ``raw_ids`` is not an int64 tensor on the CPU.
        """
        if not isinstance(raw_ids, Tensor):
            raise InvalidArgumentError("raw_ids", raw_ids, "Pass int64 ids on the CPU, such as torch.tensor([7, 42])")
        if raw_ids.dtype != torch.int64 or raw_ids.device.type != "cpu":
            raise InvalidArgumentError("raw_ids", (raw_ids.dtype, str(raw_ids.device)), "Pass int64 ids on the CPU")
        found = self.find(raw_ids)
        if self._identity is None:
            return found
        return torch.where(found == _NO_ROW, defaults_of(self._identity, raw_ids, self._default_rows), found)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the index as int64 tensors.

        Save the state together with the table and the predictor's position, in one ``with predictor.reading()`` block.

        Returns:
            ``owners``, ``[num_rows]``: raw id of each row, 2**63 - 1 for a row without a raw id. ``hash_size``,
            ``[1]``: size of the range of raw ids. ``buckets``, ``[B, 3]``: first row, end and default row (or -1) of
            each bucket. ``hash_size`` and ``buckets`` are empty before the first version.
        """
        identity = self._identity
        buckets = () if identity is None else identity.buckets
        records = [(*each.rows, _NO_ROW if each.default is None else each.default) for each in buckets]
        return {
            "owners": self.owners(),
            "hash_size": self._slots.new_tensor([] if identity is None else [identity.hash_size]),
            "buckets": self._slots.new_tensor(records).view(-1, 3),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state of the index with a saved state. Call it before the predictor applies a version.

        Args:
            state: result of :meth:`state_dict`.

        Raises:
            InvalidArgumentError: if ``state`` is not valid for this number of rows. The index is then unchanged.
        """
        remedy = f"Pass what state_dict() of an index with {self.rows[1]} rows returned"
        if not isinstance(state, Mapping):
            raise InvalidArgumentError("state", type(state).__name__, remedy)
        if set(state) != _NUM_DIMS.keys():
            raise InvalidArgumentError("state", list(state), remedy)
        for name, num_dims in _NUM_DIMS.items():
            tensor: object = state[name]
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or tensor.dim() != num_dims:
                raise InvalidArgumentError("state", f"{name!r} is not an int64 tensor of {num_dims} dimensions", remedy)
        try:
            identity, owners = _loaded(state, self.rows[1])
        except (ValueError, RuntimeError) as error:
            raise InvalidArgumentError("state", str(error), remedy) from error
        self._route_by(identity)
        self.map(self.prepare(owners))

    def _route_by(self, identity: Identity | None) -> None:
        self._identity = identity
        self._default_rows = self._slots[:0] if identity is None else default_rows(identity)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the sorted raw ids and their rows. See :meth:`SortedMap.tensors`."""
        return self._raw_ids, self._slots

    def refusal(self, identity: Identity) -> str:
        """Return the reason why the index cannot use a stream's ``identity``, or an empty string if it can."""
        if identity.num_rows != self.rows[1]:
            return f"with a RawIdIndex of {self.rows[1]} rows"
        return ""

    def routes_by(self, identity: Identity) -> bool:
        """Return True if the index already maps unknown raw ids to the default rows of ``identity``."""
        return identity == self._identity

    def set_identity(self, identity: Identity) -> None:
        """Map unknown raw ids to the default rows of ``identity`` from now on."""
        if identity != self._identity:
            self.reroute(identity)
            self._route_by(identity)


def _loaded(state: Mapping[str, Tensor], num_rows: int) -> tuple[Identity | None, Tensor]:
    """Return the buckets and owners in a saved state. Raise ValueError or RuntimeError if the state is invalid."""
    owners, hash_size, records = (state[name].to("cpu", copy=True) for name in ("owners", "hash_size", "buckets"))
    if owners.shape != (num_rows,):
        raise ValueError(f"owners of shape {tuple(owners.shape)}")
    if not len(hash_size):
        if bool((owners != NO_OWNER).any()) or records.numel():
            raise ValueError("raw ids without buckets")
        return None, owners
    buckets = [Bucket((first, end), None if row == _NO_ROW else row) for first, end, row in records.tolist()]
    identity = Identity(int(hash_size.item()), tuple(buckets))
    if identity.num_rows != num_rows:
        raise ValueError(f"buckets of {identity.num_rows} rows")
    check_owners(identity, torch.arange(num_rows, device="cpu"), owners)
    return identity, owners
