"""Models whose gradients would be summed in another order after a restore."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.recovery.job import check_warm


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("finds_unused", [False, True])
def test_the_gradients_of_a_warm_model_have_their_last_order(is_static: bool, finds_unused: bool) -> None:
    inner = DistributedDataParallel(nn.Linear(2, 2), static_graph=is_static, find_unused_parameters=finds_unused)
    model = nn.Sequential(inner)
    is_warm = []
    for _ in range(4):
        try:
            check_warm(model)
            is_warm.append(True)
        except InvalidArgumentError as error:
            assert "Train two batches before restore()" in str(error)  # noqa: PT017
            is_warm.append(False)
        model(torch.ones(1, 2)).sum().backward()
        if is_warm[-1]:
            assert inner._has_rebuilt_buckets == (is_static or not finds_unused), "before the next backward pass"
    assert is_warm == ([True] * 4 if finds_unused and not is_static else [False, False, True, True])


def test_a_model_without_dense_replicas_needs_no_batch() -> None:
    check_warm(nn.Linear(2, 2))


@pytest.mark.advice("InvalidArgumentError: check_warm")
@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_a_wrapper_that_training_does_not_call_has_a_way_out() -> None:
    inner = nn.Linear(2, 2)
    wrapped = DistributedDataParallel(inner)
    for _ in range(3):
        inner(torch.ones(1, 2)).sum().backward()
    with pytest.raises(InvalidArgumentError, match="build it with find_unused_parameters=True, or pass init_data_para"):
        check_warm(wrapped)
    check_warm(DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True))
