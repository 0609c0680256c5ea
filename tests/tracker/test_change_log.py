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
from delta_tracker.sharding.collisions import SortedOwners
from delta_tracker.tracker.change_log import ChangeLog, Reading
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.store.owners import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Bucket, Delta, DeltaRows, Identity
from tests.fake_streams.simulation import fake_streams

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
    source = SortedOwners("t", identity, (0, _NUM_ROWS), empty, torch.device("cpu"))
    owners = {"t": OwnerStore(source, engine="torch")}
    return ChangeLog(stores, consumers, delete_on_read=True, max_bytes=None, owners=owners)


def _delta(reading: Reading, *, leaves_out: bool = False) -> Delta:
    left_out = {fqn: rows.take(rows.ids % 3 == 0) for fqn, rows in reading.rows.items()} if leaves_out else {}
    start, stop, batches = reading.start, reading.stop, reading.batches
    return Delta({}, consumer=reading.consumer, start=start, stop=stop, batches=batches, left_out=left_out)


_MARKING_ALL = ("mark_all_later", "mark_everything", "mark_everything_later", "restore")


def _calls(log: ChangeLog, generator: random.Random) -> dict[str, Callable[[], object]]:
    """Return one call for each public name of the log."""
    ids = torch.tensor(generator.sample(range(_NUM_ROWS), 5))
    key, name = generator.randrange(1 << 40), f"extra {generator.randrange(3)}"

    def read_and(end: Callable[[Delta], None]) -> None:
        with log.lock:
            end(_delta(log.read("other"), leaves_out=generator.random() < 0.5))

    def sealed(delta: Delta) -> Delta:
        log.seal(delta, commit=False)
        return delta

    def read_and_discard() -> None:
        with log.lock:
            log.read("other")
            log.discard()

    return {
        "abort": lambda: read_and(lambda delta: log.abort(sealed(delta))),
        "acknowledge_writes": lambda: log.acknowledge_writes(["t"]),
        "add": lambda: log.add(name),
        "applied": lambda: log.applied(key, ["t"]),
        "batches": lambda: log.batches,
        "carried_bytes": lambda: log.carried_bytes,
        "changed_since_sync": lambda: log.changed_since_sync(["t"]),
        "clear": lambda: log.clear("other"),
        "commit": lambda: read_and(lambda delta: log.commit(sealed(delta))),
        "compact": log.compact,
        "consumers": lambda: log.consumers,
        "discard": read_and_discard,
        "diverged": lambda: log.diverged(["t"]),
        "distrust": lambda: log.distrust("other", "t", ids),
        "ended": lambda: log.ended(key),
        "is_behind": lambda: log.is_behind("other"),
        "log_bytes": lambda: log.log_bytes,
        "looked_up": lambda: log.looked_up({"t": ids}),
        "mark": lambda: log.mark("t", ids),
        "mark_all_later": lambda: log.mark_all_later(["t"]),
        "mark_everything": log.mark_everything,
        "mark_everything_later": log.mark_everything_later,
        "memory": log.memory,
        "notice_writes": lambda: log.notice_writes(["t"]),
        "num_batches": lambda: log.num_batches,
        "num_compacted": lambda: log.num_compacted,
        "num_pending": lambda: log.num_pending("other"),
        "num_recorded": lambda: log.num_recorded,
        "open_updates": log.open_updates,
        "opened": lambda: log.opened(key, {"t": ids}),
        "others": lambda: log.others("reader"),
        "position": lambda: log.position("other"),
        "read": read_and_discard,
        "release": lambda: log.release("other"),
        "remove": lambda: log.remove(log.resolve(name)),
        "replace": lambda: log.replace({f"new {generator.randrange(3)}": SegmentStore(_NUM_ROWS, engine="torch")}),
        "reserve": lambda: log.reserve("other", "a test"),
        "resolve": lambda: log.resolve("reader"),
        "restore": lambda: log.restore(log.state()),
        "output_launched": log.output_launched,
        "owners": lambda: log.owners,
        "owners_of": lambda: log.owners_of("t", ids),
        "rewind": lambda: log.rewind("other"),
        "seal": lambda: read_and(lambda delta: log.seal(delta, commit=True)),
        "standings": lambda: log.standings(counts=True),
        "state": log.state,
        "step": log.step,
        "stores": lambda: sum(store.num_rows for store in log.stores.values()),
        "synced": lambda: log.synced(["t"]),
        "undo_commit": lambda: read_and(log.undo_commit),
        "unsynced": lambda: log.unsynced(["t"]),
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
    for name, each in inspect.getmembers(ChangeLog)
    if not name.startswith("_") and (inspect.isfunction(each) or isinstance(each, property))
]


