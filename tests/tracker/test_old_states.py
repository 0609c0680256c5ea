"""Old states on a device: bounded memory, no waits, and the states of the slow reference, with copies that are late."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_tracker.buffers.host_copy import HostCopy
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store import old_states
from delta_tracker.tracker.store.segments import SegmentStore
from tests.fake_streams.simulation import fake_streams
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.syncs import SIMULATED, SyncError, find_syncs, held, on_device
from tests.tracker.test_segments import make_store, run_random

_NUM_COLUMNS = 16
_ROW_BYTES = 8 + 4 * _NUM_COLUMNS
_ORDERS = 1000 if SWEEPS_ARE_WHOLE else 12


class _LateCopy(HostCopy):
    """Copy that completes after a random number of polls, as on CUDA. Only a complete copy may be used.

    A copy aside reads its source at a random time until then.
    """

    draw = random.Random(0)
    num_aside = 0
    late = 3

    def __init__(self, source: Tensor, *, stream: str | None = None) -> None:
        super().__init__(source)
        aside = stream is not None
        _LateCopy.num_aside += aside
        self._polls = self.draw.randrange(self.late + 1)
        self._kept: Tensor | None = None if aside and self.draw.random() < 0.5 else held(source).clone()
        self._from: Tensor | None = source
        self._size = source.nbytes

    @property
    def is_done(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    @property
    def num_bytes(self) -> int:
        return self._size

    def result(self) -> Tensor:
        assert self._polls < 0, "used before it was complete"
        if self._kept is None:
            self._kept = held(self._from).clone()
        self._from = None
        return self._kept


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host that complete later."""
    monkeypatch.setattr(old_states, "HostCopy", _LateCopy)
    monkeypatch.setattr(old_states, "side_stream", lambda _: "side stream")
    monkeypatch.setattr(_LateCopy, "num_aside", 0)
    monkeypatch.setattr(_LateCopy, "late", 3)
    monkeypatch.setattr(_LateCopy, "draw", random.Random(0))


