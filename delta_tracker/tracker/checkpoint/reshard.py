"""Find the rows of this rank's shards in the saved states of all ranks, even if the sharding plan has changed.

The saved state of one rank is called a *part*. A shard is a block of a table: a range of rows and some ranges of
columns. A row is pending in a shard of this rank if it was pending in any saved shard that shares columns with this
shard. If the row was pending in only some of these saved shards, the columns of the others are unchanged, and their old
states are computed from the current rows. Therefore the model must be restored first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from delta_tracker.errors import CheckpointError, StateMismatchError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.tracker.checkpoint.counters import counted_by
from delta_tracker.tracker.checkpoint.part import HISTORY, Layout, RankHeader, counter_layouts
from delta_tracker.tracker.cursors import LogState, PendingState
from delta_tracker.tracker.modes import Capture
from delta_tracker.types import ShardSpec


@dataclass(frozen=True, slots=True, eq=False)
class _SavedRows:
    """Saved part that contains rows of one shard of this rank.

    An old state has one value per column or per column range. ``K`` is the number of values that the saved shard and
    this rank's shard have in common.

    Args:
        part: header of the part.
        saved_indices: ``[K]`` int64 indices of these values in an old state of the part.
        indices: ``[K]`` int64 indices of these values in an old state of the shard.
    """

    part: RankHeader
    saved_indices: Tensor
    indices: Tensor


class Resharding:
    """Plan for loading saved parts on one rank: it lists the tensors to read, and converts them to the rank's state.

    Args:
        parts: headers of parts that were saved together.
        shards: this rank's shard of each table in the parts, by table FQN.
        capture: implementation of the tracking mode of the parts.
        rank: this rank.
        world_size: the current world size.

    Attributes:
        counted: headers of the parts whose counters this rank loads.

    Raises:
        CheckpointError: if the parts do not contain all rows and counters that this rank must load.
        StateMismatchError: if old states have one value per column range, and the column ranges have changed.
    """

    def __init__(
        self, parts: list[RankHeader], shards: Mapping[str, LocalShard], capture: Capture, rank: int, world_size: int
    ) -> None:
        self._parts = sorted(parts, key=lambda part: part.rank)
        self._shards = shards
        self._capture = capture
        missing = sorted(set(range(parts[0].world_size)) - {part.rank for part in parts})
        self._saved = {fqn: self._find(shard.spec, rank, missing) for fqn, shard in shards.items()}
        self.counted = counted_by(rank, world_size, self._parts)

    def needs(self) -> dict[str, Layout]:
        """Return the dtype and shape of each tensor that :meth:`state` and the counters require, by key."""
        rows = {
            saved.part.prefix + name: layout
            for fqn, several in self._saved.items()
            for saved in several
            for name, layout in saved.part.row_layouts(fqn).items()
        }
        return {**rows, **counter_layouts(self.counted)}

    def state(self, tensors: Mapping[str, Tensor]) -> LogState:
        """Return the state to restore in this rank's log. It has local ids and is on the devices of the shards.

        ``tensors`` contains the tensors that :meth:`needs` lists, by key. Raises StateMismatchError if the saved old
        states have another dtype than the current states.
        """
        first = self._parts[0]
        used = {saved.part.rank: saved.part for several in self._saved.values() for saved in several}
        consumers = {}
        for number, consumer in enumerate(first.consumers):
            was_dropped = any(part.consumers[number].was_dropped for part in used.values())
            rows = {} if was_dropped else self._rows(str(number), tensors)
            batch = max(part.consumers[number].batch for part in self._parts)
            # The note is that of the lowest rank.
            consumers[consumer.name] = PendingState(batch, rows, was_dropped, first.annotations.get(consumer.name))
        num_batches = max(part.num_batches for part in self._parts)
        return LogState(num_batches, consumers, self._rows(HISTORY, tensors) if first.has_history else None)

    def _find(self, spec: ShardSpec, rank: int, missing: Sequence[int]) -> list[_SavedRows]:
        """Return the parts that contain a shard's rows. Raise CheckpointError if they do not cover the shard."""
        fqn = spec.table.fqn
        sharing = [part for part in self._parts if _shared_area(part.shards[fqn], spec)]
        copies = [part for part in sharing if part.shards[fqn].is_replicated]
        if copies:
            # Each replica has its own state. New replicas and shards load the first replica's state, because only this
            # replica is published and has rows that top-k left out.
            own = [part for part in copies if spec.is_replicated and part.rank == rank]
            sharing = own or copies[:1]
        else:
            # The same holds in 2D parallelism, in which the blocks of the first replicas cover the table.
            own = [part for part in sharing if part.rank == rank and part.shards[fqn] == spec]
            sharing = own or [part for part in sharing if part.shards[fqn].replica == 0]
        area = sum(_shared_area(part.shards[fqn], spec) for part in sharing)
        if not copies and area != spec.num_rows * spec.num_columns:
            raise CheckpointError(None, f"the shard of table {fqn!r} on rank {rank} is not covered", missing)
        return [_SavedRows(part, *self._indices(part.shards[fqn], spec)) for part in sharing]

    def _indices(self, saved: ShardSpec, spec: ShardSpec) -> tuple[Tensor, Tensor]:
        """Return the fields ``saved_indices`` and ``indices`` of a :class:`_SavedRows`."""
        if self._capture.states_are_columns:
            mine = {column: number for number, column in enumerate(_columns(spec))}
            pairs = [(number, mine[column]) for number, column in enumerate(_columns(saved)) if column in mine]
        else:
            pairs = [(i, spec.columns.index(each)) for i, each in enumerate(saved.columns) if each in spec.columns]
            if self._capture.keeps_old and _width(saved, spec) != sum(
                saved.columns[number][1] - saved.columns[number][0] for number, _ in pairs
            ):
                what = f"old states of table {spec.table.fqn!r} for the column ranges"
                raise StateMismatchError(what, saved.columns, spec.columns)
        found = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def _rows(self, row_set: str, tensors: Mapping[str, Tensor]) -> dict[str, ChangedRows]:
        rows = {fqn: self._table_rows(row_set, fqn, tensors) for fqn in self._shards}
        return {fqn: each for fqn, each in rows.items() if each is not None}

    def _table_rows(self, row_set: str, fqn: str, tensors: Mapping[str, Tensor]) -> ChangedRows | None:
        shard = self._shards[fqn]
        pieces = [
            (saved, rows)
            for saved in self._saved[fqn]
            if (rows := _local(saved.part.rows(row_set, fqn, tensors), shard.spec)) is not None
        ]
        if not pieces:
            return None
        ids = torch.unique(torch.cat([rows.ids for _, rows in pieces]))
        held = self._capture.old_states(shard, ids.to(shard.device)).cpu().clone() if self._capture.keeps_old else None
        known, ages = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.int32)
        former: Tensor | None = None
        for saved, rows in pieces:
            at = torch.searchsorted(ids, rows.ids)
            if rows.ages is not None:
                ages[at] = torch.maximum(ages[at], rows.ages)
            if rows.former is not None:
                former = torch.full((len(ids),), NO_OWNER, device="cpu") if former is None else former
                former[at] = rows.former
            if held is not None:
                states, was_known = _checked_states(saved.part, fqn, rows, held, saved.saved_indices)
                held[at.unsqueeze(1), saved.indices] = states[:, saved.saved_indices]
                known[at] &= was_known
        if held is not None:
            held[~known] = torch.nan
        columns = held, None if held is None else known, ages if bool(ages.any()) else None, former
        device = shard.device
        return ChangedRows(ids.to(device), *(None if each is None else each.to(device) for each in columns))


