"""A table split over ranks in any way, and a slow reference of what each consumer has not yet received.

The reference is independent of ranks. For each consumer and each element of the table it keeps the value that was last
sent, whether the element is pending, whether its old value is known, and how many reads left it out. Only two
things depend on the split: a rank marks and leaves out whole rows of its block, and a restore makes a row of a block
pending if one of its elements is.
"""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.checkpoint.part import HEADER, pack, parse
from delta_tracker.tracker.checkpoint.reshard import Resharding
from delta_tracker.tracker.cursors import Read
from delta_tracker.tracker.modes import CAPTURES
from delta_tracker.tracker.store.shadow import make_store
from delta_tracker.types import DeltaRows, ShardSpec, TableSpec, TrackingMode

NUM_ROWS, DIM = 10, 6
CONSUMERS = ("a", "b")
TABLE = TableSpec("t", NUM_ROWS, DIM, torch.float32)

Blocks = list[tuple[range, tuple[tuple[int, int], ...]]]


def random_blocks(draw: random.Random, column_edges: tuple[int, ...] | None = None) -> Blocks:
    """Draw a split of the table: the rows and column ranges of each rank; some ranks have none.

    Args:
        draw: random generator.
        column_edges: split columns only there.
    """
    row_edges = [0, *sorted(draw.sample(range(1, NUM_ROWS), draw.randrange(3))), NUM_ROWS]
    edges = column_edges or (0, *sorted(draw.sample(range(1, DIM), draw.randrange(3))), DIM)
    ranges = list(itertools.pairwise(edges))
    blocks: Blocks = []
    for start, stop in itertools.pairwise(row_edges):
        holders: dict[int, list[tuple[int, int]]] = {}
        for each in ranges:
            holders.setdefault(draw.randrange(2), []).append(each)
        blocks += [(range(start, stop), tuple(held)) for held in holders.values()]
    blocks += [(range(0), ())] * draw.randrange(2)
    draw.shuffle(blocks)
    return blocks


class Rank:
    """One rank's log over its block of the table, with a minimal kernel that only has memory."""

    def __init__(
        self,
        block: tuple[range, tuple[tuple[int, int], ...]],
        mode: TrackingMode,
        values: Tensor,
        *,
        is_fused: bool,
        keeps_all: bool,
    ) -> None:
        self.rows, columns = block
        self.capture = CAPTURES[mode]
        self.units = units_of(columns, mode)
        spec = ShardSpec(TABLE, self.rows.start, len(self.rows), columns)
        self.memory = [values[self.rows.start : self.rows.stop, units].clone() for units in self.units]
        self.places = tuple(
            (Kernel(_module(mode, memory), (("t", 1),), is_fused=is_fused), 0) for memory in self.memory
        )
        self.shards = {"t": LocalShard(spec, self.places, torch.device("cpu"), is_fused)}
        store = make_store(lambda: self.shards["t"], self.capture, engine=None)
        self.log = ChangeLog({"t": store}, CONSUMERS, delete_on_read=not keeps_all, max_bytes=None)
        self.reads: dict[str, Read] = {}

    @property
    def columns(self) -> list[int]:
        return [unit for units in self.units for unit in units]

    def local(self, rows: set[int]) -> list[int]:
        return sorted(row - self.rows.start for row in rows if row in self.rows)


def units_of(columns: tuple[tuple[int, int], ...], mode: TrackingMode) -> list[list[int]]:
    """Return which reference elements each column range holds: its columns, or the one sum of the range."""
    if mode is TrackingMode.MOMENTUM_DIFF:
        return [[start] for start, _ in columns]
    return [list(range(start, stop)) for start, stop in columns]


def _module(mode: TrackingMode, memory: Tensor) -> SimpleNamespace:
    # Writes of a fused kernel do not change the version counters of its tensors, so it has none.
    kernel = SimpleNamespace(_parameters={}, _buffers={}, split_optimizer_states=lambda: [[memory[:, 0]]])
    if mode is TrackingMode.MOMENTUM_DIFF:
        return SimpleNamespace(flush=lambda: None, emb_module=kernel)
    return SimpleNamespace(flush=lambda: None, emb_module=kernel, split_embedding_weights=lambda: [memory])


