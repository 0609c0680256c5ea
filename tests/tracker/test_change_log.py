"""The change log: bounds, reads, lagging consumers, and concurrent threads."""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from delta_tracker.errors import (
    DeltaTrackerError,
    InvalidArgumentError,
    NeedsSnapshotError,
    StaleDeltaError,
)
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sharding.collisions import MchOwners
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.cursors import Read
from delta_tracker.tracker.log_consumers import LogConsumers
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.store.owner_store import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Bucket, Delta, DeltaRows, Identity
from tests.fake_streams.simulation import fake_streams
from tests.sweeps import SWEEPS_ARE_WHOLE

_NUM_ROWS = 512


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Make Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _log(consumers: list[str]) -> ChangeLog:
    stores = {fqn: SegmentStore(_NUM_ROWS, engine="torch") for fqn in ("t", "u")}
    empty = SimpleNamespace(
        _mch_sorted_raw_ids=torch.full((_NUM_ROWS,), NO_OWNER), _mch_remapped_ids_mapping=torch.arange(_NUM_ROWS)
    )
    identity = Identity(1000, (Bucket((0, _NUM_ROWS), _NUM_ROWS - 1),))
    source = MchOwners("t", identity, (0, _NUM_ROWS), empty, torch.device("cpu"))
    owners = {"t": OwnerStore(source, engine="torch")}
    return ChangeLog(stores, consumers, delete_on_read=True, max_bytes=None, owners=owners)


def _answer(read: Read, *, leaves_out: bool = False) -> Delta:
    left_out = {fqn: rows.take(rows.ids % 3 == 0) for fqn, rows in read.rows.items()} if leaves_out else {}
    return read.returns({}, left_out)


_MARKING_ALL = ("mark_all_later", "mark_everything", "restore")


def _calls(log: ChangeLog, generator: random.Random) -> dict[str, Callable[[], object]]:
    """Return one call for each public name of the log, its writes and its consumers."""
    ids = torch.tensor(generator.sample(range(_NUM_ROWS), 5))
    key, name = generator.randrange(1 << 40), f"extra {generator.randrange(3)}"

    def read_and(end: Callable[[Read], object], *, holds: bool = False) -> None:
        with log.lock:
            read = log.consumers.read("other")
            _answer(read, leaves_out=generator.random() < 0.5)
            if holds:
                log.consumers.hold(read)
            end(read)

    return {
        "abort": lambda: read_and(log.consumers.abort, holds=True),
        "annotate": lambda: log.consumers.annotate("other", [1]),
        "acknowledge_writes": lambda: log.writes.acknowledge_writes(["t"]),
        "add": lambda: log.consumers.add(name),
        "end_write": lambda: log.writes.end_write(key, ["t"]),
        "changed_since_sync": lambda: log.writes.changed_since_sync(["t"]),
        "clear": lambda: log.consumers.clear("other"),
        "commit": lambda: read_and(log.consumers.commit, holds=True),
        "compact": log.compact,
        "compacts_after_odist": lambda: log.writes.compacts_after_odist,
        "cut": log.writes.cut,
        "names": lambda: log.consumers.names,
        "diverged": lambda: log.writes.diverged(["t"]),
        "make_pending": lambda: log.consumers.make_pending("other", "t", ids),
        "end_writes": log.writes.end_writes,
        "find": lambda: log.consumers.find("other"),
        "end_write_later": lambda: log.writes.end_write_later(key),
        "hold": lambda: read_and(log.consumers.hold),
        "lags": lambda: log.consumers.lags(counts=True),
        "looked_up": lambda: log.writes.looked_up({"t": ids}),
        "mark": lambda: log.writes.mark("t", ids),
        "mark_all_later": lambda: log.writes.mark_all_later(["t"]),
        "mark_everything": log.mark_everything,
        "notice_writes": lambda: log.writes.notice_writes(["t"]),
        "num_pending": lambda: log.consumers.num_pending("other"),
        "num_writes": log.writes.num_writes,
        "begin_write": lambda: log.writes.begin_write(key, {"t": ids}),
        "read": lambda: read_and(log.consumers.abort),
        "release": lambda: log.consumers.release("other"),
        "remove": lambda: log.consumers.remove(log.consumers.resolve(name)),
        "replace": lambda: log.replace({f"new {generator.randrange(3)}": SegmentStore(_NUM_ROWS, engine="torch")}),
        "reserve": lambda: log.consumers.reserve("other", "a test"),
        "resolve": lambda: log.consumers.resolve("reader"),
        "restore": lambda: log.restore(log.state()),
        "output_launched": log.writes.output_launched,
        "order_lookup": log.writes.order_lookup,
        "rewind": lambda: log.consumers.rewind("other"),
        "state": log.state,
        "step": log.consumers.step,
        "synced": lambda: log.writes.synced(["t"]),
        "uncommitted": lambda: read_and(lambda read: log.consumers.uncommitted(read.delta), holds=True),
    }