def _local(rows: ChangedRows | None, spec: ShardSpec) -> ChangedRows | None:
    """Return the rows inside a shard, with ids converted from global to local. Return None if ``rows`` is None."""
    if rows is None:
        return None
    is_inside = (rows.ids >= spec.row_offset) & (rows.ids < spec.row_offset + spec.num_rows)
    inside = rows.take(is_inside)
    return replace(inside, ids=inside.ids - spec.row_offset)


def _checked_states(
    part: RankHeader, fqn: str, rows: ChangedRows, held: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Check that the old states of ``rows`` fit into ``held``. Return the states, and a mask of the known states."""
    if rows.states is None or rows.known is None:
        raise CheckpointError(part.prefix, f"old states are missing for rows of {fqn!r}")
    if rows.states.dtype != held.dtype:
        raise StateMismatchError(f"old states of table {fqn!r} of dtype", rows.states.dtype, held.dtype)
    if rows.states.dim() != held.dim() or (len(indices) and int(indices.max()) >= rows.states.shape[1]):
        raise CheckpointError(part.prefix, f"old states of {fqn!r} have shape {tuple(rows.states.shape)}")
    return rows.states, rows.known


def _shared_area(left: ShardSpec, right: ShardSpec) -> int:
    stop = min(left.row_offset + left.num_rows, right.row_offset + right.num_rows)
    return max(0, stop - max(left.row_offset, right.row_offset)) * _width(left, right)


def _width(left: ShardSpec, right: ShardSpec) -> int:
    return sum(max(0, min(b, d) - max(a, c)) for a, b in left.columns for c, d in right.columns)


def _columns(spec: ShardSpec) -> list[int]:
    return [column for start, stop in spec.columns for column in range(start, stop)]
