"""Fault sweep over every storage operation of a publisher: ``python -m tests.system.fault_sweep kills DIRECTORY``.

The parent imports everything and uses no store, so that it can fork. Each point of a sweep runs in a child with a real
sharded model, a publisher, and a reader that polls before and after every operation. A dry run counts the operations; a
sweep that misses one fails. Every function in ``SCENARIOS`` is swept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, Recovery, Upkeep
from delta_tracker.errors import (
    FencedError,
    IncompleteModelError,
    NoSnapshotError,
    RankFailedError,
    StorageError,
)
from delta_tracker.recovery.restore import restore
from delta_tracker.stream.format.manifest import STATES_FORMAT, Manifest
from delta_tracker.stream.format.part_reader import PartReader, dense_of, read_parts, read_training
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.storage.storage import Storage
from tests.models import Spec, Table, batch, kernels_of, shard
from tests.stores.rules import Moment, watches
from tests.stores.wrapped import Operation, WrappedStorage

_SPEC = Spec([Table("row", 17, "row"), Table("column", 9, "column:0,0"), Table("first", 10, "table:0")])
_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Point:
    """An operation of a scenario by its number, and a moment of it; ``within`` is during the write of an object."""

    scenario: str
    number: int
    when: Moment


class Trainer:
    """A model in training and its publisher, which publishes the states of the optimizers if ``has_states`` is set."""

    def __init__(self, storage: Storage, seed: int) -> None:
        self.storage = storage
        self.has_states = False
        self.model = shard(_SPEC)
        self.optimizer = torch.optim.Adam(self.model.module.dense.parameters())
        self.tracker = ModelDeltaTracker(self.model, ["stream"])
        self._generator = torch.Generator().manual_seed(seed)
        self.publisher: Publisher
        self.train(seed % 3 + 1)

    def claim(self) -> None:
        self.publisher = Publisher(
            self.tracker,
            self.storage,
            dense=self.model.module.dense,
            recovery=Recovery(training_state={"optimizer": self.optimizer}) if self.has_states else None,
            upkeep=Upkeep(pointer_seconds=None),  # its thread would make the number of operations random
        )

    def restore(self) -> int:
        """Restore the newest version, and return it."""
        recovery = Recovery(training_state={"optimizer": self.optimizer})
        return restore(self.model, self.storage, tracker=self.tracker, recovery=recovery).version

    def train(self, num_batches: int = 2) -> None:
        for _ in range(num_batches):
            self.optimizer.zero_grad()
            self.model(batch(_SPEC, self._generator)).backward()
            self.optimizer.step()
            self.tracker.step()

    def state(self) -> dict[str, Tensor]:
        """Copy all tensors that a restore has to write."""
        dense = {f"dense.{name}": each for name, each in self.model.module.dense.state_dict().items()}
        moments = {
            f"optimizer.{number}.{name}": each
            for number, states in self.optimizer.state_dict()["state"].items()
            for name, each in states.items()
        }
        states = {
            f"{kernel_number}.{number}.{name}": each
            for kernel_number, kernel in enumerate(kernels_of(self.model.module.ec))
            for number, states in enumerate(kernel.emb_module.split_optimizer_states())
            for name, each in enumerate(states)
        }
        return {name: each.detach().clone() for name, each in (dense | moments | states).items()} | self.tables()

    def tables(self) -> dict[str, Tensor]:
        """Copy each table from the blocks of its columns."""
        return {
            fqn: torch.cat([view.detach() for view in self.tracker.live.column_views(fqn)], 1).clone()
            for fqn in self.tracker.tables
        }


class Reader:
    """A predictor that polls, and must hold a version exactly or not at all.

    A trainer's tables and state are in the folder ``next`` before it publishes, and in one of the version's number once
    it was seen.
    """

    def __init__(self, url: str, expected: Path) -> None:
        self._url = url
        self._expected = expected
        expected.mkdir(exist_ok=True)
        self._tables = {
            f"ec.embeddings.{table.name}": torch.full((table.rows, table.dim), -1.0) for table in _SPEC.tables
        }
        self._predictor = Predictor(ModelTarget(self._tables, dense=False), Storage(url))
        self._lock = threading.Lock()
        self.num_polls = 0

    def announce(self, trainer: Trainer) -> None:
        """Record the trainer's tables and state before it publishes."""
        self.poll()
        (draft := self._expected / "draft").mkdir()
        torch.save(trainer.tables(), draft / "tables.pt")
        torch.save(trainer.state(), draft / "state.pt")
        shutil.rmtree(self._expected / "next", ignore_errors=True)
        draft.rename(self._expected / "next")

    def poll(self) -> None:
        """Sync, and check the tables of the version reached."""
        with self._lock:
            self.num_polls += 1
            try:
                self._predictor.sync()
            except NoSnapshotError:
                assert all(bool((table == -1).all()) for table in self._tables.values())
                return
            assert self._predictor.manifest is not None
            seen = self._expected / f"{self._predictor.manifest.version}"
            if not seen.exists():
                shutil.copytree(self._expected / "next", seen)
            _assert_equal(self._tables, torch.load(seen / "tables.pt"))

    def check_restored(self) -> None:
        """Check that another trainer restores the newest version exactly, if it has the states of optimizers."""
        self.poll()
        manifest = self._predictor.manifest
        if manifest is not None and manifest.format == STATES_FORMAT:
            trainer = Trainer(Storage(self._url), seed=1)
            assert trainer.restore() == manifest.version
            _assert_equal(trainer.state(), torch.load(self._expected / f"{manifest.version}" / "state.pt"))

    def finish(self, trainer: Trainer) -> None:
        """Check that the reader, a new reader and the dense tensors equal the trainer."""
        self.poll()
        _assert_equal(self._tables, trainer.tables())
        Reader(self._url, self._expected).poll()
        manifest = self._predictor.manifest
        assert manifest is not None
        dense = dense_of(read_parts(Storage(self._url), manifest))
        assert dense
        for name, tensor in trainer.model.module.dense.state_dict().items():
            assert torch.equal(dense[f"dense.{name}"], tensor), name


