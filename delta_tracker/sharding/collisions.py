"""Read the raw ids that own this rank's rows of tables with managed collisions.

A managed-collision module maps raw ids to slots, which are the rows of its table. It admits new ids and evicts old ids.
The *owner* of a slot is the raw id that the module maps to it. Raw ids are the output of its ``input_hash_func``.

The modules are TorchRec's ``MCHManagedCollisionModule`` and ``HashZchManagedCollisionModule``, and subclasses of them.
The MCH module stores the owners in ascending order, each with its slot. The hash module stores one owner per slot.
Because it does not train on the CPU, it was tested only with mappings that a test had written.

Notation: ``R`` is the number of rows of the shard.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.torchrec_api import Torchrec, planned_blocks
from delta_tracker.types import Bucket, Identity

_HASH_EMPTY = -1  # value of an empty slot in hash-ZCH


class TensorVersions:
    """Token of the state of ``tensors``. Two tokens differ if a tensor was replaced or written in place in between."""

    __slots__ = ("_tensors", "_versions")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors  # held, so that no other tensor gets their address
        self._versions = [(id(tensor), tensor._version) for tensor in tensors]  # noqa: SLF001

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorVersions) and self._versions == other._versions


@dataclass(frozen=True, slots=True, eq=False)
class LocalOwners(ABC):
    """Reader of the owners (raw ids) of one table's slots on this rank.

    Args:
        fqn: FQN of the table.
        identity: hash size and slot ranges of the whole table, the same on all ranks.
        rows: half-open range of the slots on this rank.
        module: this rank's managed-collision module of the table.
        device: device of the result of :meth:`read`.
    """

    fqn: str
    identity: Identity
    rows: tuple[int, int]
    module: Any
    device: torch.device

    @property
    def num_rows(self) -> int:
        """Number of slots on this rank, ``R``."""
        return self.rows[1] - self.rows[0]

    @property
    def falls_back(self) -> bool:
        """True if the module may map an unknown raw id to a row that another raw id owns. False by default."""
        return False

    @abstractmethod
    def token(self) -> object | None:
        """Return a token that changes when an owner changes; None if not supported. Does not wait for the device."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the owner of each slot, ``[R]`` int64; ``NO_OWNER`` for empty slots. Does not wait for the device."""

    @abstractmethod
    def refusal(self) -> str:
        """Check if the owners can be published. Return the reason if not, otherwise ``""``. Waits for the device."""


class MchOwners(LocalOwners):
    """Reader of the owners in an ``MCHManagedCollisionModule``."""

    __slots__ = ()

    def token(self) -> object | None:
        """Return a token for the mapping's two tensors; None for inference tensors, which have no version counter."""
        tensors = self.module._mch_sorted_raw_ids, self.module._mch_remapped_ids_mapping  # noqa: SLF001
        return None if any(tensor.is_inference() for tensor in tensors) else TensorVersions(*tensors)

    def read(self) -> Tensor:
        """Return the owner of each slot, ``[R]`` int64; ``NO_OWNER`` if the slot is empty."""
        raw_ids = self.module._mch_sorted_raw_ids  # noqa: SLF001
        slots = self.module._mch_remapped_ids_mapping - self.rows[0]  # noqa: SLF001
        return torch.full_like(raw_ids, NO_OWNER).index_copy_(0, slots, raw_ids).to(self.device)

    def refusal(self) -> str:
        """Return an error message if a raw id owns two slots, otherwise an empty string."""
        return _repeated(self.module._mch_sorted_raw_ids, NO_OWNER)  # noqa: SLF001


class HashOwners(LocalOwners):
    """Reader of the owners in a ``HashZchManagedCollisionModule``."""

    __slots__ = ()

    @property
    def falls_back(self) -> bool:
        """True unless the module was built with ``disable_fallback=True``. Early torchrec versions lack this option."""
        return not getattr(self.module, "_disable_fallback", False)

    def token(self) -> object | None:
        """Return None, because FBGEMM's operator may write the owners without incrementing a version counter."""
        return None

    def read(self) -> Tensor:
        """Return the owner of each slot, ``[R]`` int64; ``NO_OWNER`` if the slot is empty.

        A raw id that equals ``NO_OWNER`` is returned as -1, to distinguish it from an empty slot. :meth:`refusal`
        rejects such a raw id.
        """
        raw_ids = self._raw_ids()
        is_empty, is_reserved = raw_ids == _HASH_EMPTY, raw_ids == NO_OWNER
        return raw_ids.masked_fill(is_empty, NO_OWNER).masked_fill_(is_reserved, _HASH_EMPTY).to(self.device)

    def refusal(self) -> str:
        """Return an error message if ``NO_OWNER`` owns a slot or a raw id owns two slots; otherwise an empty string."""
        raw_ids = self._raw_ids()
        if bool((raw_ids == NO_OWNER).any()):
            return f"the raw id {NO_OWNER}, which marks empty slots in the format, owns a slot"
        return _repeated(raw_ids.sort().values, _HASH_EMPTY)

    def _raw_ids(self) -> Tensor:
        held: Tensor = self.module._hash_zch_identities.detach()[:, 0]  # noqa: SLF001
        return held


