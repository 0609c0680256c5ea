"""The log and its stores against the reference on random schedules, also with deliberate defects."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from delta_tracker.rows import ChangedRows
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.cursors import Consumer
from delta_tracker.tracker.log_consumers import LogConsumers
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.store import marked_rows
from delta_tracker.tracker.store.marked_rows import Segment
from delta_tracker.tracker.store.segments import SegmentStore
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples
from tests.syncs import SIMULATED, SyncError, find_syncs, held, on_device
from tests.tracker.reference import NUM_ROWS, Schedule

_NAMES = ("a", "b", "c")

_EVENTS = {
    "begin": 6, "fail": 0.1, "edit": 0.5, "overwrite": 0.3, "write": 3, "end": 6, "raise": 1, "read": 4, "top-k": 2,
    "fail_read": 1, "commit": 5, "abort": 1, "add": 0.3, "remove": 0.2, "clear": 0.1, "compact": 1,
}  # fmt: skip


def happen(schedule: Schedule, event: str, draw: random.Random) -> None:
    """Run one event with random arguments."""
    key = draw.choice(schedule.in_progress) if schedule.in_progress else None
    name = draw.choice(sorted(schedule.readers))
    ids = [draw.randrange(-1, NUM_ROWS + 1) for _ in range(draw.randrange(5))]
    if event in ("begin", "fail"):
        schedule.begin(ids if event == "begin" else None)
    elif event in ("edit", "overwrite"):
        getattr(schedule, event)([row for row in ids if 0 <= row < NUM_ROWS])
    elif event in ("write", "end"):
        if key is not None:
            getattr(schedule, event)(key)
    elif event == "raise":
        if key is not None:
            schedule.raise_in(key, is_written=draw.random() < 0.5)
    elif event in ("read", "top-k"):
        schedule.read(name, set(draw.sample(range(NUM_ROWS), 8)) if event == "top-k" else set())
    elif event == "compact":
        schedule.log.compact()
    else:
        getattr(schedule, event)(draw.choice(_NAMES) if event in ("add", "remove") else name)


def make_store(
    engine: str | None, *, keeps_states: bool, kind: type[SegmentStore] = SegmentStore
) -> Callable[[Any], Any]:
    return lambda held, was_written: kind(
        NUM_ROWS, engine=engine, old_states=held if keeps_states else None, was_written=was_written
    )


def run_random(seed: int, make: Callable[[Any], SegmentStore], num_events: int = 300, **kwargs: Any) -> Schedule:
    """Run a plain random schedule, fast enough for many mutations."""
    draw = random.Random(seed)
    schedule = Schedule(make, **kwargs)
    for event in draw.choices(list(_EVENTS), list(_EVENTS.values()), k=num_events):
        happen(schedule, event, draw)
        assert schedule.store.num_segments <= 2 * len(schedule.readers) + 2
    schedule.finish()
    return schedule


class LogMachine(RuleBasedStateMachine):
    """The same events in orders that hypothesis chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(make_store(None, keeps_states=True))

    @rule(event=st.sampled_from([event for event in _EVENTS if event not in ("write", "end")]), draw=st.randoms())
    def happens(self, event: str, draw: random.Random) -> None:
        happen(self.schedule, event, draw)

    @precondition(lambda self: self.schedule.in_progress)
    @rule(event=st.sampled_from(["write", "end"]), draw=st.randoms())
    def ends(self, event: str, draw: random.Random) -> None:
        happen(self.schedule, event, draw)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.schedule.store.num_segments <= 2 * len(self.schedule.readers) + 2

    def teardown(self) -> None:
        self.schedule.finish()


TestLogMachine = pytest.mark.sweep("short")(LogMachine.TestCase)

TestLogMachine.settings = settings(
    max_examples=50 if SWEEPS_ARE_WHOLE else num_examples(15), stateful_step_count=40, deadline=None
)


@pytest.mark.promise("lossless", "independent")
@pytest.mark.parametrize("delete_on_read", [True, False])
@pytest.mark.parametrize("keeps_states", [True, False])
@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_random_schedules_agree_with_the_reference(engine: str, keeps_states: bool, delete_on_read: bool) -> None:
    totals: dict[str, int] = {}
    for seed in range(6):
        schedule = run_random(seed, make_store(engine, keeps_states=keeps_states), delete_on_read=delete_on_read)
        totals = {kind: totals.get(kind, 0) + count for kind, count in schedule.counts.items()}
    assert all(count > 0 for kind, count in totals.items() if keeps_states or kind != "unknown"), totals