def _assert_equal(tables: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tables.keys() == expected.keys(), (tables.keys(), expected.keys())
    for fqn, table in expected.items():
        assert torch.equal(tables[fqn].view(torch.int32), table.view(torch.int32)), fqn


def check_log(url: str) -> None:
    """Check that the log is valid by FORMAT.md.

    All claims exist, each with the entry before it, so the generations have no gap. The other entries form a range
    without gaps from the head down to at least the head's parent and the newest snapshot. Parts are complete, except
    below that snapshot those of an entry before a claim.
    """
    log = StreamLog(Storage(url))
    entries = [entry for entry in map(log.read, log.versions()) if entry is not None]
    if not entries:
        return
    newest = log.newest_snapshot()
    start = -1 if newest is None else newest.version
    first, head = entries[0], entries[-1]
    assert (first.version, first.kind, first.generation, first.parent) == (0, "claim", 1, None)
    for before, after in itertools.pairwise(entries):
        is_next_life = after.kind == "claim"
        assert after.generation == before.generation + is_next_life
        assert (after.writer == before.writer) != is_next_life
        if after.version == before.version + 1:
            assert after.parent == before.link
            assert after.snapshot == (after.version if after.kind == "snapshot" else before.snapshot)
        else:
            assert not is_next_life, "the entry before a claim is gone"
            assert after.version <= max(start, 0), "an entry above the newest snapshot is gone"
    versions = {entry.version for entry in entries}
    guards = {entry.version - behind for entry in entries if entry.kind == "claim" for behind in (0, 1)}
    lowest = next(version for version in range(head.version, -1, -1) if version - 1 not in versions)
    assert versions <= guards | set(range(lowest, head.version + 1)), "an entry below a gap is no guard"
    assert head.parent is None or head.parent.version in versions
    for entry in entries:
        if entry.version in guards and entry.version < start:
            sizes = [(log.storage.size(part.name), part.num_bytes) for part in entry.parts]
            assert all(found in (None, expected) for found, expected in sizes)
        else:
            read_parts(log.storage, entry)
            _read_states(log.storage, entry)
    for merged in log.merged():
        manifest = log.read_merged(merged)
        assert manifest is not None
        read_parts(log.storage, manifest)
        _read_states(log.storage, manifest)


def _read_states(storage: Storage, manifest: Manifest) -> None:
    for part in manifest.parts:
        for rows in PartReader(storage, part, manifest).with_states():
            for read in rows.states:
                read(0, rows.block.num_rows)
    for stored in manifest.training:
        read_training(storage, stored).load()


@dataclass
class Stage:
    """The objects that a scenario uses."""

    storage: WrappedStorage
    reader: Reader
    trainer: Trainer
    reached: Callable[[Operation, Moment], None]
    is_over: bool = False  # all swept operations are done

    def arm(self) -> None:
        """Call ``reached`` at each moment of each later operation."""
        self.storage.take()
        self.storage.rules.append(watches(self.reached))

    def publish(self, kind: str = "publish") -> None:
        """Publish with the trainer's publisher, after the reader recorded the expected tables."""
        self.reader.announce(self.trainer)
        getattr(self.trainer.publisher, kind)()

    def try_again(self, action: Callable[[], object]) -> None:
        """Check that a failure is reported, loses no row, and ends when the store works again."""
        try:
            action()
        except (StorageError, RankFailedError):
            self.trainer.train()
            action()


def _claim(stage: Stage) -> None:
    stage.arm()
    stage.try_again(stage.trainer.claim)


def _second_claim(stage: Stage) -> None:
    stage.trainer.claim()
    stage.publish()
    stage.trainer.publisher.close()
    stage.arm()
    stage.try_again(stage.trainer.claim)


def _snapshot(stage: Stage) -> None:
    stage.trainer.claim()
    stage.arm()
    stage.try_again(stage.publish)


def _second_snapshot(stage: Stage) -> None:
    stage.trainer.claim()
    stage.publish()
    stage.trainer.train()
    stage.arm()
    stage.try_again(lambda: stage.publish("snapshot"))


def _delta(stage: Stage) -> None:
    stage.trainer.claim()
    stage.publish()
    stage.trainer.train()
    stage.arm()
    stage.try_again(stage.publish)


def _some_versions(stage: Stage) -> None:
    stage.trainer.claim()
    stage.publish()
    for _ in range(3):
        stage.trainer.train()
        stage.publish()


def _compaction(stage: Stage) -> None:
    _some_versions(stage)
    stage.arm()
    stage.try_again(lambda: compact(stage.storage, fold=10.0))


def _fold(stage: Stage) -> None:
    _some_versions(stage)
    stage.arm()
    stage.try_again(lambda: compact(stage.storage, fold=1e-9))


def _retention(stage: Stage) -> None:
    _some_versions(stage)
    compact(stage.storage, fold=10.0)
    stage.publish("snapshot")
    stage.arm()
    stage.try_again(lambda: retain(stage.storage, Retention(versions=1, grace_seconds=0.0)))


def _pointer(stage: Stage) -> None:
    _some_versions(stage)
    head = StreamLog(Storage(stage.storage.url)).head()
    stage.arm()
    stage.try_again(lambda: PointerWriter(stage.storage).write_now(head))


def _states(stage: Stage) -> None:
    stage.trainer.has_states = True
    stage.trainer.claim()
    stage.arm()
    stage.try_again(stage.publish)
    stage.trainer.train()
    stage.try_again(stage.publish)


def _restore(stage: Stage) -> None:
    stage.trainer.has_states = True
    stage.trainer.claim()
    stage.publish()
    stage.trainer.train()
    stage.publish()
    expected = stage.trainer.state()
    trainer = Trainer(stage.storage, seed=1)
    before = trainer.state()
    stage.arm()
    try:
        trainer.restore()
    except (StorageError, RankFailedError):
        try:
            trainer.model(batch(_SPEC, torch.Generator()))
        except IncompleteModelError:
            pass
        else:
            _assert_equal(trainer.state(), before)
        trainer.restore()
    _assert_equal(trainer.state(), expected)
    trainer.train()


# Each arms the storage before the first swept operation.
SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "claim": _claim,
    "second claim": _second_claim,
    "snapshot": _snapshot,
    "second snapshot": _second_snapshot,
    "delta": _delta,
    "compaction": _compaction,
    "fold": _fold,
    "retention": _retention,
    "pointer": _pointer,
    "states": _states,
    "restore": _restore,
}
# Only kills are swept here: tests/stream/test_upkeep_faults.py sweeps failures, and races need two publishers.
_UPKEEP = ("compaction", "fold", "retention", "pointer")
# A restore writes nothing to the store, so that only its failures are swept.
_LEFT_OUT = {"kills": ("restore",), "failures": _UPKEEP, "races": (*_UPKEEP, "restore")}


