"""A monitor with one sample of every kind of data."""

from __future__ import annotations

import logging

from delta_tracker.monitor import Event, Monitor, Severity, Window
from delta_tracker.monitor.sinks.base_sink import Sink
from tests.monitor.clocks import ManualClock


def fill(sink: Sink) -> Monitor:
    """Deliver two steps of all kinds of data to a sink, and close it."""
    clock = ManualClock()
    monitor = Monitor(clock)
    rows = monitor.counter("published_rows", "Rows.", labels=["table"])
    depth = monitor.gauge("queue.depth", "Waiting.")
    loss = monitor.stat("training.loss", "Loss.", aggregations=("mean", "std"), window=Window(count=2))
    seconds = monitor.histogram("apply", "Apply.", unit="seconds")
    monitor.gauge("empty", "Never set.")
    monitor.start([sink], attributes={"rank": "3"}, system=False)
    monitor.log("training.start", "go", lr=0.1, name="x", nan=float("nan"))
    for step in (10, 20):
        monitor.step(step)
        rows.cell(table='us"er').add(step)
        rows.cell(table="item").add(1)
        depth.set(step / 2)
        loss.add(step)
        loss.add(step + 2)
        for value in (0.25, 0.3, 4.0, 0.0):
            seconds.add(value)
        with monitor.span("publish", trace=7, version=step):
            clock.go(1)
            monitor.log("inside", "in a span")
        clock.go(1)
        assert monitor.flush()
    monitor.emit(Event("training.end", data={"version": 5}, severity=Severity.ERROR))
    assert monitor.stop()
    assert not logging.getLogger("delta_tracker.monitor").disabled
    return monitor
