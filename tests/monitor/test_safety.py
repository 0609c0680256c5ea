"""Threads, forks, signals, sinks that raise or block, the end of the program: nothing lost, nothing stuck."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.sinks.sink import Sink
from tests.monitor.clocks import ManualClock
from tests.monitor.hammer import hammer
from tests.monitor.recording import Kept

_ROOT = Path(__file__).parent.parent.parent
_SHORT = timedelta(milliseconds=200)


def _total(monitor, name):
    return sum(each.figures.total for each in monitor.collect().totals if each.definition.name == name)


def test_eight_threads_hammer() -> None:
    hammer(num_threads=8, num_records=400_000)


def test_windows_lose_no_record_between_threads() -> None:
    monitor = Monitor()
    sink = Kept()
    stat = monitor.stat("s", window=Window(count=7), aggregations=("sum",))
    monitor.start([sink], interval=timedelta(milliseconds=5), system=False)
    threads = [threading.Thread(target=lambda: [stat.add(1) for _ in range(20_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.stop()
    windows = sink.windows("s")
    lost = sum(t.figures.total for t in monitor.collect().totals if t.definition.name == "delta_tracker_lost_windows")
    assert all(window.count == 7 for window in windows[:-1])
    assert sum(window.count for window in windows) + 7 * lost == 80_000
    assert _total(monitor, "s") == 80_000


def test_signal_handlers_and_finalizers_may_record(monkeypatch) -> None:
    """They run between any two instructions of the thread that is folding."""
    monkeypatch.setattr("delta_tracker.monitor.cell._MAX_WAITING", 2)
    monitor = Monitor()
    stat = monitor.histogram("s")
    interrupted = 0

    def handler(*_) -> None:
        nonlocal interrupted
        interrupted += 1
        stat.add(1)
        monitor.log("from.a.signal")

    class Finalised:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            stat.add(1)

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(30_000):
            stat.add(1)
            Finalised()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    gc.collect()
    assert interrupted > 10
    assert _total(monitor, "s") == 60_000 + interrupted


class _Blocking(Sink):
    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.num_calls = 0

    def deliver(self, batch) -> None:
        self.num_calls += 1
        self.may_go.wait(60)


class _Raising(Sink):
    def __init__(self) -> None:
        self.num_calls = 0

    def deliver(self, batch) -> None:
        self.num_calls += 1
        raise SystemExit("not even that gets out")

    def close(self) -> None:
        raise KeyboardInterrupt


def test_sinks_that_raise_or_block_are_counted_and_muted(caplog) -> None:
    clock = ManualClock()
    monitor = Monitor(clock, deadline=_SHORT)
    blocking, raising, fine = _Blocking(), _Raising(), Kept()
    counter = monitor.counter("c")
    monitor.start([blocking, raising, fine], system=False)
    for _ in range(4):
        counter.add(1)
        assert monitor.flush()
    assert (blocking.num_calls, raising.num_calls) == (1, 1)
    assert [window.values["sum"] for window in fine.windows("c")] == [1] * 4
    clock.go(11)
    monitor.flush()
    assert (blocking.num_calls, raising.num_calls) == (1, 2), "not while it has not returned"
    clock.go(11)
    monitor.flush()
    assert (blocking.num_calls, raising.num_calls) == (1, 2), "muted twice as long"
    blocking.may_go.set()
    assert monitor.stop()
    assert (blocking.num_calls, raising.num_calls) == (2, 3), "the last batch is tried in any case"
    assert fine.is_closed
    errors = {
        t.labels: t.figures.total for t in monitor.collect().totals if t.definition.name.endswith("outlet_errors")
    }
    assert errors[(("outlet", "_Blocking"),)] == 1
    assert errors[(("outlet", "_Raising"),)] == 4
    assert len([record for record in caplog.records if "_Raising" in record.getMessage()]) == 1


def test_a_blocking_callback_keeps_nobody_else(caplog) -> None:
    may_go = threading.Event()
    monitor = Monitor(deadline=_SHORT)
    monitor.passive("blocks", lambda: may_go.wait(60))
    monitor.passive("fine", lambda: 1)
    assert _total(monitor, "fine") == 1
    may_go.set()


def test_recording_goes_on_while_a_sink_blocks() -> None:
    monitor = Monitor(deadline=timedelta(seconds=30))
    blocking = _Blocking()
    stat = monitor.stat("s")
    monitor.start([blocking], interval=timedelta(milliseconds=1), system=False)
    while not blocking.num_calls:
        time.sleep(0.001)
    for _ in range(5000):
        stat.add(1)
        monitor.log("a")
    blocking.may_go.set()
    assert monitor.stop()
    assert _total(monitor, "s") == 5000


def test_start_and_stop() -> None:
    monitor = Monitor()
    assert not monitor.is_running
    assert monitor.stop()
    before = set(threading.enumerate())  # of other tests, whose threads may end meanwhile
    for _ in range(3):
        sink = Kept()
        monitor.start([sink], system=False)
        with pytest.raises(InvalidArgumentError, match="stop"):
            monitor.start()
        assert monitor.is_running
        assert monitor.stop()
        assert sink.is_closed
    time.sleep(0.05)
    assert set(threading.enumerate()) <= before
    for interval in (timedelta(0), 3):
        with pytest.raises(InvalidArgumentError, match="interval"):
            monitor.start(interval=interval)
    with pytest.raises(InvalidArgumentError, match="labels"):
        monitor.start(attributes={"no label": "x"})
    assert not monitor.is_running


def test_the_interval_collects_without_anybody_asking() -> None:
    monitor = Monitor()
    sink = Kept()
    monitor.start([sink], interval=timedelta(milliseconds=2), system=True)
    while len(sink.batches) < 3:
        time.sleep(0.002)
    monitor.stop()
    assert {each.definition.name for each in sink.batches[-1].totals} >= {"process_cpu_seconds", "process_memory_bytes"}


def test_a_handler_hears_of_an_event_before_the_next_collection() -> None:
    monitor = Monitor()
    heard = threading.Event()
    monitor.on("a", lambda _: heard.set())
    monitor.start(interval=timedelta(hours=1), system=False)
    monitor.log("a")
    assert heard.wait(30)
    monitor.stop()


_EXIT = """
import sys
from datetime import timedelta
from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.sinks.jsonl import JsonlSink
monitor = Monitor()
loss = monitor.stat("loss", window=Window(count=100), aggregations=("sum",))
monitor.start([JsonlSink(sys.argv[1])], interval=timedelta(hours=1))
for _ in range(130):
    loss.add(1)
