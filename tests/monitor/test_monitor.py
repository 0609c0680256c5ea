"""Threads, signals, start and stop: nothing is lost and nothing waits for ever."""

from __future__ import annotations

import gc
import signal
import threading
from datetime import timedelta

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor, Window
from tests.monitor.figures import total
from tests.monitor.recording import Kept
from tests.waiting import eventually


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
    assert total(monitor, "s") == 80_000


def test_signal_handlers_and_finalizers_may_record(monkeypatch) -> None:
    """They run between any two instructions of the thread that is folding."""
    monkeypatch.setattr("delta_tracker.monitor.series._MAX_WAITING", 2)
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
    assert total(monitor, "s") == 60_000 + interrupted


def test_start_and_stop() -> None:
    monitor = Monitor()
    assert not monitor.is_running
    assert monitor.stop()
    before = set(threading.enumerate())  # threads of other tests, which may end during this one
    for _ in range(3):
        sink = Kept()
        monitor.start([sink], system=False)
        with pytest.raises(InvalidArgumentError, match="stop"):
            monitor.start()
        assert monitor.is_running
        assert monitor.stop()
        assert sink.is_closed
    eventually(lambda: set(threading.enumerate()) <= before)
    for interval in (timedelta(0), 3):
        with pytest.raises(InvalidArgumentError, match="interval"):
            monitor.start(interval=interval)
    with pytest.raises(InvalidArgumentError, match="labels"):
        monitor.start(attributes={"no label": "x"})
    assert not monitor.is_running


def test_a_full_stat_does_not_deadlock_with_configuration() -> None:
    """The registry locks the stat to configure it; a full stat calls the registry to count the loss."""
    monitor = Monitor()
    full = monitor.counter("full", labels=["x"], max_cells=1)
    full.cell(x="1")
    counts, configures = threading.Event(), threading.Event()
    overflowed = full._overflowed

    def slowly(name: str) -> None:
        counts.set()
        configures.wait(1)
        overflowed(name)

    full._overflowed = slowly

    def configure() -> None:
        counts.wait(60)
        monitor.configure("full", enabled=True)
        configures.set()

    threads = [threading.Thread(target=each, daemon=True) for each in (lambda: full.cell(x="2"), configure)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
