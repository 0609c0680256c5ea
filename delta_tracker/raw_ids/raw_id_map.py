"""Raw ids of tables with managed collisions: the bucket of a raw id, and the interface of a live mapping.

A managed-collision module maps raw 64-bit ids to the rows of a table, admits new ids and evicts old ones. The *owner*
of a row is the raw id that is mapped to it. Raw ids are the ids that the collision module receives, after its
``input_hash_func``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from delta_tracker.types import Identity

NO_OWNER: Final = (1 << 63) - 1
"""Owner of a row that no raw id is mapped to."""

_LOW = (1 << 63) - 1  # bits of an int64 without the sign


def bucket_of(identity: Identity, raw_ids: Tensor) -> Tensor:
    """Return the index of the bucket of each raw id. TorchRec uses the same rule to assign ids to ranks.

    With ``B`` buckets, bucket ``b`` contains the ids from ``b * size`` to ``(b + 1) * size - 1``, where ``size`` is
    ``hash_size / B``, rounded up. An id outside these ranges belongs to the bucket ``id % B``. Negative ids are
    interpreted as unsigned 64-bit integers.

    Args:
        identity: buckets and ``hash_size`` of the table.
        raw_ids: int64 ids of any shape.

    Returns:
        int64 indices in ``identity.buckets``, in the shape and on the device of ``raw_ids``.

    Example:
        >>> from delta_tracker.types import Bucket
        >>> identity = Identity(100, (Bucket((0, 8), 7), Bucket((8, 16), 15)))
        >>> bucket_of(identity, torch.tensor([3, 50, 101, 102, -1]))
        tensor([0, 1, 1, 0, 1])
    """
    num_buckets = len(identity.buckets)
    if num_buckets == 1:
        return torch.zeros_like(raw_ids)
    size = -(-identity.hash_size // num_buckets)
    low = raw_ids.bitwise_and(_LOW)
    is_low = raw_ids >= 0
    # An unsigned id is 2**63 larger than its low bits if its sign is set.
    found = torch.where(is_low, low % num_buckets, (low % num_buckets + (1 << 63) % num_buckets) % num_buckets)
    if size:
        found = torch.where(is_low & (low // size < num_buckets), low // size, found)
        beyond = size * num_buckets - (1 << 63)
        if beyond > 0:  # the last bucket ends after 2**63
            found = torch.where(~is_low & (low < beyond), num_buckets - 1, found)
    return found


def default_rows(identity: Identity) -> Tensor:
    """Return the global id of each bucket's default row, ``[B]`` int64 on the CPU; -1 if the bucket has none."""
    return torch.tensor([-1 if bucket.default is None else bucket.default for bucket in identity.buckets], device="cpu")