@pytest.mark.parametrize("name", _NAMES)
def test_every_method_takes_the_lock(name: str) -> None:
    log = _log(["reader", "other"])
    calls = _calls(log, random.Random(0))
    assert name in calls, "a new method: add a call of it"
    # The calls acquire the lock too, so count the method's own.
    if name in ("commit", "abort", "seal", "discard", "undo_commit"):
        delta = _delta(log.read("other"))
        log.seal(delta, commit=False)
        argument = {"seal": {"commit": False}}.get(name, {})
        calls[name] = lambda: getattr(log, name)(*([] if name == "discard" else [delta]), **argument)
    if name == "read":
        calls[name] = lambda: log.read("other")
    if name == "remove":
        log.add("gone")
        calls[name] = lambda: log.remove("gone")
    if name == "restore":
        state = log.state()
        calls[name] = lambda: log.restore(state)
    lock = log.lock = _CountedLock()
    try:
        calls[name]()
    except DeltaTrackerError:
        assert name == "rewind", "a log that forgets cannot rewind"
    # The hook acquires it without blocking, and only if there are segments to compact.
    assert (lock.num_taken > 0) == (name not in ("ended", "mark_all_later", "output_launched"))


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
        asking = ["carried_bytes"] * 20 + ["stores", "num_recorded", "consumers", "memory"]
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
        for _ in range(5000):
            row = draw.randrange(_NUM_ROWS)
            self.log.mark("u", torch.tensor([row]))
            self.marked.add(row)

    def _read(self) -> None:
        with self.log.lock:
            reading = self.log.read("reader")
            self.log.seal(_delta(reading), commit=True)
        self.received.update(reading.rows["u"].ids.tolist())


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
        log.mark("t", torch.tensor([number]))
        reading = log.read("a")
        sent = Delta({}, consumer="a", start=reading.start, stop=reading.stop, batches=(0, 0))
        log.seal(sent, commit=True)
    assert store.num_segments <= 17


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, "x"])
def test_an_invalid_bound_is_refused(max_bytes: object) -> None:
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        ChangeLog({}, ["a"], delete_on_read=True, max_bytes=max_bytes)


def test_rows_left_out_of_a_moved_table_are_forgotten() -> None:
    log = ChangeLog({"t": SegmentStore(30)}, ["a"], delete_on_read=True, max_bytes=None)
    log.mark("t", torch.tensor([3, 25]))
    reading = log.read("a")
    left_out = {"t": reading.rows["t"].take(torch.tensor([False, True]))}
    rows = {"t": DeltaRows(torch.tensor([3]))}
    sent = Delta(rows, consumer="a", start=0, stop=reading.stop, batches=(0, 0), left_out=left_out)
    log.seal(sent, commit=True)
    reading = log.read("a")
    uncommitted = Delta({}, consumer="a", start=reading.start, stop=reading.stop, batches=(0, 0))
    log.seal(uncommitted, commit=False)
    log.replace({"t": SegmentStore(10)})
    with pytest.raises(StaleDeltaError):
        log.commit(uncommitted)
    assert log.read("a").rows["t"].ids.tolist() == list(range(10))


