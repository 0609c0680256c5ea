"""The tables of a model are found and named as in its state dict."""

from __future__ import annotations

from tests.ranks import RankPool

_CASES = "tests.tracker.tracking_cases"


def test_tables_are_named_as_in_the_state_dict(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:what_is_tracked"):
        assert sorted(answer["keys"]) == sorted([*answer["tables"], "ec.embeddings.first", "ec.embeddings.row"])
        assert answer["read"] == answer["tables"]
        assert answer["modules"] == {"ec": "ShardedEmbeddingCollection"}
        assert answer["features"]["ec.embeddings.shared"] == ["row"]
        assert len(answer["warnings"]) == 1
        assert "'nonsense'" in answer["warnings"][0]
        assert answer["errors"] == 0


def test_the_same_table_name_in_two_modules(two_ranks: RankPool) -> None:
    for fqns in two_ranks.run(f"{_CASES}:one_name_in_two_modules"):
        assert fqns == ["left.embeddings.t", "right.embeddings.t"]
