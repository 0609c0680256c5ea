"""Spans nest, end where their body raises, and can be joined over ranks."""

from __future__ import annotations

import pytest

from delta_tracker.monitor import Severity
from delta_tracker.monitor.event import Phase


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
