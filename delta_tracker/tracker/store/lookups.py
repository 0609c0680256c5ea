"""A row store of raw lookups by batch, for ids without a dense row space: hashed, remapped or counted by somebody else.

Letters: ``N`` ids.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import first_per_id, last_per_id
from delta_tracker.types import DeltaRows, EmbdUpdateMode, IndexedLookup


@dataclass(slots=True)
class _Table:
    """The lookups of one table, their batches ascending.

    Args:
        empty: a lookup of nothing, with the dtypes, device and shapes of all others.
        newest_batch: the latest batch that was appended; compaction does not lower it.
        lookups: what is held.
    """

    empty: IndexedLookup
    newest_batch: int
    lookups: list[IndexedLookup] = field(default_factory=list)

    def places(self, start_idx: int, end_idx: int | None) -> slice:
        """Where the lookups of the batches from ``start_idx`` to before ``end_idx``, None for all, stand."""
        batches = [lookup.batch_idx for lookup in self.lookups]
        return slice(bisect_left(batches, start_idx), None if end_idx is None else bisect_left(batches, end_idx))


class DeltaStore:
    """Keeps every lookup of every table until it is deleted; its memory grows with the lookups, not with the tables.

    It has the interface of TorchRec's store of the same name. A tracker of sharded tables does not need it: there
    :class:`~delta_tracker.tracker.store.segments.SegmentStore` costs less. Use it for what has no rows to mark.

    Call order: :meth:`append` for each batch, batches ascending; :meth:`get_delta` from the batch that a reader has
    reached; :meth:`delete` up to the batch that all readers have reached. :meth:`compact` may come at any time, over
    batches that no reader stands between. It is for one thread.

    Args:
        update_mode: which of an id's recorded states is kept.

    Raises:
        InvalidArgumentError: for another ``update_mode``.

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
        """Keep a copy of one lookup; the ids may be none.

        Args:
            batch_idx: the batch, not before the table's latest one.
            table_fqn: the table.
            ids: ``[N]`` integers, in any order, duplicates and negative ones allowed.
            states: ``[N, ...]`` one state for each id, the same shape and dtype in every lookup of a table; None in
                the mode NONE.

        Raises:
            InvalidArgumentError: for anything else; nothing is kept then.
        """
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InvalidArgumentError("ids", (tuple(ids.shape), ids.dtype), "Pass a [N] tensor of integers")
        self._check_states(ids, states)
        lookup = IndexedLookup(
            batch_idx, ids.to(torch.int64, copy=True), None if states is None else states.detach().clone()
        )
        table = self._tables.get(table_fqn)
        if table is None:
            table = _Table(IndexedLookup(batch_idx, lookup.ids[:0].clone(), _none_of(lookup.states)), batch_idx)
        _check_same_kind(table, table_fqn, lookup)
        table.newest_batch = batch_idx
        table.lookups.append(lookup)
        self._tables[table_fqn] = table

    def delete(self, up_to_idx: int | None = None) -> None:
        """Forget the lookups of all batches before ``up_to_idx``; without it forget everything, the tables too."""
        if up_to_idx is None:
            self._tables = {}
            return
        for table in self._tables.values():
            del table.lookups[: table.places(up_to_idx, None).start]

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merge each table's lookups of the batches from ``start_idx`` to before ``end_idx`` into one of ``start_idx``.

        A read from a batch in between misses the merged rows afterwards.

        Raises:
            InvalidArgumentError: for an empty range.
        """
        if start_idx >= end_idx:
            raise InvalidArgumentError("start_idx", start_idx, f"Pass a batch before end_idx={end_idx}")
        for table in self._tables.values():
            places = table.places(start_idx, end_idx)
            lookups = table.lookups[places]
            if len(lookups) > 1:
                table.lookups[places] = [IndexedLookup(start_idx, *self._merged(table, lookups))]

    def get_delta(self, from_idx: int = 0) -> dict[str, DeltaRows]:
        """Table FQN to the ids of all batches from ``from_idx`` on, ascending and unique, with one state of each.

        A table is present until everything is deleted, empty if it has nothing new.
        """
        return {
            fqn: DeltaRows(*self._merged(table, table.lookups[table.places(from_idx, None)]))
            for fqn, table in self._tables.items()
        }

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """Table FQN to the lookups of the batches from ``start_idx`` to before ``end_idx``, as they are held.

        The tensors are the store's own; copy before writing to them.
        """
        return {fqn: table.lookups[table.places(start_idx, end_idx)] for fqn, table in self._tables.items()}

    def _check_states(self, ids: Tensor, states: Tensor | None) -> None:
        if (states is None) != (self._mode is EmbdUpdateMode.NONE):
            expected = "no states" if states is not None else "one state for each id"
            found = None if states is None else tuple(states.shape)
            raise InvalidArgumentError("states", found, f"The update mode is {self._mode}: pass {expected}")
        if states is not None and (states.dim() == 0 or states.shape[0] != ids.shape[0]):
            raise InvalidArgumentError("states", tuple(states.shape), f"Pass one row for each of {len(ids)} ids")

    def _merged(self, table: _Table, lookups: list[IndexedLookup]) -> tuple[Tensor, Tensor | None]:
        """Each id once, ascending, with the state that the mode keeps."""
        lookups = lookups or [table.empty]
        ids = torch.cat([lookup.ids for lookup in lookups])
        if self._mode is EmbdUpdateMode.NONE:
            return first_per_id(ids, ids)[0], None
        states = torch.cat([lookup.states for lookup in lookups if lookup.states is not None])
        return (first_per_id if self._mode is EmbdUpdateMode.FIRST else last_per_id)(ids, states)


def _none_of(states: Tensor | None) -> Tensor | None:
    return None if states is None else states[:0].clone()


def _check_same_kind(table: _Table, fqn: str, lookup: IndexedLookup) -> None:
    """Refuse what could not be merged with the table's other lookups."""
    if lookup.batch_idx < table.newest_batch:
        remedy = f"Batches must not go backwards: table {fqn!r} is at batch {table.newest_batch}"
        raise InvalidArgumentError("batch_idx", lookup.batch_idx, remedy)
    if lookup.ids.device != table.empty.ids.device:
        raise InvalidArgumentError("ids", lookup.ids.device, f"Table {fqn!r} is on {table.empty.ids.device}")
    known = table.empty.states
    if lookup.states is None or known is None:
        return
    kinds = [(tuple(each.shape[1:]), each.dtype, each.device) for each in (lookup.states, known)]
    if kinds[0] != kinds[1]:
        raise InvalidArgumentError("states", kinds[0], f"Pass states as in the other lookups of {fqn!r}: {kinds[1]}")
