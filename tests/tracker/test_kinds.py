"""Every kind of sharded module, kernel and optimizer is tracked exactly, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.kinds_cases"

_NUM_RANDOM = 36


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


@pytest.mark.parametrize("module", ["own ec", "own ebc"])
def test_a_subclass_serves_like_its_base(two_ranks: RankPool, module: str) -> None:
    holder = "embedding_bags" if module == "own ebc" else "embeddings"
    for answer in two_ranks.run(f"{_CASES}:subclasses_serve", module=module):
        assert answer["dense"] == ["dense.bias", "dense.weight"]
        assert [fqn for fqn in answer["targets"] if fqn != "dense"] == [f"tables.{holder}.t", f"tables.{holder}.u"]


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_lookups_come_in_addition_to_what_an_ordinary_optimizer_moves(two_ranks: RankPool, mode: str) -> None:
    for counts in two_ranks.run(f"{_CASES}:lookups_of_compared", mode=mode):
        assert counts["moved"] > 20
        assert counts["only looked up"] > 4


@pytest.mark.promise("supported", "minimal")
def test_random_kinds_are_tracked_exactly_or_refused(two_ranks: RankPool) -> None:
    refused, tracked = [], []
    seeds = list(range(_NUM_RANDOM))
    for outcomes in zip(*two_ranks.run(f"{_CASES}:random_kinds", seeds=seeds), strict=True):
        assert len({"refused" in each for each in outcomes}) == 1, f"one rank refuses and another does not: {outcomes}"
        kind, must = outcomes[0]["kind"], outcomes[0]["must"]
        if "refused" in outcomes[0]:
            assert must, f"{kind}: {outcomes[0]['refused']}"
            refused.append(outcomes[0]["refused"])
        else:
            assert not must, f"{kind} is not refused"
            tracked.append(kind)
            assert sum(each["changed"] for each in outcomes), f"{kind}: no row changed"
    assert any("record='lookups'" in kind and ("'dense'" in kind or "'data'" in kind) for kind in tracked)
    assert len(tracked) > 10
    for words in (
        "ShardedEmbeddingBag",
        "DMPCollection",
        "EMAINPLACE",
        "ENSEMBLE",
        "DECOUPLE_GLOBAL",
        "GenericITEPModule",
    ):
        assert any(words in each for each in refused), words