def defaults_of(identity: Identity, raw_ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the default row of each raw id: the row that lookups read while the id is unknown.

    ``rows`` is the result of :func:`default_rows` on the device of ``raw_ids``; None to compute it.

    Returns:
        int64 global row ids in the shape and on the device of ``raw_ids``; -1 if the table has no default rows.
    """
    if rows is None:
        rows = default_rows(identity).to(raw_ids.device)
    return rows[bucket_of(identity, raw_ids)]


def check_owners(identity: Identity, slots: Tensor, owners: Tensor, *, is_unique: bool = True) -> None:
    """Check that each raw id may own its row. Synchronizes with the device of ``owners``.

    Args:
        identity: buckets and default rows of the table.
        slots: ``[N]`` int64 global row ids, inside the table.
        owners: ``[N]`` int64 raw ids of these rows, :data:`NO_OWNER` for a row without a raw id.
        is_unique: True to also check that no raw id owns two rows. Pass False for rows that were copied at different
            times, because a raw id may have moved to another row in the meantime.

    Raises:
        ValueError: if a default row has an owner; if a raw id owns a row outside its bucket; or if ``is_unique`` is
            True and a raw id owns two rows.
    """
    is_owned = owners != NO_OWNER
    slots, owners = slots[is_owned], owners[is_owned]
    ends = torch.tensor([bucket.rows[1] for bucket in identity.buckets], device=slots.device)
    buckets = torch.searchsorted(ends, slots, right=True)
    if identity.defaults:
        defaults = torch.tensor(identity.defaults, device=slots.device)
        wrong = slots == defaults[buckets]
        if wrong.any():
            raise ValueError(f"the default row {int(slots[wrong][0])} has the raw id {int(owners[wrong][0])}")
    wrong = buckets != bucket_of(identity, owners)
    if wrong.any():
        row, owner = int(slots[wrong][0]), int(owners[wrong][0])
        raise ValueError(f"row {row} has the raw id {owner}, which belongs to another bucket")
    if is_unique:
        check_unique(owners)


def check_unique(owners: Tensor) -> None:
    """Raise ValueError if a raw id owns two rows. Synchronizes with the device of ``owners``.

    ``owners`` is ``[N]`` int64, :data:`NO_OWNER` for a row that no raw id owns.
    """
    is_host = owners.device.type == "cpu"  # numpy sorts faster
    ordered = torch.from_numpy(np.sort(owners.numpy())) if is_host else owners.sort().values
    twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != NO_OWNER)]
    if len(twice):
        raise ValueError(f"the raw id {int(twice[0])} has two rows")


class RawIdMap(ABC):
    """Live mapping from raw ids to a range of a table's rows. A predictor updates it while lookups read it.

    Callers of methods that change the mapping must hold the lock that lookups acquire. Notation: ``R`` is the number of
    rows of the range.

    Attributes:
        rows: half-open range of the global row ids that this mapping covers.
    """

    rows: tuple[int, int]

    @property
    @abstractmethod
    def memory(self) -> Tensor:
        """Tensor that stores the mapping. Two mappings must not share it."""

    @property
    def devices(self) -> Iterable[torch.device]:
        """Devices of the mapping's tensors."""
        return (self.memory.device,)

    @abstractmethod
    def refusal(self, identity: Identity) -> str:
        """Return the reason why the mapping cannot use a stream's ``identity``, or an empty string if it can."""

    @abstractmethod
    def routes_by(self, identity: Identity) -> bool:
        """Return True if the mapping already maps unknown raw ids to the default rows of ``identity``."""

    @abstractmethod
    def set_identity(self, identity: Identity) -> None:
        """Map unknown raw ids to the default rows of ``identity`` from now on. The caller must hold the lock."""

    @abstractmethod
    def owners(self) -> Tensor:
        """Return the raw id of each row, ``[R]`` int64 on the CPU; :data:`NO_OWNER` for a row without a raw id."""

    @abstractmethod
    def slots_of(self, raw_ids: Tensor) -> Tensor:
        """Return the global id of each raw id's row, ``[N]`` int64 on the CPU; -1 or a default row for an unknown id.

        ``raw_ids`` is ``[N]`` int64 on the CPU.
        """

    def conflict(self, slots: Tensor, owners: Tensor) -> str:  # noqa: ARG002  a default
        """Check whether lookups would find the rows of newly assigned raw ids.

        Returns the reason if they would not, or an empty string if they would. ``slots`` are ``[N]`` int64 global row
        ids inside :attr:`rows`, and ``owners`` are the ``[N]`` int64 raw ids of these rows.
        """
        return ""

    @abstractmethod
    def unmap(self, slots: Tensor, owners: Tensor) -> None:
        """Remove raw ids from the mapping, so that their lookups read default rows. The caller must hold the lock.

        ``slots`` are ``[N]`` int64 global row ids inside :attr:`rows`, and ``owners`` are their raw ids, not NO_OWNER.
        """

    @abstractmethod
    def prepare(self, owners: Tensor) -> object:
        """Prepare new owners for :meth:`map`, and return its argument. Does not change the mapping.

        Args:
            owners: ``[R]`` int64 raw id of each row (or :data:`NO_OWNER`), already checked with :func:`check_owners`.
        """

    @abstractmethod
    def map(self, ready: object) -> None:
        """Replace the mapping with ``ready``, the result of :meth:`prepare`. The caller must hold the lock.

        An interrupted call never leaves a raw id mapped to the row of another raw id.
        """