class _Padded(SegmentStore):
    """Captures states as on a device, in small blocks of which few stay on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_device_bytes = _LateCopy.draw.choice([0, 30, 1 << 20])
        self.pads = True


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_states_in_small_blocks_with_late_copies_are_the_same(
    late_copies: None, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    for seed in range(4):
        monkeypatch.setattr(old_states, "_MIN_BYTES", 12 * (1 + seed % 4))
        monkeypatch.setattr(old_states, "_MAX_BYTES", 12 * (1 + seed % 4))
        monkeypatch.setattr(_LateCopy, "late", seed % 3)
        run_random(seed, make_store(engine, keeps_states=True, kind=_Padded))
    assert _LateCopy.num_aside


class _Recorder:
    """A log with a table of ``num_rows`` rows on a device, and batches of random ids."""

    def __init__(self, num_rows: int, num_ids: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._weights = torch.arange(num_rows * float(_NUM_COLUMNS)).view(num_rows, _NUM_COLUMNS)
        self.num_ids = num_ids
        self.store = SegmentStore(
            num_rows,
            SIMULATED,
            engine="torch",
            old_states=lambda ids: on_device(self._weights[held(ids)]),
        )
        self.log = ChangeLog({"t": self.store}, ["fast", "slow"], delete_on_read=True, max_bytes=None)
        self.found: list[SyncError] = []
        self.seen: set[int] = set()

    def train(self, num_batches: int) -> None:
        for _ in range(num_batches):
            ids = torch.randint(self.store.num_rows, (self.num_ids,), generator=self._generator)
            self.seen.update(ids.tolist())
            with find_syncs() as found:
                self.log.writes.begin_write(0, {"t": on_device(ids)})
                self.log.writes.end_write(0, ["t"])
                self.log.consumers.step()
            self.found += found

    def read(self, name: str) -> int:
        """Read and commit, check the states, and return the number of waits."""
        with find_syncs() as found:
            reading = self.log.consumers.read(name)
        rows = reading.rows["t"]
        assert torch.equal(held(rows.states)[:, 0], held(rows.ids) * float(_NUM_COLUMNS))
        assert bool(held(rows.known).all())
        self.log.consumers.commit(reading)
        return len(found)

    @property
    def state_bytes(self) -> int:
        """Size of the old states."""
        return self.store.log_bytes - sum(seg.rows.num_bytes for seg in self.store._segments if seg.rows is not None)


def test_blocks_are_trimmed_to_their_rows(late_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_states, "_MIN_BYTES", 1)
    with find_syncs():
        recorder = _Recorder(20_000, 500)
        for _ in range(4):
            recorder.train(6)
            # At most one open block and the blocks whose number of rows is not known, of two batches each.
            assert recorder.state_bytes <= _ROW_BYTES * (len(recorder.seen) * 8 / 7 + 3 * 1002)
        recorder.train(1)
        assert not recorder.found
        num_waits = recorder.read("slow")
        assert recorder.state_bytes <= _ROW_BYTES * len(recorder.seen) * 8 / 7 + 1000, "no block is open"
        recorder.train(3)
        assert recorder.read("slow") == num_waits


def test_old_blocks_are_spilled(late_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_states, "_MIN_BYTES", 1)
    with find_syncs():
        recorder = _Recorder(20_000, 500)
        recorder.store.max_device_bytes = 100_000
        recorder.train(20)
        assert not recorder.found
        states = recorder.store._segments[0].states
        on_it = sum(block.device_bytes - 8 * len(block._ids) for block in states._blocks)
        assert on_it <= 100_000 + _ROW_BYTES * 6 * 1002
        assert recorder.state_bytes >= _ROW_BYTES * len(recorder.seen), "also the states on the host count"
        assert recorder.state_bytes <= _ROW_BYTES * (len(recorder.seen) * 8 / 7 + 6 * 1002)
        num_waits = recorder.read("fast")  # one of them for the numbers of rows, which are known afterwards
        assert num_waits - recorder.read("slow") in (0, 1), "a spilled block is copied back without a wait"
        assert num_waits <= 4
        assert recorder.store.num_segments <= 2


def test_no_step_waits_while_consumers_read_at_different_times(
    late_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_states, "_MIN_BYTES", 1)
    with find_syncs():
        recorder = _Recorder(3000, 200)
        recorder.store.max_device_bytes = 20_000
        for batch in range(15):
            recorder.train(1)
            if batch % 3 == 0:
                recorder.read("fast")
            if batch % 7 == 0:
                recorder.read("slow")
        assert not recorder.found


def test_memory_for_further_states_is_released_before_a_consumer_is_dropped() -> None:
    with find_syncs():
        store = SegmentStore(
            10_000, SIMULATED, engine="torch", old_states=lambda ids: on_device(torch.zeros(len(ids), _NUM_COLUMNS))
        )
        log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=10_000 + 100 * _ROW_BYTES + 1000)
        for batch in range(10):
            log.writes.begin_write(batch, {"t": on_device(torch.arange(batch * 10, batch * 10 + 10))})
            log.writes.end_write(batch, ["t"])
            log.consumers.step()
            assert log.segments.memory().log_bytes <= 10_000 + 100 * _ROW_BYTES + 1000
        assert not log.consumers.find("a").was_dropped
        assert held(log.consumers.read("a").rows["t"].ids).tolist() == list(range(100))


def test_states_given_with_ids_are_kept_without_waiting() -> None:
    with find_syncs():
        store = SegmentStore(
            20, SIMULATED, engine="torch", old_states=lambda ids: on_device(torch.full((len(ids), 1), -1.0))
        )
        with find_syncs() as found:
            store.mark(on_device(torch.tensor([3, 5])))
            ids = torch.tensor([7, 5, 0, 3, 19])
            store.mark(on_device(ids), states=on_device(ids.float().unsqueeze(1)))
        assert not found
        changed = store.changed(0, 1)
        assert held(changed.ids).tolist() == [0, 3, 5, 7, 19]
        assert held(changed.states).flatten().tolist() == [0, -1, -1, 7, 19]


def _trained(seed: int) -> None:
    """Train on a simulated CUDA device, whose operations run in the order of ``seed``, and check what is read."""
    draw = random.Random(seed)
    num_rows = 30
    with fake_streams(seed) as devices:
        weights = torch.zeros(num_rows, 2, device="cuda")
        store = SegmentStore(
            num_rows,
            "cuda",
            engine="torch",
            old_states=lambda ids: weights.index_select(0, ids),
        )
        store.max_device_bytes = draw.choice([0, 60, 1 << 20])
        current, expected = [0.0] * num_rows, {}
        for position in (1, 2):
            batches = [
                [draw.randrange(num_rows) for _ in range(draw.randrange(1, 5))] for _ in range(draw.randrange(9))
            ]
            on_it = [torch.tensor(batch, device="cuda") for batch in batches]
            before, pageable = devices.num_waits, devices.num_pageable
            for number, (batch, ids) in enumerate(zip(batches, on_it, strict=True)):
                store.begin_write(number, ids)
                weights.index_fill_(0, ids, float(number + position * 10))
                store.end_write(number)
                for row in batch:
                    expected.setdefault(row, current[row])
                    current[row] = float(number + position * 10)
            assert (devices.num_waits, devices.num_pageable) == (before, pageable)
            store.cut(position)
            if draw.random() < 0.5:
                store.compact(())
        changed = store.changed(0, 3)
        assert changed.ids.cpu().tolist() == sorted(expected)
        assert changed.states.cpu()[:, 0].tolist() == [expected[row] for row in sorted(expected)]
        assert changed.known.cpu().all()


@pytest.mark.sweep("long")
def test_states_are_right_in_any_order_of_the_copies_and_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(_ORDERS):
        monkeypatch.setattr(old_states, "_MIN_BYTES", 16 * (1 + seed % 3))
        _trained(seed)
