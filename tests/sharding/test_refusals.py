"""Modules and optimizers that cannot be tracked exactly are refused by name."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.kinds_cases"


@pytest.mark.advice("UnsupportedModelError: discover")
@pytest.mark.promise("supported")
def test_all_modules_that_cannot_be_tracked_are_named_together(two_ranks: RankPool) -> None:
    for said in two_ranks.run(f"{_CASES}:refused_modules"):
        assert said["all"].startswith("UnsupportedModelError: the model has ")
        assert "'bag' (ShardedEmbeddingBag)" in said["all"]
        assert "'split.weight' (DTensor)" in said["all"]
        assert "'pool' (ShardedTensorPool)" in said["all"]
        assert "'tower' (_Tower)" in said["all"]
        assert "fqns_to_skip" in said["all"]
        assert "'bag'" not in said["one skipped"]
        assert "'split.weight' (DTensor)" in said["one skipped"]
        assert said["skipped"] == "model.tables.embeddings.t model.tables.embeddings.u"


@pytest.mark.promise("supported")
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("ema", "EMAINPLACE_ROWWISE_ADAGRAD"),
        ("ensemble", "ENSEMBLE_ROWWISE_ADAGRAD"),
        ("global decay", "EXACT_ROWWISE_ADAGRAD with weight decay DECOUPLE_GLOBAL"),
    ],
)
def test_an_optimizer_that_writes_other_rows_is_refused(two_ranks: RankPool, optimizer: str, name: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:track", kind={"module": "ebc", "optimizer": optimizer}):
        assert answer["refused"].startswith("UnsupportedModelError: the model has ")
        parts = ", ".join(f"'tables.embedding_bags.{table}' ({name})" for table in "tu")
        assert f"{parts}. Train them with another" in answer["refused"]


@pytest.mark.promise("supported")
def test_a_collection_without_replicas_in_a_dmp_collection_is_refused(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:track", kind={"is_replicated": True}):
        assert answer["refused"].startswith("UnsupportedModelError: the model has ")
        assert "DMPCollection" in answer["refused"]
        assert "'tables.embeddings.t'" in answer["refused"]


@pytest.mark.advice("UnsupportedModelError: _refuse_stashing")
@pytest.mark.promise("supported")
@pytest.mark.parametrize("chosen_by", ["config", "planner"])
def test_a_table_whose_memory_is_stashed_is_refused(two_ranks: RankPool, chosen_by: str) -> None:
    for answer in two_ranks.run(f"{_CASES}:stashed", chosen_by=chosen_by):
        if answer is not None:  # a release without this option
            assert answer["refused"].startswith("UnsupportedModelError: the model has ")
            assert "'tables.embeddings.t' (stash_weights=True" in answer["refused"]
            assert "tables.embeddings.u" not in answer["refused"]
            assert answer["skipped"] == ["tables.embeddings.u"]


def test_pruning_is_refused(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:track", kind={"prunes": True}):
        assert answer["refused"].startswith("UnsupportedModelError: the model has ")
        assert "'pruning'" in answer["refused"]
        assert "GenericITEPModule" in answer["refused"]
