"""Events: their fields, and refused values."""

from __future__ import annotations

import threading

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Event, Severity
from delta_tracker.monitor.event import Phase, json_value, new_id, renew_ids


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


@pytest.mark.parametrize(
    "ids",
    [
        {"id": 2**64},
        {"span": -1},
        {"parent": 2**64},
        {"trace": 2**128},
        {"trace": 1.0},
        {"span": 1, "trace": 0, "phase": Phase.END},
        {"span": 0, "trace": 1, "phase": Phase.BEGIN},
    ],
    ids=str,
)
def test_ids_that_are_invalid_in_a_trace_are_refused(ids) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be used"):
        Event("a", **ids)


def test_an_event_cannot_be_changed_by_its_creator() -> None:
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


def test_json_has_no_non_finite_numbers() -> None:
    assert [json_value(each) for each in (float("inf"), 2, "x", True)] == ["inf", 2, "x", True]
