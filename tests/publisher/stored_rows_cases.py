"""Cases for publishers that leave unchanged rows out; each runs on every rank.

The reference is a publisher of the same tracker that sends all changed rows to another stream.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TopK, restore
from delta_tracker.errors import DeltaTrackerError
from delta_tracker.monitor import Monitor
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import DeltaRows
from tests.models import Spec, Table, shard
from tests.monitor.figures import Figures
from tests.publisher.identities_cases import Served
from tests.publisher.publishing_cases import assert_equal, attempt, empty_model
from tests.publisher.states_cases import Trainer
from tests.recovery.collision_cases import answers
from tests.stores.rules import alters, fails, loses_answers, nth, on
from tests.stores.wrapped import Rule, WrappedStorage
from tests.tracker.collision_cases import collision_batch, shard_collision

_ENCODINGS = (None, Encoding.F16, Encoding.BF16, Encoding.INT8, Encoding.INT4)
_FAULTS = (None, None, None, "put", "after put", "create", "after create", "altered")


def _once(fault: str) -> Rule:
    """Return a rule for a store that fails once."""
    when = nth(1, on("put") if "put" in fault else on("create", name="log/"))
    if fault == "altered":
        return alters(lambda data: data.replace(b"{", b"[", 1), when)
    return loses_answers(when) if "after" in fault else fails(when, "No space left on device")


class _Run:
    """One seed: a trainer with two publishers, and a predictor of each stream."""

    def __init__(self, seed: int, rank: int, world_size: int, root: str) -> None:
        self.chance = random.Random(seed)  # the same on all ranks
        self.seed, self.rank, self.world_size = seed, rank, world_size
        last = world_size - 1
        self.tracker = ModelDeltaTracker(
            shard(
                Spec(
                    [
                        Table("row", 23, "row"),
                        Table("stacked", 9, "column:0,0"),
                        Table("column", 7, f"column:0,{last}"),
                        Table("last", 6, f"table:{last}"),
                        Table("replica", 7, "data"),
                    ]
                )
            ),
            ["skips", "plain", "third"],
        )
        directory = Path(root) / str(seed)
        self.url, plain = (directory / "skips").as_uri(), (directory / "plain").as_uri()
        self.storage = WrappedStorage(Storage(self.url, create=True, fsync=False), is_remote=True)
        self.encoding = self.chance.choice(_ENCODINGS)
        self.choice = self.chance.choice(["bytes", "digest"])
        self.top_k = TopK(rows=7, score=_score) if self.chance.random() < 0.3 else None
        self.plain = Publisher(
            self.tracker,
            Storage(plain, create=True, fsync=False),
            "plain",
            encoding=self.encoding,
            pointer_seconds=None,
        )
        self.skips = self.build()
        self.held, self.expected = empty_model(self.tracker), empty_model(self.tracker)
        self.predictor, self.reference = Predictor(self.held, self.url), Predictor(self.expected, plain)
        self.num_unchanged = self.num_writes = 0

    def build(self) -> Publisher:
        return Publisher(
            self.tracker,
            self.storage,
            "skips",
            encoding=self.encoding,
            top_k=self.top_k,
            skip_unchanged=self.choice,
            pointer_seconds=None,
        )

    def write(self) -> None:
        """Change rows by much, by little, not at all, or back to earlier values."""
        self.num_writes += 1
        for fqn, spec in self.tracker.shards.items():
            if not spec.num_rows:
                continue
            chance = random.Random(f"{self.seed} {self.num_writes} {fqn} {0 if spec.is_replicated else self.rank}")
            generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
            kind = chance.choice(["random", "nudge", "same", "earlier", "one column"])
            ids = torch.randperm(spec.num_rows, generator=generator)[: chance.randint(1, spec.num_rows)]
            for view in self.tracker.column_views(fqn):
                wide = torch.rand(len(ids), view.shape[1], generator=generator)
                match kind:
                    case "random":
                        view.data[ids] = wide - 0.5
                    case "nudge":
                        view.data[ids] *= 1 + 1e-5 * wide
                    case "earlier":
                        view.data[ids] = (wide[:, :1] * 3).floor() - torch.linspace(0, 1, view.shape[1])
                    case "one column":
                        view.data[ids, 0] += 0.25
                        break  # only the first column range
            if fqn in self.tracker.fused_tables:
                self.tracker.mark_changed(fqn, ids)
        self.tracker.step()

    def publish(self) -> None:
        """Publish on both streams, on one of them with a fault, and compare the predictors if no row is pending."""
        fault = self.chance.choice(_FAULTS)
        victim = self.chance.randrange(self.world_size)
        if fault is not None and self.rank == (victim if fault in {"put", "after put"} else 0):
            self.storage.rules.append(_once(fault))
        name = self.chance.choice(["publish"] * 4 + ["snapshot"])
        manifest: Manifest | None = None
        try:
            manifest = getattr(self.skips, name)()
        except DeltaTrackerError as error:
            if fault is None:
                raise AssertionError(f"seed {self.seed}: {error}") from error
            if fault == "altered":  # otherwise no publisher can claim the stream
                self.skips.publish()
        self.storage.rules.clear()
        getattr(self.plain, name)()
        with contextlib.nullcontext() if manifest is not None else contextlib.suppress(DeltaTrackerError):
            self.predictor.sync()  # also a version whose publisher saw an error
        self.reference.sync()
        if manifest is not None and manifest.pending_rows == 0:
            assert self.predictor.version == manifest.version
            for fqn, tensor in self.expected.items():
                assert torch.equal(self.held[fqn], tensor), (fqn, self.choice, self.encoding, manifest.version)

    def fence(self) -> None:
        """Let another publisher write other rows, and take the stream back."""
        other = Publisher(self.tracker, self.url, "third", encoding=self.encoding, pointer_seconds=None)
        other.publish()
        self.write()
        other.publish()
        other.close()
        assert attempt(self.skips.publish).startswith("FencedError")

    def restart(self) -> None:
        self.num_unchanged += self.skips.num_unchanged
        self.skips.close()
        self.skips = self.build()

    def close(self) -> None:
        self.num_unchanged += self.skips.num_unchanged
        dist.barrier()
        self.skips.close()
        self.plain.close()
        self.tracker.detach()


def _score(fqn: str, rows: DeltaRows) -> Tensor:
    return rows.ids.float()


def random_runs(rank: int, world_size: int, root: str, seeds: list[int]) -> int:
    """A predictor equals that of a publisher that sends all rows, after failures, fences, restarts and reattaching."""
    num_unchanged = 0
    for seed in seeds:
        run = _Run(seed, rank, world_size, root)
        for _ in range(14):
            draw = run.chance.random()
            if draw < 0.05:
                run.fence()
                run.restart()
            elif draw < 0.1:
                run.restart()
            elif draw < 0.15:
                run.tracker.reattach()
            run.write()
            run.publish()
        run.close()
        num_unchanged += run.num_unchanged
    return num_unchanged


def counts(rank: int, world_size: int, root: str, encoding: str | None, choice: Any) -> dict[str, list[int]]:
    """Only rows whose stored bytes changed are sent; a row that failed is sent again."""
    storage = WrappedStorage(Storage(f"file://{root}", create=True, fsync=False), is_remote=True)
    chosen = None if encoding is None else Encoding(encoding)
    spec = Spec.every_sharding(world_size)
    found: dict[str, list[int]] = {"sent": [], "unchanged": [], "counted": []}
    monitor = Monitor()
    with ModelDeltaTracker(shard(spec)) as tracker:
        publisher = Publisher(tracker, storage, encoding=chosen, skip_unchanged=choice, monitor=monitor)
        held = empty_model(tracker)
        predictor = Predictor(held, f"file://{root}")

        def publish(change: float, *, is_failing: bool = False) -> None:
            for fqn, place in tracker.shards.items():
                if place.num_rows:
                    for view in tracker.column_views(fqn):
                        view.data[0] += change * torch.arange(view.shape[1])
                    tracker.mark_changed(fqn, torch.arange(place.num_rows))
            tracker.step()
            storage.rules[:] = [_once("put")] if is_failing and rank == world_size - 1 else []
            if is_failing:
                assert "PublishError" in (said := attempt(publisher.publish)) or "StorageError" in said
                return
            manifest = publisher.publish()
            predictor.sync()
            found["sent"].append(manifest.num_rows)
            found["unchanged"].append(publisher.num_unchanged)
            counted = [
                Figures(monitor).of("unchanged_rows", publisher="publisher", table=fqn) for fqn in tracker.tables
            ]
            found["counted"].append(sum(int(each or 0) for each in counted))

        for change in (0.0, 0.0, 1e-12, 0.5, 0.0):
            publish(change)
        publish(0.5, is_failing=True)
        publish(0.0)  # the rows that the version did not bring to the stream
        publish(0.0)
        found["bytes"] = [publisher.stored_bytes]
        tracker.reattach()
        publish(0.0)
        publish(0.0)
        if chosen is None:
            assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
    return found


def whole_rows(rank: int, world_size: int, root: str) -> list[int]:
    """A change of one column is in a version with all columns of the row, for predictors that need whole rows."""
    spec = Spec([Table("column", 9, f"column:0,{world_size - 1}"), Table("stacked", 9, "column:0,0")])
    sent = []
    with (
        ModelDeltaTracker(shard(spec)) as tracker,
        TestCase().assertLogs("delta_tracker.publisher.stored_rows", "WARNING") as logs,
    ):
        publisher = Publisher(tracker, f"file://{root}", skip_unchanged="bytes")
        held = {fqn: _Whole(table.num_rows, table.dim) for fqn, table in tracker.tables.items()}
        predictor = Predictor(held, f"file://{root}")
        for _ in range(3):
            for fqn in tracker.shards:
                views = tracker.column_views(fqn)
                if views:
                    tracker.mark_changed(fqn, torch.arange(9))
                if rank == 0:
                    views[0].data[3] += 1
            tracker.step()
            sent.append(publisher.publish().num_rows)
            predictor.sync()
            for fqn, place in tracker.shards.items():
                for (first, end), view in zip(place.columns, tracker.column_views(fqn), strict=True):
                    assert torch.equal(held[fqn].values[:, first:end], view)
        dist.barrier()
        publisher.close()
    said = "skip_unchanged: all changed rows are sent of the table 'ec.embeddings.column', whose columns are on several"
    assert [said in each for each in logs.output] == [True], logs.output
    return sent


class _Whole:
    """A table that takes whole rows only."""

    needs_whole_rows = True

    def __init__(self, num_rows: int, dim: int) -> None:
        self.num_rows, self.dim, self.dtype = num_rows, dim, torch.float32
        self.rows, self.columns = (0, num_rows), ((0, dim),)
        self.values = torch.zeros(num_rows, dim)

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:
        assert columns == (0, self.dim)
        return values.clone()

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        assert columns == (0, self.dim)
        self.values[ids] = values


def states(rank: int, world_size: int, root: str, choice: str) -> list[int]:
    """A row is sent if only its states changed; predictors and a restore equal the trainer."""
    trainer = Trainer(rank, world_size, f"file://{root}", skip_unchanged=choice)
    publisher, tracker = trainer.publisher, trainer.tracker
    sent = []

    def publish() -> None:
        for fqn in tracker.fused_tables:
            if num_rows := tracker.shards[fqn].num_rows:
                tracker.mark_changed(fqn, torch.arange(num_rows))
        tracker.step()
        sent.append(publisher.publish().num_rows)
        dist.barrier()
        trainer.check()

    for _ in range(2):
        publish()
    for _ in range(2):
        trainer.train()
        publish()
    fqn = next(fqn for fqn in tracker.fused_tables if fqn.endswith(".row"))
    if rank == 0:
        tracker.state_views(fqn)[0][0].data[2] += 1
    publish()
    trainer.close()
    return sent


def read_between(rank: int, world_size: int, root: str) -> tuple[int, list[int]]:
    """A consumer that read a row between two versions with equal rows has the row pending after a restore."""
    url = f"file://{root}"
    trainer = Trainer(rank, world_size, url, consumers=["stream", "reader"], skip_unchanged="bytes")
    tracker = trainer.tracker
    fqn = next(fqn for fqn in tracker.fused_tables if fqn.endswith(".row"))
    (view,) = tracker.column_views(fqn)
    for _ in range(2):  # a restore needs them
        trainer.train()
    tracker.get_delta("reader")
    trainer.publisher.publish()
    before = view.data[2].clone()
    for value in (before + 1, before):
        view.data[2] = value
        tracker.mark_changed(fqn, torch.tensor([2]))
        if value is not before:
            tracker.get_delta("reader")
    tracker.step()
    sent = trainer.publisher.publish().num_rows
    trainer.publisher.close()
    again = ModelDeltaTracker(trainer.model, ["stream", "reader"])
    restore(trainer.model, url, tracker=again, training_state={"dense": trainer.optimizer})
    pending = again.get_delta("reader")[fqn].ids.tolist()
    again.detach()
    tracker.detach()
    return sent, pending


def raw_ids(rank: int, world_size: int, root: str, choice: Any) -> list[int]:
    """Each raw id gets the trainer's answer, and a row that only got another raw id is sent."""
    url = f"file://{root}"
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url, dense=model, skip_unchanged=choice)
    readers = Served(tracker, url) if rank == 0 else None
    for number in range(10):
        if number != 5:
            with torch.no_grad():  # all rows have equal values, so that only raw ids differ
                for fqn in tracker.tables if number < 5 else ():
                    tracker.column_views(fqn)[0].data.fill_(1.0)
                    tracker.mark_changed(fqn, torch.arange(tracker.shards[fqn].num_rows))
            model(collision_batch(generator)).backward()
        for fqn, spec in tracker.shards.items():
            tracker.mark_changed(fqn, torch.arange(spec.num_rows))
            if number < 5:
                tracker.column_views(fqn)[0].data.fill_(1.0)
        tracker.step()
        manifest = publisher.publish()
        expected = answers(model)
        if readers is not None:
            assert readers.sync() == manifest.version
            readers.check(expected)
    unchanged = publisher.num_unchanged
    publisher.close()
    return [unchanged, manifest.num_rows]


def refused(rank: int, world_size: int, root: str) -> list[str]:
    """Invalid choices and choices that differ are refused, and no row is read."""
    with ModelDeltaTracker(shard(Spec([Table("t", 8, "row")]))) as tracker:
        wrong: Any = "md5"
        return [
            attempt(lambda: Publisher(tracker, f"file://{root}", skip_unchanged=wrong)),
            attempt(lambda: Publisher(tracker, f"file://{root}", skip_unchanged="bytes" if rank else "digest")),
        ]
