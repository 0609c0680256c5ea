"""Spans nest, end where their body raises, and can be joined over ranks."""

from __future__ import annotations

import pytest

from delta_tracker.monitor import Monitor, Severity
from delta_tracker.monitor.event import Phase


def test_spans_nest_and_end_also_where_the_body_raises(monitor, clock) -> None:
    with monitor.span("outer", step=3) as outer:
        monitor.log("inside", "text", rows=2)
        clock.go(2)
        with pytest.raises(KeyError), monitor.span("inner"):
            raise KeyError("x")
        clock.go(1)
    monitor.log("after")
    begin, inside, inner, inner_end, end, after = monitor.events.take()
    assert [each.phase for each in (begin, inner, inner_end, end)] == [Phase.BEGIN, Phase.BEGIN, Phase.END, Phase.END]
    assert begin.span == end.span == inside.span == inner.parent == outer.id
    assert inner.span == inner_end.span != outer.id
    assert len({each.trace for each in (begin, inside, inner, inner_end, end)}) == 1
    assert end.data == {"step": 3, "seconds": 3.0}
    assert (inner_end.severity, inner_end.data["error"]) == (Severity.ERROR, "KeyError")
    assert (after.span, after.trace) == (0, 0)


def _trace(number: int | None, run_id: str | None = None) -> int:
    """Return the trace of a span in a monitor of its own."""
    monitor, events = Monitor(), []
    monitor.on("*", events.append)
    if run_id is not None:
        monitor.start(system=False, run_id=run_id)
    with monitor.span("step", trace=number), monitor.span("part"):
        pass
    monitor.stop()
    monitor.collect()  # if it was not started
    (trace,) = {event.trace for event in events}
    return trace


def test_a_trace_can_join_the_spans_of_all_ranks() -> None:
    assert _trace(17, "run 1") == _trace(17, "run 1")
    traces = {_trace(number, run) for number in (0, 1, 17, -1, 2**128) for run in ("run 1", "run 2", "run 11")}
    assert len(traces) == 15
    assert all(2**64 < trace < 2**128 for trace in traces)


def test_traces_of_two_runs_differ(monkeypatch, caplog) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert len({_trace(17), _trace(17), _trace(None), _trace(None), 0}) == 5
    assert not caplog.records
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default
    assert _trace(17) != _trace(17)
    assert ["run_id" in record.getMessage() for record in caplog.records] == [True, True]
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, name)
        assert _trace(17) == _trace(17) == _trace(17, name)


def test_traces_without_a_number_have_128_random_bits() -> None:
    traces = {_trace(None) for _ in range(20)}
    assert len({trace >> 64 for trace in traces}) == len({trace % 2**64 for trace in traces}) == 20


def test_spans_by_start_and_stop(monitor) -> None:
    span = monitor.span("s").start()
    monitor.log("inside")
    span.stop()
    span.stop()
    events = monitor.events.take()
    assert [event.span for event in events] == [span.id] * 3
    assert events[-1].phase is Phase.END
