"""The collector keeps its interval, even if handlers and sinks are slow or fail."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from delta_tracker.monitor import Monitor
from tests.monitor.recording import Kept
from tests.waiting import eventually


def test_the_interval_collects_automatically() -> None:
    monitor = Monitor()
    sink = Kept()
    monitor.start([sink], interval=timedelta(milliseconds=2), system=True)
    eventually(lambda: len(sink.collections) >= 3)
    monitor.stop()
    names = {each.definition.name for each in sink.collections[-1].totals}
    assert names >= {
        "process_cpu_seconds",
        "process_memory_bytes",
    }


def test_a_handler_gets_an_event_before_the_next_collection() -> None:
    monitor = Monitor()
    heard = threading.Event()
    monitor.on("a", lambda _: heard.set())
    monitor.start(interval=timedelta(hours=1), system=False)
    monitor.log("a")
    assert heard.wait(30)
    monitor.stop()


def test_a_thread_that_outlives_stop_does_not_affect_the_next_start() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Blocking(Kept):
        def deliver(self, collection) -> None:
            entered.set()
            go_on.wait(60)
            super().deliver(collection)

    monitor = Monitor()
    monitor.start([Blocking()], interval=timedelta(milliseconds=1), system=False)
    assert entered.wait(60)
    (old,) = (each for each in threading.enumerate() if each.name == "delta_tracker-collector")
    assert not monitor.stop(timedelta(milliseconds=1))
    second = Kept()
    monitor.start([second], interval=timedelta(hours=1), system=False)
    go_on.set()
    old.join(60)
    assert not old.is_alive(), "it ends by itself"
    assert monitor.stop()
    assert sum(collection.is_last for collection in second.collections) == 1


def test_a_busy_handler_does_not_keep_the_collector_from_collecting() -> None:
    monitor, sink, is_over = Monitor(), Kept(), threading.Event()
    monitor.on("*", lambda _: time.sleep(0.002))

    def work() -> None:
        while not is_over.is_set():
            with monitor.span("busy"):
                time.sleep(0.0005)

    monitor.start([sink], interval=timedelta(milliseconds=100), system=False)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        eventually(lambda: len(sink.collections) >= 5)
    finally:
        is_over.set()
        thread.join()
        monitor.stop()