def _play(stage: Stage, scenario: str) -> None:
    SCENARIOS[scenario](stage)
    stage.is_over = True


def _ignore(_operation: Operation, _when: Moment) -> None:
    """Do nothing at a moment of an operation."""


def _stage(root: Path, act: Callable[[Operation, Moment], None]) -> Stage:
    storage = WrappedStorage(Storage(root / "stream", create=True, fsync=False))
    reader = Reader(storage.url, root / "expected")

    def reached(operation: Operation, when: Moment) -> None:
        if when != "within":  # the store is busy then and cannot be read from its own threads
            reader.poll()
        act(operation, when)

    return Stage(storage, reader, Trainer(storage, seed=0), reached)


def _dry(root: Path, scenario: str) -> dict[str, Any]:
    """Return the operations of a scenario with their moments, and the modules that it loaded."""
    passed: list[list[Any]] = []
    stage = _stage(root, lambda operation, when: passed.append([operation.number, operation.kind, when]))
    _play(stage, scenario)
    stage.storage.rules.clear()
    assert stage.reader.num_polls >= sum(when != "within" for _, _, when in passed)
    return {"passed": passed, "modules": sorted(sys.modules)}


def _killed(root: Path, point: Point) -> None:
    def act(operation: Operation, when: Moment) -> None:
        if (operation.number, when) == (point.number, point.when):
            (root / "fired").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _play(_stage(root, act), point.scenario)
    raise AssertionError("it outlived the point")


