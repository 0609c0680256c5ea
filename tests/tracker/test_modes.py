"""Tracking modes, ordinary optimizers, consumers and top-k on real sharded models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.tracker.modes import CAPTURES, UPDATE_MODE_MAP
from delta_tracker.types import EmbdUpdateMode, ShardSpec, TableSpec, TrackingMode
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.tracker.modes_cases"


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
        ("Adam", {"lr": 0.1}),
    ],
    ids=str,
)
def test_rows_that_an_ordinary_optimizer_moves(
    two_ranks: RankPool, optimizer: str, arguments: dict[str, float], mode: str
) -> None:
    totals = two_ranks.run(f"{_CASES}:dense", optimizer=optimizer, arguments=arguments, mode=mode)
    assert totals[0]["moved"] == totals[1]["moved"], "every rank sees the rows of all ranks"
    assert totals[0]["moved"] > max(total["looked up"] for total in totals)


@pytest.mark.sweep("short")
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
@pytest.mark.parametrize("seed", range(3 if SWEEPS_ARE_WHOLE else 1))
def test_old_states_are_what_the_consumer_last_received(two_ranks: RankPool, seed: int, bag: bool) -> None:
    assert all(two_ranks.run(f"{_CASES}:first_seen", seed=seed, bag=bag))


@pytest.mark.parametrize(
    ("mode", "optimizer", "answer"),
    [
        ("momentum_last", "RowWiseAdagrad", "right"),
        ("momentum_last", "Adagrad", "right"),
        ("momentum_last", "SGD", "keeps no state per row"),
        ("momentum_diff", "RowWiseAdagrad", "right"),
        ("rowwise_adagrad", "RowWiseAdagrad", "right"),
        ("momentum_diff", "Adagrad", "keeps no sum of squared gradients per row"),
        ("momentum_diff", "SGD", "keeps no state per row"),
    ],
)
def test_momentum(two_ranks: RankPool, mode: str, optimizer: str, answer: str) -> None:
    for said in two_ranks.run(f"{_CASES}:momentum", mode=mode, optimizer=optimizer):
        assert answer in said


@pytest.mark.parametrize(
    ("budget", "mode"),
    [
        ({"rows": 6}, "embedding"),
        ({"rows": 3, "per_table": True}, "embedding"),
        ({"fraction": 0.25}, "embedding"),
        ({"num_bytes": 400}, "embedding"),
        ({"rows": 4, "max_age": 2}, "embedding"),
        ({"rows": 6}, "momentum_diff"),
        ({"rows": 6}, "momentum_last"),
    ],
    ids=str,
)
def test_top_k(two_ranks: RankPool, budget: dict[str, Any], mode: str) -> None:
    answers = two_ranks.run(f"{_CASES}:top_k", budget=budget, mode=mode)
    sent = [sum(counts) for counts in zip(*(answer["sent"] for answer in answers), strict=True)]
    assert all(sum(counts) > 0 for counts in zip(*(answer["left"] for answer in answers), strict=True))
    if "rows" in budget and "max_age" not in budget:
        assert max(sent) <= budget["rows"] * (6 if budget.get("per_table") else 1)
        assert min(sent) == max(sent) or budget.get("per_table")
    if "num_bytes" in budget:
        assert max(sent) <= 400 // (4 * 4 + 8)


@pytest.mark.parametrize("mode", TrackingMode)
def test_a_mode_states_what_it_keeps(mode: TrackingMode) -> None:
    table = TableSpec("t", 5, 3, torch.float16)
    weight, state = torch.rand(5, 3).half(), torch.rand(5)
    memory: Any = SimpleNamespace(rows=lambda _, ids: weight[ids], optimizer_states=lambda _: [state])
    places = ((memory, 0),)
    shard = LocalShard(ShardSpec(table, 0, 5, ((0, 3),)), places, torch.device("cpu"), is_fused=True)
    capture = CAPTURES[mode]
    assert capture.old_states(shard, torch.tensor([3, 1])).nbytes == 2 * capture.old_state_bytes(table)
    assert capture.keeps_old == (capture.old_state_bytes(table) > 0) == (UPDATE_MODE_MAP[mode] is EmbdUpdateMode.FIRST)


def test_rows_of_a_replicated_table_are_selected_once(two_ranks: RankPool) -> None:
    (sent, left), (all_of_it, none_left) = two_ranks.run(f"{_CASES}:top_k_of_replicated")
    assert (sent, left + sent, none_left) == (2, all_of_it, 0)


@pytest.mark.promise("refused")
def test_bad_input_is_refused_by_name(two_ranks: RankPool) -> None:
    for rank, messages in enumerate(two_ranks.run(f"{_CASES}:refused_top_k")):
        assert "give TopK a score" in messages["no score"]
        assert ("without NaN" if rank == 0 else "the rank that failed") in messages["nan"]
        assert "ids=[15, -1]" in messages["outside"]
        assert "tensor of integers" in messages["floats"]
        assert "'ec.embeddings.t'" in messages["table"]
        assert "consumer='default'" in messages["consumer"]
        assert "Pass one of the known consumers" in messages["remove"]
        assert "Pass one of the known consumers" in messages["clear"]
        assert "'torch'" in messages["engine"]
        assert "('updates', 'lookups')" in messages["record"]


@pytest.mark.parametrize("mode", ["id_only", "embedding"])
def test_lookups(two_ranks: RankPool, mode: str) -> None:
    two_ranks.run(f"{_CASES}:lookups", mode=mode)


@pytest.mark.promise("independent")
@pytest.mark.parametrize("case", ["consumers", "recorded_by_hand", "unknown_first"])
def test_case(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


@pytest.mark.promise("independent")
def test_a_slow_consumer_gets_an_error_that_it_needs_a_snapshot(two_ranks: RankPool) -> None:
    for message in two_ranks.run(f"{_CASES}:slow_consumer"):
        assert message.startswith("NeedsSnapshotError: consumer 'slow' needs a snapshot")
