"""Events: what they carry, who gets them, how many may come; spans and their parents."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Event, Monitor, Severity
from delta_tracker.monitor.event import Phase, json_value, new_id, renew_ids
from tests.monitor.clocks import ManualClock
from tests.monitor.recording import Kept

_ROOT = Path(__file__).parent.parent.parent


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


def test_everything_is_filled_in_and_everything_can_be_set() -> None:
    first, second = Event("a.b"), Event("a.b", "text", {"x": 1, "y": 2.0, "z": "s", "w": True}, Severity.ERROR)
    assert first.id != second.id
    assert second.time_ns >= first.time_ns > 10**18
    assert second.monotonic_ns >= first.monotonic_ns
    assert (first.severity, first.span, first.phase) == (Severity.INFO, 0, Phase.INSTANT)
    chosen = Event("a", time_ns=5, monotonic_ns=6, id=7, span=8, parent=9, trace=10)
    assert (chosen.time_ns, chosen.monotonic_ns, chosen.id) == (5, 6, 7)
    assert (chosen.span, chosen.parent, chosen.trace) == (8, 9, 10)


@pytest.mark.parametrize("data", [{"x": [1]}, {"x": None}, {"x": {"y": 1}}, {1: 2}, {"x": b"y"}], ids=str)
def test_data_is_flat_and_typed(data) -> None:
    with pytest.raises(InvalidArgumentError, match="data"):
        Event("a", data=data)


def test_malformed_events_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        Event("no name")
    with pytest.raises(InvalidArgumentError, match="severity"):
        Event("a", severity=25)


def test_an_event_cannot_be_changed_by_who_made_it() -> None:
    data = {"x": 1}
    event = Event("a", data=data)
    data["x"] = 2
    assert event.data["x"] == 1
    with pytest.raises(TypeError):
        event.data["x"] = 3


def test_ids_have_64_bits_and_differ_over_ranks_threads_and_lives(monkeypatch) -> None:
    found = []
    for rank in ("0", "1", "65535", ""):
        monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            renew_ids()
            threads = [threading.Thread(target=lambda: found.extend(new_id() for _ in range(500))) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if rank:
            assert {number >> 48 for number in found[-4000:]} == {int(rank)}
    renew_ids()
    assert len(set(found)) == len(found) == 16_000
    assert all(0 < number < 2**64 for number in found)


def test_spans_nest_and_end_also_where_the_body_raises(monitor, clock) -> None:
    with monitor.span("outer", step=3) as outer:
        monitor.log("inside", "text", rows=2)
        clock.go(2)
        with pytest.raises(KeyError), monitor.span("inner"):
            raise KeyError("x")
        clock.go(1)
    monitor.log("after")
    begin, inside, inner, inner_end, end, after = monitor.events.recent
    assert [each.phase for each in (begin, inner, inner_end, end)] == [Phase.BEGIN, Phase.BEGIN, Phase.END, Phase.END]
    assert begin.span == end.span == inside.span == inner.parent == outer.id
    assert inner.span == inner_end.span != outer.id
    assert len({each.trace for each in (begin, inside, inner, inner_end, end)}) == 1
    assert end.data == {"step": 3, "seconds": 3.0}
    assert (inner_end.severity, inner_end.data["error"]) == (Severity.ERROR, "KeyError")
    assert (after.span, after.trace) == (0, 0)


def test_a_trace_can_join_the_spans_of_all_ranks(monitor) -> None:
    with monitor.span("step", trace=17), monitor.span("part"):
        pass
    assert {event.trace for event in monitor.events.recent} == {17}


def test_spans_by_start_and_stop(monitor) -> None:
    span = monitor.span("s").start()
    monitor.log("inside")
    span.stop()
    span.stop()
    assert [event.span for event in monitor.events.recent] == [span.id] * 3
    assert monitor.events.recent[-1].phase is Phase.END


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
    assert [event.data["number"] for event in monitor.events.recent] == list(range(12, 20))
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
    assert len(monitor.events.recent) == 10 + 3
    monitor.log("quiet.a")
    assert not monitor.events.is_enabled("quiet.b")
    assert monitor.events.is_enabled("quiet.b", Severity.ERROR)
    monitor.emit(Event("quiet.a", severity=Severity.ERROR))
    assert len(monitor.events.recent) == 14
    for _ in range(2000):
        monitor.log("rare")
    drawn = len(monitor.events.recent) - 14
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
    assert [event.name for batch in sink.batches for event in batch.events] == ["a", "b"]
    assert [batch.is_last for batch in sink.batches][-1]
    assert sink.is_closed


def test_json_has_no_numbers_that_are_none() -> None:
    assert [json_value(each) for each in (float("inf"), 2, "x", True)] == ["inf", 2, "x", True]


def test_importing_the_monitor_imports_the_standard_library_alone_and_starts_nothing() -> None:
    """The packages above it are stood in for: the rest of the library needs torch."""
    program = """
import os, sys, threading, types
import logging, random  # they register handlers of their own
registered = []
register = os.register_at_fork
os.register_at_fork = lambda **handlers: (registered.append(handlers), register(**handlers))
root = types.ModuleType("delta_tracker")
root.__path__ = ["delta_tracker"]
sys.modules["delta_tracker"] = root
before = set(sys.modules)
import delta_tracker.monitor
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert new - {"delta_tracker"} <= set(sys.stdlib_module_names), new
assert threading.active_count() == 1
assert not registered
delta_tracker.monitor.counter("c").add(1)
assert len(registered) == 1
assert delta_tracker.monitor.collect().totals[0].figures.total == 1
"""
    subprocess.run([sys.executable, "-S", "-c", program], check=True, timeout=60, cwd=_ROOT)