class _Padded(SegmentStore):
    """Captures states as on a device, without a sync."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pads = True


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_states_captured_without_waiting_are_the_same(engine: str) -> None:
    for seed in range(6):
        run_random(seed, make_store(engine, keeps_states=True, kind=_Padded))


def _run_seeds(mutant: type[SegmentStore]) -> None:
    for seed in range(30):
        run_random(seed, make_store("torch", keeps_states=True, kind=mutant))


class _NoRemark(SegmentStore):
    def cut(self, position: int) -> None:
        held, self.writes = self.writes, {}
        super().cut(position)
        self.writes = held


class _CloseAtCut(SegmentStore):
    def cut(self, position: int) -> None:
        super().cut(position)
        self.writes.clear()


class _MarkOnClose(SegmentStore):
    def begin_write(self, key: int, ids: Tensor | None) -> None:
        self.writes[key] = ids

    def end_write(self, key: int) -> None:
        if key in self.writes:
            self.mark(self.writes.pop(key))


class _MergeAcrossPins(SegmentStore):
    def compact(self, pinned: Any) -> None:
        super().compact(())


class _KeepsOpen(SegmentStore):
    def end_write(self, key: int) -> None:
        """Never end a write: sends too many rows."""


class _SkipsLastRow(SegmentStore):
    def changed(self, start: int, stop: int, *, with_states: bool = True) -> ChangedRows:
        changed = super().changed(start, stop, with_states=with_states)
        return changed.take(torch.arange(len(changed) - 1)) if len(changed) else changed


class _DeletesTooMuch(SegmentStore):
    def delete(self, before: int | None) -> None:
        super().delete(None if before is None else before + 1)


class _RemarksWithOldState(SegmentStore):
    """Marks rows of writes in progress at a cut with their state at the beginning."""

    def cut(self, position: int) -> None:
        before = {
            int(row): old
            for seg in self._segments
            if seg.states is not None
            for ids, states in seg.states.pieces
            for row, old in zip(ids, states, strict=False)
        }
        super().cut(position)
        last = self._segments[-1].states
        if last is not None:
            last.pieces = [
                (
                    ids,
                    torch.stack([before.get(int(row), old) for row, old in zip(ids, states, strict=False)])
                    if len(ids)
                    else states,
                )
                for ids, states in last.pieces
            ]


class _GathersAtRead(SegmentStore):
    """Gathers the states at the read, after the writes, instead of before them."""

    def changed(self, start: int, stop: int, *, with_states: bool = True) -> ChangedRows:
        changed = super().changed(start, stop, with_states=with_states)
        return ChangedRows(changed.ids, self._old_states(changed.ids), changed.known, changed.ages)


class _NewestWins(SegmentStore):
    def changed(self, start: int, stop: int, *, with_states: bool = True) -> ChangedRows:
        self._segments.reverse()
        try:
            return super().changed(start, stop, with_states=with_states)
        finally:
            self._segments.reverse()


class _OneSharedState(SegmentStore):
    """Keeps one first-seen state per row for all consumers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first: dict[int, Tensor] = {}
        held = self._old_states

        def shared(ids: Tensor) -> Tensor:
            now = held(ids)
            return (
                torch.stack([first.setdefault(int(row), old) for row, old in zip(ids, now, strict=False)])
                if len(ids)
                else now
            )

        self._old_states = shared


class _MarksOnceAfterAFailure(SegmentStore):
    def begin_write(self, key: int, ids: Tensor | None) -> None:
        super().begin_write(key, ids)
        if ids is None:
            self.writes[key] = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(
    "mutant",
    [
        _NoRemark,
        _CloseAtCut,
        _MarkOnClose,
        _MergeAcrossPins,
        _KeepsOpen,
        _SkipsLastRow,
        _DeletesTooMuch,
        _RemarksWithOldState,
        _GathersAtRead,
        _NewestWins,
        _OneSharedState,
        _MarksOnceAfterAFailure,
    ],
)
def test_the_reference_catches_a_broken_store(mutant: type[SegmentStore]) -> None:
    with pytest.raises(AssertionError):
        _run_seeds(mutant)


def test_the_reference_catches_a_merge_in_which_the_newer_state_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def merged(self: Segment, newer: Segment) -> Segment:
        if self.rows is None:
            return Segment(self.start, newer.rows, newer.states)
        if newer.rows is not None:
            if newer.states is not None:
                self.states = self.states or newer.states.empty()
                self.states.pieces += newer.states.pieces
            self.rows.merge(newer.rows)
        return self

    monkeypatch.setattr(Segment, "merged", merged)
    with pytest.raises(AssertionError):
        _run_seeds(SegmentStore)


def test_the_reference_catches_a_consumer_added_without_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: LogConsumers, consumer: str) -> None:
        self._known[consumer] = Consumer(consumer, self._segments.position, 0, 0.0)

    monkeypatch.setattr(LogConsumers, "add", add)
    with pytest.raises(AssertionError):
        _run_seeds(SegmentStore)


def test_a_shard_without_rows_accepts_every_call() -> None:
    store = SegmentStore(0)
    store.begin_write(0, torch.tensor([3]))
    store.mark(None)
    store.cut(1)
    assert store.changed(0, 1).ids.tolist() == []


@pytest.mark.parametrize("is_over", [False, True])
def test_a_write_of_unknown_rows_marks_all_rows_until_it_is_over(is_over: bool) -> None:
    store = SegmentStore(3, engine="torch")
    store.mark_all_later(7)
    for position in (1, 2):
        store.notice_writes()
        store.cut(position)
        assert store.changed(position - 1, position).ids.tolist() == [0, 1, 2]
    if is_over:
        store.end_write(7)
    for position, is_marked in ((3, True), (4, not is_over)):
        store.notice_writes()
        store.cut(position)
        assert store.changed(position - 1, position).ids.tolist() == ([0, 1, 2] if is_marked else [])


