"""Simulated trainers with managed collisions, and predictors whose answers are checked after every hold of the lock.

A row of the table is ``[number, time, 0, 0]``: the number of its raw id in the list of all raw ids, -1 if it has none,
and the time of its last change. TorchRec's tables have a multiple of four columns.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import CorruptPartError, StreamError
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.raw_ids import NO_OWNER, bucket_of, defaults_of
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, Kind, Manifest
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.log import Claim, StreamLog, part_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.reading.position import Written
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, TableSpec
from tests.predictor.serving import Breakable
from tests.stores.rules import fails, nth
from tests.stores.wrapped import WrappedStorage

FQN = "ec.embeddings.t"
DIM = 4
_STEPS = (
    *["delta"] * 6, "snapshot", "restart", "fold", "lose", "fail", "fail", "unreadable", "sync", *["one"] * 5,
    "rollback", "release", "kept", "kept", "newcomer",
)  # fmt: skip
_NONE = -1  # number of a row without a raw id


def split(num_rows: int, num_buckets: int, hash_size: int, *, has_defaults: bool = True) -> Identity:
    """Return buckets of equal size, each with its last row as default row."""
    edges = [num_rows * number // num_buckets for number in range(num_buckets + 1)]
    pairs = itertools.pairwise(edges)
    return Identity(hash_size, tuple(Bucket(pair, pair[1] - 1 if has_defaults else None) for pair in pairs))


@dataclass
class State:
    """Owners and rows of a table.

    Args:
        identity: buckets of the table.
        owners: ``[R]`` raw ids.
        rows: ``[R, DIM]`` rows.
    """

    identity: Identity
    owners: Tensor
    rows: Tensor

    def slots_of(self, raw_ids: Tensor) -> Tensor:
        """Return the row that each raw id reads, -1 for none: the slow reference."""
        owned = (self.owners == raw_ids[:, None]) & (self.owners != NO_OWNER)
        return torch.where(owned.any(1), owned.int().argmax(1), defaults_of(self.identity, raw_ids))


class History:
    """Trainer with one table, and its stream. ``states`` maps each version to the state of a reader after it.

    Args:
        seed: seed of all choices.
        num_buckets: number of ranks of the first training; None for a random one. The other arguments are alike.
        num_rows: number of rows.
        hash_size: size of the range of raw ids.
        has_defaults: True for default rows.
        is_small: True for raw ids inside the hash size only.
    """

    def __init__(
        self,
        seed: int,
        num_buckets: int | None = None,
        *,
        num_rows: int | None = None,
        hash_size: int | None = None,
        has_defaults: bool | None = None,
        is_small: bool = False,
    ) -> None:
        self.storage = Storage("memory://")
        self.random = random.Random(seed)
        self.num_rows = self.random.choice([4, 6, 8, 12]) if num_rows is None else num_rows
        self.hash_size = self.random.choice([0, 100, 1000, 2**63 - 1]) if hash_size is None else hash_size
        self.has_defaults = self.random.random() < 0.8 if has_defaults is None else has_defaults
        small = range(max(1, min(self.hash_size, 200)))
        kinds = [lambda: self.random.choice(small), lambda: self.random.randrange(-(2**63), 2**63 - 1)]
        kinds = kinds[:1] if is_small else kinds
        found = {self.random.choice(kinds)() for _ in range(10 * self.num_rows)}
        self.raw_ids = torch.tensor(self.random.sample(sorted(found), min(len(found), 5 * self.num_rows)))
        self.numbers = {raw_id: number for number, raw_id in enumerate(self.raw_ids.tolist())}
        self.states: dict[int, State] = {}
        self.snapshots: list[int] = []
        self.time = 0
        self.claim: Claim = StreamLog(self.storage).claim()
        self.restart(num_buckets)

    @property
    def version(self) -> int:
        return self.claim.head.version

    def restart(self, num_buckets: int | None = None) -> None:
        """Start a new training, by default with a random number of ranks, and publish a snapshot."""
        num_buckets = num_buckets or self.random.choice([each for each in (1, 2, 4) if 2 * each <= self.num_rows])
        self.identity = split(self.num_rows, num_buckets, self.hash_size, has_defaults=self.has_defaults)
        self.buckets = bucket_of(self.identity, self.raw_ids).tolist()
        self.owners = [NO_OWNER] * self.num_rows
        self.rows = [[_NONE, self._tick(), 0, 0] for _ in range(self.num_rows)]
        self.changed: set[int] = set()
        self.snapshot()

    def _tick(self) -> int:
        self.time += 1
        return self.time

    def _write(self, slot: int) -> None:
        self.rows[slot] = [self.numbers.get(self.owners[slot], _NONE), self._tick(), 0, 0]
        self.changed.add(slot)

    def train(self) -> None:
        """Train one raw id: admit it if it is unknown, which evicts another one if its bucket is full."""
        number = self.random.randrange(len(self.raw_ids))
        bucket = self.identity.buckets[self.buckets[number]]
        raw_id = int(self.raw_ids[number])
        if bucket.default is not None:
            self._write(bucket.default)
        slots = [slot for slot in range(*bucket.rows) if slot != bucket.default]
        chance = self.random.random()
        if raw_id in self.owners:
            slot = self.owners.index(raw_id)
            if chance < 0.3:  # move to another row
                other = self.random.choice(slots)
                self.owners[slot], self.owners[other] = self.owners[other], self.owners[slot]
                self._write(slot)
                slot = other
            elif chance < 0.4:  # evict without an admission
                self.owners[slot] = NO_OWNER
        else:
            empty = [slot for slot in slots if self.owners[slot] == NO_OWNER]
            slot = self.random.choice(empty if empty and chance < 0.5 else slots)
            self.owners[slot] = raw_id
        self._write(slot)

    def delta(self) -> None:
        for _ in range(self.random.randrange(6)):
            self.train()
        self._commit("delta", [], sorted(self.changed))

    def snapshot(self) -> None:
        """Publish all rows, which are copied while the training continues; the owners are copied before."""
        owners, rows = list(self.owners), []
        self.changed.clear()
        for slot in range(self.num_rows):
            for _ in range(self.random.choice([0, 0, 1, 2])):
                self.train()
            rows.append(self.rows[slot])
        whole = [
            self._block(bucket.rows, None, owners[slice(*bucket.rows)], rows[slice(*bucket.rows)])
            for bucket in self.identity.buckets
        ]
        self._commit("snapshot", whole, sorted(self.changed))
        self.snapshots.append(self.version)

    def fold(self) -> None:
        with contextlib.suppress(CorruptPartError):  # parts that were deleted
            compact(self.storage, fold=self.random.choice([0.2, 1e9]))

    def _block(
        self, rows: tuple[int, int], ids: list[int] | None, owners: list[int], values: list[list[int]]
    ) -> BlockRows:
        block = Block(FQN, rows, (0, DIM), len(values), "all" if ids is None else "list", Encoding.F32)
        held = torch.tensor(owners, dtype=torch.int64)[:, None]
        stored = torch.tensor(values, dtype=torch.float32).view(-1, DIM)
        listed = None if ids is None else torch.tensor(ids, dtype=torch.int64)
        return BlockRows(block, listed, lambda begin, end: stored[begin:end], (), lambda begin, end: held[begin:end])

    def _commit(self, kind: Kind, whole: list[BlockRows], changed: list[int]) -> None:
        head, parts = self.claim.head, []
        for rank, bucket in enumerate(self.identity.buckets):
            ids = [slot for slot in changed if bucket.rows[0] <= slot < bucket.rows[1]]
            listed = self._block(
                bucket.rows, ids, [self.owners[slot] for slot in ids], [self.rows[slot] for slot in ids]
            )
            names = [part_name(head.version + 1, head.generation, author) for author in (f"r{rank}", f"r{rank}s")]
            parts.append(put_part(self.storage, names[0], [*whole[rank : rank + 1], listed], states_name=names[1]))
        self.changed.clear()
        # Readers may reach the version before the commit returns.
        rows = torch.tensor(self.rows, dtype=torch.float32)
        self.states[head.version + 1] = State(self.identity, torch.tensor(self.owners), rows)
        self.claim.commit(
            Manifest(
                stream="", generation=0, writer="", version=0, kind=kind, created=0.0, format=STATES_FORMAT,
                tables={FQN: TableSpec(FQN, self.num_rows, DIM, torch.float32)}, identities={FQN: self.identity},
                parts=tuple(parts),
            )
        )  # fmt: skip


class Follower:
    """Predictor whose answers for all raw ids are checked each time that it releases the lock for writing.

    Args:
        history: the trainer.
        table: ``[R, DIM]`` rows.
        index: index of the raw ids.

    Attributes:
        num_checks: number of checks.
    """

    def __init__(self, history: History, table: Tensor | None = None, index: RawIdIndex | None = None) -> None:
        self.history, self.storage = history, WrappedStorage(history.storage)
        self.table = torch.full((history.num_rows, DIM), float(_NONE)) if table is None else table
        self.index = RawIdIndex(history.num_rows) if index is None else index
        self.target = Breakable.of(self.table)
        self._follow(Predictor(ModelTarget({FQN: self.target}, raw_ids={FQN: self.index}, chunk_rows=1), self.storage))

    def _follow(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.served: set[int] = set()  # versions whose rows may be in the table
        # Versions that an earlier predictor of the table has partly written, and the version that it had reached.
        self.kept: set[int] = set()
        self.kept_at: int | None = None
        self.num_checks = 0
        writer = predictor._destination
        assert isinstance(writer, ModelWriter)
        begin = writer._begin

        def begun(manifest: Manifest, *, is_elsewhere: bool) -> Written:
            self.served.add(manifest.version)
            return begin(manifest, is_elsewhere=is_elsewhere)

        writer._begin = begun  # type: ignore[method-assign]
        lock = writer.lock
        writing = lock.writing

        @contextlib.contextmanager
        def checked() -> Iterator[None]:
            with writing():
                yield
            self.check()

        lock.writing = checked  # type: ignore[method-assign]

    def lookups(self) -> tuple[Tensor, Tensor]:
        """Return the row that each raw id reads, and its content. Call it inside ``reading()``."""
        slots = self.index.rows_of(self.history.raw_ids)
        return slots, self.table[slots]

    def equal(self, rows: Tensor, expected: Tensor) -> Tensor:
        """Return a mask of the ``[N, DIM]`` rows that are equal."""
        return (rows == expected).all(1)

    def is_initial(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Return a mask of the answers that are of before the first version: none, as an index has no row."""
        assert len(slots) == len(rows)
        return torch.zeros_like(slots, dtype=torch.bool)

    def check(self) -> None:
        """Check that each raw id reads its own row or its default row, as of a version that is served."""
        self.num_checks += 1
        history, raw_ids = self.history, self.history.raw_ids
        with self.predictor.reading() as (version, applying):
            is_newest = version is not None and version >= max(self.kept, default=-1)
            if version != self.kept_at and (is_newest or version in self.history.snapshots):
                self.kept.clear()
            if applying is None:
                self.served = self.kept | ({version} - {None})  # type: ignore[assignment]
            slots, rows = self.lookups()
        if version is None and applying is None:
            return
        states = [history.states[each] for each in self.served if each in history.states]
        is_right = torch.zeros(len(raw_ids), dtype=torch.bool)
        for state in states:
            own = state.slots_of(raw_ids)
            is_right |= self.equal(rows, state.rows[own]) & (slots == own)  # its answer in that version
            default = defaults_of(state.identity, raw_ids)
            for other in states:  # the default row, which may be written already or not yet
                held = other.rows[default]
                is_right |= (slots == default) & (held[:, 0] == _NONE) & self.equal(rows, held)
            is_right |= (slots == _NONE) & ((default == _NONE) | (version is None))
        if version is None:
            is_right |= self.is_initial(slots, rows)
        wrong = (~is_right).nonzero().flatten().tolist()
        assert not wrong, f"ids {wrong} read {slots[wrong].tolist()} {rows[wrong].tolist()}: {version=} {applying=}"

    def assert_holds(self) -> None:
        """Check all answers and the whole table, unless an interrupted version is still partly written."""
        with self.predictor.reading() as (version, applying):
            if version is None or applying is not None or self.kept:
                return
            self.assert_is(self.history.states[version])

    def assert_is(self, state: State) -> None:
        """Check the whole table and the index."""
        assert torch.equal(self.table, state.rows)
        assert torch.equal(self.index.rows_of(self.history.raw_ids), state.slots_of(self.history.raw_ids))
        assert torch.equal(self.index.owners(), state.owners)

    def sync(self, limit: int | None = None) -> bool:
        """Return True if the call succeeds."""
        return self._succeeds(lambda: self.predictor.sync(limit))

    def rollback(self, version: int) -> bool:
        """Return True if the call succeeds."""
        return self._succeeds(lambda: self.predictor.rollback(version))

    def _succeeds(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except (StreamError, MemoryError):
            return False
        finally:
            self.check()
        self.assert_holds()
        return True

    def break_at(self, count: int) -> None:
        """Make the ``count``-th next write raise once."""
        left = [count]

        def write(_: int) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryError("no memory")

        self.target.before_write = write

    def restarted(self) -> Follower:
        """Return a new predictor with the saved table, index and position, as they are now."""
        with self.predictor.reading() as (_, applying):
            table, index, state = self.table.clone(), self.index.state_dict(), self.predictor.state_dict()
        held = RawIdIndex(self.history.num_rows)
        held.load_state_dict(index)
        found = Follower(self.history, table, held)
        found.kept = set(self.kept if applying is None else self.served)
        found.kept_at = self.predictor.version
        found.predictor.load_state_dict(state)
        return found


class Schedule:
    """A stream and one predictor of it; each method is a step that may happen to them.

    Args:
        history: the trainer.
        follower: return a new predictor.
    """

    def __init__(self, history: History, follower: Callable[[History], Follower]) -> None:
        self.history = history
        self.draw = self.history.random
        self._newcomer = follower
        self.follower = follower(history)

    def run(self, num_steps: int) -> None:
        """Take random steps, then check that the predictor reaches the newest version."""
        for _ in range(num_steps):
            getattr(self, self.draw.choice(_STEPS))()
        self.history.snapshot()
        self.history.delta()
        self.release()
        assert self.follower.sync()
        assert self.follower.predictor.version == self.history.version

    def delta(self) -> None:
        self.history.delta()

    def snapshot(self) -> None:
        self.history.snapshot()

    def restart(self) -> None:
        self.history.restart()

    def fold(self) -> None:
        self.history.fold()

    def lose(self) -> None:
        """Delete the parts of a version, so that predictors resync."""
        lost = self.draw.randrange(self.history.version + 1)
        for name in self.history.storage.names("parts"):
            if f"{lost:020}" in name:
                self.history.storage.delete(name)

    def fail(self) -> None:
        self.follower.break_at(self._some_write())
        self.follower.sync(1)
        self.follower.break_at(0)

    def _some_write(self) -> int:
        return self.draw.randrange(1, 2 * self.history.num_rows)

    def unreadable(self) -> None:
        begin = self.draw.randrange(6)
        with self.follower.storage.under(fails(nth(range(begin, begin + 3)))):
            self.follower.sync(1)

    def sync(self) -> None:
        self.follower.sync()

    def one(self) -> None:
        self.follower.sync(1)

    def rollback(self) -> None:
        if self.draw.random() < 0.3:
            self.follower.break_at(self._some_write())
        self.follower.rollback(self.draw.randrange(self.history.version + 1))
        self.follower.break_at(0)

    def release(self) -> None:
        self.follower.predictor.release()

    def kept(self) -> None:
        self.follower = self.follower.restarted()

    def newcomer(self) -> None:
        self.follower = self._newcomer(self.history)
