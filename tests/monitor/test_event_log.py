"""Events reach handlers and sinks, filtered, limited and contained."""

from __future__ import annotations

import threading

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Event, Monitor, Severity
from tests.monitor.clocks import ManualClock
from tests.monitor.recording import Kept


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def monitor(clock) -> Monitor:
    return Monitor(clock, capacity=8)


def _dropped(monitor) -> dict[str, float]:
    totals = monitor.collect().totals
    return {
        each.labels[0][1]: each.figures.total
        for each in totals
        if each.definition.name == "delta_tracker_dropped_events"
    }


def test_handlers_get_what_they_asked_for_and_can_leave(monitor) -> None:
    got = {"all": [], "errors": [], "pattern": []}
    everything = monitor.on("*", got["all"].append)
    monitor.on("*", got["errors"].append, Severity.ERROR)
    monitor.on("a.*", got["pattern"].append)
    monitor.log("a.x")
    monitor.emit(Event("b.y", severity=Severity.CRITICAL))
    monitor.collect()
    everything.remove()
    everything.remove()
    monitor.log("a.z")
    monitor.collect()
    names = {key: [event.name for event in events] for key, events in got.items()}
    assert names == {"all": ["a.x", "b.y"], "errors": ["b.y"], "pattern": ["a.x", "a.z"]}


def test_a_handler_runs_in_a_thread_of_the_library(monitor) -> None:
    names = []
    monitor.on("*", lambda _: names.append(threading.current_thread().name))
    monitor.log("a")
    monitor.collect()
    assert names == ["delta_tracker-sinks"]


def test_a_handler_that_raises_or_logs_is_contained(monitor) -> None:
    def broken(event) -> None:
        monitor.log("from.handler")
        raise RuntimeError(event.name)

    got = []
    monitor.on("*", broken)
    monitor.on("*", got.append)
    monitor.log("a")
    monitor.collect()
    monitor.log("b")
    monitor.collect()
    assert [event.name for event in got] == ["a", "from.handler", "b"]


def test_the_ring_is_bounded_and_counts_what_it_drops(monitor) -> None:
    got = []
    monitor.on("*", got.append)
    for number in range(20):
        monitor.log("a", number=number)
    monitor.collect()
    assert [event.data["number"] for event in got] == list(range(12, 20))
    assert _dropped(monitor) == {"overrun": 12}


def test_rates_severities_and_samples(clock) -> None:
    monitor = Monitor(clock, capacity=10_000)
    monitor.limit_events("limited", per_second=1)
    monitor.limit_events("quiet.*", severity=Severity.WARNING)
    monitor.limit_events("rare", sample=0.25)
    for _ in range(30):
        monitor.log("limited")
    clock.go(3)
    for _ in range(30):
        monitor.log("limited")
    assert len(monitor.events.take()) == 10 + 3
    monitor.log("quiet.a")
    monitor.emit(Event("quiet.a", severity=Severity.ERROR))
    assert len(monitor.events.take()) == 1
    for _ in range(2000):
        monitor.log("rare")
    drawn = len(monitor.events.take())
    assert 400 < drawn < 600
    assert _dropped(monitor) == {"rate": 47, "severity": 1, "sample": 2000 - drawn}


@pytest.mark.parametrize("rule", [{"per_second": 0}, {"sample": 0}, {"sample": 1.5}], ids=str)
def test_bad_rules_are_refused(monitor, rule) -> None:
    with pytest.raises(InvalidArgumentError):
        monitor.limit_events("*", **rule)


def test_sinks_get_events_too(monitor) -> None:
    sink = Kept()
    monitor.start([sink], system=False)
    monitor.log("a")
    assert monitor.flush()
    monitor.log("b")
    assert monitor.stop()
    assert [event.name for collection in sink.collections for event in collection.events] == ["a", "b"]
    assert [collection.is_last for collection in sink.collections][-1]
    assert sink.is_closed
