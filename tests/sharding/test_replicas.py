"""2D parallelism: the rows that ``DMPCollection.sync`` changes are reported on every replica, and published once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker.sharding.replicas import _is_stable
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.sharding.replicas_cases"


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless", "minimal")
@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_the_rows_that_a_sync_changes_are_reported(two_ranks: RankPool, mode: str) -> None:
    seeds = list(range(20 if SWEEPS_ARE_WHOLE else 2))
    for answer in two_ranks.run(f"{_CASES}:reported", num_replicas=2, mode=mode, seeds=seeds):
        assert all(counts["synced"] for counts in answer)


def test_rows_that_the_next_average_changes_are_reported(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:reported", num_replicas=2, mode="embedding", seeds=[0, 1], dtype="FP16"):
        assert sum(counts["unstable"] for counts in answer) > 0


@pytest.mark.sweep("short")
@pytest.mark.parametrize("num_replicas", [2, 4] if SWEEPS_ARE_WHOLE else [2])
@pytest.mark.parametrize("mode", ["id_only", "embedding", "momentum_diff"])
def test_replicas_of_several_ranks(four_ranks: RankPool, num_replicas: int, mode: str) -> None:
    if not SWEEPS_ARE_WHOLE:
        pytest.skip("the sweeps run this test")
    for bag in (False, True):
        for answer in four_ranks.run(
            f"{_CASES}:reported", num_replicas=num_replicas, mode=mode, seeds=list(range(4)), bag=bag
        ):
            assert all(counts["synced"] for counts in answer)


def test_a_predictor_equals_every_replica_after_a_sync(two_ranks: RankPool, tmp_path: Path) -> None:
    answers = two_ranks.run(f"{_CASES}:follow", url=tmp_path.as_uri(), num_replicas=2)
    assert answers[0] == answers[1]
    assert [kind for kind, _ in answers[0]["versions"]].count("snapshot") == 2


@pytest.mark.sweep("short", only=True)
@pytest.mark.parametrize("local", [{}, {"use_inter_host_allreduce": True}], ids=["alternating", "inter-host"])
def test_a_predictor_equals_replicas_of_several_ranks(
    four_ranks: RankPool, tmp_path: Path, local: dict[str, Any]
) -> None:
    for seed in range(5):
        url = (tmp_path / str(seed)).as_uri()
        four_ranks.run(f"{_CASES}:follow", url=url, num_replicas=2, seed=seed, local=local)


def test_top_k_counts_each_row_once(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(f"{_CASES}:top_k", num_replicas=2)
    assert first["changed"] == second["changed"] > 3
    assert (first["replica"], first["sent"], first["left"]) == (0, 3, first["changed"] - 3)
    assert (second["replica"], second["sent"], second["left"]) == (1, second["changed"], 0)


@pytest.mark.advice("InvalidArgumentError: TrackerCheckpoint._check_synced")
def test_a_state_is_saved_only_after_a_sync(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:saved"):
        before, changed, gathered, after = answer["said"]
        for said in (before, changed, gathered):
            assert said.startswith(
                "InvalidArgumentError: state_dict() cannot be called: replicas of a DMPCollection may"
            )
        assert after == "nothing was raised"
        assert answer["num_pending"] > 0


def test_the_position_of_the_last_sync_is_dropped_if_the_log_is_too_large(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:exceeded"):
        assert answer["before"] < 2_000, "rows that all consumers committed keep no old states"
        assert answer == {"before": answer["before"], "needs": True, "rows": 4000}


def test_trackers_are_detached_in_any_order(two_ranks: RankPool) -> None:
    for answer in two_ranks.run(f"{_CASES}:attached"):
        (both, second, last) = answer["rows"]
        assert both[0] == both[1] > 0
        assert 0 < second < 20
        assert last == [20, 0]
        assert answer["restored"]


@pytest.mark.parametrize(
    ("cause", "errors"), [("number", [0, 0]), ("function", [0, 0]), ("states", [0, 0]), ("error", [1, 0])]
)
def test_all_rows_are_reported_if_a_sync_may_change_them(two_ranks: RankPool, cause: str, errors: list[int]) -> None:
    answers = two_ranks.run(f"{_CASES}:whole", cause=cause, mode="embedding")
    assert [answer["rows"] for answer in answers] == [20, 20]
    assert [answer["errors"] for answer in answers] == errors
    assert [answer["is_old"] for answer in answers] == [not number for number in errors], "unknown after an error"


def test_rows_of_one_replica_only_are_reported_on_all(two_ranks: RankPool) -> None:
    answers = two_ranks.run(f"{_CASES}:whole", cause="load", mode="id_only")
    assert [answer["rows"] for answer in answers] == [20, 20]


@pytest.mark.promise("lossless")
@pytest.mark.parametrize(("num_replicas", "mode"), [(1, "id_only"), (1, "embedding"), (2, "id_only")])
def test_writes_in_place_just_before_a_sync_are_reported(two_ranks: RankPool, num_replicas: int, mode: str) -> None:
    for ids in two_ranks.run(f"{_CASES}:written_before", num_replicas=num_replicas, mode=mode):
        assert 3 in ids


@pytest.mark.advice("UnsupportedModelError: _refuse_replicas")
@pytest.mark.promise("supported")
def test_replicas_whose_writes_cannot_be_reported_are_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(f"{_CASES}:refused"):
        assert said.pop("accepted") == said.pop("skipped") == "nothing was raised"
        assert "'ec.embeddings.t' (in a DMPCollection that is not in the model" in said["no wrapper"]
        assert "FULLY_SHARDED, which averages replicas in each forward pass" in said["fully sharded"]
        assert "maps ids to other rows" in said["collisions"]
        assert "sharded without replicas" in said["sharded before"]
        assert "cached rows of FUSED_UVM_CACHING" in said["cached"]
        assert "'ec.embeddings.u'" not in said["cached"]
        assert all(each.startswith("UnsupportedModelError: ") for each in said.values())


def test_tables_without_a_fused_optimizer_are_not_averaged(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{_CASES}:dense") == [[0, 0, 9], [0, 0, 9]]


def test_training_is_the_same_with_a_tracker(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:untouched")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_the_average_of_equal_values_is_the_value(dtype: torch.dtype, num_replicas: int) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    share = values * (1 / num_replicas)
    total = share.clone()
    for _ in range(num_replicas - 1):
        total = total + share
    is_stable = _is_stable(values.view(-1, 1), num_replicas).flatten()
    assert torch.equal(total[is_stable], values[is_stable])
    assert (~is_stable).sum() <= (100 if dtype == torch.float16 else 0)


def test_values_near_the_limits_are_not_stable() -> None:
    tiny = torch.finfo(torch.float16).smallest_normal
    values = torch.tensor([[tiny * (1 + 2**-10)], [2 * tiny], [0.0], [40_000.0], [torch.inf]], dtype=torch.float16)
    assert _is_stable(values, 2).flatten().tolist() == [False, True, True, False, True]