@pytest.fixture
def always_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep row sets of any size for reuse."""
    monkeypatch.setattr(marked_rows, "_SPARE_BYTES", 0)


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_reused_row_sets_are_empty(always_spare: None, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    for seed in range(6):
        run_random(seed, make_store(engine, keeps_states=True))
    monkeypatch.setattr(TorchRows, "clear", lambda _: None)
    with pytest.raises(AssertionError):
        _run_seeds(SegmentStore)


def test_a_row_set_kept_for_reuse_drops_no_consumer(always_spare: None) -> None:
    log = ChangeLog({"t": SegmentStore(1000, engine="torch")}, ["a", "b"], delete_on_read=True, max_bytes=1500)
    for batch in range(3):
        for name in ("a", "b"):
            log.writes.mark("t", torch.tensor([batch]))
            log.consumers.commit(log.consumers.read(name))
            log.consumers.step()
            assert log.segments.memory().log_bytes <= 1500
    assert not log.consumers.find("a").was_dropped
    assert not log.consumers.find("b").was_dropped


@pytest.mark.promise("independent")
def test_memory_is_one_row_set_per_segment() -> None:
    store = SegmentStore(1000, engine="torch")
    assert store.log_bytes == 0
    store.mark(torch.tensor([1]))
    assert store.log_bytes == 1000
    store.cut(1)
    store.mark(torch.tensor([2]))
    assert (store.num_segments, store.log_bytes) == (2, 2000)
    store.compact({0})
    assert (store.num_segments, store.log_bytes) == (1, 1000)


@pytest.mark.parametrize("fails", ["rows", "states"])
def test_a_merge_that_runs_out_of_memory_is_repeated(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that the failed merge had moved were once moved again."""
    weights = torch.arange(10.0).unsqueeze(1)
    store = SegmentStore(10, engine="torch", old_states=lambda ids: weights.index_select(0, ids))
    store.mark(torch.tensor([1, 2]))
    store.cut(1)
    store.mark(torch.tensor([3]))
    store.mark(torch.tensor([2, 4]))
    num_calls = itertools.count()
    name, last = ("merge", 0) if fails == "rows" else ("contains", 1)
    method = getattr(TorchRows, name)

    def failing(self: TorchRows, argument: Any) -> Any:
        if next(num_calls) == last:
            raise MemoryError
        return method(self, argument)

    with monkeypatch.context() as patch:
        patch.setattr(TorchRows, name, failing)
        with pytest.raises(MemoryError):
            store.compact(())
    store.compact(())
    num_bytes = store.log_bytes
    changed = store.changed(0, 2)
    assert (changed.ids.tolist(), changed.states.flatten().tolist()) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert num_bytes == 10 + 4 * (8 + 4), "a byte per row, and an id and a state per marked row"


def _recorded_on_a_device(num_batches: int, num_ids: int, num_rows: int) -> tuple[SegmentStore, list[SyncError]]:
    """Return a store on a device that recorded batches of random ids, and where recording waited for the device."""
    generator = torch.Generator().manual_seed(0)
    weights = on_device(torch.arange(num_rows * 16.0).view(num_rows, 16))
    store = SegmentStore(num_rows, SIMULATED, engine="torch", old_states=lambda ids: weights.index_select(0, ids))
    with find_syncs() as found:
        for batch in range(num_batches):
            store.begin_write(batch, on_device(torch.randint(num_rows, (num_ids,), generator=generator)))
            store.end_write(batch)
    return store, found


def test_old_states_on_a_device_take_the_memory_of_their_rows() -> None:
    with find_syncs():
        store, found = _recorded_on_a_device(40, 4096, 3125)
        assert not found
        with find_syncs() as found:
            num_bytes = store.log_bytes
        assert not found
        row_bytes = 8 + 16 * 4
        assert num_bytes <= 3125 * (1 + row_bytes) + 100, "a byte per row for the set, and a state per row"


def test_reads_of_old_states_on_a_device_wait_equally_often_after_any_number_of_batches() -> None:
    with find_syncs():
        counts = []
        for num_batches in (2, 12):
            store, _ = _recorded_on_a_device(num_batches, 500, 3125)
            store.cut(1)
            with find_syncs() as found:
                changed = store.changed(0, 1)
            counts.append(len(found))
            assert torch.equal(held(changed.states)[:, 0], 16.0 * held(changed.ids))
            assert bool(held(changed.known).all())
    assert counts[0] == counts[1] <= 5


def test_a_merge_of_segments_on_a_device_waits_equally_often_after_any_number_of_batches() -> None:
    with find_syncs():
        counts = []
        for num_batches in (2, 12):
            store, _ = _recorded_on_a_device(num_batches, 500, 3125)
            store.cut(1)
            store.mark(on_device(torch.arange(100)))
            with find_syncs() as found:
                store.compact(())
            counts.append(len(found))
            assert store.num_segments == 1
    assert counts[0] == counts[1] <= 3
