"""Seconds since a consumer's last read and age of its oldest pending row, against a full history."""

from __future__ import annotations

import random

import pytest
import torch

from delta_tracker import Delta
from delta_tracker.tracker import consumer_lag as module
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.consumer_lag import Lag, LagClock
from delta_tracker.tracker.log_consumers import Standing
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


class _Reference:
    """Reference that keeps every timestamp with its position."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, float]] = []
        self.placed: dict[str, tuple[int, float]] = {}

    def oldest(self, consumer: str, now: float) -> float | None:
        return max((now - at for position, at in self.recorded if position >= self.placed[consumer][0]), default=None)


@pytest.mark.parametrize("seed", range(20))
def test_ages_are_those_of_all_moments_kept(clock: list[float], seed: int) -> None:
    draw, lags, reference, position = random.Random(seed), LagClock(), _Reference(), 0
    sealed: dict[str, int] = {}
    for name in ("a", "b", "c"):
        lags.placed(name, 0)
        reference.placed[name] = 0, clock[0]
    for _ in range(300):
        clock[0] += 1
        name = draw.choice("abc")
        match draw.choice(["record", "record", "read", "commit", "compact"]):
            case "record":
                lags.recorded(position)
                reference.recorded.append((position, clock[0]))
            case "read":
                position += 1
                sealed[name] = position
            case "commit" if name in sealed:
                lags.committed(name, sealed[name], leaves_out=False)
                reference.placed[name] = sealed.pop(name), clock[0]
            case "compact":
                lags.compact(sealed.values(), forgets=True)
                assert len(lags._recorded) <= 6, "one moment for each place that somebody stands at"
        for each, (_, at) in reference.placed.items():
            lag = lags.lag(each, 7)
            assert (lag.batches, lag.seconds) == (7, clock[0] - at)
            assert lag.oldest_pending == reference.oldest(each, clock[0])


def _oldest_pending(log: ChangeLog) -> float | None:
    return log.consumers.standings(counts=False)["a"].lag.oldest_pending


def test_rows_that_are_left_out_keep_their_age_until_all_are_sent(clock: list[float]) -> None:
    lags = LagClock()
    lags.placed("a", 0)
    clock[0] = 5
    lags.recorded(0)
    clock[0] = 8
    lags.committed("a", 1, leaves_out=True)
    assert lags.lag("a", 0).oldest_pending == 3
    clock[0] = 9
    lags.recorded(1)
    lags.committed("a", 2, leaves_out=True)
    assert lags.lag("a", 0).oldest_pending == 4
    lags.committed("a", 3, leaves_out=False)
    assert lags.lag("a", 0).oldest_pending is None
    clock[0] = 10
    lags.distrusted("a")
    clock[0] = 12
    lags.distrusted("a")
    assert lags.lag("a", 0).oldest_pending == 2


def test_a_consumer_moved_back_has_the_earlier_ages(clock: list[float]) -> None:
    lags = LagClock()
    lags.placed("a", 0)
    lags.recorded(0)
    clock[0] = 4
    lags.committed("a", 1, leaves_out=False)
    lags.compact([], forgets=False)
    lags.placed("a", 0)
    assert lags.lag("a", 0).oldest_pending == 4


def test_a_row_open_at_a_read_is_pending_since_that_read(clock: list[float]) -> None:
    log = ChangeLog({"t": SegmentStore(8)}, ["a"], delete_on_read=True, max_bytes=None)
    log.writes.begin_write(0, {"t": torch.tensor([3])})
    clock[0] = 5
    log.consumers.read("a").commit()
    clock[0] = 7
    assert log.consumers.num_pending("a") == {"t": 1}
    assert _oldest_pending(log) == 2


def test_a_dropped_consumer_lags_since_its_last_read(clock: list[float]) -> None:
    """Its metrics show that rows are pending, not that it has just read everything."""
    log = ChangeLog({"t": SegmentStore(1 << 12)}, ["a", "b"], delete_on_read=True, max_bytes=800)
    for _ in range(20):
        clock[0] += 1
        log.writes.mark("t", torch.arange(9))
        log.consumers.step()
        log.consumers.read("b").commit()
        if log.consumers.is_behind("a"):
            break
    assert log.consumers.is_behind("a")
    clock[0] += 1
    shown = log.consumers.standings(counts=True)
    lag = Lag(batches=log.num_batches, seconds=clock[0], oldest_pending=clock[0] - 1)
    assert shown["a"] == Standing(lag, {"t": 1 << 12})
    assert shown["b"].pending == {"t": 0}
    assert log.consumers.standings(counts=False)["b"].pending == {}, "what is not counted is not shown as 0"
    log.restore(log.state())
    clock[0] += 1
    assert _oldest_pending(log) == 1
    log.consumers.clear("a")
    assert _oldest_pending(log) is None


def test_rows_that_a_read_finds_by_comparison_are_pending_since_that_read(clock: list[float]) -> None:
    rows = torch.zeros(4, 2)
    store = ShadowStore(lambda ids: rows.clone() if ids is None else rows[ids], 4)
    log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
    rows[1:3] = 1
    clock[0] = 5
    reading = log.consumers.read("a")
    clock[0] = 6
    assert _oldest_pending(log) == 1
    part = {"t": reading.rows["t"].take(torch.tensor([True, False]))}
    reading.delta = Delta({}, consumer="a", start=0, stop=reading.stop, batches=reading.batches, left_out=part)
    reading.commit()
    clock[0] = 8
    assert _oldest_pending(log) == 3
