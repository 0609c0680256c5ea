"""Predictors of sharded and quantized models that follow real trainers with other shardings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.predictor.serving_cases"
_EC = ["row", "table:0", "table:1", "column:0,1", "column:1,1"]
_EBC = [*_EC, "data", "table_row:0", "table_column:0,1"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


@pytest.mark.parametrize("kernels", [["fused", "fused"], ["fused", "fused_uvm_caching"]], ids=str)
@pytest.mark.parametrize("bag", [False, True])
def test_every_sharding_serves_every_sharding(two_ranks: RankPool, url: str, bag: bool, kernels: list[str]) -> None:
    shardings = _EBC if bag else _EC
    answers = two_ranks.run(f"{_CASES}:sharded", url=url, shardings=shardings, bag=bag, kernels=kernels)
    for answer in answers:
        assert answer["tables"] == len(shardings) ** 2
        assert len(shardings) <= answer["held"] < answer["tables"]  # a table-wise table is on one rank only
        assert all(answer["rows"])


def test_a_dense_trainer_serves_a_dense_server(two_ranks: RankPool, url: str) -> None:
    shardings = ["row", "table:0", "column:0,1", "data"]
    two_ranks.run(f"{_CASES}:sharded", url=url, shardings=shardings, bag=True, kernels=["dense", "dense"])


def test_grids_serve_grids_and_others(four_ranks: RankPool, url: str) -> None:
    shardings = ["grid:0,1", "row", "column:0,1,2,3", "table_row:1"]
    four_ranks.run(
        f"{_CASES}:sharded",
        url=url,
        shardings=shardings,
        bag=True,
        kernels=["fused", "fused"],
        dim=256,
        local_size=2,
    )


@pytest.mark.parametrize(
    ("bag", "kind", "server"),
    [
        (False, "int8", None),
        (True, "int8", None),
        (False, "int4", None),
        (True, "int4", None),
        (False, "fp16", None),
        (True, "fp16", None),
        (False, "int8", "row"),
        (True, "int4", "row"),
        (True, "int8", "column"),
        (True, "int4", "column"),
        (True, "int8", "table"),
    ],
)
def test_every_sharding_serves_quantized_models(
    two_ranks: RankPool, url: str, bag: bool, kind: str, server: str | None
) -> None:
    for rows in two_ranks.run(f"{_CASES}:quantized", url=url, bag=bag, kind=kind, server=server):
        assert all(rows)


def test_rows_with_a_part_of_their_columns_wait_for_a_snapshot(two_ranks: RankPool, url: str) -> None:
    for message in two_ranks.run(f"{_CASES}:partial", url=url):
        assert message.startswith("1 rows of table 'ec.embedding_bags.column' have the columns (0, 4) only")


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching"])
def test_cached_rows_are_written_in_place(two_ranks: RankPool, kernel: str) -> None:
    for events in two_ranks.run(f"{_CASES}:caches", kernel=kernel):
        assert events == []


def test_four_trainers_serve_two_predictors(four_ranks: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    """Run two jobs that share a directory and nothing else."""
    trained = ["grid:0,1", "row", "column:0,1,2,3", "table_row:1", "table:3", "data"]
    served = ["row", "column:0,1", "table:1", "column:1,1", "row", "table:0"]
    directory = str(tmp_path)
    cases = "tests.predictor.two_jobs_cases"
    with ThreadPoolExecutor() as threads:
        ends = threads.submit(two_ranks.run, f"{cases}:predictor", directory=directory, shardings=served)
        trainers = four_ranks.run(f"{cases}:trainer", directory=directory, shardings=trained, num_batches=36)
        assert set(trainers) == set(ends.result())
    assert trainers[0] > 5
