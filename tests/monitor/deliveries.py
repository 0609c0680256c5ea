"""Random schedules of sinks that fail, block and return late, with a slow handler, forks, and an end without threads.

``python -m tests.monitor.deliveries [SEEDS]``
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from datetime import timedelta

from delta_tracker.monitor import Event, Monitor, Window
from tests.monitor.clocks import ManualClock
from tests.monitor.scripted import ScriptedSink, no_thread_starts

_DEADLINE = timedelta(milliseconds=150)
_INTERVAL = timedelta(milliseconds=20)
_PATIENCE_SECONDS = 60
_LONGEST_MUTE_SECONDS = 601


class Schedule:
    """One monitor with three scripted sinks, and the events of a schedule.

    Args:
        seed: random seed of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._choose = random.Random(seed)
        self._clock = ManualClock()
        self._monitor = Monitor(self._clock, deadline=_DEADLINE)
        self._records = self._monitor.counter("records", window=Window(count=5))
        self._num_recorded = self._num_handled = 0
        self._marks: set[int] = set()
        self._sinks = [ScriptedSink(number) for number in range(3)]
        self._monitor.limit_events("busy", per_second=1e9)
        self._handler = self._monitor.on("busy", self._handle)

    def run(self, num_actions: int) -> None:
        """Run the schedule; at the end every sink has received every window and every mark exactly once."""
        self._monitor.start(self._sinks, interval=_INTERVAL, system=False)
        actions = [self.record, self.record, self.script, self.release, self._monitor.flush, self.go, self.wait]
        for place in range(num_actions):
            self._choose.choice(actions)()
            if place == num_actions // 2:
                self.keep_busy()
                _fork(self._monitor)
        self._handler.remove()
        self.record()
        self.end()
        assert self._num_handled, self.seed
        for sink in self._sinks:
            assert not sink.wrong, (self.seed, sink.name, sink.wrong)
            assert sink.is_closed, (self.seed, sink.name)
            assert sink.total == self._num_recorded, (self.seed, sink.name, sink.total, self._num_recorded)
            assert sorted(sink.event_ids) == sorted(self._marks), (self.seed, sink.name)

    def record(self) -> None:
        for _ in range(self._choose.randrange(20)):
            self._records.add(1)
            self._num_recorded += 1
        mark = Event("mark")
        self._monitor.emit(mark)
        self._marks.add(mark.id)

    def script(self) -> None:
        """Choose the behavior of a sink at its next deliveries."""
        sink = self._choose.choice(self._sinks)
        sink.script = self._choose.choices(["take", "fail", "block", "block and fail"], k=3)
        if any("block" in each for each in sink.script):
            sink.may_return.clear()

    def release(self) -> None:
        """Let the calls of a sink return, after the deadline or before it."""
        self._choose.choice(self._sinks).may_return.set()

    def go(self) -> None:
        """Let mutes end."""
        self._clock.go(self._choose.choice([1, 15, 60]))

    def wait(self) -> None:
        """Let the interval pass, or not."""
        time.sleep(self._choose.random() * 0.05)

    def keep_busy(self) -> None:
        """Emit more events than the handler can process; the interval must still be kept."""
        before, deadline = _num_collections(self._monitor), time.monotonic() + _PATIENCE_SECONDS
        while _num_collections(self._monitor) < before + 3:
            assert time.monotonic() < deadline, f"seed {self.seed}: a busy handler keeps the collector from collecting"
            self._monitor.log("busy")
            time.sleep(0.0005)

    def end(self) -> None:
        """End like a program; in half of the schedules all calls have timed out before, and return late."""
        for sink in self._sinks:
            sink.script = []
            sink.may_return.set()
        if self.seed % 2 == 0:
            for sink in self._sinks:
                sink.script = ["block"]
                sink.may_return.clear()
            self._clock.go(_LONGEST_MUTE_SECONDS)
            time.sleep(4 * _DEADLINE.total_seconds())
        with no_thread_starts():
            for sink in self._sinks:
                sink.script = []
                sink.may_return.set()
            while any(sink.is_inside for sink in self._sinks):
                time.sleep(0.001)
            assert self._monitor.stop(timedelta(seconds=60)), self.seed

    def _handle(self, event: Event) -> None:
        time.sleep(0.002)
        self._num_handled += 1


def run(seed: int, num_actions: int = 25) -> None:
    """Run one schedule."""
    Schedule(seed).run(num_actions)


def _num_collections(monitor: Monitor) -> int:
    return sum(cell.collect().figures.count for cell in monitor.metrics.collect_seconds.cells)


def _fork(monitor: Monitor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if not monitor.collect().events else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    for each in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
        run(each)
        print(f"seed {each}: each window and event delivered once")
