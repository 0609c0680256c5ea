"""Many threads that record at once, with sinks that raise and block, and forks. Ten million records:

python -m tests.monitor.hammer
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import timedelta

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.collection_report import CollectionReport
from delta_tracker.monitor.sinks.base_sink import Sink


class _Raising(Sink):
    def deliver(self, collection: CollectionReport) -> None:
        raise RuntimeError("on purpose")


class _Blocking(Sink):
    """Sink that blocks for longer than the collector waits."""

    def deliver(self, collection: CollectionReport) -> None:
        time.sleep(0.3)


class _Summing(Sink):
    """Sink that sums the windows."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def deliver(self, collection: CollectionReport) -> None:
        for report in collection.windows:
            name = report.definition.name
            self.sums[name] = self.sums.get(name, 0) + report.window.aggregate.total


def hammer(num_threads: int, num_records: int, num_forks: int = 3) -> float:
    """Record, and check that every total is exact; return the seconds taken."""
    monitor = Monitor(deadline=timedelta(milliseconds=100))
    summing = _Summing()
    counter = monitor.counter("count", labels=["parity"])
    stat = monitor.stat("stat", aggregations=("sum", "std"))
    histogram = monitor.histogram("histogram")
    monitor.on("*", lambda _: 1 / 0)
    monitor.start([_Raising(), _Blocking(), summing], interval=timedelta(milliseconds=20))
    per_thread = num_records // num_threads // 4

    def work(thread: int) -> None:
        cell = counter.cell(parity=thread % 2)
        for number in range(per_thread):
            cell.add()
            cell.add(3)
            stat.add(number % 7)
            histogram.add(number % 5 + 1)
            if number % 5000 == 0:
                monitor.log("progress", number=number)

    begin = time.monotonic()
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for _ in range(num_forks):
        _fork(monitor)
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "deadlock"
    seconds = time.monotonic() - begin
    assert monitor.stop(timedelta(seconds=60))
    sevens, fives = (sum(number % n for number in range(per_thread)) for n in (7, 5))
    expected = {
        "count": 4 * per_thread * num_threads,
        "stat": sevens * num_threads,
        "histogram": (fives + per_thread) * num_threads,
    }
    for name, total in expected.items():
        assert summing.sums[name] == total, (name, summing.sums[name], total)
        figures = [each.figures for each in monitor.collect().totals if each.definition.name == name]
        assert sum(each.total for each in figures) == total
    assert sum(each.figures.count for each in monitor.collect().totals if each.definition.name == "histogram") == (
        per_thread * num_threads
    )
    errors = {
        each.labels[0][1]: each.figures.total
        for each in monitor.collect().totals
        if each.definition.name == "delta_tracker_outlet_errors"
    }
    assert {"_Raising", "_Blocking"} <= set(errors), errors
    return seconds


def _fork(monitor: Monitor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            monitor.stat("stat", aggregations=("sum", "std")).add(1)
            is_exact = sum(t.figures.total for t in monitor.collect().totals if t.definition.name == "stat") == 1
            status = 0 if is_exact else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    print(f"10 million records by 8 threads, all totals exact, in {hammer(8, 10_000_000):.1f} s")
