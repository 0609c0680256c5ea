"""Cases for standbys of real sharded models; each runs on every rank, with the trainer and the standby in turn."""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import distributed as dist

from delta_tracker import Cadence, Predictor, Publisher, Standby, Takeover, Upkeep
from delta_tracker.errors import StorageError, UnsupportedStoreError
from delta_tracker.monitor import Monitor
from delta_tracker.publisher import coordinator
from delta_tracker.publisher.tracker_reader import TrackerReader
from delta_tracker.recovery import job as restoring
from delta_tracker.recovery import recovery_plan
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.recovery.shard_follower import ShardFollower
from delta_tracker.recovery.targets import RowWriter
from delta_tracker.sharding.interrupted import check_complete
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.heartbeat import BEAT_SECONDS, PublisherHeartbeatWriter
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.reading.source import Source
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import PublisherObserver, request_takeover
from tests.heartbeats import read_heartbeats
from tests.publisher.publishing_cases import assert_equal, attempt, empty_model
from tests.recovery.restore_cases import Trainer, same, spec_of, warm

NUM_MORE = 3  # batches that are trained after a takeover


class Job(Trainer):
    """Trainer that can stand by."""

    last: Publisher  # the publisher after a takeover

    def standby(self, path: str, **kwargs: Any) -> Standby:
        arguments = {
            "tracker": self.tracker,
            "recovery": self.recovery,
            "data": self.data,
            "look_seconds": 0.0,
            "monitor": Monitor(),
            **kwargs,
        }
        return Standby(self.model, f"file://{path}/stream", **arguments)

    def successor(self, taken: Takeover) -> Publisher:
        """Return the publisher after a takeover."""
        return Publisher(
            self.tracker,
            taken.recovery,
            "main",
            dense=["dense.weight"],
            recovery=self.recovery,
        )

    def publisher(self, path: str, *, heartbeat_seconds: float = BEAT_SECONDS, **kwargs: Any) -> Publisher:
        """Return a publisher with states."""
        return Publisher(
            self.tracker,
            f"file://{path}/stream",
            "main",
            dense=["dense.weight"],
            recovery=replace(self.recovery, heartbeat_seconds=heartbeat_seconds),
            **kwargs,
        )

    def rows(self) -> list[Any]:
        """Return the rows and the states of all tables."""
        return [(table["weights"], table["states"]) for table in self.held()["tables"].values()]


def log_of(path: str) -> StreamLog:
    return StreamLog(Storage(f"file://{path}/stream"))


def made(spec: dict[str, Any], rank: int) -> Job:
    """Return a job with other weights and settings than the trainer's, that has trained two batches."""
    with mock.patch(f"{warm.__module__}.Trainer", Job):
        return warm(spec_of(**spec), rank)  # type: ignore[return-value]


def request(path: str, *, force: bool = False) -> None:
    storage = Storage(f"file://{path}/stream")
    request_takeover(storage, log_of(path).head(), force=force)


def barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def check_successor(trainer: Job, publisher: Publisher, job: Job, taken: Takeover, expected: Any) -> None:
    """Check that the job has the state ``expected`` and continues as the trainer, which is fenced."""
    check_complete(job.model)
    assert same(job.held(), expected)
    generators = RandomStates()
    seeds = generators.state_dict()
    losses = trainer.train(NUM_MORE)  # from the restored version on; not published
    later = trainer.held()
    assert attempt(publisher.publish).startswith("FencedError")
    publisher.close()
    generators.load_state_dict(seeds)
    successor = job.successor(taken)
    found = job.train(1)
    entry = successor.publish()
    assert (entry.kind, entry.generation) == ("delta", taken.recovery.entry.generation)
    found += job.train(NUM_MORE - 1)
    assert found == losses
    assert same(job.held(), later)
    successor.close()
    assert "a used claim" in attempt(lambda: job.successor(taken))


