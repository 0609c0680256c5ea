"""Collections inside other modules of TorchRec, and batches of unusual shapes, are tracked exactly."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool


@pytest.mark.promise("lossless")
@pytest.mark.parametrize(
    "kind", ["feature processors", "pec", "repeated ids removed", "uneven batches", "variable batch"]
)
def test_reported_rows_are_those_that_changed(two_ranks: RankPool, kind: str) -> None:
    found = two_ranks.run("tests.tracker.wrapped_cases:exact", kind=kind)
    if found == [None, None]:
        pytest.skip("this release of torchrec has no such module")
    assert sum(found) > 0


@pytest.mark.promise("lossless")
@pytest.mark.parametrize(
    "sharding", ["column_wise", "data_parallel", "grid_shard", "table_column_wise", "table_row_wise"]
)
def test_feature_processors_are_tracked_under_every_sharding(two_ranks: RankPool, sharding: str) -> None:
    assert sum(two_ranks.run("tests.tracker.wrapped_cases:exact", kind="feature processors", sharding=sharding)) > 0
