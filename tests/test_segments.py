"""The segment store against its reference, on random schedules, and broken on purpose."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delta_tracker.cursors import Cursors
from delta_tracker.errors import InvalidArgumentError, StaleDeltaError, UnknownConsumerError
from delta_tracker.store.segments import SegmentStore
from delta_tracker.types import Delta
from tests.reference import CONSUMERS, NUM_ROWS, Schedule

_IDS = st.lists(st.integers(-2, NUM_ROWS + 2), max_size=6)
_NAMES = st.sampled_from(CONSUMERS)


class StoreMachine(RuleBasedStateMachine):
    """Opens, writes, closes, reads, commits and aborts in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    @rule(ids=_IDS)
    def open(self, ids: list[int]) -> None:
        self.schedule.open(ids)

    @rule()
    def fail_hook(self) -> None:
        self.schedule.fail_hook()

    @precondition(lambda self: self.schedule.open_batches)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.schedule.write(data.draw(st.sampled_from(self.schedule.open_batches)))

    @precondition(lambda self: self.schedule.open_batches)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.schedule.close(data.draw(st.sampled_from(self.schedule.open_batches)))

    @rule(name=_NAMES)
    def read(self, name: str) -> None:
        self.schedule.read(name)

    @rule(name=_NAMES)
    def commit(self, name: str) -> None:
        self.schedule.commit(name)

    @rule(name=_NAMES)
    def abort(self, name: str) -> None:
        self.schedule.abort(name)

    @rule()
    def compact(self) -> None:
        self.schedule.compact()

    @invariant()
    def memory_is_bounded(self) -> None:
        self.schedule.compact()
        assert self.schedule.store.num_segments <= len(self.schedule.cursors.pinned) + 1

    def teardown(self) -> None:
        self.schedule.finish()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def run_random(seed: int, store: SegmentStore, num_events: int = 300, *, delete_on_read: bool = True) -> Schedule:
    """A plain random schedule, quick enough to try many mutations with."""
    draw = random.Random(seed)
    schedule = Schedule(store, delete_on_read=delete_on_read)
    for _ in range(num_events):
        event = draw.choices(["open", "write", "close", "read", "commit", "abort", "fail"], [6, 3, 6, 4, 4, 1, 0.1])[0]
        key = draw.choice(schedule.open_batches) if schedule.open_batches else None
        name = draw.choice(CONSUMERS)
        if event == "open":
            schedule.open([draw.randrange(NUM_ROWS) for _ in range(draw.randrange(4))])
        elif event == "fail":
            schedule.fail_hook()
        elif event in ("write", "close") and key is not None:
            getattr(schedule, event)(key)
        elif event in ("read", "commit", "abort"):
            getattr(schedule, event)(name)
    schedule.finish()
    return schedule


@pytest.mark.parametrize("delete_on_read", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_agree_with_the_reference(seed: int, delete_on_read: bool) -> None:
    schedule = run_random(seed, SegmentStore(NUM_ROWS), delete_on_read=delete_on_read)
    assert all(count > 0 for kind, count in schedule.num_reads.items() if kind != "empty"), schedule.num_reads


def _run_seeds(store: type[SegmentStore]) -> None:
    for seed in range(20):
        run_random(seed, store(NUM_ROWS))


class _NoRemark(SegmentStore):
    def cut(self, position: int) -> None:
        held, self._open = self._open, {}
        super().cut(position)
        self._open = held


class _CloseAtCut(SegmentStore):
    def cut(self, position: int) -> None:
        super().cut(position)
        self._open.clear()


class _MarkOnClose(SegmentStore):
    def open_batch(self, batch: int, ids: torch.Tensor | None) -> None:
        self._open[batch] = ids

    def close_batch(self, batch: int) -> None:
        ids = self._open.pop(batch, None)
        if ids is not None:
            self.mark(ids)

    def mark(self, ids: torch.Tensor | None) -> None:
        super().open_batch(-1, ids)
        self._open.pop(-1, None)


class _MergeAcrossPins(SegmentStore):
    def compact(self, pinned: Any) -> None:
        super().compact(())


class _KeepsOpen(SegmentStore):
    def close_batch(self, batch: int) -> None:
        """Never closes: sends too much."""


class _SkipsLastRow(SegmentStore):
    def changed(self, start: int, stop: int) -> torch.Tensor:
        return super().changed(start, stop)[:-1]


class _DeletesTooMuch(SegmentStore):
    def delete(self, before: int) -> None:
        super().delete(before + 1)


@pytest.mark.parametrize(
    "mutant", [_NoRemark, _CloseAtCut, _MarkOnClose, _MergeAcrossPins, _KeepsOpen, _SkipsLastRow, _DeletesTooMuch]
)
def test_the_reference_catches_a_broken_store(mutant: type[SegmentStore]) -> None:
    with pytest.raises(AssertionError):
        _run_seeds(mutant)


def test_a_shard_without_rows_takes_everything() -> None:
    store = SegmentStore(0)
    store.open_batch(0, torch.tensor([3]))
    store.mark(None)
    store.cut(1)
    assert store.changed(0, 1).tolist() == []


def test_memory_is_one_byte_per_row_and_segment() -> None:
    store = SegmentStore(1000)
    assert store.num_bytes == 0
    store.mark(torch.tensor([1]))
    assert store.num_bytes == 1000
    store.cut(1)
    store.mark(torch.tensor([2]))
    assert (store.num_segments, store.num_bytes) == (2, 2000)
    store.compact({0})
    assert (store.num_segments, store.num_bytes) == (1, 1000)


def _delta(consumer: str, stop: int) -> Delta:
    return Delta({}, consumer=consumer, start=0, stop=stop, batches=(0, stop))


def test_cursors_refuse_what_they_do_not_know() -> None:
    for names in ([], ["a", "a"], "a"):
        with pytest.raises(InvalidArgumentError, match="consumers"):
            Cursors(names)
    cursors = Cursors(["a", "b"])
    with pytest.raises(UnknownConsumerError, match=r"known consumers: 'a', 'b'") as caught:
        cursors.resolve("c")
    assert (caught.value.consumer, caught.value.known) == ("c", ("a", "b"))
    with pytest.raises(UnknownConsumerError, match="has several"):
        cursors.resolve(None)
    assert Cursors(["only"]).resolve(None) == "only"


def test_only_the_newest_read_can_be_committed_and_only_once() -> None:
    cursors = Cursors(["a", "b"])
    old, new = _delta("a", 1), _delta("a", 2)
    cursors.seal(old)
    cursors.seal(new)
    with pytest.raises(StaleDeltaError):
        cursors.commit(old)
    assert cursors.pinned == {0, 2}
    cursors.commit(new)
    with pytest.raises(StaleDeltaError):
        cursors.commit(new)
    with pytest.raises(StaleDeltaError):
        cursors.abort(new)
    assert (cursors.start("a"), cursors.start("b"), cursors.oldest) == ((2, 2), (0, 0), 0)