def followed(rank: int, world_size: int, path: str, spec: dict[str, Any], num_versions: int) -> list[str]:
    """A standby has the rows and states of each version, and continues from the last one as the trainer."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    standby = job.standby(path)
    assert standby.sync() is None
    messages = []
    for number in range(num_versions):
        trainer.train(1)
        version = publisher.snapshot() if number in (0, 4) else publisher.publish()
        if number != 1:  # two versions are applied at once
            assert standby.sync() == version.version == standby.version
            assert same(job.rows(), trainer.rows())
    messages += [attempt(lambda: job.train(1)), attempt(lambda: job.publisher(path)), attempt(standby.take_over)]
    expected = trainer.held()
    taken = standby.take_over(force=True)
    assert (taken.restored.version, taken.restored.num_batches) == (version.version, num_versions)
    assert taken.recovery.entry.parent == version.link
    check_successor(trainer, publisher, job, taken, expected)
    messages.append(attempt(standby.sync))
    standby.close()
    return messages


def scattered(rank: int, world_size: int, path: str, spec: dict[str, Any], seed: int, num_turns: int) -> None:
    """Ranks that have applied different versions end at the parent of the claim."""
    common, own = random.Random(seed), random.Random(1000 * seed + rank)
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    standby = job.standby(path)
    trainer.train(1)
    publisher.snapshot()
    for _ in range(num_turns):
        action = common.choice(["publish", "publish", "follow", "follow", "snapshot", "sync", "compact", "replace"])
        if action in ("publish", "snapshot"):
            trainer.train(1)
            (publisher.snapshot if action == "snapshot" else publisher.publish)()
        elif action == "sync":
            standby.sync()
            assert same(job.rows(), trainer.rows())
        elif action == "compact":
            if rank == 0:
                compact(Storage(f"file://{path}/stream"))
            barrier()
        elif action == "replace":  # the trainer restarts
            publisher.close()
            publisher = trainer.publisher(path)
        else:
            for _ in range(own.randrange(3)):  # each rank for itself
                standby._follower.advance(-math.inf)
    expected = trainer.held()
    taken = standby.take_over(force=True)
    check_successor(trainer, publisher, job, taken, expected)


def overtaken(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A version that is committed during the decision prevents the claim."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    standby = job.standby(path)
    trainer.train(1)
    publisher.snapshot()
    standby.sync()
    before = PublisherObserver(Storage(f"file://{path}/stream"), "observer").observe() if rank == 0 else None
    barrier()
    trainer.train(1)
    last = publisher.publish()
    late = None if before is None else replace(before, silent_seconds=100.0)
    with mock.patch.object(PublisherObserver, "observe", return_value=late):
        messages = [attempt(standby.take_over)]
    assert log_of(path).head() == last
    assert standby.sync() == last.version
    make_silent(path)
    taken = standby.take_over()
    fault = StorageError("file:///gone", "the disk is gone")
    with mock.patch.object(TrackerReader, "resume", side_effect=fault):
        assert attempt(lambda: job.successor(taken)).startswith("StorageError"), "this does not use the claim up"
    check_successor(trainer, publisher, job, taken, trainer.held())
    return messages


def revived(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> str:
    """A publisher that leaves a heartbeat while the standby catches up is not fenced."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    standby = job.standby(path)
    trainer.train(1)
    last = publisher.snapshot()
    make_silent(path)
    write = RowWriter.write

    def slow(writer: RowWriter, entry: Any) -> None:
        write(writer, entry)
        PublisherHeartbeatWriter(Storage(f"file://{path}/stream")).write(last)

    with mock.patch.object(RowWriter, "write", slow):
        message = attempt(standby.take_over)
    barrier()
    assert log_of(path).head() == last
    make_silent(path)
    check_successor(trainer, publisher, job, standby.take_over(), trainer.held())
    return message