def _repeated(ascending: Tensor, empty: int) -> str:
    """Return an error message if a value other than ``empty`` occurs twice in ``[R]`` sorted values."""
    twice = ascending[1:][(ascending[1:] == ascending[:-1]) & (ascending[1:] != empty)]
    return f"the raw id {int(twice[0])} owns two slots" if len(twice) else ""


def local_owners(model: nn.Module, found: Discovery) -> dict[str, LocalOwners]:
    """Return a reader of this rank's owners for each tracked table that has managed collisions, by table FQN.

    Raises:
        UnsupportedModelError: if a managed-collision module has an unsupported class, is not in the same module as
            its table, has an ``input_hash_func`` that TorchRec does not call, or has ranges of slots that do not fit
            the sharding plan of the table.
    """
    torchrec = Torchrec()
    fqns = {id(module): fqn for fqn, module in found.modules.items()}
    sources: dict[str, LocalOwners] = {}
    unknown: dict[str, str] = {}
    unhashed: dict[str, str] = {}
    for part in model.modules():
        held = getattr(part, "_embedding_module", None)
        collection = getattr(part, "_managed_collision_collection", None)
        mapped = getattr(collection, "_managed_collision_modules", {})
        for fqn in found.tables_of(fqns[id(held)]) if id(held) in fqns else []:
            name = fqn.rpartition(".")[2]
            if name not in mapped:
                continue
            if not isinstance(mapped[name], (*torchrec.sorted_collisions, *torchrec.hashed_collisions)):
                unknown[fqn] = type(mapped[name]).__name__
            elif getattr(mapped[name], "_input_hash_func", None) and not getattr(collection, "need_preprocess", True):
                unhashed[fqn] = type(mapped[name]).__name__
            else:
                sources[fqn] = _local_owners(held, mapped[name], found.shards[fqn], torchrec)
    if unknown:
        remedy = "Use an MCHManagedCollisionModule, or name the tables in fqns_to_skip to train them untracked"
        raise UnsupportedModelError(unknown, remedy, problem="sharded parts whose managed collisions cannot be read")
    if unhashed:
        remedy = "An unsharded module calls it: remove need_preprocess=False, or pass no function"
        raise UnsupportedModelError(unhashed, remedy, problem="sharded parts whose input_hash_func is not called")
    _check_apart(model, found)
    return sources


def _check_apart(model: nn.Module, found: Discovery) -> None:
    """Reject managed-collision collections that are not in the same module as their tables."""
    held = {id(getattr(part, "_managed_collision_collection", None)) for part in model.modules()}
    apart: set[str] = set()
    for part in model.modules():
        if id(part) not in held:
            apart.update(getattr(part, "_managed_collision_modules", ()))
    if tables := {fqn: "table" for fqn in found.shards if fqn.rpartition(".")[2] in apart}:
        raise UnsupportedModelError(
            tables,
            "Use TorchRec's ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection, or name the "
            "tables in fqns_to_skip to train them untracked",
            problem="sharded parts whose managed collisions are in a module of their own",
        )


def _local_owners(held: Any, module: Any, shard: LocalShard, torchrec: Torchrec) -> LocalOwners:  # noqa: ANN401
    """Return the reader for one table. ``held`` is the table's collection, ``module`` its managed-collision module."""
    table, rows = shard.spec.table, (shard.spec.row_offset, shard.spec.row_offset + shard.spec.num_rows)
    is_sorted = isinstance(module, torchrec.sorted_collisions)
    if is_sorted:
        # Not from the module's _output_segments_tensor, into which load_state_dict copies the segments of the save.
        blocks = planned_blocks(held, table.fqn.rpartition(".")[2]) or set()
        edges = sorted({0, *(row + num_rows for row, _, num_rows, _ in blocks)})
        fits = rows in pairwise(edges) and len(edges) - 1 == module.buckets()
        buckets = tuple(Bucket((begin, end), end - 1) for begin, end in pairwise(edges))
    else:
        edges = list(module._output_segments)  # noqa: SLF001
        fits = edges == sorted(set(edges)) and {0, *rows} <= set(edges)
        buckets = tuple(Bucket(ends, None) for ends in pairwise(edges))
    if not fits or edges[-1] != table.num_rows or module.output_size() != shard.spec.num_rows:
        reason = f"its managed collisions have the ranges of slots {edges}, which do not fit its shard {rows}"
        raise UnsupportedModelError({table.fqn: reason})
    kind = MchOwners if is_sorted else HashOwners
    return kind(table.fqn, Identity(module.input_size(), buckets), rows, module, shard.device)
