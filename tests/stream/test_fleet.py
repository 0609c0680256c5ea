"""States of predictors by a window of heartbeats."""

from __future__ import annotations

import pytest

from delta_tracker.stream.fleet import evaluate
from delta_tracker.stream.heartbeat import Heartbeat


@pytest.mark.parametrize(
    ("versions", "lags", "error", "seconds", "state"),
    [
        ([5, 5, 5], [0, 0, 0], None, 1.0, "current"),
        ([5, 5, 5], [0, 2, 2], None, 1.0, "current"),  # one late version is no alarm
        ([5, 5, 5], [2, 2, 3], None, 1.0, "stuck"),
        ([5, 5, 5], [2, 2, 3], "late", 1.0, "failing"),
        ([5, 6, 7], [2, 2, 3], "late", 1.0, "behind"),
        ([5, 6, 7], [3, 2, 2], None, 1.0, "applying"),
        ([5, 5, 5], [2, None, 2], None, 1.0, "applying"),
        ([5, 5], [2, 2], None, 1.0, "applying"),  # too few heartbeats to judge
        ([5, 5, 5], [0, 0, 0], None, 14.0, "current"),
        ([5, 5, 5], [0, 0, 0], None, 16.0, "silent"),
        ([5] * 10, [0] * 10, None, 44.0, "current"),  # the window has 45 s
        ([5] * 10, [0] * 10, None, 46.0, "silent"),
    ],
)
def test_a_state_is_judged_by_the_window(
    versions: list[int], lags: list[int | None], error: str | None, seconds: float, state: str
) -> None:
    window = tuple(
        (5.0 * (len(versions) - 1 - place), version, lag)
        for place, (version, lag) in enumerate(zip(versions, lags, strict=True))
    )
    beat = Heartbeat(
        name="p",
        time=0.0,
        stream="0" * 32,
        version=versions[-1],
        lag_versions=lags[-1],
        lag_seconds=None,
        resyncs=0,
        error=error,
        pin=2,
        window=window,
    )
    assert evaluate(beat, seconds) == state
    assert evaluate(beat, seconds, pin=2) == ("silent" if state == "silent" else "pinned")
    assert evaluate(beat, seconds, pin=3) == state
