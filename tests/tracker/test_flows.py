"""Rows count as changed correctly in every way to train."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.flows_cases"


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_reads_between_the_steps_of_a_pipeline(two_ranks: RankPool, bag: bool) -> None:
    for counts in two_ranks.run(f"{_CASES}:pipeline", bag=bag):
        assert all(counts)


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("case", ["accumulation", "second_backward", "reattached"])
def test_case(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


@pytest.mark.skipif(version("torchrec").startswith("1.3."), reason="its reshard hangs on gloo")
@pytest.mark.parametrize("trains_between", [False, True])
def test_a_table_that_torchrec_moved(two_ranks: RankPool, trains_between: bool) -> None:
    first, second = two_ranks.run(f"{_CASES}:resharded", trains_between=trains_between)
    assert first["shards"] == {"moves": 0, "stays": 12}
    assert second["shards"] == {"moves": 12, "stays": 0}
    assert first["rows"] > 0
    assert second["rows"] > 0
