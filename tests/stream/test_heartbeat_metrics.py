"""Metrics of the lag of a stream's predictors."""

from __future__ import annotations

from delta_tracker import Predictor
from delta_tracker.monitor import Monitor
from delta_tracker.stream.heartbeat import Heartbeat, leave_heartbeat
from delta_tracker.stream.heartbeat_metrics import show_heartbeats
from delta_tracker.stream.storage.storage import Storage
from tests.monitor.clocks import ManualClock
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
    clock = ManualClock()
    storage, monitor = Storage("memory://"), Monitor(clock)
    start = clock.time_ns() / 1e9
    show_heartbeats(storage, monitor)
    assert shown(monitor) == {}
    leave_heartbeat(storage, beat("a", start))
    leave_heartbeat(storage, beat("b", start + 2, lag_versions=None, lag_seconds=None))
    clock.go(3)
    assert shown(monitor) == {
        ("lag_versions", "a"): 2, ("lag_seconds", "a"): 0.5, ("age_seconds", "a"): 3,
        ("age_seconds", "b"): 1,
    }  # fmt: skip
    leave_heartbeat(storage, beat("b", start + 3600, lag_versions=9, lag_seconds=4))
    leave_heartbeat(storage, beat("a", start + 3, lag_versions=None, lag_seconds=None))
    clock.go(3597)
    assert shown(monitor) == {
        ("age_seconds", "a"): 3597,
        ("lag_versions", "b"): 9, ("lag_seconds", "b"): 4, ("age_seconds", "b"): 0,
    }, "what a predictor cannot tell any more is not told for it"  # fmt: skip
    clock.go(4)
    assert {name for _, name in shown(monitor)} == {"b"}
    other = Monitor(clock)
    show_heartbeats(storage, other, gone_seconds=3.5)
    assert shown(other) == {}


def test_a_real_predictor_is_shown_without_extra_code() -> None:
    storage, monitor = Storage("memory://"), Monitor()
    writer = Writer(storage)
    writer.snapshot()
    predictor = Predictor(writer.model(), storage, name="p-1")
    show_heartbeats(storage, monitor)
    predictor.sync()
    found = shown(monitor)
    assert found.pop(("age_seconds", "p-1")) >= 0
    assert found == {("lag_versions", "p-1"): 0, ("lag_seconds", "p-1"): 0}


def test_an_unreadable_store_is_counted_and_raises_nothing(tmp_path) -> None:
    monitor = Monitor()
    (tmp_path / "file").write_text("in the way")
    storage = Storage(f"file://{tmp_path}/stream")
    show_heartbeats(storage, monitor)
    assert shown(monitor) == {}
    (tmp_path / "stream").write_text("in the way")
    assert shown(monitor) == {}
    assert (
        monitor.metrics.outlet_errors.cell(outlet=f"heartbeats of {storage.url}").collect(is_last=False)[1].total == 1
    )
