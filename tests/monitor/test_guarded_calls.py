"""Sinks and callbacks that raise or block do not affect others."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.sinks.sink import Sink
from tests.monitor.clocks import ManualClock
from tests.monitor.figures import total
from tests.monitor.recording import Kept

_SHORT = timedelta(seconds=1)  # of calls that block; others must be faster


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
