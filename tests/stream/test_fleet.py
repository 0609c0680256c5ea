"""States of predictors by a window of heartbeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_tracker.stream.heartbeat import Heartbeat, predictor_state
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import Pin
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.storage.storage import Storage

HEAD = replace(StreamLog(Storage("memory://")).claim().head, version=9)
PIN = Pin(counter=2, stream=HEAD.stream, kind="pin", version=3, xxh3="0" * 32, bad=5, reason="", time=HEAD.created)


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
    beat = beat_of(versions, lags, error)
    assert predictor_state(beat, seconds, HEAD) == state
    assert predictor_state(beat, seconds, HEAD, order=PIN) == ("silent" if state == "silent" else "pinned")
    for order in (replace(PIN, counter=3), replace(PIN, kind="release"), replace(PIN, stream="1" * 32)):
        assert predictor_state(beat, seconds, HEAD, order=order) == state


def test_an_error_of_a_predictor_that_has_the_newest_version_is_no_failure() -> None:
    assert predictor_state(beat_of([9] * 10, [0] * 9 + [None], "one poll failed"), 1.0, HEAD) == "current"
    assert predictor_state(beat_of([8] * 10, [None] * 10, "no poll succeeds"), 1.0, HEAD) == "failing"


def test_a_canary_is_current_while_no_version_comes() -> None:
    beat = replace(beat_of([5] * 10, [4] * 10, None), canary_versions=4)
    assert predictor_state(beat, 1.0, HEAD) == "current"
    late = replace(beat_of([5] * 10, [4, 5, 5, 5, 5, 6, 6, 7, 8, 9], None), canary_versions=4)
    assert predictor_state(late, 1.0, HEAD) == "stuck"


@pytest.mark.parametrize(
    ("canary", "lags", "state"),
    [
        (Canary(versions=4), [4, 4, 5], "current"),
        (Canary(versions=4), [5, 5, 6], "behind"),
        (Canary(versions=4), [6, 5, 6], "applying"),
        (Canary(seconds=4), [4, 4, 5], "behind"),  # the lag in seconds is not in the window
        (None, [4, 4, 5], "behind"),
    ],
)
def test_a_canary_that_keeps_its_distance_is_current(canary: Canary | None, lags: list[int | None], state: str) -> None:
    beat = keeping(canary, beat_of([3, 4, 5], lags, None))
    assert predictor_state(beat, 1.0, HEAD) == state


@pytest.mark.parametrize(
    ("versions", "canary", "release", "age", "error", "state"),
    [
        ([5, 5, 5], Canary(versions=2), 8, 0.0, None, "waiting"),
        ([5, 5, 5], Canary(versions=1), 8, 0.0, None, "stuck"),  # version 8 is allowed: nothing delays it
        ([5, 5, 5], Canary(versions=2), 5, 0.0, None, "stuck"),  # it has the release
        ([5, 5, 5], Canary(seconds=4), 8, 3.0, None, "waiting"),
        ([5, 5, 5], Canary(seconds=4), 8, 5.0, None, "stuck"),
        ([5, 5, 5], None, 8, 0.0, None, "stuck"),
        ([5, 5, 5], Canary(versions=2), 8, 0.0, "late", "failing"),
        ([5, 6, 7], Canary(versions=2), 8, 0.0, None, "behind"),  # it does not follow pins
        ([5], Canary(versions=2), 8, 0.0, None, "waiting"),
    ],
)
def test_a_canary_that_may_not_apply_a_release_yet_waits(
    versions: list[int], canary: Canary | None, release: int, age: float, error: str | None, state: str
) -> None:
    lags: list[int | None] = [4, 5, 6][: len(versions)]
    beat = keeping(canary, beat_of(versions, lags, error))
    order = replace(PIN, counter=3, kind="release", version=release, time=HEAD.created - age)
    assert predictor_state(beat, 1.0, HEAD, order=order) == state
    assert predictor_state(replace(beat, pin=3), 1.0, HEAD, order=order) != "waiting"
    assert predictor_state(beat, 60.0, HEAD, order=order) == "silent"


@pytest.mark.parametrize(
    ("versions", "pin", "state"),
    [
        ([6, 7, 8], 0, "unpinned"),
        ([6, 7, 8], 3, "pinned"),
        ([5, 6, 7], 0, "behind"),  # version 5 was the newest when the pin was written
        ([6, 7], 0, "applying"),  # it may not have looked for the pin yet
        ([5, 5, 5], 0, "stuck"),
    ],
)
def test_a_predictor_that_goes_on_after_a_pin_is_unpinned(versions: list[int], pin: int, state: str) -> None:
    lags: list[int | None] = [1, 2, 3][: len(versions)]
    beat = replace(beat_of(versions, lags, None), pin=pin)
    assert predictor_state(beat, 1.0, HEAD, order=replace(PIN, counter=3)) == state
    assert predictor_state(beat, 60.0, HEAD, order=replace(PIN, counter=3)) == "silent"


def test_a_predictor_of_another_stream_is_elsewhere() -> None:
    beat = replace(beat_of([9] * 10, [0] * 10, None), stream="1" * 32)
    assert predictor_state(beat, 1.0, HEAD) == "elsewhere"
    assert predictor_state(beat, 1.0, HEAD, order=PIN) == "elsewhere"
    assert predictor_state(beat, 46.0, HEAD) == "silent"
    assert predictor_state(replace(beat, stream=None, version=None), 1.0, HEAD) == "current", "it has no version yet"


def keeping(canary: Canary | None, beat: Heartbeat) -> Heartbeat:
    """Return a heartbeat of a predictor with a canary."""
    return beat if canary is None else replace(beat, canary_versions=canary.versions, canary_seconds=canary.seconds)


def beat_of(versions: list[int], lags: list[int | None], error: str | None) -> Heartbeat:
    """Return a heartbeat with a window of heartbeats that are five seconds apart."""
    window = tuple(
        (5.0 * (len(versions) - 1 - place), version, lag)
        for place, (version, lag) in enumerate(zip(versions, lags, strict=True))
    )
    return Heartbeat(
        name="p",
        time=0.0,
        stream=HEAD.stream,
        version=versions[-1],
        lag_versions=lags[-1],
        lag_seconds=None,
        resyncs=0,
        error=error,
        pin=2,
        window=window,
    )
