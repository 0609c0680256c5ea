"""Hooks on collections: output distributions, loads, and evictions."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.tracker.store.segments import SegmentStore
from tests.ranks import RankPool
from tests.syncs import SIMULATED, find_syncs, on_device

_CASES = "tests.sharding.collection_hooks_cases"
_FLOWS = "tests.tracker.flows_cases"


@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_a_forward_compacts_the_log_without_step(one_rank: RankPool, two_ranks: RankPool, bag: bool) -> None:
    for pool in (one_rank, two_ranks):
        for answer in pool.run(f"{_CASES}:compacted", bag=bag):
            assert answer == {"smaller": [True, True], "left": 0}


def test_the_slot_of_torchrec_is_left_to_others(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:slot_is_free")


def test_a_forward_of_a_managed_collision_module_compacts_the_log(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{_CASES}:managed_collisions") == [True, True]


@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_the_hook_runs_in_a_train_pipeline(two_ranks: RankPool, bag: bool) -> None:
    for smaller in two_ranks.run(f"{_CASES}:pipelined", bag=bag):
        assert smaller == [True] * 6


def test_the_hook_neither_raises_nor_blocks(one_rank: RankPool) -> None:
    (answer,) = one_rank.run(f"{_CASES}:contained")
    assert answer["errors"] >= 1
    assert not answer["waited"]
    assert answer["smaller"]


@pytest.mark.parametrize("keeps_states", [False, True])
def test_compaction_in_the_hook_does_not_wait_for_the_device(keeps_states: bool) -> None:
    weights = torch.rand(10, 2)
    with find_syncs() as found:
        on_it = on_device(weights)
        old_states = (lambda ids: on_it.index_select(0, ids)) if keeps_states else None
        store = SegmentStore(10, SIMULATED, engine="torch", old_states=old_states)
        for position in (1, 2):
            store.mark(on_device(torch.tensor([position, 3])))
            store.cut(position)
        store.mark(on_device(torch.tensor([4])))
        assert not found
        store.compact(set())
    assert store.num_segments == 1
    assert store.compact_waits == bool(found) == keeps_states, "reads compact a store that would wait"


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_managed_collisions_are_tracked_by_remapped_row(two_ranks: RankPool, mode: str) -> None:
    for counts in two_ranks.run(f"{_FLOWS}:managed_collision", mode=mode):
        assert counts["changed"] > counts["evicted"] > 0


@pytest.mark.parametrize("through", ["model", "module", "collection"])
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_a_load_is_noticed(two_ranks: RankPool, bag: bool, through: str) -> None:
    two_ranks.run(f"{_FLOWS}:loaded", bag=bag, through=through)
