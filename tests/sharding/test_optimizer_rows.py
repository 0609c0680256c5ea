"""States and numbers of fused optimizers, and updates in progress."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.sharding.optimizer_rows_cases"


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad"])
def test_the_views_are_those_of_the_kernels(two_ranks: RankPool, optimizer: str) -> None:
    two_ranks.run(f"{_CASES}:views", optimizer=optimizer)


@pytest.mark.advice("InvalidArgumentError: kernel_scalars")
@pytest.mark.parametrize("case", ["scalars", "refused", "written"])
def test_case(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


@pytest.mark.parametrize("case", ["waiting", "others"])
def test_a_cut_of_states(one_rank: RankPool, case: str) -> None:
    one_rank.run(f"{_CASES}:{case}")