def _restarted(root: Path) -> None:
    """Check after a kill that the stream is readable and that a new life continues from it."""
    stage = _stage(root, _ignore)
    stage.reader.poll()
    check_log(stage.storage.url)
    stage.reader.check_restored()
    _go_on(stage, seed=7)


def _go_on(stage: Stage, seed: int) -> None:
    """Claim and publish with another trainer, which has other rows; the reader follows."""
    stage.storage.rules.clear()
    stage.trainer = Trainer(stage.storage, seed)
    stage.trainer.claim()
    for _ in range(2):
        stage.publish()
        stage.reader.finish(stage.trainer)
        stage.trainer.train()
    check_log(stage.storage.url)


def _failed(root: Path, point: Point) -> None:
    """Make the store fail at the point; ``after`` means that the operation was done and only its answer is lost."""

    def act(operation: Operation, when: Moment) -> None:
        if (operation.number, when) == (point.number, point.when):
            (root / "fired").touch()
            raise StorageError(operation.url, f"connection reset {when} {operation.kind}")

    stage = _stage(root, act)
    _play(stage, point.scenario)
    for _ in range(2):
        stage.publish()
        stage.reader.finish(stage.trainer)
        stage.trainer.train()
    check_log(stage.storage.url)
    stage.reader.check_restored()
    _go_on(stage, seed=5)


def _raced(root: Path, point: Point) -> None:
    """Pause the publisher at the point, let another one claim and publish, and resume the first."""
    first, second, fate = _overtaken(root, point)
    head = StreamLog(Storage(first.storage.url)).head()
    assert head is not None
    # The last claim owns the stream; a version of the first publisher is in it only if it precedes that claim.
    if head.writer == second.trainer.publisher._writer.head.writer:
        assert fate == ("finished" if first.is_over else "fenced")
        winner, loser = second, first.trainer
    else:
        assert (fate, "claim" in point.scenario) == ("finished", True)
        winner, loser = first, second.trainer
        loser.train()
    for publisher in (loser.publisher, winner.trainer.publisher):
        publisher._caller = threading.get_ident(), os.getpid()  # the first publisher's thread has ended
    pending = loser.tracker.num_pending()
    assert sum(pending.values()) > 0 or first.is_over, "what a fenced publisher read is pending again"
    log = StreamLog(Storage(first.storage.url))
    before = log.versions()
    for _ in range(2):
        try:
            loser.publisher.publish()
        except FencedError:
            continue
        raise AssertionError("both publish")
    assert log.versions() == before
    assert loser.tracker.num_pending() == pending
    winner.publish()
    winner.reader.finish(winner.trainer)
    check_log(first.storage.url)


