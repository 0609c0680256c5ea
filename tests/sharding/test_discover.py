"""The tables of a model are found and named as in its state dict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.tracking_cases"
_WRAPPERS = "tests.sharding.wrapper_cases"


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


def test_wrappers_have_no_component_in_names(one_rank: RankPool) -> None:
    (answer,) = one_rank.run(f"{_WRAPPERS}:checkpoint_wrappers")
    for name, (found, expected, part, is_tracked) in answer.items():
        assert found == expected, name
        assert found[0] == ["model.ec.embeddings.t", "model.ec.embeddings.u"]
        assert part == ["model.dense.bias", "model.dense.weight"], name
        assert is_tracked, name


@pytest.mark.parametrize("what", ["collection", "model"])
def test_the_wrapper_of_torch_compile_has_no_component_in_names(one_rank: RankPool, what: str, tmp_path: Path) -> None:
    (names,) = one_rank.run("tests.sharding.compile_cases:compiled_names", what=what, directory=str(tmp_path))
    assert names == ["ec.embeddings.a", "dense.weight", "dense.bias"]


def test_parameters_that_fsdp_shards_are_not_taken_as_whole(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_WRAPPERS}:fsdp"):
        for said in answer.values():
            assert said["tables"] == ["model.ec.embeddings.t"]
            assert said["whole"] == ["model.dense.weight", "over.1.running_mean"]
            assert said["part"] == ["model.dense.bias", "model.dense.weight"]
            assert said["model"].startswith("InvalidArgumentError")
            assert said["name"].startswith("InvalidArgumentError")
        assert "'over.0.weight'" in answer["True"]["model"]
        assert "'over.0.weight'" in answer["True"]["name"]
        assert "each rank has a part" in answer["True"]["name"]
        assert "'_flat_param'" in answer["False"]["model"]


def test_raw_ids_of_managed_collisions_are_not_dense(one_rank: RankPool, two_ranks: RankPool) -> None:
    for answer in (*two_ranks.run(f"{_WRAPPERS}:collision_buffers"), *one_rank.run(f"{_WRAPPERS}:collision_buffers")):
        assert answer["dense"] == ["mc.scale"]
        assert len(answer["names"]) == 2
        for name, message in answer["names"].items():
            assert message.startswith(f"InvalidArgumentError: dense='mc._managed_collision_collection.{name}")
            assert "Pass some of ['mc.scale']" in message


def test_towers_are_refused_by_name_and_with_them_their_dense_parameters(one_rank: RankPool) -> None:
    (answer,) = one_rank.run(f"{_WRAPPERS}:towers")
    assert answer["refused"].startswith("UnsupportedModelError")
    assert "'one' (_Tower), 'some' (_Towers)" in answer["refused"]
    assert answer["tables"] == ["model.ec.embeddings.t"]
    assert answer["dense"].startswith("InvalidArgumentError: dense=['one', 'some']")
    assert answer["name"].startswith("InvalidArgumentError")
    assert answer["part"] == answer["kept"] == ["model.dense.bias", "model.dense.weight"]