monitor.log("end", "bye")
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise ValueError('x')", "monitor.stop()"])
def test_the_last_window_is_delivered_at_the_end_of_the_program(tmp_path, end) -> None:
    path = tmp_path / "metrics.jsonl"
    program = [sys.executable, "-W", "ignore", "-c", _EXIT.format(end=end), str(path)]
    subprocess.run(program, check=False, timeout=120, cwd=_ROOT, stderr=subprocess.DEVNULL)
    text = path.read_text()
    lines = [line for line in text.splitlines() if '"loss"' in line and '"window"' in line]
    assert len(lines) == 2
    assert '"count": 100' in lines[0]
    assert '"count": 30' in lines[1]
    assert '"bye"' in text


def _in_child(body) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_begins_empty_and_can_start_again() -> None:
    monitor = Monitor()
    sink = Kept()
    stat = monitor.counter("c")
    stat.add(5)
    monitor.log("parent")
    monitor.start([sink], interval=timedelta(hours=1), system=False)

    def child() -> None:
        assert not monitor.is_running
        assert not monitor.events.recent
        assert _total(monitor, "c") == 0
        stat.add(1)
        own = Kept()
        monitor.start([own], interval=timedelta(hours=1), system=False)
        assert monitor.stop()
        assert own.windows("c")[0].values == {"sum": 1}
        assert sink.was_forgotten
        assert not sink.is_closed
        assert not sink.batches

    assert _in_child(child) == 0
    assert not sink.was_forgotten
    stat.add(1)
    assert monitor.stop()
    assert sink.windows("c")[0].values == {"sum": 6}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_waits_for_no_lock_that_a_thread_of_the_parent_holds() -> None:
    monitor = Monitor()
    stat = monitor.stat("s", labels=["k"])
    cell = stat.cell(k=1)
    monitor.start([Kept()], interval=timedelta(hours=1), system=False)
    locks = [monitor.registry._lock, stat._lock, cell._lock, monitor._collector._lock]
    held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        may_go.wait(60)
        for lock in locks:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)

    def child() -> None:
        signal.alarm(20)  # ends a child that waits
        for _ in range(2000):
            cell.add(1)
        stat.cell(k=2).add(1)
        monitor.configure("s", raw=2)
        monitor.counter("new").add(1)
        assert _total(monitor, "s") == 2001

    try:
        assert _in_child(child) == 0
    finally:
        may_go.set()
        holder.join()
    assert monitor.stop()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forks_while_threads_record_and_fold() -> None:
    """A child inherits locks that nobody will ever release; it must not wait for one."""
    monitor = Monitor()
    stat = monitor.histogram("s")
    cells = monitor.counter("labelled", labels=["k"], max_cells=16)
    monitor.start([Kept()], interval=timedelta(milliseconds=1), system=False)
    stop = threading.Event()
    counts = [0] * 4

    def record(place: int) -> None:
        while not stop.is_set():
            for _ in range(1000):
                stat.add(1)
                counts[place] += 1
            cells.cell(k=counts[place] % 100).add(1)
            monitor.log("a")

    threads = [threading.Thread(target=record, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()

    def child() -> None:
        for _ in range(3000):
            stat.add(1)
            cells.cell(k=_).add(1)
        monitor.log("b")
        monitor.configure("s", raw=1)
        assert _total(monitor, "s") == 3000
        assert _total(monitor, "labelled") == 3000

    try:
        for _ in range(12):
            assert _in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert monitor.stop()
    assert _total(monitor, "s") == sum(counts)


def test_a_thread_that_stop_did_not_wait_for_leaves_what_is_started_next_alone() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Blocking(Kept):
        def deliver(self, batch) -> None:
            entered.set()
            go_on.wait(10)
            super().deliver(batch)

    monitor = Monitor()
    monitor.start([Blocking()], interval=timedelta(milliseconds=1), system=False)
    assert entered.wait(10)
    (old,) = (each for each in threading.enumerate() if each.name == "delta_tracker-collector")
    assert not monitor.stop(timedelta(milliseconds=1))
    second = Kept()
    monitor.start([second], interval=timedelta(hours=1), system=False)
    go_on.set()
    old.join(10)
    assert not old.is_alive(), "it ends by itself"
    assert monitor.stop()
    assert sum(batch.is_last for batch in second.batches) == 1


def test_a_stat_that_is_full_waits_for_nobody_while_others_configure() -> None:
    """The registry locks it to configure it; to count that it is full, it asks the registry."""
    monitor = Monitor()
    full = monitor.counter("full", labels=["x"], max_cells=1)
    full.cell(x="1")
    counts, configures = threading.Event(), threading.Event()
    overflowed = full._hooks.overflowed

    def slowly(name: str) -> None:
        counts.set()
        configures.wait(1)
        overflowed(name)

    full._hooks.overflowed = slowly

    def configure() -> None:
        counts.wait(10)
        monitor.configure("full", enabled=True)
        configures.set()

    threads = [threading.Thread(target=each, daemon=True) for each in (lambda: full.cell(x="2"), configure)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert not any(each.is_alive() for each in threads)
