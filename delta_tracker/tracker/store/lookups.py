"""Store that records the lookups of each batch. Its ids need not be row numbers: they may be hashed or remapped ids.

Notation: ``N`` is the number of ids of a lookup.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import first_per_id, last_per_id
from delta_tracker.types import DeltaRows, EmbdUpdateMode, IndexedLookup


@dataclass(slots=True)
class _Table:
    """Record of the lookups of one table.

    Args:
        empty: a lookup without ids. All lookups of the table have its dtypes, device and state shape.
        newest_batch: index of the latest batch that was appended. Compaction and deletion do not change it.
        lookups: the stored lookups, in ascending order of batches.
    """

    empty: IndexedLookup
    newest_batch: int
    lookups: list[IndexedLookup] = field(default_factory=list)

    def range(self, start_idx: int, end_idx: int | None) -> slice:
        """Return the slice of :attr:`lookups` for batches ``[start_idx, end_idx)``; None for no upper bound."""
        batches = [lookup.batch_idx for lookup in self.lookups]
        return slice(bisect_left(batches, start_idx), None if end_idx is None else bisect_left(batches, end_idx))


class DeltaStore:
    """Standalone store of the lookups of several tables. The ids need not be rows of a table.

    The class has the same interface as TorchRec's ``DeltaStore``. It keeps all lookups until :meth:`delete` is called.
    Its memory grows with the number of stored ids, not with the size of the tables. Trackers do not use this class: one
    :class:`~delta_tracker.tracker.store.segments.SegmentStore` per table takes less memory.

    Call :meth:`append` for each batch, in ascending order of batches. A reader calls :meth:`get_delta` with the first
    batch that it has not read. When all readers have read the batches before ``n``, call ``delete(n)``. After
    :meth:`compact` has merged a range of batches, a read may start at the first batch of the range, but not at the
    other batches. Not thread-safe.

    Args:
        update_mode: which state :meth:`get_delta` returns for each id: no state, the first one or the last one.

    Raises:
        InvalidArgumentError: if ``update_mode`` is invalid.

    Example:
        >>> store = DeltaStore(EmbdUpdateMode.LAST)
        >>> store.append(0, "user", torch.tensor([7, 3]), torch.tensor([0.7, 0.3]))
        >>> store.append(1, "user", torch.tensor([7]), torch.tensor([1.7]))
        >>> rows = store.get_delta()["user"]
        >>> rows.ids, rows.states
        (tensor([3, 7]), tensor([0.3000, 1.7000]))
        >>> store.delete(up_to_idx=2)
        >>> len(store.get_delta()["user"])
        0
    """

    def __init__(self, update_mode: EmbdUpdateMode = EmbdUpdateMode.NONE) -> None:
        if not isinstance(update_mode, EmbdUpdateMode):
            raise InvalidArgumentError(
                "update_mode", update_mode, f"Pass one of {[str(mode) for mode in EmbdUpdateMode]}"
            )
        self._mode = update_mode
        self._tables: dict[str, _Table] = {}

    def append(self, batch_idx: int, table_fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Append a copy of one lookup, which may be empty.

        Args:
            batch_idx: index of the batch. It must not be lower than in the previous call for this table.
            table_fqn: FQN of the table.
            ids: ``[N]`` integer ids in any order. Duplicates and negative ids are allowed.
            states: ``[N, ...]``, one state for each id; None if the update mode is NONE. All lookups of a table must
                have the same device, dtype and shape of a state.

        Raises:
            InvalidArgumentError: if an argument is invalid. Nothing is appended in this case.
        """
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InvalidArgumentError("ids", (tuple(ids.shape), ids.dtype), "Pass a [N] tensor of integers")
        self._check_mode(states)
        if states is not None and (states.dim() == 0 or states.shape[0] != ids.shape[0]):
            raise InvalidArgumentError("states", tuple(states.shape), f"Pass one row for each of {len(ids)} ids")
        own = None if states is None else states.detach().clone()
        lookup = IndexedLookup(batch_idx, ids.to(torch.int64, copy=True), own)
        table = self._tables.get(table_fqn)
        if table is None:
            nothing = None if lookup.states is None else lookup.states[:0].clone()
            table = _Table(IndexedLookup(batch_idx, lookup.ids[:0].clone(), nothing), batch_idx)
        _check_same_kind(table, table_fqn, lookup)
        table.newest_batch = batch_idx
        table.lookups.append(lookup)
        self._tables[table_fqn] = table

    def delete(self, up_to_idx: int | None = None) -> None:
        """Delete the lookups of all batches before ``up_to_idx``. If it is None, delete all lookups and tables."""
        if up_to_idx is None:
            self._tables = {}
            return
        for table in self._tables.values():
            del table.lookups[: table.range(up_to_idx, None).start]

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merge each table's lookups of batches in ``[start_idx, end_idx)`` into one lookup of batch ``start_idx``.

        Later reads may start at ``start_idx``. If they started at another batch of the range, they would miss the
        merged ids. Raises InvalidArgumentError if the range is empty.
        """
        if start_idx >= end_idx:
            raise InvalidArgumentError("start_idx", start_idx, f"Pass a batch before end_idx={end_idx}")
        for table in self._tables.values():
            chosen = table.range(start_idx, end_idx)
            lookups = table.lookups[chosen]
            if len(lookups) > 1:
                table.lookups[chosen] = [IndexedLookup(start_idx, *self._merged(table, lookups))]

    def get_delta(self, from_idx: int = 0) -> dict[str, DeltaRows]:
        """Return the ids that were looked up in batch ``from_idx`` or later, with one state for each id.

        Returns:
            Rows by table FQN. Their ids are unique and ascending. The rows are empty if the table has no lookups in
            these batches. After ``delete()`` without an argument, a table is missing until its next lookup is appended.
        """
        return {
            fqn: DeltaRows(*self._merged(table, table.lookups[table.range(from_idx, None)]))
            for fqn, table in self._tables.items()
        }

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """Return the stored lookups of batches in ``[start_idx, end_idx)`` by table FQN.

        Do not write to the returned tensors, because they are not copies.
        """
        return {fqn: table.lookups[table.range(start_idx, end_idx)] for fqn, table in self._tables.items()}

    def _check_mode(self, states: Tensor | None) -> None:
        if (states is None) != (self._mode is EmbdUpdateMode.NONE):
            expected = "no states" if states is not None else "one state for each id"
            found = None if states is None else tuple(states.shape)
            raise InvalidArgumentError("states", found, f"Pass {expected}, as the update mode {self._mode} needs")

    def _merged(self, table: _Table, lookups: list[IndexedLookup]) -> tuple[Tensor, Tensor | None]:
        """Return the unique ids of ``lookups``, ascending, and the state that the update mode selects for each id."""
        lookups = lookups or [table.empty]
        ids = torch.cat([lookup.ids for lookup in lookups])
        states = [lookup.states for lookup in lookups if lookup.states is not None]
        match self._mode:
            case EmbdUpdateMode.NONE:
                return first_per_id(ids, ids)[0], None
            case EmbdUpdateMode.FIRST:
                return first_per_id(ids, torch.cat(states))
            case EmbdUpdateMode.LAST:
                return last_per_id(ids, torch.cat(states))
            case _:
                assert_never(self._mode)


def _check_same_kind(table: _Table, fqn: str, lookup: IndexedLookup) -> None:
    """Raise InvalidArgumentError if ``lookup`` has an older batch than ``table``, or a different kind of tensors."""
    if lookup.batch_idx < table.newest_batch:
        remedy = f"Pass batches in ascending order: table {fqn!r} is at batch {table.newest_batch}"
        raise InvalidArgumentError("batch_idx", lookup.batch_idx, remedy)
    if lookup.ids.device != table.empty.ids.device:
        remedy = f"Move them to {table.empty.ids.device}, where table {fqn!r} is"
        raise InvalidArgumentError("ids", lookup.ids.device, remedy)
    known = table.empty.states
    if lookup.states is None or known is None:
        return
    kinds = [(tuple(each.shape[1:]), each.dtype, each.device) for each in (lookup.states, known)]
    if kinds[0] != kinds[1]:
        raise InvalidArgumentError("states", kinds[0], f"Pass states as in the other lookups of {fqn!r}: {kinds[1]}")
