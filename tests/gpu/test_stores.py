"""Stores of changed rows on the device. Recording does not wait for the device, and reads are exact."""

from __future__ import annotations

import pytest
import torch

from delta_tracker import DeltaStore, EmbdUpdateMode
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore
from tests.gpu.devices import ENGINES, IS_TINY, OF_MODULES, device, needs, no_sync, put, take

pytestmark = pytest.mark.usefixtures("tensors_on_device")

_NUM_ROWS, _NUM_IDS = (1000, 64) if IS_TINY else (50_000, 65_536)


@pytest.mark.parametrize("with_states", [False, True], ids=["ids", "states"])
@pytest.mark.parametrize("engine", ENGINES)
def test_recording_does_not_wait_and_keeps_the_oldest_states(engine: str, with_states: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    host = torch.rand(_NUM_ROWS, 4, generator=generator)
    weights = put(host)
    old_states = (lambda ids: weights.index_select(0, ids)) if with_states else None
    store = SegmentStore(_NUM_ROWS, device(), engine=engine, old_states=old_states)
    raw = DeltaStore(EmbdUpdateMode.FIRST if with_states else EmbdUpdateMode.NONE)
    batches = [torch.randint(0, _NUM_ROWS, (_NUM_IDS,), generator=generator) for _ in range(3)]
    on_it = [put(ids) for ids in batches]
    store.begin_write(-1, on_it[0][:1])  # the first one may compile
    store.end_write(-1)
    with no_sync():
        for number, ids in enumerate(on_it):
            store.begin_write(number, ids)
            weights.index_copy_(0, ids, weights.index_select(0, ids).mul_(0.5).add_(1))
            store.end_write(number)
            raw.append(number, "t", ids, weights.index_select(0, ids) if with_states else None)
        store.cut(1)
    expected = torch.cat(batches).unique()
    changed = store.changed(0, 1)
    assert torch.equal(take(changed.ids), expected)
    assert torch.equal(take(raw.get_delta()["t"].ids), expected)
    if with_states:
        assert changed.states is not None
        assert changed.known is not None
        assert bool(take(changed.known).all())
        assert torch.equal(take(changed.states), host[expected])


@pytest.mark.parametrize("keeps_states", [False, True])
def test_rows_that_differ_from_the_copy_are_found(keeps_states: bool) -> None:
    num_rows = 70_000  # more than a chunk
    weights = put(torch.zeros(num_rows, 2))

    def read_rows(ids: torch.Tensor | None) -> torch.Tensor:
        return weights.clone() if ids is None else weights.index_select(0, ids)

    store = ShadowStore(read_rows, num_rows, device(), engine="torch", keeps_states=keeps_states)
    moved = torch.tensor([0, 5, 65_535, 65_536, num_rows - 1])
    weights.index_copy_(0, put(moved), put(torch.tensor([[1.0, 0.0]] * 4 + [[-0.0, 0.0]])))
    store.cut(1)
    changed = store.changed(0, 1)
    assert take(changed.ids).tolist() == moved.tolist()
    if keeps_states:
        assert changed.states is not None
        assert torch.equal(take(changed.states), torch.zeros(5, 2))
    store.cut(2)
    assert len(store.changed(1, 2)) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_of_the_host_are_rows_of_the_device(engine: str) -> None:
    """A publisher that repairs earlier versions, and a restore, take the ids from objects of the stream."""
    store = SegmentStore(_NUM_ROWS, device(), engine=engine)
    assert take(store.unknown(torch.tensor([7, 3, 7])).ids).tolist() == [3, 7]


@needs("memory", "streams")
@pytest.mark.parametrize("max_device_bytes", [0, 1 << 30], ids=["spilled", "on the device"])
def test_old_states_take_the_memory_of_their_rows(max_device_bytes: int) -> None:
    weights = torch.rand(1_000_000, 64, device=OF_MODULES)
    store = SegmentStore(len(weights), OF_MODULES, old_states=lambda ids: weights.index_select(0, ids))
    store.max_device_bytes = max_device_bytes
    batches = [torch.randint(0, 200_000, (65_536,), device=OF_MODULES) for _ in range(40)]
    rows = torch.cat(batches).unique()
    store.begin_write(-1, batches[0])  # the first one allocates
    with no_sync():
        for batch, ids in enumerate(batches):
            store.begin_write(batch, ids)
            store.end_write(batch)
    store.cut(1)
    changed = store.changed(0, 1)
    assert torch.equal(changed.ids, rows)
    assert torch.equal(changed.states, weights[rows])
    assert store.log_bytes <= len(weights) + len(rows) * (8 + 64 * 4) * 8 / 7 + (1 << 20)
