"""Trainers with managed collisions and their predictors: ``python -m tests.system.raw_ids --steps 20000``.

A seed trains a sharded model on one, two or four ranks with far more raw ids than rows, so that ids are admitted and
evicted all the time. It publishes with or without top-k, rounded or not, with storage that fails, and while a snapshot
is copied. Versions are merged, deleted and lost, and the trainer returns to older checkpoints. Predictors follow: an
unsharded model, a quantized one, a model that is sharded as the trainer, and a plain table with a ``RawIdIndex``. They
are slow, fail at any hold of the lock or read of the store, roll back, and restart from kept tables.

The oracle is the evaluation of the trainer's own module, recorded after each batch:

- After a complete version, each id reads what it read in the trainer at that version, within the error of the encoding.
  With top-k, a row that was left out may be an older row of the same id.
- At each release of the lock, and in other threads, each id reads that of the version before, of this one, or the
  default row of its bucket.
- The numbers of admitted and evicted ids of a version, and ``evicted`` of a second consumer, are those of the trainer.

A step trains some batches, publishes perhaps, and lets each predictor do something.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torchrec import JaggedTensor, KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, TopK, TrackingMode
from delta_tracker.errors import DeltaTrackerError, StreamError
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.reading.position import Written
from delta_tracker.stream.storage.storage import Storage
from tests.ranks import RankPool
from tests.stores.rules import fails, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.system.raw_id_models import DIM, TABLES, Model, Shape, answers, collision, local_rows, quantized, shard

_BLANK = -1.0  # value of the rows of a table before the first version
_WORLD_SIZES = (1, 2, 4)


@dataclass(frozen=True, eq=False)
class Truth:
    """What the trainer's evaluation reads after a batch.

    Args:
        rows: ``[T, N, D]`` row of each id.
        slots: ``[T, N]`` global slot of each id; -1 for an unknown one.
        defaults: ``[T, N, D]`` default row of the bucket of each id.
    """

    rows: Tensor
    slots: Tensor
    defaults: Tensor

    def owners(self, table: int, raw_ids: Tensor, num_rows: int) -> Tensor:
        """Return the raw id of each slot, ``[num_rows]``."""
        found = torch.full((num_rows,), NO_OWNER)
        is_known = self.slots[table] >= 0
        found[self.slots[table][is_known]] = raw_ids[is_known]
        return found


@dataclass(frozen=True, eq=False)
class Version:
    """A version of the stream, or a claim, which has the rows of the version before.

    Args:
        truth: evaluation at its cut; None for a claim before the first version.
        starts: ``[T, N]`` first version whose row of the id may still be in the tables, because top-k left others out.
        exact: newest version without left out rows.
    """

    truth: Truth | None
    starts: Tensor
    exact: int


class Trainer:
    """One rank of a trainer, and what it knows of all versions.

    Args:
        seed: seed of all choices.
        root: directory of the stream.
    """

    def __init__(self, seed: int, root: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shape = shape = Shape.of(seed, self.world_size)
        self.url = f"file://{root}"
        self.storage = WrappedStorage(Storage(self.url, create=True))
        self.draw = random.Random(f"trainer {seed} {self.world_size}")  # the same on all ranks
        self._generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        count = 5 * shape.num_rows
        small = range(min(shape.hash_size or 200, 200))
        found: set[int] = set()
        while len(found) < count:
            wide = self.draw.randrange(-(2**63), 2**63 - 1)
            found.add(wide if shape.is_hashed or self.draw.random() < 0.4 else self.draw.choice(small))
        self.ids = torch.tensor(self.draw.sample(sorted(found), count))
        self.raw_ids = shape.raw_ids(self.ids)
        buckets = [bucket_of(raw_id, shape.hash_size, self.world_size) for raw_id in self.raw_ids.tolist()]
        self.buckets = torch.tensor(buckets)
        # The ids of the first raw id of each bucket, and some others, are never trained.
        reserved = {buckets.index(bucket) for bucket in range(self.world_size)} | set(range(count // 10))
        never = {int(self.raw_ids[place]) for place in reserved}
        self._never = torch.tensor([buckets.index(bucket) for bucket in buckets])
        self._trained = self.ids[torch.tensor([raw_id not in never for raw_id in self.raw_ids.tolist()])]
        self._by_batch: dict[int, Truth] = {}
        self._versions: dict[int, Version] = {}
        self._entries: dict[int, Manifest] = {}
        self._binding = threading.Lock()
        self._saved: tuple[Any, Any, dict[int, Truth]] | None = None
        self._num_trained = 0
        self.counts: Counter[str] = Counter()
        torch.manual_seed(seed)
        self.model = shard(shape)
        self._track()
        self._publish()

    def _track(self) -> None:
        self.tracker = ModelDeltaTracker(self.model, ["stream", "other"], mode=TrackingMode.EMBEDDING)
        self.fqns = {fqn.rpartition(".")[2]: fqn for fqn in self.tracker.tables}

    def _publish(self) -> None:
        """Build a publisher."""
        self._remember()
        self.tracker.get_delta("other")
        self._other = self._by_batch[self.tracker.num_batches]
        shape = self.shape
        snapshot_every = 4 if shape.style == "step" else None
        self.publisher = Publisher(
            self.tracker,
            self.storage,
            "stream",
            top_k=None if shape.top_k is None else TopK(rows=shape.top_k),
            encoding=None if shape.encoding == "F32" else Encoding(shape.encoding),
            cadence=Cadence(batches=2, snapshot_every=snapshot_every),
        )

    # Training

    def train(self) -> None:
        """Train a batch; in the style ``"step"``, publish when due."""
        self._num_trained += 1
        self.model(self._batch()).backward()
        self.tracker.step()
        self._remember()
        if self.shape.style == "step":
            self.publisher.step()

    def _batch(self, size: int = 12) -> KeyedJaggedTensor:
        """Return ids from a window that moves; many batches have few ids, so that the ids become frequent."""
        values = []
        for _ in TABLES:
            window, offset = (int(torch.randint(1, 10, (), generator=self._generator)) for _ in range(2))
            if self._num_trained < 3:  # the first batch has an id for each rank
                window = len(self._trained)
            places = self._num_trained * 3 // 2 + offset + torch.randint(0, window, (size,), generator=self._generator)
            values.append(self._trained[places % len(self._trained)])
        lengths = torch.full((len(TABLES) * size // 2,), 2)
        return KeyedJaggedTensor(list(TABLES), torch.cat(values), lengths=lengths)

    def _remember(self) -> None:
        rows = answers(self.model, self.ids)
        slots = torch.full(rows.shape[:2], -1)
        for number, table in enumerate(TABLES):
            module = collision(self.model, table)
            known = torch.isin(self.raw_ids, module._mch_sorted_raw_ids)
            if bool(known.any()):
                raw_ids = self.raw_ids[known]
                features = {table: JaggedTensor(raw_ids, lengths=torch.ones_like(raw_ids))}
                slots[number, known] = module.remap(features)[table].values()
        dist.all_reduce(slots, dist.ReduceOp.MAX)
        defaults = rows[:, self._never]
        is_known = slots >= 0
        assert not bool(is_known[:, self._never].any()), "ids that are not trained"
        same = (rows == defaults).all(-1)
        assert bool((same | is_known).all()), "unknown ids read the default row of their bucket"
        assert not bool((same & is_known).any()), "known ids do not"
        self._by_batch[self.tracker.num_batches] = Truth(rows, slots, defaults)

    def read_other(self) -> None:
        """Read the second consumer, and compare the raw ids with those of its own last read."""
        delta = self.tracker.get_delta("other")
        now = self._by_batch[self.tracker.num_batches]
        for number, table in enumerate(TABLES):
            rows, shard_ = delta[self.fqns[table]], self.tracker.shards[self.fqns[table]]
            place = slice(shard_.row_offset, shard_.row_offset + shard_.num_rows)
            former, owners = (
                each.owners(number, self.raw_ids, self.shape.num_rows)[place] for each in (self._other, now)
            )
            changed = (former != owners).nonzero().flatten()
            assert bool(torch.isin(changed, rows.ids).all()), "a change of owner marks its row"
            former, owners = former[rows.ids], owners[rows.ids]
            assert torch.equal(rows.raw_ids, owners)
            assert torch.equal(rows.evicted, torch.where(former == owners, NO_OWNER, former)), "evicted"
            assert torch.equal(rows.admitted, torch.where(former == owners, NO_OWNER, owners)), "admitted"
        self._other = now
        self.counts["other reads"] += 1

    # Publishing

    def publish(self) -> None:
        """Publish a delta."""
        self._attempt(self.publisher.publish)

    def snapshot(self) -> None:
        """Publish a snapshot."""
        self._attempt(self.publisher.snapshot)

    def _attempt(self, call: Callable[[], Manifest]) -> None:
        if self.shape.style == "step":
            self.train()
            return
        version = call().version
        assert version == self.publisher.version

    def fail(self) -> None:
        """Try to publish while the store of a rank fails."""
        rank, kind = self.draw.randrange(self.world_size), self.draw.choice(["put", "create"])
        if self.rank == rank:
            self.storage.rules.append(fails(on(kind), "No space left on device"))
        try:
            self.publish()
        except DeltaTrackerError:
            self.counts["failed publishes"] += 1
        self.finish()
        self.storage.rules.clear()

    def finish(self) -> None:
        """In the style ``"step"``, wait for a version; it may have failed, and its rows are then pending."""
        if self.shape.style == "step":
            with contextlib.suppress(DeltaTrackerError):
                self.publisher.flush()

    def republish(self) -> None:
        """Replace the publisher."""
        self._end_publisher()
        self._publish()

    def _end_publisher(self) -> None:
        self.finish()
        self.publisher.close()
        dist.barrier()
        self.bind()

    def save(self) -> None:
        """Save a checkpoint."""
        self.finish()
        model = {
            name: each.clone() if type(each) is Tensor else copy.deepcopy(each)
            for name, each in self.model.state_dict().items()
        }
        tracker = {name: each.clone() for name, each in self.tracker.state_dict().items()}
        self._saved = model, tracker, dict(self._by_batch)

    def revert(self) -> None:
        """Return to the checkpoint, with or without the tracker's state."""
        if self._saved is None:
            return
        self._end_publisher()
        self.tracker.detach()
        model, tracker, _ = self._saved
        self.model = shard(self.shape)
        self.model.load_state_dict(model)
        self._track()
        if self.draw.random() < 0.7:
            self.tracker.load_state_dict(tracker)
        self._saved, self._by_batch = None, {}
        self._publish()
        self.counts["reverts"] += 1

    # Upkeep, by rank 0

    def fold(self) -> None:
        """Merge versions."""
        fold = self.draw.choice([0.2, 1e9])
        if self.rank == 0:
            before = len(StreamLog(self.storage).merged())
            with contextlib.suppress(StreamError):  # parts that were deleted
                compact(self.storage, fold=fold, min_versions=2)
            self.counts["merged"] += len(StreamLog(self.storage).merged()) - before

    def forget(self) -> None:
        """Delete old versions."""
        retention = Retention(versions=self.draw.choice([1, 3]), grace_seconds=0.0)
        if self.rank == 0:
            before = len(StreamLog(self.storage).versions())
            retain(self.storage, retention)
            self.counts["deleted"] += before - len(StreamLog(self.storage).versions())

    def lose(self) -> None:
        """Delete the parts of a version, so that predictors resync."""
        version = self.draw.randrange(1 + max(self._versions, default=0))
        if self.rank == 0:
            for name in self.storage.names("parts"):
                if f"{version:020}" in name:
                    self.storage.delete(name)

    # Versions

    @property
    def head(self) -> int:
        """Number of the newest version that is known here."""
        return max(self._versions, default=-1)

    def bind(self) -> None:
        """Record what the trainer's evaluation was at the cut of each new version."""
        with self._binding:
            log = StreamLog(self.storage)
            for number in log.versions(after=self.head):
                entry = log.read(number)
                assert entry is not None
                self._versions[number] = self._version(number, entry)
                self._entries[number] = entry

    def _version(self, number: int, entry: Manifest) -> Version:
        before = self._versions.get(number - 1)
        if entry.kind == "claim":
            starts = torch.full((len(TABLES), len(self.ids)), number)
            return before or Version(None, starts, number)
        truth = self._by_batch[entry.batches[1]]
        self.counts[entry.kind] += 1
        if before is None or before.truth is None or entry.kind == "snapshot" or entry.pending_rows == 0:
            starts, exact = torch.full(truth.slots.shape, number), number
        else:
            is_same = (truth.slots >= 0) & (truth.slots == before.truth.slots)
            starts = torch.where(is_same, before.starts, number).masked_fill(truth.slots < 0, before.exact)
            exact = before.exact
        if before is not None and before.truth is not None:
            self._count(entry, before.truth, truth)
        return Version(truth, starts, exact)

    def _count(self, entry: Manifest, before: Truth, now: Truth) -> None:
        """Compare the numbers of admitted and evicted ids of a version."""
        for number, table in enumerate(TABLES):
            former, owners = (each.owners(number, self.raw_ids, self.shape.num_rows) for each in (before, now))
            moved = former != owners
            expected = tuple(int((moved & (each != NO_OWNER)).sum()) for each in (owners, former))
            found = entry.owner_changes.get(self.fqns[table])
            assert found is None or tuple(found) == expected, (entry.version, table, found, expected)
            self.counts["evicted"] += expected[1]
            self.counts["counted versions"] += found is not None

    def at(self, number: int) -> Version:
        """Return what is known of a version."""
        if number not in self._versions:
            self.bind()
        return self._versions[number]

    def is_right(self, found: Tensor, versions: set[int], *, is_between: bool, num_rounded: int) -> Tensor:
        """Return for each id whether it reads a row that it may read, ``[T, N]``.

        Args:
            found: ``[T, N, D]`` rows that it reads.
            versions: versions whose rows may be in the tables.
            is_between: True if a version may be partly written, so that ids may read default rows.
            num_rounded: number of times that the rows were rounded to 8 bits.
        """
        is_right = torch.zeros(found.shape[:2], dtype=torch.bool)
        for number in versions:
            version = self.at(number)
            if version.truth is None:
                continue
            known = (version.truth.slots >= 0)[..., None]
            for earlier in range(number, min(version.exact, int(version.starts.min())) - 1, -1):
                truth = self.at(earlier).truth
                assert truth is not None
                rows = torch.where(known, truth.rows, truth.defaults)
                is_right |= _is_close(found, rows, num_rounded) & (version.starts <= earlier)
                if is_between and earlier >= version.exact:
                    is_right |= _is_close(found, truth.defaults, num_rounded)
                if bool(is_right.all()):
                    break
        return is_right


