"""A copy of a tracked model works and is not tracked; the tracker of the original reports only the original's rows."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from delta_tracker import ModelDeltaTracker
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.sharding.copies_cases"


_WAYS = ["deepcopy", "twice", "average", "torchrec"]
_EVERY_COPY = list(itertools.product([1, 2], _WAYS, ["id_only", "embedding"]))
_SOME_COPIES = [*((2, how, "embedding") for how in _WAYS), (1, "deepcopy", "id_only"), (1, "torchrec", "id_only")]


@pytest.mark.sweep("short")
@pytest.mark.parametrize(("world_size", "how", "mode"), _EVERY_COPY if SWEEPS_ARE_WHOLE else _SOME_COPIES)
def test_a_copy_of_a_sharded_model(
    one_rank: RankPool, two_ranks: RankPool, how: str, mode: str, world_size: int
) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for answer in ranks.run(f"{_CASES}:copied", how=how, mode=mode):
        assert answer["errors"] == 0
        assert answer["is_shared"] == (how == "torchrec")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_with_managed_collisions(one_rank: RankPool, two_ranks: RankPool, world_size: int) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for num_rows, num_evicted in ranks.run(f"{_CASES}:copied_collisions"):
        assert num_rows > 0
        assert num_evicted > 0
    assert all(ranks.run(f"{_CASES}:shared_collisions"))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")  # the compiler's own code
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_copy_of_a_plain_model(is_sparse: bool, is_compiled: bool) -> None:
    model: Any = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=is_sparse, mode="sum"))
    model = torch.compile(model, backend="eager") if is_compiled else model
    tracker = ModelDeltaTracker(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    copied, its = copy.deepcopy((model, optimizer))
    again = ModelDeltaTracker(copied)
    for each, stepped, ids in ((model, optimizer, [1, 2]), (copied, its, [3])):
        each(torch.tensor([ids])).sum().backward()
        stepped.step()
    average.update_parameters(model)
    assert tracker.get_delta()["0"].ids.tolist() == [1, 2]
    assert again.get_delta()["0"].ids.tolist() == [3]


def test_a_copy_in_2d_parallelism(two_ranks: RankPool) -> None:
    for num_rows in two_ranks.run(f"{_CASES}:copied_replicas"):
        assert num_rows > 0