def restored_between(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> None:
    """A standby notices that an older version was restored, in part or completely, between two of its calls."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    standby = job.standby(path)
    versions = []
    for _ in range(3):
        trainer.train(1)
        versions.append(publisher.publish().version)
    assert standby.sync() == versions[-1]
    with _fault("write") if rank == 1 else nullcontext():
        assert "the disk is gone" in attempt(lambda: job.restore(path, versions[0]))
    assert standby.sync() == versions[-1]
    job.restore(path, versions[0])
    check_successor(trainer, publisher, job, standby.take_over(force=True), trainer.held())


def unmounted(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> str:
    """A stream whose directory is missing after a failed takeover is not reported as one without versions."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    standby = job.standby(path)
    for _ in range(2):
        trainer.train(1)
        publisher.publish()
    standby.sync()
    with _fault("older rows") if rank == 0 else nullcontext():
        assert attempt(partial(standby.take_over, force=True)).startswith("TakeoverFailedError")
    messages = []
    for before, after in (("stream", "unmounted"), ("unmounted", "stream")):
        barrier()
        if rank == 0:
            (Path(path) / before).rename(Path(path) / after)
        barrier()
        if after == "unmounted":
            messages.append(attempt(partial(standby.take_over, force=True)))
    check_successor(trainer, publisher, job, standby.take_over(), trainer.held())
    return messages[0]


@contextmanager
def _fault(where: str) -> Iterator[None]:
    """Context manager in which a step of a takeover fails.

    Args:
        where: the step.
    """
    fault = StorageError("file:///gone", "the disk is gone")
    if where in ("rows", "older rows"):
        write = RowWriter.write

        def failing(writer: RowWriter, entry: Any) -> None:
            write(writer, entry)
            raise fault

        # Without a path from the applied version, the first entry is the snapshot.
        older = mock.patch.object(ShardFollower, "applied", return_value=None)
        with mock.patch.object(RowWriter, "write", failing), older if where == "older rows" else nullcontext():
            yield
        return
    kinds: dict[str, tuple[Any, str]] = {
        "store": (recovery_plan.Plan, "check_objects"),
        "fit": (recovery_plan, "check_scalars"),
        "write": (recovery_plan, "write_scalars"),
        "load": (restoring, "_state"),
    }
    with mock.patch.object(*kinds[where], side_effect=fault):
        yield


def failed(rank: int, world_size: int, path: str, spec: dict[str, Any], steps: list[tuple[str, int]]) -> list[str]:
    """After a failure, the claim is kept, nothing trains, and the next call completes the takeover."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    urls = [f"file://{path}/serving-{number}" for number in range(2)]
    for name in ("first", "second"):
        trainer.tracker.add_consumer(name)
    others = [Publisher(trainer.tracker, url, name) for url, name in zip(urls, ("first", "second"), strict=True)]
    monitor = Monitor()
    standby = job.standby(path, serving=urls, monitor=monitor)
    assert len(list(monitor.metrics.takeover_failures.cells)) == 1, "an alert sees the first failure"
    for number in range(5):
        trainer.train(1)
        last = publisher.publish()
        if number < 3:
            standby.sync()
    expected = trainer.held()
    messages, log = [], log_of(path)
    for where, where_rank in steps:
        fault = _fault(where) if rank == where_rank else nullcontext()
        if where == "serving":
            fault = _without_second_claim(urls[1]) if rank == 0 else nullcontext()
        with fault:
            messages.append(attempt(partial(standby.take_over, force=True)))
        claim = log.head()
        assert (claim.kind, claim.version) == ("claim", last.version + 1)
        assert attempt(lambda: job.model(None)).startswith("IncompleteModelError: the model follows a stream")
    heads = [StreamLog(Storage(url)).head() for url in urls]
    taken = standby.take_over()
    assert log.head() == taken.recovery.entry == claim
    assert [each.entry.kind for each in taken.serving] == ["claim", "claim"]
    assert heads[0] == taken.serving[0].entry, "its claim was kept"
    for each in others:
        assert attempt(each.publish).startswith("FencedError")
        each.close()
    counted = [each for each in monitor.collect().totals if each.definition.name.endswith("takeover_failures")]
    messages.append(str(int(sum(each.figures.total for each in counted))))
    check_successor(trainer, publisher, job, taken, expected)
    return messages


def _without_second_claim(url: str) -> AbstractContextManager[Any]:
    """Context manager in which one stream cannot be claimed."""
    claim = StreamLog.claim

    def failing(log: StreamLog, **kwargs: Any) -> Any:
        if log.storage.url == url:
            raise StorageError(url, "the disk is gone")
        return claim(log, **kwargs)

    return mock.patch.object(StreamLog, "claim", failing)


def suspended(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A standby that is suspended before it claims a serving stream does not fence the job that has taken over."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(1)
    publisher.snapshot()
    url = f"file://{path}/serving"
    standby = job.standby(path, serving=[url])
    claim, log, serving = StreamLog.claim, log_of(path), StreamLog(Storage(url, create=True))
    if rank == 0:
        claim(serving)
    barrier()

    def late(held: StreamLog, **kwargs: Any) -> Any:
        if held.storage.url == url and log.head().generation == 2:
            claim(log)
            claim(serving)
        return claim(held, **kwargs)

    with mock.patch.object(StreamLog, "claim", late):
        messages = [attempt(partial(standby.take_over, force=True))]
    barrier()
    assert (log.head().generation, serving.head().generation) == (3, 2)
    messages.append(attempt(standby.take_over))
    return messages


def followed_until(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """``follow`` ends by a request, by silence, or if there is nothing to follow."""
    job = made(spec, rank)
    messages = [attempt(job.standby(path).follow)]
    barrier()
    trainer = Job(spec_of(**spec), rank)
    publisher = trainer.publisher(path)
    make_silent(path)
    messages.append(attempt(partial(job.standby(path).follow, silence=30.0)))
    trainer.train(1)
    publisher.snapshot()
    standby = job.standby(path)
    if rank == 0:  # the publisher was silent for a while
        request(path)
        PublisherHeartbeatWriter(Storage(f"file://{path}/stream")).write(log_of(path).head())
    expected = trainer.held()
    with _at_the_third_look(partial(request, path, force=True)) as looks:
        taken = standby.follow()
    assert len(looks) in (0, 3), "the first request has lapsed"
    check_successor(trainer, publisher, job, taken, expected)
    other = made(spec, rank).standby(path)
    other.sync()
    following, calls = Source.next, []

    def unreachable(*position: Any, **options: Any) -> Any:
        calls.append(position)
        if len(calls) <= 2:
            raise StorageError("file:///gone", "the disk is gone")
        return following(*position, **options)

    with mock.patch.object(Source, "next", unreachable) if rank == world_size - 1 else nullcontext():
        make_silent(path)
        silent = other.follow(silence=30.0)
    assert len(calls) > 2 or rank < world_size - 1, "a rank that is cut off prevents the claim"
    assert silent.recovery.entry.generation == taken.recovery.entry.generation + 1
    assert silent.seconds > 0
    return messages


def followed_by_a_clock(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[float]:
    """A standby with another clock repeats a failed read by that clock, and waits with its sleep.

    Returns:
        Time of each attempt to read the damaged version, in seconds since the first one.
    """
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    now, attempts = 1000.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if len(attempts) == 5:
            damaged.write_bytes(data)
            request(path, force=True)

    standby = job.standby(path, look_seconds=0.125, runtime=Runtime(monotonic=lambda: now, sleep=sleep))
    trainer.train(1)
    publisher.snapshot()
    standby.sync()
    trainer.train(1)
    last = publisher.publish()
    damaged = Path(path) / "stream" / last.parts[0].name
    data = damaged.read_bytes()
    damaged.unlink()
    write = RowWriter.write

    def written(writer: RowWriter, entry: Any) -> None:
        attempts.append(now)
        write(writer, entry)

    expected = trainer.held()
    with mock.patch.object(RowWriter, "write", written):
        taken = standby.follow()
    assert taken.seconds == 0, "the clock did not move during the takeover"
    check_successor(trainer, publisher, job, taken, expected)
    return [each - attempts[0] for each in attempts]


def asked_once(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """Of two standbys that see one request, one takes over, and the other one follows it."""
    trainer, job, other = Job(spec_of(**spec), rank), made(spec, rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(1)
    publisher.snapshot()
    monitor = Monitor()
    first, second = job.standby(path, name="first", monitor=monitor), other.standby(path, name="second")
    if rank == 0:
        request(path, force=True)
    found: list[Publisher] = []
    claim = Standby._claim

    def overtaken(standby: Standby, *args: Any) -> Any:
        if standby is first or found:
            return claim(standby, *args)
        taken = first.follow()  # while the second one waits for its slowest rank
        signs = PublisherObserver(Storage(f"file://{path}/stream"), f"observer-{rank}").observe()
        assert signs.heartbeat_seconds is None, "the time between heartbeats is that of the new publisher"
        found.append(job.successor(taken))
        metrics = monitor.metrics
        assert not metrics.standby_version.cells + metrics.standby_lag_versions.cells, "an alert would fire"
        job.train(1)
        found[0].publish()
        result = claim(standby, *args)
        job.train(1)
        found[0].publish()
        if rank == 0:
            request(path, force=True)
        return result

    expected = trainer.held()
    with mock.patch.object(Standby, "_claim", overtaken):
        taken = second.follow()
    assert taken.recovery.entry.generation == 3
    assert same(other.held(), job.held())
    assert not same(other.held(), expected)
    check_successor(job, found[0], other, taken, job.held())
    return [attempt(publisher.publish)]


@contextmanager
def _at_the_third_look(act: Callable[[], object]) -> Iterator[list[Any]]:
    """Context manager that calls ``act`` before the third look at the publisher. Yields a list of the looks so far."""
    looks: list[Any] = []
    look = PublisherObserver.observe

    def looked(each: PublisherObserver, *args: Any, **kwargs: Any) -> Any:
        looks.append(each)
        if len(looks) == 3:
            act()
        return look(each, *args, **kwargs)

    with mock.patch.object(PublisherObserver, "observe", looked):
        yield looks


def make_silent(path: str) -> None:
    """Let the publisher have been silent for 100 s. A collective."""
    barrier()
    if dist.get_rank() == 0:
        for each in (*(Path(path) / "stream").glob("log/*"), *(Path(path) / "stream").glob("publishers/*")):
            os.utime(each, (time.time() - 100, time.time() - 100))
    barrier()


def stuck(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A standby that cannot apply the newest version does not take over until it can, or is forced to.

    After a forced takeover that fails, an older version is restored.
    """
    job, other = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = job.publisher(path)
    messages = []
    for what in ("part", "entry"):
        messages.append(_repaired(path, what, job, other, publisher))
        job, other = other, job
        publisher = job.last
    standby = other.standby(path)
    job.train(1)
    older = publisher.publish()
    expected = copy.deepcopy(job.held())
    standby.sync()
    job.train(1)
    last = publisher.publish()
    barrier()
    if rank == 0:
        (Path(path) / "stream" / last.parts[0].name).unlink()
    barrier()
    messages.append(attempt(partial(standby.take_over, force=True)))
    standby.close()
    assert attempt(publisher.publish).startswith("FencedError")
    publisher.close()
    other.restore(path, older.version)
    assert same(other.held(), expected)
    publisher = other.publisher(path)
    other.train(1)
    publisher.publish()
    publisher.close()
    job.restore(path)
    assert same(job.held(), other.held())
    return messages


def _repaired(path: str, what: str, job: Job, other: Job, publisher: Publisher) -> str:
    """Check that ``other`` takes over from ``job`` when a damaged version is repaired, and not before.

    Returns:
        The error of a takeover before.
    """
    is_entry, is_first = what == "entry", dist.get_rank() == 0
    job.train(1)
    publisher.snapshot()
    standby = other.standby(path)
    standby.sync()
    job.train(1)
    last = publisher.publish()
    expected = job.held()
    damaged = Path(path) / "stream" / (entry_name(last.version) if is_entry else last.parts[0].name)
    data = damaged.read_bytes()
    make_silent(path)
    if is_first:
        request(path, force=True)
        damaged.write_bytes(b"") if is_entry else damaged.unlink()
    barrier()
    message = attempt(standby.take_over)

    def repair() -> None:
        (beat,) = read_heartbeats(Storage(f"file://{path}/stream"))
        assert (beat.name, beat.version, beat.error is None) == ("standby", last.version - 1, False)
        assert is_entry or beat.lag_versions == 1
        damaged.write_bytes(data)
        os.utime(damaged, (time.time() - 100, time.time() - 100))

    unsafe = mock.patch.object(Storage, "probe", side_effect=[UnsupportedStoreError("file:///unsafe"), None])
    with _at_the_third_look(repair) as looks, unsafe if is_entry else nullcontext():
        taken = standby.follow(silence=30.0)
    assert not is_first or len(looks) > 2 + is_entry, "it took over before"
    assert taken.recovery.entry.parent == last.link
    assert same(other.held(), expected)
    assert attempt(publisher.publish).startswith("FencedError")
    publisher.close()
    other.last = other.successor(taken)
    return message


def misplaced(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A standby with other serving streams than the trainer's, or without its store, claims nothing."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    root = Path(path)
    publisher, serving = trainer.publisher(path), Publisher(trainer.tracker, f"file://{path}/serving", "other")
    trainer.train(1)
    serving.publish()
    publisher.publish()
    if rank == 0:
        StreamLog(Storage(f"file://{path}/another", create=True)).claim()
        (root / "serving").rename(root / "mounted")
    barrier()
    messages = []
    for name in ("serving", "another"):
        standby = job.standby(path, serving=[f"file://{path}/{name}"])
        messages += [attempt(partial(standby.take_over, force=True)), attempt(standby.follow)]
        assert (root / name).exists() == (name == "another")
    for names in (["stream"], ["mounted", "mounted"]):
        urls = [f"file://{path}/{name}" for name in names]
        messages.append(attempt(lambda urls=urls: job.standby(path, serving=urls)))
    standby = job.standby(path, serving=[f"file://{path}/serving"])
    barrier()
    if rank == 0:
        (root / "mounted").rename(root / "serving")
    barrier()
    others = []
    for call in ("take_over", "follow"):
        forgetful = job.standby(path)
        others.append(attempt(partial(getattr(forgetful, call), **({"force": True} if call == "take_over" else {}))))
    assert standby.sync() is not None
    barrier()
    if rank == 0:
        (root / "stream").rename(root / "unmounted")
    barrier()
    others.append(attempt(partial(standby.take_over, force=True)))
    barrier()
    if rank == 0:
        (root / "unmounted").rename(root / "stream")
    barrier()
    assert publisher.publish().generation == 1, "the trainer is not fenced"
    taken = standby.take_over(force=True)
    assert taken.serving[0].entry.stream == serving.stream
    others.append(attempt(lambda: Publisher(job.tracker, taken.recovery, "other")))
    return [*messages, *others]


def believed_failed(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A version that was committed, although its publisher saw an error, is followed by the retry, or restored."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(1)
    publisher.snapshot()
    standby = job.standby(path)
    standby.sync()
    messages = []
    for is_retried in (True, False):
        trainer.train(1)
        with _cut_off_after_the_commit():
            messages.append(attempt(publisher.publish))
        expected, last = trainer.held(), log_of(path).head()
        assert last.version == publisher.version + 1
        if is_retried:
            assert standby.sync() == last.version
            assert same(job.rows(), trainer.rows())
            trainer.train(1)
            assert publisher.publish().parent == last.link
            assert standby.sync() == last.version + 1
            assert same(job.rows(), trainer.rows())
    taken = standby.take_over(force=True)
    assert taken.recovery.entry.parent == last.link
    check_successor(trainer, publisher, job, taken, expected)
    return messages


@contextmanager
def _cut_off_after_the_commit() -> Iterator[None]:
    """Context manager in which no publisher learns that its entry was created."""
    create, read, fault = Storage.create, Storage.read, StorageError("file:///gone", "the network is gone")
    sent: list[str] = []

    def created(storage: Storage, name: str, data: Any) -> bool:
        create(storage, name, data)
        sent.append(name)
        raise fault

    def seen(storage: Storage, name: str, **options: Any) -> Any:
        if sent:
            raise fault
        return read(storage, name, **options)

    with mock.patch.object(Storage, "create", created), mock.patch.object(Storage, "read", seen):
        yield


class _Log(logging.Handler):
    """Context manager that collects the messages of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelname, record.getMessage()))

    def __enter__(self) -> list[tuple[str, str]]:
        logging.getLogger("delta_tracker").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("delta_tracker").removeHandler(self)


def misused(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """Different calls of the ranks, and invalid seconds, raise typed errors."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(1)
    last = publisher.snapshot()
    standby = job.standby(path)
    if rank == 0:
        PublisherHeartbeatWriter(Storage(f"file://{path}/stream"), 5.0).write(last)
    barrier()
    different = (
        (partial(standby.follow, 30.0), standby.take_over),
        (standby.sync, standby.follow),
        (partial(standby.take_over, silence=30.0), partial(standby.take_over, silence=40.0)),
    )
    messages = [attempt(calls[rank]) for calls in different]
    messages += [attempt(partial(standby.follow, seconds)) for seconds in ("30", 0, math.nan)]
    messages += [attempt(partial(standby.take_over, silence=seconds)) for seconds in (-1, True)]
    messages += [attempt(partial(standby.follow, 4.9)), attempt(partial(standby.take_over, silence=4.9))]
    assert log_of(path).head() == last
    with _Log() as logged:
        assert attempt(partial(standby.take_over, silence=14.9)).startswith("LivePublisherError")
        assert attempt(partial(standby.take_over, silence=15.0)).startswith("LivePublisherError")
    found = [message for _, message in logged if "may look dead" in message]
    assert found == ["a live publisher may look dead: silence=14.9 heartbeat_seconds=5"][rank:]
    return messages


def stopped(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> tuple[int, list[str]]:
    """A training loop with ``step()`` ends on all ranks at the same batch after a takeover.

    Returns:
        Number of batches after the takeover, and the errors in the log.
    """
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path, cadence=Cadence(batches=1))
    trainer.train(1)
    publisher.snapshot()
    standby = job.standby(path)
    standby.take_over(force=True)
    num_batches = 0
    with _Log() as logged:
        while not publisher.is_fenced and num_batches < 1000:
            trainer.train(1)
            publisher.step()
            num_batches += 1
        for _ in range(3):
            publisher.step()
    publisher.close()
    assert publisher.is_fenced
    return num_batches, [message for level, message in logged if level == "ERROR"]


def beating(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> int:
    """A publisher leaves heartbeats while another rank writes a version, but not while that rank trains or hangs.

    Returns:
        Number of heartbeats that rank 0 left while rank 1 did not publish.
    """
    trainer = Job(spec_of(**spec), rank)
    publisher = trainer.publisher(path, heartbeat_seconds=0.01)
    beat = Path(path) / "stream" / "publishers" / f"{1:020d}.json"
    write = coordinator.put_part

    def times(seconds: float, number: int) -> set[int]:
        end, found = time.monotonic() + seconds, set()
        while time.monotonic() < end and len(found) < number:
            found.add(beat.stat().st_mtime_ns if beat.exists() else 0)
            time.sleep(0.005)
        return found

    def late(*args: Any, **kwargs: Any) -> Any:
        assert len(times(60.0, 4)) == 4, "the former heartbeat, one of rank 0's write, and two of its wait"
        return write(*args, **kwargs)

    with mock.patch.object(coordinator, "put_part", late) if rank else nullcontext():
        for publish in (publisher.snapshot, publisher.publish):
            trainer.train(1)
            publish()
    if publisher._versions._beats is not None:
        publisher._versions._beats._job.result()  # the last heartbeat may be in progress
    barrier()
    found = len(times(0.5, 100)) if rank else 1
    publisher.publish()
    publisher.close()
    return found


def beating_without_threads(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> bool:
    """The system has no more threads after the first version; return True if a later heartbeat is written."""
    trainer = Job(spec_of(**spec), rank)
    publisher = trainer.publisher(path, heartbeat_seconds=1e9)
    publisher.snapshot()
    assert publisher._versions._beats is not None
    publisher._versions._beats._writer._next = 0.0
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        publisher.publish()
    publisher.close()
    return (Path(path) / "stream" / "publishers" / f"{1:020d}.json").exists()


def served(rank: int, world_size: int, path: str, spec: dict[str, Any], later: str) -> tuple[str, int]:
    """After a takeover, the serving stream continues with a delta if its later versions can be repaired.

    Args:
        rank: this rank.
        world_size: number of ranks.
        path: directory.
        spec: the model.
        later: method of the serving publisher that is called after the last recovery version; "" for none.
    """
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    url = f"file://{path}/serving"
    publisher, serving = trainer.publisher(path), Publisher(trainer.tracker, url, "other")
    held = empty_model(trainer.tracker)
    predictor = Predictor(held, url)
    standby = job.standby(path, serving=[url])
    for _ in range(3):
        trainer.train(1)
        serving.publish()
        trainer.train(1)
        publisher.publish()
    predictor.sync()
    trainer.train(1)
    if later:
        getattr(serving, later)()
        predictor.sync()
    taken = standby.take_over(force=True)
    assert attempt(serving.publish).startswith("FencedError")
    successor = job.successor(taken)
    serving = Publisher(job.tracker, taken.serving[0], "other")
    first = serving.publish()
    predictor.sync()
    assert_equal(job.tracker, held)
    job.train(1)
    assert serving.publish().kind == "delta"
    predictor.sync()
    assert_equal(job.tracker, held)
    resyncs = predictor.status().resyncs
    successor.close()
    serving.close()
    note = {"stream": "another"}
    with job.tracker.reserve("other", holder="a test") as handle:
        handle.annotate(note)
    with job.tracker.reserve("main", holder="a test") as handle:
        assert handle.note_of("other") == note
        job.train(1)
        job.tracker.get_delta("other")
        assert handle.note_of("other") is None, "its stream lacks the rows of this read"
    barrier()
    return first.kind, resyncs


def replaced(rank: int, world_size: int, path: str, spec: dict[str, Any], where: str) -> None:
    """Rows of a version that was applied, at least in part, and that is not in the log any more, do not stay.

    Args:
        rank: this rank.
        world_size: number of ranks.
        path: directory.
        spec: the model.
        where: the step that failed: ``rows`` while the version was followed, or ``serving`` after a takeover.
    """
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(2)
    publisher.snapshot()
    serving = f"file://{path}/serving"
    StreamLog(Storage(serving, create=True)).claim()
    standby = job.standby(path, serving=[serving])
    standby.sync()
    log = Path(path) / "stream" / "log"
    before = sorted(log.iterdir())
    trainer.train(3)
    publisher.publish()
    publisher.close()
    if where == "rows":
        with _fault("rows"):
            assert attempt(standby.sync).startswith("StorageError")
    else:
        with _without_second_claim(serving):
            assert attempt(partial(standby.take_over, force=True)).startswith("TakeoverFailedError")
    assert standby.version == 1
    for each in set(log.iterdir()) - set(before):  # as in a backup from before the version
        each.unlink()
    other = made(spec, rank)
    other.restore(path)
    publisher = other.publisher(path)
    other.train(1)
    assert publisher.publish().kind == "delta"
    check_successor(other, publisher, job, standby.take_over(force=True), other.held())


def rolled_back(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A standby keeps its version while the log is an older copy, and follows a trainer that continues from the copy.

    A version that was applied in part before, and is not in the copy, leaves no rows.
    """
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(2)
    publisher.snapshot()
    standby, messages = job.standby(path), []
    log = Path(path) / "stream" / "log"
    for is_partial in (False, True):
        trainer.train(1)
        held = publisher.publish()
        standby.sync()
        before = sorted(log.iterdir())
        trainer.train(3)
        publisher.publish()
        publisher.close()
        with _fault("rows") if is_partial else nullcontext():
            messages.append(attempt(standby.sync))
        for each in set(log.iterdir()) - set(before):  # as in a backup from before the version
            each.unlink()
        trainer = made(spec, rank)
        trainer.restore(path)
        if not is_partial:
            messages += [attempt(standby.sync), attempt(standby.sync)]
            assert standby.version == held.version + 1
        publisher = trainer.publisher(path)
        trainer.train(1)
        last = publisher.publish()
        assert (standby.sync(), standby.error) == (last.version, None)
        assert same(job.rows(), trainer.rows())
    trainer.train(1)
    lost = publisher.publish()
    standby.sync()
    publisher.close()
    (Path(path) / "stream" / entry_name(lost.version)).unlink()
    make_silent(path)
    messages.append(attempt(standby.take_over))
    trainer = made(spec, rank)
    trainer.restore(path)
    standby.take_over(force=True)
    assert same(job.held(), trainer.held())
    return messages


def promoted(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> str:
    """A standby of a mirror that is promoted keeps its version until the new stream has a snapshot."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    copy, copied = f"{path}/copy", f"file://{path}/copy/stream"
    with trainer.publisher(path) as publisher:
        trainer.train(1)
        publisher.snapshot()
        trainer.train(1)
        last = publisher.publish()
    mirror = Mirror(Storage(f"file://{path}/stream"), Storage(copied, create=True))
    while mirror.step():
        pass
    standby = job.standby(copy)
    assert standby.sync() == last.version
    promote(Storage(copied))
    message = attempt(standby.sync)
    assert standby.version == last.version
    with trainer.publisher(copy) as publisher:
        trainer.train(1)
        publisher.snapshot()
        trainer.train(1)
        last = publisher.publish()
    assert (standby.sync(), standby.error) == (last.version, None)
    assert same(job.rows(), trainer.rows())
    return message


def begun(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> None:
    """A standby that begins applies the versions that a damaged merged one replaces."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    publisher = trainer.publisher(path)
    trainer.train(1)
    publisher.snapshot()
    for _ in range(3):
        trainer.train(1)
        last = publisher.publish()
    merged = compact(Storage(f"file://{path}/stream"), fold=1e9)
    assert (merged.kind, merged.version) == ("delta", last.version)
    part = Path(path) / "stream" / merged.parts[0].name
    part.write_bytes(b"\0" * part.stat().st_size)
    assert job.standby(path).sync() == last.version
    assert same(job.rows(), trainer.rows())
    publisher.close()


def disturbed(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """A version that is damaged or missing is passed as soon as there is a way; a stream that does not fit raises."""
    trainer, job = Job(spec_of(**spec), rank), made(spec, rank)
    # Readers notice a damaged log once the pointer passes it, up to a second later: here at once.
    publisher = trainer.publisher(path, upkeep=Upkeep(pointer_seconds=None))
    standby = job.standby(path)
    messages = []
    for what in ("part", "entry", "merged"):
        trainer.train(1)
        publisher.snapshot()
        standby.sync()
        trainer.train(1)
        damaged = publisher.publish()
        name = entry_name(damaged.version) if what == "entry" else damaged.parts[0].name
        trainer.train(1)
        last = publisher.publish()
        if what == "merged":
            compact(Storage(f"file://{path}/stream"))
        (Path(path) / "stream" / name).unlink()
        if what != "merged":  # the first attempt finds no other way
            messages += [attempt(standby.sync), attempt(standby.sync)]
            assert standby.version == damaged.version - 1
            assert type(standby.error).__name__ == messages[-1].partition(":")[0], (messages, standby.error)
            trainer.train(1)
            last = publisher.snapshot()
        assert standby.sync() == last.version
        assert standby.error is None
        assert same(job.rows(), trainer.rows())
    publisher.close()
    tables = [{**each, "rows": 18} if each["name"] == "row" else each for each in spec["tables"]]
    other = Job(spec_of(**{**spec, "tables": tables}), rank)
    other.publisher(path).snapshot()
    messages.append(attempt(standby.sync))
    return messages
