"""Seconds since a consumer's last read and age of its oldest pending row, against a full history."""

from __future__ import annotations

import random
import time

import pytest
import torch

from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.cursors import Read
from delta_tracker.tracker.log_consumers import ConsumerLag
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("seed", range(20))
def test_ages_are_those_of_all_moments_kept(clock: list[float], seed: int) -> None:
    draw = random.Random(seed)
    log = ChangeLog({"t": SegmentStore(8)}, ["a", "b", "c"], delete_on_read=seed % 2 == 0, max_bytes=None)
    marked: list[float] = []
    num_read, read_at = dict.fromkeys("abc", 0), dict.fromkeys("abc", clock[0])
    reads: dict[str, tuple[Read, int]] = {}
    for _ in range(300):
        clock[0] += 1
        name = draw.choice("abc")
        match draw.choice(["record", "record", "read", "commit", "compact"]):
            case "record":
                log.writes.mark("t", torch.tensor([draw.randrange(8)]))
                marked.append(clock[0])
            case "read":
                reads[name] = log.consumers.read(name), len(marked)
                log.consumers.hold(reads[name][0])
            case "commit" if name in reads:
                read, num_read[name] = reads.pop(name)
                log.consumers.commit(read)
                read_at[name] = clock[0]
            case "compact":
                log.compact()
                assert len(log.cursors._times) <= 7, "one for each cursor and uncommitted read, and for the first row"
        for each, lag in log.consumers.lags(counts=False).items():
            pending = marked[num_read[each] :]
            assert lag == ConsumerLag(0, clock[0] - read_at[each], clock[0] - pending[0] if pending else None, {})


def _oldest_pending(log: ChangeLog) -> float | None:
    return log.consumers.lags(counts=False)["a"].oldest_pending


def _commit(log: ChangeLog, read: Read, *, num_left_out: int) -> None:
    """Commit a read whose delta leaves out some rows."""
    read.returns({}, {"t": read.rows["t"].take(torch.arange(num_left_out))})
    log.consumers.commit(read)


def test_rows_that_are_left_out_keep_their_age_until_all_are_sent(clock: list[float]) -> None:
    log = ChangeLog({"t": SegmentStore(8)}, ["a"], delete_on_read=True, max_bytes=None)
    clock[0] = 5
    log.writes.mark("t", torch.tensor([1, 2]))
    clock[0] = 8
    _commit(log, log.consumers.read("a"), num_left_out=1)
    assert _oldest_pending(log) == 3
    clock[0] = 9
    log.writes.mark("t", torch.tensor([3]))
    _commit(log, log.consumers.read("a"), num_left_out=1)
    assert _oldest_pending(log) == 4
    _commit(log, log.consumers.read("a"), num_left_out=0)
    assert _oldest_pending(log) is None
    clock[0] = 10
    log.consumers.make_pending("a", "t", torch.tensor([4]))
    clock[0] = 12
    log.consumers.make_pending("a", "t", torch.tensor([5]))
    assert _oldest_pending(log) == 2


def test_a_consumer_moved_back_has_the_earlier_ages(clock: list[float]) -> None:
    log = ChangeLog({"t": SegmentStore(8)}, ["a"], delete_on_read=False, max_bytes=None)
    log.writes.mark("t", torch.tensor([1]))
    clock[0] = 4
    log.consumers.commit(log.consumers.read("a"))
    log.compact()
    log.consumers.rewind("a")
    assert _oldest_pending(log) == 4


def test_a_row_written_during_a_read_is_pending_since_that_read(clock: list[float]) -> None:
    log = ChangeLog({"t": SegmentStore(8)}, ["a"], delete_on_read=True, max_bytes=None)
    log.writes.begin_write(0, {"t": torch.tensor([3])})
    clock[0] = 5
    log.consumers.commit(log.consumers.read("a"))
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
        log.consumers.commit(log.consumers.read("b"))
        if log.consumers.find("a").was_dropped:
            break
    assert log.consumers.find("a").was_dropped
    clock[0] += 1
    shown = log.consumers.lags(counts=True)
    assert shown["a"] == ConsumerLag(log.cursors.num_batches, clock[0], clock[0] - 1, {"t": 1 << 12})
    assert shown["b"].pending == {"t": 0}
    assert log.consumers.lags(counts=False)["b"].pending == {}, "what is not counted is not shown as 0"
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
    read = log.consumers.read("a")
    clock[0] = 6
    assert _oldest_pending(log) == 1
    _commit(log, read, num_left_out=1)
    clock[0] = 8
    assert _oldest_pending(log) == 3
