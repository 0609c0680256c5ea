"""Every kind of sharded module, kernel and optimizer is tracked exactly, or refused with a typed error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankPool

_CASES = "tests.cases.kinds"
_OPTIMIZERS = pytest.mark.xfail(strict=True, reason="optimizers are not looked at")
_REPLICAS = pytest.mark.xfail(strict=True, reason="DMPCollection is taken for a DistributedModelParallel")
_PRUNING = pytest.mark.xfail(strict=True, reason="pruning is not looked for")


@pytest.mark.parametrize(
    "kind",
    [
        {"module": "own ec"},
        {"module": "own ebc", "sharding": "column"},
        {"module": "own ebc", "sharding": "data"},
        {"module": "fused ec"},
        {"module": "fused ebc", "sharding": "table"},
    ],
    ids=str,
)
def test_a_subclass_is_tracked_like_its_base(two_ranks: RankPool, kind: dict[str, Any]) -> None:
    assert any(answer["changed"] for answer in two_ranks.run(f"{_CASES}:track", kind=kind))


def test_all_modules_that_cannot_be_tracked_are_named_together(two_ranks: RankPool) -> None:
    for said in two_ranks.run(f"{_CASES}:refused_modules"):
        assert said["all"].startswith("UnsupportedModuleError: ")
        assert "'bag' (ShardedEmbeddingBag)" in said["all"]
        assert "'split.weight' (DTensor)" in said["all"]
        assert "fqns_to_skip" in said["all"]
        assert "'bag'" not in said["one skipped"]
        assert "'split.weight' (DTensor)" in said["one skipped"]
        assert said["skipped"] == "model.tables.embeddings.t model.tables.embeddings.u"


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_lookups_come_in_addition_to_what_an_ordinary_optimizer_moves(two_ranks: RankPool, mode: str) -> None:
    for counts in two_ranks.run(f"{_CASES}:lookups_of_compared", mode=mode):
        assert counts["moved"] > 20
        assert counts["only looked up"] > 4


@_OPTIMIZERS
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
        assert answer["refused"].startswith("UnsupportedOptimizerError: ")
        assert name in answer["refused"]
        assert "'tables.embedding_bags.t', 'tables.embedding_bags.u'" in answer["refused"]


@_REPLICAS
def test_replicas_are_refused(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:track", kind={"is_replicated": True}):
        assert answer["refused"].startswith("UnsupportedModuleError: ")
        assert "DMPCollection" in answer["refused"]
        assert "'tables.embeddings.t'" in answer["refused"]


@_PRUNING
def test_pruning_is_refused(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:track", kind={"prunes": True}):
        assert answer["refused"].startswith("UnsupportedModuleError: ")
        assert "'pruning'" in answer["refused"]
        assert "GenericITEPModule" in answer["refused"]