@dataclass
class _Cells:
    """Per element, ``[NUM_ROWS, DIM]`` each: pending, old value known, number of reads that left it out."""

    pending: Tensor = field(default_factory=lambda: torch.zeros(NUM_ROWS, DIM, dtype=torch.bool))
    known: Tensor = field(default_factory=lambda: torch.ones(NUM_ROWS, DIM, dtype=torch.bool))
    ages: Tensor = field(default_factory=lambda: torch.zeros(NUM_ROWS, DIM, dtype=torch.int32))

    def mark(self, where: Tensor, *, known: bool) -> None:
        """Mark elements; those already pending do not change."""
        new = where & ~self.pending
        self.pending |= new
        self.known[new] = known
        self.ages[new] = 0


@dataclass
class _Reader:
    has: Tensor
    cells: _Cells = field(default_factory=_Cells)
    # For an uncommitted read: elements marked since its cut, the values that it read, and what it left out.
    since: tuple[_Cells, Tensor, Tensor] | None = None


class World:
    """The split table and the reference, with one method per event."""

    def __init__(self, blocks: Blocks, mode: TrackingMode, *, is_fused: bool = True, keeps_all: bool = False) -> None:
        self.mode, self.is_fused, self.keeps_all = mode, is_fused, keeps_all
        self.values = torch.arange(NUM_ROWS * DIM, dtype=torch.float32).reshape(NUM_ROWS, DIM)
        self.readers = {name: _Reader(self.values.clone()) for name in CONSUMERS}
        self.ever = torch.zeros(NUM_ROWS, DIM, dtype=torch.bool)
        self.writes: dict[int, Tensor] = {}
        self._written: dict[int, Tensor] = {}
        self.failed: dict[int, Tensor] = {}
        self.saved: Any = None
        self.num_batches = 0
        self.keys = itertools.count()
        kinds = ("rows", "unknown", "aged", "joined", "uncommitted", "in progress", "rolled back")
        self.counts = dict.fromkeys(kinds, 0)
        self.ranks = self._ranks(blocks)

    def _ranks(self, blocks: Blocks) -> list[Rank]:
        return [
            Rank(block, self.mode, self.values, is_fused=self.is_fused, keeps_all=self.keeps_all) for block in blocks
        ]

    def _mark(self, where: Tensor, *, known: bool) -> None:
        self.ever |= where
        for reader in self.readers.values():
            reader.cells.mark(where, known=known)
            if reader.since is not None:
                reader.since[0].mark(where, known=known)

    def begin(self, rows: set[int], failing: int | None = None) -> int:
        """Begin a write before its rows change; on rank ``failing`` the hook fails, so that all its rows are marked."""
        key = next(self.keys)
        where = torch.zeros(NUM_ROWS, DIM, dtype=torch.bool)
        where[sorted(rows)] = True
        self.writes[key] = where
        if not self.is_fused:
            self._mark(where, known=True)  # found by the comparison at the next cut, not earlier
            return key
        for number, rank in enumerate(self.ranks):
            failed = number == failing
            ids = None if failed else torch.tensor(rank.local(rows), dtype=torch.int64)
            rank.log.writes.begin_write(key, {"t": ids})
            block = _block(rank)
            self._mark(block if failed else where & block, known=not failed)
        if failing is not None:
            self.writes[key] = where | _block(self.ranks[failing])
            self.failed[key] = _block(self.ranks[failing])
        self._written[key] = where
        return key

    def write(self, key: int) -> None:
        where = self._written.pop(key, None) if self.is_fused else self.writes.get(key)
        if where is not None:
            self._add(where)

    def end(self, key: int) -> None:
        self.write(key)
        for rank in self.ranks if self.is_fused else []:
            rank.log.writes.end_write(key, ["t"])
        del self.writes[key]

    def edit(self, rows: set[int]) -> None:
        """Change rows outside a write, then notify the log."""
        where = torch.zeros(NUM_ROWS, DIM, dtype=torch.bool)
        where[sorted(rows)] = True
        self._add(where)
        self._mark(where, known=not self.is_fused)
        for rank in self.ranks if self.is_fused else []:
            rank.log.writes.mark("t", torch.tensor(rank.local(rows), dtype=torch.int64), is_written=True)

    def make_pending(self, name: str, rows: set[int]) -> None:
        """Mark rows whose copy at a consumer is unknown."""
        self.abort(name)
        cells = self.readers[name].cells
        where = torch.zeros(NUM_ROWS, DIM, dtype=torch.bool)
        where[sorted(rows)] = True
        where &= _held(self.ranks)
        self.readers[name].has[where] = -1.0
        self.ever |= where
        cells.pending |= where
        cells.known[where] = False
        cells.ages[where] = 0
        for rank in self.ranks:
            rank.log.consumers.make_pending(name, "t", torch.tensor(rank.local(rows), dtype=torch.int64))

    def step(self) -> None:
        self.num_batches += 1
        for rank in self.ranks:
            rank.log.consumers.step()

    def _add(self, where: Tensor) -> None:
        self.values += where.float() * (self.values.abs().max() + 1)
        for rank in self.ranks:
            for memory, units in zip(rank.memory, rank.units, strict=True):
                memory.copy_(self.values[rank.rows.start : rank.rows.stop, units])

    def read(self, name: str, leave_out: Callable[[int], bool]) -> None:
        """Read on every rank without committing; each rank chooses the rows that it leaves out."""
        reader, left = self.readers[name], torch.zeros(NUM_ROWS, DIM, dtype=torch.bool)
        for rank in self.ranks:
            reading = rank.log.consumers.read(name)
            changed = reading.rows["t"]
            self.check(name, rank, changed)
            keep = torch.tensor([not leave_out(row) for row in changed.ids.tolist()], dtype=torch.bool)
            reading.returns({"t": DeltaRows(changed.ids[keep])}, {"t": changed.take(~keep)})
            rank.log.consumers.hold(reading)
            rank.reads[name] = reading
            for row in changed.ids[~keep].tolist():
                left[row + rank.rows.start, rank.columns] = True
        since = _Cells()
        for key, where in self.writes.items() if self.is_fused else []:
            failed = self.failed.get(key, torch.zeros_like(where))
            since.mark(where & ~failed, known=True)
            since.mark(failed, known=False)
        reader.since = since, self.values.clone(), left

    def check(self, name: str, rank: Rank, changed: object) -> None:
        """Check a consumer's rows, old states and ages on a rank against the reference."""
        reader, columns = self.readers[name], rank.columns
        pending = reader.cells.pending[:, columns]
        expected = [row for row in rank.rows if bool(pending[row].any())]
        assert (changed.ids + rank.rows.start).tolist() == expected, (name, rank.rows, columns)
        ages = torch.zeros(len(expected), dtype=torch.int32) if changed.ages is None else changed.ages
        for place, row in enumerate(expected):
            cells = pending[row]
            assert int(ages[place]) == int(reader.cells.ages[row, columns][cells].max()), (name, row)
            self.counts["aged"] += int(ages[place] > 0)
            self.counts["rows"] += 1
            if not rank.capture.keeps_old:
                assert changed.states is None
                continue
            is_known = bool(reader.cells.known[row, columns][cells].all())
            assert bool(changed.known[place]) == is_known, (name, row, columns)
            self.counts["unknown"] += int(not is_known)
            if is_known:
                assert torch.equal(changed.states[place], reader.has[row, columns]), (name, row, columns)
            else:
                assert bool(changed.states[place].isnan().all())

    def commit(self, name: str) -> None:
        reader = self.readers[name]
        if reader.since is None:
            return
        for rank in self.ranks:
            rank.log.consumers.commit(rank.reads.pop(name))
        since, seen, left = reader.since
        sent = reader.cells.pending & ~left
        reader.has[sent] = seen[sent]
        kept = _Cells(reader.cells.pending & left, reader.cells.known.clone(), reader.cells.ages + 1)
        for known in (True, False):
            kept.mark(since.pending & (since.known == known), known=known)
        reader.cells, reader.since = kept, None

    def abort(self, name: str) -> None:
        if self.readers[name].since is not None:
            for rank in self.ranks:
                rank.log.consumers.abort(rank.reads.pop(name))
            self.readers[name].since = None

    def reshard(self, blocks: Blocks) -> None:
        """Save on every rank, and continue in another world that is restored from it."""
        saved = self._save()
        before = self.ranks
        self.ranks = self._ranks(blocks)
        self._restore(saved)
        for rank in before:  # saving leaves the ranks undisturbed
            for name in CONSUMERS:
                if self.readers[name].since is None:
                    self.check(name, rank, rank.log.consumers.read(name).rows["t"])
        self._forget_ranks()

    def remember(self) -> None:
        """Save, for :meth:`roll_back`."""
        self.saved = self._save(), copy.deepcopy((self.values, self.readers, self.ever, self.num_batches))

    def roll_back(self) -> None:
        """Restore the same ranks from the last save."""
        if self.saved is None:
            return
        for key in list(self.writes):
            self.end(key)
        saved, reference = self.saved
        self.values, self.readers, self.ever, self.num_batches = copy.deepcopy(reference)
        self._add(torch.zeros(NUM_ROWS, DIM))
        self._restore(saved)
        self._forget_ranks()
        for rank in self.ranks:
            rank.reads = {}
        self.counts["rolled back"] += 1

    def _save(self) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        for number, rank in enumerate(self.ranks):
            specs = {"t": rank.shards["t"].spec}
            saved |= pack(number, len(self.ranks), self.mode.value, specs, rank.log.state(), {}, {})
        self.counts["in progress"] += len(self.writes)
        self.counts["uncommitted"] += sum(reader.since is not None for reader in self.readers.values())
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def _restore(self, saved: dict[str, Tensor]) -> None:
        parts = [parse(key, header) for key, header in saved.items() if HEADER.fullmatch(key)]
        for number, rank in enumerate(self.ranks):
            plan = Resharding(parts, rank.shards, rank.capture, number, len(self.ranks))
            rank.log.restore(plan.state({key: saved[key] for key in plan.needs()}))
            assert rank.log.cursors.num_batches == self.num_batches

    def _forget_ranks(self) -> None:
        """Discard what a checkpoint does not contain: writes in progress and uncommitted reads."""
        self.writes, self.failed, self._written = {}, {}, {}
        for reader in self.readers.values():
            reader.since = None
            for rank in self.ranks:
                self._join(reader, rank)

    def _join(self, reader: _Reader, rank: Rank) -> None:
        """Make whole rows of a block pending if one of their elements is."""
        cells, columns = reader.cells, rank.columns
        for row in rank.rows:
            pending = cells.pending[row, columns]
            if not bool(pending.any()):
                continue
            self.counts["joined"] += int(not bool(pending.all()))
            known, age = cells.known[row, columns][pending].all(), cells.ages[row, columns][pending].max()
            cells.pending[row, columns] = True
            cells.known[row, columns] = known
            cells.ages[row, columns] = age

    def finish(self) -> None:
        """End every write; then the values sent to each consumer must equal the table."""
        for key in list(self.writes):
            self.end(key)
        if self.keeps_all:
            for rank in self.ranks:
                rank.log.consumers.rewind("a")
                found = rank.log.consumers.read("a").rows["t"].ids + rank.rows.start
                # elements that a restore joined in a row stay joined
                assert set(found.tolist()) >= {row for row in rank.rows if bool(self.ever[row, rank.columns].any())}
                assert set(found.tolist()) <= {row for row in rank.rows if bool(self.ever[row].any())}
            return
        for name, reader in self.readers.items():
            self.read(name, lambda _: False)
            self.commit(name)
            held = _held(self.ranks)
            assert torch.equal(reader.has[held], self.values[held]), name


