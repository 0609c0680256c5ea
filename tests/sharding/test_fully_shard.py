"""A table that ``fully_shard`` takes after it is tracked is refused at the next read; other tables are not."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.sharding.fully_shard_cases"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_sharded_table_is_refused(one_rank: RankPool, two_ranks: RankPool, is_sparse: bool, world_size: int) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for messages in ranks.run(f"{_CASES}:refused", is_sparse=is_sparse):
        assert len(messages) == (16 if is_sparse else 24)
        for message in messages:
            assert "a table that can no longer be tracked: 'table' (" in message, message
            assert "pass its weight to fully_shard in ignored_params" in message


def test_a_table_that_is_ignored_is_tracked(one_rank: RankPool) -> None:
    assert one_rank.run(f"{_CASES}:ignored") == [[[1, 2], [3]]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_tables_do_not_care(one_rank: RankPool, two_ranks: RankPool, world_size: int) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    assert all(ranks.run(f"{_CASES}:beside_sharded_tables"))