@pytest.mark.promise("independent")
def test_a_slow_consumer_is_dropped_and_recovers() -> None:
    store = SegmentStore(1000, engine="torch", old_states=lambda ids: torch.zeros(len(ids), 16))
    log = ChangeLog({"t": store}, ["fast", "slow"], delete_on_read=True, max_bytes=20_000)
    for batch in range(50):
        log.opened(batch, {"t": torch.arange(batch * 10, batch * 10 + 10)})
        log.applied(batch, ["t"])
        log.step()
        reading = log.read("fast")
        delta = Delta(
            {"t": DeltaRows(reading.rows["t"].ids)},
            consumer="fast", start=reading.start, stop=reading.stop, batches=reading.batches,
        )  # fmt: skip
        log.seal(delta, commit=True)
        assert log.log_bytes <= 20_000
    with pytest.raises(NeedsSnapshotError, match="max_bytes=20000") as caught:
        log.read("slow")
    assert caught.value.consumer == "slow"
    log.clear("slow")
    log.opened(99, {"t": torch.tensor([7])})
    assert log.read("slow").rows["t"].ids.tolist() == [7]


def test_writes_not_marked_for_lack_of_memory_are_marked_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = [True]
    store = SegmentStore(8, engine="torch", was_written=lambda: bool(writes) and writes.pop())
    log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
    with monkeypatch.context() as patch:
        patch.setattr(TorchRows, "mark_all", _raises_memory_error)
        with pytest.raises(MemoryError):
            log.read("a")
    assert log.read("a").rows["t"].ids.tolist() == list(range(8))


def _raises_memory_error(*_: object) -> None:
    raise MemoryError


def test_a_commit_succeeds_where_memory_runs_out_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SegmentStore(1000, engine="torch")
    log = ChangeLog({"t": store}, ["fast", "slow"], delete_on_read=True, max_bytes=10)
    log.mark("t", torch.tensor([3]))
    reading = log.read("fast")
    sent = Delta({"t": DeltaRows(reading.rows["t"].ids)}, consumer="fast", start=0, stop=reading.stop, batches=(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(store, "cut", _raises_memory_error)
        log.seal(sent, commit=True)
    assert log.read("fast").rows["t"].ids.tolist() == []


@pytest.mark.parametrize("is_abandoned", [False, True])
@pytest.mark.parametrize("call", ["num_pending", "is_behind", "resolve"])
def test_the_only_consumer_needs_no_name_while_a_snapshot_is_copied(call: str, *, is_abandoned: bool) -> None:
    log = _log(["default"])
    log.mark("t", torch.tensor([1, 2]))
    log.add("default (snapshot)", holder="a publisher")
    if is_abandoned:
        log.abandoned.append(("default (snapshot)", True))
    assert getattr(log, call)(None) == {"num_pending": {"t": 2, "u": 0}, "is_behind": False, "resolve": "default"}[call]
    assert log.consumers == (("default",) if is_abandoned else ("default", "default (snapshot)"))
    with pytest.raises(InvalidArgumentError, match=r"known consumers: 'default'\."):
        getattr(log, call)("absent")


def test_a_reserved_consumer_that_was_never_added_is_ignored() -> None:
    log = _log(["default"])
    log.abandoned.append(("default (snapshot)", True))  # memory ran out before the log added it
    assert log.resolve(None) == "default"
    assert not log.abandoned


@pytest.mark.parametrize("call", ["num_pending", "is_behind"])
def test_an_abandoned_consumer_is_not_found_by_name(call: str) -> None:
    log = _log(["default"])
    log.add("default (snapshot)", holder="a publisher")
    log.abandoned.append(("default (snapshot)", True))
    with pytest.raises(InvalidArgumentError, match="known consumers: 'default'"):
        getattr(log, call)("default (snapshot)")


@pytest.mark.parametrize("seed", range(10))
def test_the_read_after_a_write_that_no_hook_could_open_waits_for_the_write(seed: int) -> None:
    with fake_streams(seed):
        weights = torch.zeros(4, device="cuda")
        log = ChangeLog({"t": SegmentStore(4, "cuda", engine="torch")}, ["a"], delete_on_read=True, max_bytes=None)
        reader = torch.cuda.Stream()
        with torch.cuda.stream(reader):
            log.read("a")
            log.discard()
        log.mark_all_later(["t"], 7)
        weights.fill_(3)
        log.applied(7, ["t"])
        with torch.cuda.stream(reader):
            ids = log.read("a").rows["t"].ids
            assert weights.index_select(0, ids).tolist() == [3] * 4