def _block(rank: Rank) -> Tensor:
    where = torch.zeros(NUM_ROWS, DIM, dtype=torch.bool)
    where[rank.rows.start : rank.rows.stop, rank.columns] = True
    return where


def _held(ranks: list[Rank]) -> Tensor:
    return torch.stack([_block(rank) for rank in ranks]).any(dim=0)


def run_events(world: World, draw: random.Random, num_events: int, blocks: Callable[[], Blocks]) -> None:
    """Run random events, all of them allowed at any time."""
    for _ in range(num_events):
        _run_event(world, draw, blocks)
        if not world.is_fused:
            for key in list(world.writes):
                world.end(key)


def _run_event(world: World, draw: random.Random, blocks: Callable[[], Blocks]) -> None:
    rows = set(draw.sample(range(NUM_ROWS), draw.randrange(1, 4)))
    name = draw.choice(CONSUMERS)
    share = draw.choice([0.0, 0.3, 0.6])
    fails = world.is_fused and draw.random() < 0.1
    events: dict[str, Callable[[], object]] = {
        "begin": lambda: world.begin(rows, draw.randrange(len(world.ranks)) if fails else None),
        "write": lambda: world.write(draw.choice(list(world.writes))),
        "end": lambda: world.end(draw.choice(list(world.writes))),
        "edit": lambda: world.edit(rows),
        "read": lambda: world.read(name, lambda _: draw.random() < share),
        "commit": lambda: world.commit(name),
        "abort": lambda: world.abort(name),
        "make_pending": lambda: world.make_pending(name, rows),
        "step": world.step,
        "remember": world.remember,
        "roll back": world.roll_back,
        "reshard": lambda: world.reshard(blocks()),
    }
    weights = [4 if event in ("begin", "commit") else 1 if event in ("edit", "make_pending") else 2 for event in events]
    event = draw.choices(list(events), weights)[0]
    is_possible = {"begin": len(world.writes) < 3, "write": bool(world.writes), "end": bool(world.writes)}
    if is_possible.get(event, True):
        events[event]()
