"""Timers as context managers and as decorators."""

from __future__ import annotations

import asyncio

import pytest

from tests.monitor.figures import window_figures


def test_timers(monitor, clock) -> None:
    stat = monitor.histogram("seconds", unit="seconds", aggregations=("sum", "count"))
    with stat.time():
        clock.go(2)

    @stat.time()
    def work(seconds: float) -> str:
        clock.go(seconds)
        return "done"

    @stat.time()
    async def wait(seconds: float) -> str:
        await asyncio.sleep(0)
        clock.go(seconds)
        return "waited"

    assert (work(3), asyncio.run(wait(4))) == ("done", "waited")
    assert work.__name__ == "work"
    with pytest.raises(ZeroDivisionError), stat.time():
        clock.go(0 / 0)
    assert window_figures(monitor.collect(), "seconds") == [(4, {"sum": 9.0, "count": 4})]


def test_a_decorated_function_may_call_itself(monitor, clock) -> None:
    stat = monitor.stat("seconds", aggregations=("sum",))

    @stat.time()
    def nested(depth: int) -> None:
        clock.go(1)
        if depth:
            nested(depth - 1)

    nested(2)
    assert window_figures(monitor.collect(), "seconds")[0] == (3, {"sum": 6.0})