class _CountedLock:
    """A lock that counts how often it was acquired."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.num_taken = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.num_taken += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_NAMES = [
    name
    for part in (ChangeLog, LogWrites, LogConsumers)
    for name, each in inspect.getmembers(part)
    if not name.startswith("_") and (inspect.isfunction(each) or isinstance(each, property))
]


@pytest.mark.parametrize("name", _NAMES)
def test_every_method_takes_the_lock(name: str) -> None:
    log = _log(["reader", "other"])
    calls = _calls(log, random.Random(0))
    assert name in calls, "a new method: add a call of it"
    # The calls acquire the lock too, so count the method's own.
    if name in ("commit", "abort", "hold", "uncommitted"):
        read = log.consumers.read("other")
        _answer(read)
        log.consumers.hold(read)
        calls[name] = lambda: getattr(log.consumers, name)(read.delta if name == "uncommitted" else read)
    if name == "read":
        calls[name] = lambda: log.consumers.read("other")
    if name == "remove":
        log.consumers.add("gone")
        calls[name] = lambda: log.consumers.remove("gone")
    if name == "restore":
        state = log.state()
        calls[name] = lambda: log.restore(state)
    lock = log.lock = log.writes.lock = log.consumers.lock = _CountedLock()
    try:
        calls[name]()
    except DeltaTrackerError:
        assert name == "rewind", "a log that forgets cannot rewind"
    # The hook acquires it without blocking, and only if there are segments to compact.
    lock_free = ("compacts_after_odist", "end_write_later", "mark_all_later", "output_launched")
    assert (lock.num_taken > 0) == (name not in lock_free)


class _Threads:
    """Threads that use one log concurrently until the marking thread is done."""

    def __init__(self) -> None:
        self.log = _log(["reader", "other", *(f"idle {number}" for number in range(20))])
        self.errors: list[Exception] = []
        self.marked: set[int] = set()
        self.received: set[int] = set()
        self._stop = threading.Event()

    def run(self) -> None:
        everything = [name for name in _NAMES if name not in _MARKING_ALL]
        changing = ["add", "remove"]
        asking = ["lags"] * 5 + ["names"]
        works: list[Callable[[], None]] = [
            *(
                partial(self._call, random.Random(seed), names)
                for seed, names in enumerate([everything, changing, changing, asking])
            ),
            self._read,
        ]
        threads = [threading.Thread(target=self._until_stopped, args=[work]) for work in works]
        for thread in threads:
            thread.start()
        try:
            self._mark()
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        self._read()

    def _until_stopped(self, work: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                work()
        except Exception as error:  # noqa: BLE001  the test raises it
            self.errors.append(error)

    def _call(self, draw: random.Random, names: list[str]) -> None:
        for name in draw.sample(names, len(names)):
            with suppress(DeltaTrackerError):  # the consumer exists already, is unknown, or is reserved
                _calls(self.log, draw)[name]()

    def _mark(self) -> None:
        draw = random.Random(9)
        for _ in range(5000 if SWEEPS_ARE_WHOLE else 1500):
            row = draw.randrange(_NUM_ROWS)
            self.log.writes.mark("u", torch.tensor([row]))
            self.marked.add(row)

    def _read(self) -> None:
        with self.log.lock:
            reading = self.log.consumers.read("reader")
            ids = reading.rows["u"].ids.tolist()
            self.log.consumers.commit(reading)
        self.received.update(ids)


@pytest.mark.sweep("short")
@pytest.mark.usefixtures("frequent_switches")
def test_all_methods_at_once_lose_no_row() -> None:
    threads = _Threads()
    threads.run()
    assert not threads.errors
    assert threads.received == threads.marked


def test_reads_alone_keep_the_log_short() -> None:
    store = SegmentStore(100)
    log = ChangeLog({"t": store}, ["a"], delete_on_read=True, auto_compact=True, max_bytes=None)
    for number in range(100):
        log.writes.mark("t", torch.tensor([number]))
        log.consumers.commit(log.consumers.read("a"))
    assert store.num_segments <= 17


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, "x"])
def test_an_invalid_bound_is_refused(max_bytes: object) -> None:
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        ChangeLog({}, ["a"], delete_on_read=True, max_bytes=max_bytes)


def test_rows_left_out_of_a_moved_table_are_forgotten() -> None:
    log = ChangeLog({"t": SegmentStore(30)}, ["a"], delete_on_read=True, max_bytes=None)
    log.writes.mark("t", torch.tensor([3, 25]))
    reading = log.consumers.read("a")
    left_out = {"t": reading.rows["t"].take(torch.tensor([False, True]))}
    reading.returns({"t": DeltaRows(torch.tensor([3]))}, left_out)
    log.consumers.commit(reading)
    uncommitted = log.consumers.read("a")
    log.consumers.hold(uncommitted)
    log.replace({"t": SegmentStore(10)})
    with pytest.raises(StaleDeltaError):
        log.consumers.commit(uncommitted)
    assert log.consumers.read("a").rows["t"].ids.tolist() == list(range(10))


@pytest.mark.promise("independent")
def test_a_slow_consumer_is_dropped_and_recovers() -> None:
    store = SegmentStore(1000, engine="torch", old_states=lambda ids: torch.zeros(len(ids), 16))
    log = ChangeLog({"t": store}, ["fast", "slow"], delete_on_read=True, max_bytes=20_000)
    for batch in range(50):
        log.writes.begin_write(batch, {"t": torch.arange(batch * 10, batch * 10 + 10)})
        log.writes.end_write(batch, ["t"])
        log.consumers.step()
        log.consumers.commit(log.consumers.read("fast"))
        assert log.segments.memory().log_bytes <= 20_000
    with pytest.raises(NeedsSnapshotError, match="max_bytes=20000") as caught:
        log.consumers.read("slow")
    assert caught.value.consumer == "slow"
    log.consumers.clear("slow")
    log.writes.begin_write(99, {"t": torch.tensor([7])})
    assert log.consumers.read("slow").rows["t"].ids.tolist() == [7]


def test_writes_not_marked_for_lack_of_memory_are_marked_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = [True]
    store = SegmentStore(8, engine="torch", was_written=lambda: bool(writes) and writes.pop())
    log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
    with monkeypatch.context() as patch:
        patch.setattr(TorchRows, "mark_all", _raises_memory_error)
        with pytest.raises(MemoryError):
            log.consumers.read("a")
    assert log.consumers.read("a").rows["t"].ids.tolist() == list(range(8))


def _raises_memory_error(*_: object) -> None:
    raise MemoryError


def test_a_commit_succeeds_where_memory_runs_out_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SegmentStore(1000, engine="torch")
    log = ChangeLog({"t": store}, ["fast", "slow"], delete_on_read=True, max_bytes=10)
    log.writes.mark("t", torch.tensor([3]))
    reading = log.consumers.read("fast")
    with monkeypatch.context() as patch:
        patch.setattr(store, "cut", _raises_memory_error)
        log.consumers.commit(reading)
    assert log.consumers.read("fast").rows["t"].ids.tolist() == []


@pytest.mark.parametrize("is_abandoned", [False, True])
@pytest.mark.parametrize("call", ["num_pending", "resolve"])
def test_the_only_consumer_needs_no_name_while_a_snapshot_is_copied(call: str, *, is_abandoned: bool) -> None:
    log = _log(["default"])
    log.writes.mark("t", torch.tensor([1, 2]))
    log.consumers.add("default (snapshot)", holder="a publisher")
    if is_abandoned:
        log.consumers.abandoned.append("default (snapshot)")
    expected = {"num_pending": {"t": 2, "u": 0}, "resolve": "default"}[call]
    assert getattr(log.consumers, call)(None) == expected
    assert log.consumers.names == (("default",) if is_abandoned else ("default", "default (snapshot)"))
    with pytest.raises(InvalidArgumentError, match=r"known consumers: 'default'\."):
        getattr(log.consumers, call)("absent")


def test_a_reserved_consumer_that_was_never_added_is_ignored() -> None:
    log = _log(["default"])
    log.consumers.abandoned.append("default (snapshot)")  # memory ran out before the log added it
    assert log.consumers.resolve(None) == "default"
    assert not log.consumers.abandoned


@pytest.mark.parametrize("call", ["num_pending", "find"])
def test_an_abandoned_consumer_is_not_found_by_name(call: str) -> None:
    log = _log(["default"])
    log.consumers.add("default (snapshot)", holder="a publisher")
    log.consumers.abandoned.append("default (snapshot)")
    with pytest.raises(InvalidArgumentError, match="known consumers: 'default'"):
        getattr(log.consumers, call)("default (snapshot)")


@pytest.mark.parametrize("seed", range(10))
def test_the_read_after_a_write_that_no_hook_could_begin_waits_for_the_write(seed: int) -> None:
    with fake_streams(seed):
        weights = torch.zeros(4, device="cuda")
        log = ChangeLog({"t": SegmentStore(4, "cuda", engine="torch")}, ["a"], delete_on_read=True, max_bytes=None)
        reader = torch.cuda.Stream()
        with torch.cuda.stream(reader):
            log.consumers.abort(log.consumers.read("a"))
        log.writes.mark_all_later(["t"], 7)
        weights.fill_(3)
        log.writes.end_write(7, ["t"])
        with torch.cuda.stream(reader):
            ids = log.consumers.read("a").rows["t"].ids
            assert weights.index_select(0, ids).tolist() == [3] * 4