def _overtaken(root: Path, point: Point) -> tuple[Stage, Stage, str]:
    """Run the race; return both publishers and how the first one's scenario ended."""
    stopped, go_on = threading.Event(), threading.Event()
    stages: list[Stage] = []
    fates: list[str] = []

    def act(operation: Operation, when: Moment) -> None:
        if (operation.number, when) == (point.number, point.when):
            (root / "fired").touch()
            stopped.set()
            assert go_on.wait(_TIMEOUT_SECONDS)

    def live() -> None:
        stages.append(_stage(root, act))
        try:
            _play(stages[0], point.scenario)
            fates.append("finished")
        except FencedError:
            fates.append("fenced")

    thread = threading.Thread(target=live)
    thread.start()
    assert stopped.wait(_TIMEOUT_SECONDS), "the first one never came to the point"
    (first,) = stages
    plain = WrappedStorage(Storage(first.storage.url, fsync=False))
    second = Stage(plain, Reader(plain.url, root / "expected"), Trainer(plain, seed=3), _ignore)
    second.trainer.claim()
    for _ in range(3):
        second.publish()
        second.reader.finish(second.trainer)
        second.trainer.train()
    first.storage.rules.clear()
    go_on.set()
    thread.join(_TIMEOUT_SECONDS)
    assert len(fates) == 1, "the first one neither finished nor was fenced"
    check_log(plain.url)
    first.reader.poll()
    return first, second, fates[0]


def _in_child(root: Path, body: Callable[[], Any]) -> int:
    """Run ``body`` in a fork and write its result or error to a file; return the exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            result = body()
            (root / "result.json").write_text(json.dumps(result))
            status = 0
        except BaseException:  # noqa: BLE001  it goes to the parent
            (root / "error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(root: Path, name: str, body: Callable[[Path], Any], wanted: int = 0) -> Any:
    status = _in_child(root, lambda: body(root))
    if status != wanted:
        error = root / "error"
        raise AssertionError(f"{name}: ended with {status}\n{error.read_text() if error.exists() else ''}")
    return json.loads((root / "result.json").read_text()) if wanted == 0 else None


def points(root: Path, scenarios: Iterable[str]) -> list[Point]:
    """Return all points of some scenarios, found by a dry run of each."""
    found = []
    for scenario in scenarios:
        directory = root / f"dry {scenario}"
        directory.mkdir(parents=True)
        dry = _run(directory, scenario, lambda root, scenario=scenario: _dry(root, scenario))
        assert dry["passed"], scenario
        found += [Point(scenario, number, when) for number, _, when in dry["passed"]]
        for module in dry["modules"]:  # otherwise every child would load them again
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    return found


def _sweep_point(root: Path, mode: str, point: Point) -> None:
    if mode == "kills":
        _run(root, str(point), lambda root: _killed(root, point), wanted=-signal.SIGKILL)
        _run(root, f"restart after {point}", _restarted)
    else:
        body = {"failures": _failed, "races": _raced}[mode]
        _run(root, str(point), lambda root: body(root, point))


def sweep(mode: str, root: Path, every: int = 1) -> dict[str, int]:
    """Sweep all points, or one in ``every``; return the number of points by scenario.

    Raises:
        AssertionError: at the first point that violates a promise, or if a point was never reached.
    """
    scenarios = [scenario for scenario in SCENARIOS if scenario not in _LEFT_OUT[mode]]
    all_points = points(root, scenarios)
    for index, point in enumerate(all_points[::every]):
        directory = root / f"{index}"
        directory.mkdir()
        _sweep_point(directory, mode, point)
        assert (directory / "fired").exists(), f"{point} was not reached"
        shutil.rmtree(directory)
    return dict(Counter(point.scenario for point in all_points))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["kills", "failures", "races"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--every", type=int, default=1, help="sweep one point in so many")
    options = parser.parse_args()
    print(json.dumps(sweep(options.mode, options.directory, options.every)))
