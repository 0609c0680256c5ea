"""Collected data reaches every sink once and in time. Outlets that raise or block do not affect others."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.sinks.base_sink import Sink
from tests.monitor.clocks import ManualClock
from tests.monitor.figures import total
from tests.monitor.recording import Kept
from tests.monitor.scripted import ScriptedSink, no_thread_starts
from tests.waiting import eventually

_SHORT = timedelta(seconds=1)  # of calls that block; others must be faster


def _sums(sink: Kept) -> list[float]:
    return [window.values["sum"] for window in sink.windows("c")]


def test_a_handler_that_is_slower_than_its_events_gets_them_in_order_and_is_not_muted() -> None:
    monitor, got = Monitor(deadline=_SHORT), []

    def handle(event) -> None:
        time.sleep(0.015)
        got.append(event.data["number"])

    monitor.on("e", handle)
    monitor.start([], interval=timedelta(milliseconds=50), system=False)
    for number in range(100):
        monitor.log("e", number=number)
    eventually(lambda: len(got) == 100)
    assert got == list(range(100))
    assert monitor.stop()
    assert not sum(cell.collect_total() for cell in monitor.metrics.outlet_errors.cells)


def test_undelivered_data_is_sent_with_the_next_collection() -> None:
    clock = ManualClock()
    monitor = Monitor(clock)
    failing, fine = ScriptedSink(0), Kept()
    counter = monitor.counter("records")
    monitor.start([failing, fine], interval=timedelta(hours=1), system=False)
    failing.script = ["take", "fail", "fail"]
    for _ in range(4):
        counter.add(1)
        monitor.log("mark")
        assert monitor.flush()
        clock.go(6)
    counter.add(1)
    clock.go(6)
    assert monitor.flush()
    assert (failing.total, len(failing.event_ids)) == (0, 0), "failed again, and is muted for 20 s"
    clock.go(30)
    assert monitor.flush()
    assert (failing.total, len(failing.event_ids)) == (5, 4)
    assert monitor.stop()
    assert failing.total == 5
    assert [window.values["sum"] for window in fine.windows("records")] == [1] * 5


def test_the_queue_of_a_sink_is_bounded_and_drops_are_counted(monkeypatch) -> None:
    monkeypatch.setattr("delta_tracker.monitor.outlets._MAX_WINDOWS", 50)
    clock = ManualClock()
    monitor = Monitor(clock, capacity=2)
    failing = ScriptedSink(0)
    failing.script = ["fail"]
    counter = monitor.counter("records", window=Window(count=1))
    monitor.start([failing], interval=timedelta(hours=1), system=False)
    for _ in range(5):
        for _ in range(40):
            counter.add(1)
        monitor.log("mark")
        assert monitor.flush()
    clock.go(11)
    assert monitor.flush()
    assert 40 <= failing.total <= 50
    assert len(failing.event_ids) == 2
    lost = monitor.metrics.lost_windows.cell(stat="records")
    assert failing.total + lost.collect_total() == 200
    assert monitor.metrics.dropped_events.cell(reason="undelivered").collect_total() == 3
    assert monitor.stop()


def test_a_sink_is_called_once_at_a_time_and_closed_after_its_call() -> None:
    clock = ManualClock()
    monitor = Monitor(clock, deadline=timedelta(seconds=1))
    slow = ScriptedSink(0)
    slow.script = ["block"]
    slow.may_return.clear()
    counter = monitor.counter("records")
    monitor.start([slow], interval=timedelta(hours=1), system=False)
    for _ in range(3):
        counter.add(1)
        assert monitor.flush()
        clock.go(700)
    threading.Timer(0.05, slow.may_return.set).start()
    assert monitor.stop()
    assert (slow.wrong, slow.total, slow.is_closed) == ([], 3, True)


def test_a_sink_that_never_returns_is_never_closed(caplog) -> None:
    monitor = Monitor(deadline=_SHORT)
    stuck, fine = ScriptedSink(0), Kept()
    stuck.script = ["block"]
    stuck.may_return.clear()
    monitor.counter("c").add(1)
    monitor.start([stuck, fine], interval=timedelta(hours=1), system=False)
    assert monitor.flush()
    assert monitor.stop()
    assert fine.is_closed
    assert not stuck.is_closed
    assert "not closed, because a delivery has not returned: sink=sink 0" in caplog.text
    stuck.may_return.set()
    assert not stuck.wrong


def test_the_last_collection_is_delivered_where_no_thread_can_be_started() -> None:
    """At the end of a program Python 3.12 starts no threads, and the sinks' thread had timed out before."""
    clock = ManualClock()
    monitor = Monitor(clock, deadline=_SHORT)
    slow, fine = ScriptedSink(0), Kept()
    slow.script = ["block"]
    slow.may_return.clear()
    counter = monitor.counter("c")
    monitor.start([slow, fine], interval=timedelta(hours=1), system=False)
    with no_thread_starts():
        assert monitor.flush()
        counter.add(1)
        slow.may_return.set()
        assert monitor.stop()
    assert sum(_sums(fine)) == 1
    assert slow.is_closed
    assert fine.is_closed
    assert not slow.wrong


class _Blocking(Sink):
    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.num_calls = 0

    def deliver(self, collection) -> None:
        self.num_calls += 1
        self.may_go.wait(60)


class _Raising(Sink):
    def __init__(self) -> None:
        self.num_calls = 0

    def deliver(self, collection) -> None:
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
    assert (blocking.num_calls, raising.num_calls) == (2, 3), "the last collection is tried in any case"
    assert fine.is_closed
    errors = {
        t.labels: t.figures.total for t in monitor.collect().totals if t.definition.name.endswith("outlet_errors")
    }
    assert errors[(("outlet", "_Blocking"),)] == 1
    assert errors[(("outlet", "_Raising"),)] == 4
    assert len([record for record in caplog.records if "_Raising" in record.getMessage()]) == 1


def test_a_blocking_callback_delays_no_other(caplog) -> None:
    may_go = threading.Event()
    monitor = Monitor(deadline=_SHORT)
    monitor.passive("blocks", lambda: may_go.wait(60))
    monitor.passive("fine", lambda: 1)
    assert total(monitor, "fine") == 1
    may_go.set()


def test_recording_continues_while_a_sink_blocks() -> None:
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
    assert total(monitor, "s") == 5000
