"""Metrics of the lag of a stream's predictors."""

from __future__ import annotations

import pytest

from delta_tracker import Predictor
from delta_tracker.monitor import Monitor
from delta_tracker.stream.heartbeat import Heartbeat, write_heartbeat
from delta_tracker.stream.heartbeat_metrics import show_heartbeats
from delta_tracker.stream.storage.storage import Storage
from tests.monitor.clocks import ManualClock
from tests.stream.histories import Clock, clocked
from tests.stream.streams import Writer


def shown(monitor: Monitor) -> dict[tuple[str, str], float]:
    """Return the current values of the heartbeats' gauges, by gauge and predictor."""
    return {
        (total.definition.name.removeprefix("delta_tracker_heartbeat_"), dict(total.labels)["predictor"]): (
            total.figures.last
        )
        for total in monitor.collect().totals
        if total.definition.name.startswith("delta_tracker_heartbeat_")
    }


def beat(name: str, time: float, **changes) -> Heartbeat:
    fields = {"stream": "0" * 32, "version": 7, "lag_versions": 2, "lag_seconds": 0.5, "resyncs": 1, "error": None}
    return Heartbeat(name=name, time=time, **fields | changes)


def test_each_predictor_is_shown_and_a_dead_one_ages_out() -> None:
    clock, host = Clock(), ManualClock()
    clock.seconds = host.time_ns() / 1e9
    storage, monitor = clocked(clock), Monitor(host)

    def go(seconds: float) -> None:
        clock.seconds += seconds
        host.go(seconds)

    show_heartbeats(storage, monitor)
    assert shown(monitor) == {}
    write_heartbeat(storage, beat("a", 1e9))
    go(2)
    write_heartbeat(storage, beat("b", 1e9, lag_versions=None, lag_seconds=None))
    go(1)
    assert shown(monitor) == {
        ("lag_versions", "a"): 2, ("lag_seconds", "a"): 0.5, ("age_seconds", "a"): 3,
        ("age_seconds", "b"): 1, ("model_differences", "a"): 0, ("model_differences", "b"): 0,
    }  # fmt: skip
    write_heartbeat(storage, beat("a", 1e9, lag_versions=None, lag_seconds=None))
    go(3597)
    write_heartbeat(storage, beat("b", 1e9, lag_versions=9, lag_seconds=4))
    assert shown(monitor) == {
        ("age_seconds", "a"): 3597,
        ("lag_versions", "b"): 9, ("lag_seconds", "b"): 4, ("age_seconds", "b"): 0,
        ("model_differences", "a"): 0, ("model_differences", "b"): 0,
    }, "what a predictor cannot tell any more is not told for it"  # fmt: skip
    go(4)
    assert {name for _, name in shown(monitor)} == {"b"}
    other = Monitor(host)
    show_heartbeats(storage, other, gone_seconds=3.5)
    assert shown(other) == {}


@pytest.mark.parametrize("ahead", [7200.0, -7200.0])
@pytest.mark.parametrize("who", ["predictor", "this host"])
def test_wrong_clocks_change_no_age(ahead: float, who: str, caplog: pytest.LogCaptureFixture) -> None:
    class WrongClock(ManualClock):
        def time_ns(self) -> int:
            return super().time_ns() + round((ahead if who == "this host" else 0.0) * 1e9)

    clock, host = Clock(), WrongClock()
    clock.seconds = ManualClock().time_ns() / 1e9
    storage, monitor = clocked(clock, resolution=1.0), Monitor(host)
    show_heartbeats(storage, monitor)
    for number in range(6):
        time = clock.seconds + (ahead if who == "predictor" else 0.0)
        for name in ("live", "dead") if number < 2 else ("live",):
            write_heartbeat(storage, beat(name, time))
        clock.seconds += 5
        host.go(5)
        found = shown(monitor)
        if number:  # one look cannot detect that this host's clock is ahead
            assert 0 <= found["age_seconds", "live"] <= 11
            assert found["age_seconds", "dead"] == pytest.approx(5 * max(1, number), abs=6)
    clock.seconds += 3601
    host.go(3601)
    assert shown(monitor) == {}
    words = "ahead of" if ahead > 0 else "behind"
    found = [record.message for record in caplog.records]
    expected = [f"the clock of predictor {name} is 7200 s {words}" for name in ("dead", "live")]
    assert [message[: len(expected[0])] for message in found] == (expected if who == "predictor" else [])


def test_a_real_predictor_is_shown_without_extra_code() -> None:
    storage, monitor = Storage("memory://"), Monitor()
    writer = Writer(storage)
    writer.snapshot()
    predictor = Predictor(writer.model(), storage, name="p-1")
    show_heartbeats(storage, monitor)
    predictor.sync()
    found = shown(monitor)
    assert found.pop(("age_seconds", "p-1")) >= 0
    assert found == {("lag_versions", "p-1"): 0, ("lag_seconds", "p-1"): 0, ("model_differences", "p-1"): 0}


def test_an_unreadable_store_is_counted_and_raises_nothing(tmp_path) -> None:
    monitor = Monitor()
    (tmp_path / "file").write_text("in the way")
    storage = Storage(f"file://{tmp_path}/stream")
    show_heartbeats(storage, monitor)
    assert shown(monitor) == {}
    (tmp_path / "stream").write_text("in the way")
    assert shown(monitor) == {}
    assert monitor.metrics.outlet_errors.cell(outlet=f"heartbeats of {storage.url}").collect_total() == 1