def bucket_of(raw_id: int, hash_size: int, count: int) -> int:
    """Return the rank to which TorchRec sends a raw id."""
    unsigned, size = raw_id % 2**64, -(-hash_size // count)
    return unsigned // size if unsigned < size * count else unsigned % count


def _is_close(found: Tensor, rows: Tensor, num_rounded: int) -> Tensor:
    if not num_rounded:
        return (found == rows).all(-1)
    least = rows.amin(-1, keepdim=True)
    spread = rows.amax(-1, keepdim=True) - least
    half = (least.abs() + spread) * 2.0**-10  # quantized tables have the scale and the least value in float16
    return ((found - rows).abs() <= 0.51 * num_rounded * spread / 255 + half + 1e-5).all(-1)


class Reader:
    """Predictor whose answers are checked at each release of its lock.

    Args:
        trainer: this rank of the trainer.
        kind: ``"model"``, ``"quantized"``, ``"sharded"`` or ``"index"``.
        seed: seed of its choices.
        kept: reader whose tables, mapping and position it takes; None for none.
    """

    def __init__(self, trainer: Trainer, kind: str, seed: str, kept: Reader | None = None) -> None:
        self.trainer, self.kind, self.seed = trainer, kind, seed
        self.draw = random.Random(seed) if kept is None else kept.draw
        self.counts = trainer.counts
        self.faults: list[str] = []
        self.storage = WrappedStorage(Storage(trainer.url))
        shape = trainer.shape
        self.tables: dict[str, Tensor] = {}
        self.index: dict[str, RawIdIndex] = {}
        self.mask = torch.ones(len(trainer.ids), dtype=torch.bool)
        self.num_rounded = (shape.encoding == "INT8") + (kind == "quantized")
        options: dict[str, Any] = {"chunk_rows": self.draw.choice([1, 3, 4096])}
        self.model: Any = None
        if kind == "index":
            self.tables = {table: torch.full((shape.num_rows, DIM), _BLANK) for table in TABLES}
            self.index = {table: RawIdIndex(shape.num_rows) for table in TABLES}
            held: Any = {trainer.fqns[table]: self.tables[table] for table in TABLES}
            options["raw_ids"] = {trainer.fqns[table]: self.index[table] for table in TABLES}
        elif kind == "quantized":
            self.model = held = quantized(shape)
            options["names"] = {fqn: f"mc.embeddings.{table}" for table, fqn in trainer.fqns.items()}
        elif kind == "model":
            self.model = held = Model(shape).eval()
            for parameter in self.model.parameters():
                parameter.data.fill_(_BLANK)
        else:
            self.model = held = shard(shape).eval()
            self.tables = {table: local_rows(self.model, table) for table in TABLES}
            self.mask = trainer.buckets == trainer.rank
            for rows in self.tables.values():
                rows.fill_(_BLANK)
        self.predictor = Predictor(ModelTarget(held, **options), self.storage)
        self.served: set[int] = set()  # versions whose rows may be in the tables
        self.kept: set[int] = set()  # versions that an earlier predictor of the tables has partly written
        self.kept_at: int | None = None
        self._snapshots: set[int] = set()
        if kept is not None:
            self._keep(kept)
        self._holds_left = 0
        self._watch()
        self.check()  # sets the versions of kept tables

    def _keep(self, other: Reader) -> None:
        with other.predictor.reading() as (_, applying):
            state = other.predictor.state_dict()
            for table, rows in self.tables.items():
                rows.copy_(other.tables[table])
                self.index[table].load_state_dict(other.index[table].state_dict())
            if self.model is not None:
                self.model.load_state_dict(other.model.state_dict())
        self.kept = set(other.kept if applying is None else other.served)
        self.kept_at = other.predictor.version
        self.predictor.load_state_dict(state)

    def _watch(self) -> None:
        """Check all answers at each release of the lock; raise before a hold if asked to."""
        writer = self.predictor._destination
        assert isinstance(writer, ModelWriter)
        begin, lock = writer._begin, writer.lock
        writing = lock.writing

        def begun(manifest: Manifest, *, is_elsewhere: bool) -> Written:
            self.served.add(manifest.version)
            if manifest.kind == "snapshot":
                self._snapshots.add(manifest.version)
            return begin(manifest, is_elsewhere=is_elsewhere)

        @contextlib.contextmanager
        def checked() -> Iterator[None]:
            self._holds_left -= 1
            if self._holds_left == 0:
                raise MemoryError("no memory")
            with writing():
                yield
            self.check()

        writer._begin = begun  # type: ignore[method-assign]
        lock.writing = checked  # type: ignore[method-assign]

    # Answers

    @torch.no_grad()
    def _answers(self) -> Tensor:
        """Return the row that each id reads, ``[T, N, D]``; only the ids of this rank count if the model is sharded."""
        raw_ids = self.trainer.raw_ids
        if self.kind == "index":
            slots = [self.index[table].rows_of(raw_ids) for table in TABLES]
        elif self.kind == "sharded":
            slots = []
            for table in TABLES:
                module, rows = collision(self.model, table), torch.full(raw_ids.shape, -1)
                features = {
                    table: JaggedTensor(raw_ids[self.mask], lengths=torch.ones(int(self.mask.sum()), dtype=torch.int64))
                }
                rows[self.mask] = module.remap(features)[table].values() - module._output_global_offset
                slots.append(rows)
        else:
            return answers(self.model, self.trainer.ids)
        return torch.stack(
            [
                torch.where((places < 0)[:, None], _BLANK, self.tables[table][places])
                for table, places in zip(TABLES, slots, strict=True)
            ]
        )

    def check(self) -> None:
        """Check that each id reads a row that it may read now. Faults are kept in :attr:`faults`."""
        with self.predictor.reading() as (version, applying):
            is_newest = version is not None and version >= max(self.kept, default=-1)
            if applying is None and version != self.kept_at and (is_newest or version in self._snapshots):
                self.kept.clear()
            if applying is None:
                self.served = self.kept | ({version} - {None})  # type: ignore[assignment]
            served, is_between = set(self.served), applying is not None or bool(self.kept)
            if not served:
                return
            found = self._answers()
        self._assert(
            found, served, self.mask, is_between=is_between, is_blank=version is None, what=(version, applying)
        )

    def _assert(
        self, found: Tensor, served: set[int], mask: Tensor, *, is_between: bool, is_blank: bool, what: Any
    ) -> None:
        is_right = self.trainer.is_right(found, served, is_between=is_between, num_rounded=self.num_rounded)
        if is_blank:  # the tables are as they were built, where they are not written yet
            is_right |= (found == (0.0 if self.kind == "quantized" else _BLANK)).all(-1)
        wrong = (~is_right & mask).nonzero().tolist()
        self.counts["lookups"] += found.shape[0] * int(mask.sum())
        self.counts["checks while applying" if is_between else "checks after"] += 1
        if wrong:
            rows = [found[table, place].tolist() for table, place in wrong[:3]]
            self.faults.append(f"{self.kind} {what} {served}: {len(wrong)} wrong, {wrong[:3]} read {rows}")

    def check_sharded(self) -> None:
        """Check the answers of all ranks, by their collective lookup."""
        found = answers(self.model, self.trainer.ids)
        with self.predictor.reading() as (version, applying):
            mine = (version, applying, sorted(self.served), bool(self.kept))
        every: list[Any] = [None] * self.trainer.world_size
        dist.all_gather_object(every, mine)
        for rank, (version, applying, served, is_kept) in enumerate(every):
            if served:
                mask, is_between = self.trainer.buckets == rank, applying is not None or is_kept
                self._assert(
                    found, set(served), mask, is_between=is_between, is_blank=version is None, what=(rank, version)
                )

    # Actions

    def act(self) -> None:
        """Do something at random."""
        if self.predictor.status().pinned is not None and self.draw.random() < 0.4:
            self.predictor.release()
        choices = ["wait"] * 3 + ["one"] * 5 + ["sync"] * 3 + ["fail"] * 3 + ["unreadable", "roll_back", "follow"]
        getattr(self, self.draw.choice(choices))()
        self.settle()

    def settle(self) -> None:
        """Raise the faults of all checks."""
        assert not self.faults, "\n".join(self.faults[:5])

    def wait(self) -> None:
        """Do nothing."""

    def one(self) -> None:
        """Apply one version."""
        self.sync(1)

    def sync(self, limit: int | None = None) -> bool:
        """Apply versions; return True if the call succeeds."""
        return self._call(lambda: self.predictor.sync(limit))

    def _call(self, call: Callable[[], object]) -> bool:
        resyncs = self.predictor._reader.resyncs.count
        try:
            call()
        except (StreamError, MemoryError) as error:
            self.counts[type(error).__name__] += 1
            return False
        finally:
            self.counts["resyncs"] += self.predictor._reader.resyncs.count - resyncs
            self.check()
        return True

    def fail(self) -> None:
        """Fail before a hold of the lock."""
        self._holds_left = self.draw.randrange(2, 6 + 4 * self.trainer.shape.num_rows)
        if self.draw.random() < 0.5:
            self._holds_left = self.draw.randrange(2, 8)
        self.sync(self.draw.choice([1, 3]))
        self._holds_left = 0

    def unreadable(self) -> None:
        """Fail to read the store."""
        begin = self.draw.randrange(6)
        with self.storage.under(fails(nth(range(begin + 1, begin + 4), on("read")))):
            self.sync(1)

    def roll_back(self) -> None:
        """Return to an older version, perhaps with a failure."""
        if self.trainer.head < 0:
            return
        if self.draw.random() < 0.3:
            self._holds_left = self.draw.randrange(2, 20)
        version = self.draw.randrange(max(0, self.trainer.head - 8), self.trainer.head + 1)
        if self._call(lambda: self.predictor.rollback(version)):
            self.counts["rollbacks"] += 1
        self._holds_left = 0

    def follow(self) -> None:
        """Follow in a thread for a short time."""
        if self.predictor.status().pinned is not None:
            return

        def run() -> None:
            self.predictor.follow(poll_seconds=1e-6)
            time.sleep(0.01)
            self.predictor.stop()

        self._call(run)

    def restarted(self) -> Reader:
        """Return a new predictor, with the kept tables or without."""
        is_kept = self.kind in ("model", "index") and self.draw.random() < 0.7
        self.counts["kept" if is_kept else "newcomers"] += 1
        return Reader(self.trainer, self.kind, self.seed + "'", self if is_kept else None)


class Watcher:
    """Thread that looks raw ids up while versions are applied.

    Args:
        readers: the predictors, which may be replaced in the list.
    """

    def __init__(self, readers: list[Reader]) -> None:
        self._readers = readers
        self._ends = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ends.wait(0.02):
                for reader in list(self._readers):
                    reader.check()
                    reader.counts["checks in a thread"] += 1
        except Exception as error:  # noqa: BLE001  it is raised by stop()
            self._error = error

    def stop(self) -> None:
        """End the thread, and raise its error."""
        self._ends.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


_ACTIONS = (
    *["publish"] * 8, "snapshot", "snapshot", "fail", "fail", "fold", "fold", "forget", "lose", "republish", "save",
    "save", "revert", "read_other", "read_other", "nothing",
)  # fmt: skip


def play(rank: int, world_size: int, root: str, seed: int, num_steps: int) -> dict[str, int]:
    """Run the steps of a seed on a rank; return what was covered. A case of :class:`~tests.ranks.RankPool`."""
    logger = logging.getLogger("delta_tracker")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return _play(seed, root, num_steps)
    finally:
        logger.setLevel(level)


def _play(seed: int, root: str, num_steps: int) -> dict[str, int]:
    trainer = Trainer(seed, root)
    rank, world_size = trainer.rank, trainer.world_size
    kinds = ["index", "model", *([] if trainer.shape.is_bag else ["quantized"]), "index"]
    readers = [
        Reader(trainer, kind, f"{seed} {kind} {number}")
        for number, kind in enumerate(kinds)
        if number % world_size == rank
    ]
    readers.insert(0, sharded := Reader(trainer, "sharded", f"{seed} sharded {rank}"))
    watcher = Watcher(readers) if seed % 3 == 0 else None
    try:
        for _ in range(num_steps):
            _step(trainer, readers, sharded)
        _end(trainer, readers, sharded)
    finally:
        if watcher is not None:
            watcher.stop()
    trainer.publisher.close()
    trainer.tracker.detach()
    counts = trainer.counts
    if rank:  # the trainer's own counts are the same on all ranks
        for name in ("snapshot", "delta", "evicted", "counted versions", "failed publishes", "reverts", "other reads"):
            counts.pop(name, None)
    else:
        counts["steps"] = num_steps
    return dict(counts)


def _step(trainer: Trainer, readers: list[Reader], sharded: Reader) -> None:
    for _ in range(trainer.draw.choice([0, 1, 1, 2, 3])):
        trainer.train()
    action = trainer.draw.choice(_ACTIONS)
    if action != "nothing":
        getattr(trainer, action)()
    dist.barrier()
    trainer.bind()
    dist.barrier()
    for place, reader in enumerate(readers):
        reader.act()
        if reader is not sharded and reader.draw.random() < 0.06:
            readers[place] = reader.restarted()
    sharded.check_sharded()
    sharded.settle()


def _end(trainer: Trainer, readers: list[Reader], sharded: Reader) -> None:
    """Publish a snapshot and a delta, after which each predictor must have the newest version."""
    trainer.finish()
    trainer.publisher.snapshot()
    trainer.train()
    trainer.finish()
    trainer.publisher.publish()
    dist.barrier()
    trainer.bind()
    for reader in readers:
        reader.predictor.release()
        assert reader.sync(), reader.kind
        assert reader.predictor.version == trainer.head
        reader.settle()
    sharded.check_sharded()
    sharded.settle()
    assert trainer.tracker.num_hook_errors == 0


def run(pool: RankPool, seed: int, num_steps: int) -> Counter[str]:
    """Run a seed on all ranks of a pool; return what was covered."""
    root = tempfile.mkdtemp(prefix="raw-ids-")
    try:
        found = pool.run("tests.system.raw_ids:play", root=str(Path(root) / "stream"), seed=seed, num_steps=num_steps)
        return sum(map(Counter, found), Counter())
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run seeds until all steps are done, and print what they covered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000, help="number of steps of all seeds together")
    parser.add_argument("--each", type=int, default=60, help="number of steps of a seed")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--ranks", type=int, nargs="*", default=_WORLD_SIZES, help="numbers of ranks, in turns")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONHASHSEED", "0")  # TorchRec's order of sends depends on the hashes of strings
    pools = [RankPool(count) for count in options.ranks]
    covered: Counter[str] = Counter()
    seed = options.first
    try:
        while covered["steps"] < options.steps:
            for pool in pools:
                begin = time.monotonic()
                covered += run(pool, seed, min(options.each, options.steps))
                seconds = round(time.monotonic() - begin, 1)
                print(json.dumps({"seed": seed, "ranks": pool.world_size, "seconds": seconds, **covered}), flush=True)
            seed += 1
    finally:
        for pool in pools:
            pool.stop()


if __name__ == "__main__":
    sys.exit(main())
