"""Forks while a collector delivers continuously: ``python -m tests.monitor.forking FOLDER FORKS``.

Children must not wait for locks that a thread of the parent held, and must not write the parent's data again. Prints
how many children were forked, hung and failed, as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.polled_stats import MetricSource
from delta_tracker.monitor.sinks.base_sink import Sink
from delta_tracker.monitor.sinks.chrome_trace import ChromeTraceSink
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.monitor.sinks.logs import LoggingSink
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink, PrometheusSink

_HANG_SECONDS = 40
_MOST_HANGS = 2  # each takes the whole timeout
_NUM_THREADS = 2


class _Unforgetting(Sink):
    """Sink that raises when a child releases it."""

    def deliver(self, collection) -> None:
        del collection

    def after_fork(self) -> None:
        raise RuntimeError("on purpose")


def _open_slow_pipe(path: Path) -> None:
    """Make a named pipe that is read slowly, so that its writer is inside a write most of the time."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)

    def read() -> None:
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)
            time.sleep(0.001)

    threading.Thread(target=read, daemon=True).start()


class _Handler(logging.Handler):
    """Has no buffered file, whose lock a child would wait for in logging's own exit handler."""

    def emit(self, record) -> None:
        self.format(record)


class _Unforgiving(MetricSource):
    """Raises in a child."""

    name = "unforgiving"

    def read(self, *, is_last) -> None:
        del is_last

    def after_fork(self) -> None:
        raise RuntimeError("on purpose")


def main(folder: Path, num_forks: int) -> None:
    random.seed(0)
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.getLogger("delta_tracker.monitor").addHandler(_Handler())
    logging.getLogger("delta_tracker.monitor").propagate = False
    monitor = Monitor(capacity=1024)
    counter = monitor.counter("records")
    monitor.add_source(_Unforgiving())
    _open_slow_pipe(folder / "pipe")
    sinks = [
        _Unforgetting(),
        JsonlSink(folder / "pipe"),
        JsonlSink(folder / "lines"),
        ChromeTraceSink(folder / "trace"),
        LoggingSink(),
        PrometheusFileSink(folder / "metrics.prom"),
        PrometheusSink(0),
    ]
    monitor.start(sinks, interval=timedelta(milliseconds=1), system=False)
    is_over = threading.Event()

    def record(thread: int) -> None:
        number = 0
        while not is_over.is_set():
            with monitor.span("busy", thread=thread, number=number, text="x" * 200):
                counter.add()
            number += 1
            time.sleep(0.0002)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    num_hung = num_failed = num_done = 0
    while num_done < num_forks and num_hung < _MOST_HANGS:
        time.sleep(random.random() * 0.005)
        child = os.fork()
        if child == 0:
            _live_as_child(monitor, counter, ends_normally=num_done % 25 == 0)
        num_done += 1
        status = _status_of(child)
        num_hung += status is None
        num_failed += status not in (None, 0)
    is_over.set()
    for thread in threads:
        thread.join()
    is_stopped = monitor.stop(timedelta(seconds=30))
    total = sum(cell.collect_total() for cell in counter.cells)
    figures = {"forked": num_done, "hung": num_hung, "failed": num_failed, "stopped": is_stopped, "records": total}
    print(json.dumps(figures))


def _live_as_child(monitor: Monitor, counter, *, ends_normally: bool) -> None:
    """Record and collect in a child that begins empty."""
    status = 1
    try:
        counter.add()
        collection = monitor.collect()
        totals = {each.definition.name: each.figures.total for each in collection.totals}
        num_errors = sum(cell.collect_total() for cell in monitor.metrics.outlet_errors.cells)
        status = 0 if totals["records"] == 1 and num_errors == 2 and not monitor.events.take() else 2
    finally:
        if not (ends_normally and status == 0):
            os._exit(status)
    # The interpreter exits normally, which closes its files.
    raise SystemExit(0)


def _status_of(child: int) -> int | None:
    """Return the exit status of a child, None if it hung and was killed."""
    deadline = time.monotonic() + _HANG_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
