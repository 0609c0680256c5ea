"""Top-k against slow selection by sorting, over several ranks in one process."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_tracker import DeltaRows, ModelDeltaTracker, TopK
from delta_tracker.errors import InvalidArgumentError, StaleDeltaError
from delta_tracker.tracker.top_k import AllRanks, Candidates, _ordered_keys, choose
from tests.ranks import RankPool
from tests.syncs import find_syncs, held, on_device

_FQNS = ["t", "u"]


class _Threads:
    """Ranks as threads, whose collectives are barriers."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._counts: list[Tensor] = [torch.empty(0)] * world_size
        self.num_calls = 0

    def gather(self, rank: int, counts: Tensor) -> list[Tensor]:
        self._counts[rank] = counts.clone()
        self._barrier.wait()
        gathered = list(self._counts)
        self.num_calls += rank == 0
        self._barrier.wait()
        return gathered


class _Rank(AllRanks):
    def __init__(self, threads: _Threads, rank: int) -> None:
        self._threads, self.rank = threads, rank

    def total(self, counts: Tensor) -> Tensor:
        return torch.stack(self._threads.gather(self.rank, counts)).sum(0)

    def before(self, counts: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(counts), *self._threads.gather(self.rank, counts)[: self.rank]]).sum(0)


def agree(top_k: TopK, ranks: list[Any]) -> tuple[list[Any], int]:
    """Return what each rank selects or raises, and the number of collectives."""
    threads = _Threads(len(ranks))
    answers: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            answers[rank] = choose(top_k, ranks[rank], _FQNS, _Rank(threads, rank))
        except Exception as error:  # noqa: BLE001  it is the answer
            answers[rank] = error

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return answers, threads.num_calls


def sorted_choice(top_k: TopK, ranks: list[dict[str, Candidates]]) -> list[dict[str, list[bool]]]:
    """Reference selection: sort all rows of a budget, and take the first ones that fit."""
    chosen = [{fqn: table.is_due.tolist() for fqn, table in rank.items()} for rank in ranks]
    for group in [[fqn] for fqn in _FQNS] if top_k.per_table else [_FQNS]:
        rows = [
            (-score, rank, _FQNS.index(fqn), place, table.row_bytes if top_k.num_bytes else 1, bool(due))
            for rank, tables in enumerate(ranks)
            for fqn, table in tables.items()
            if fqn in group
            for place, (score, due) in enumerate(zip(table.scores.tolist(), table.is_due.tolist(), strict=True))
        ]
        budget = top_k.rows or top_k.num_bytes or -(-len(rows) * top_k.fraction // 1)
        budget -= sum(cost for *_, cost, due in rows if due)
        waiting = sorted(row for row in rows if not row[5])
        for _, rank, table, place, cost, _ in waiting:
            if cost > budget:
                break
            chosen[rank][_FQNS[table]][place] = True
            budget -= cost
    return chosen


def _candidates(draw: random.Random, num_rows: int, row_bytes: int, values: list[float]) -> Candidates:
    scores = torch.tensor([draw.choice(values) for _ in range(num_rows)], dtype=torch.float32)
    return Candidates(scores, torch.tensor([draw.random() < 0.1 for _ in range(num_rows)], dtype=torch.bool), row_bytes)


def test_a_number_without_a_name_is_that_of_rows() -> None:
    assert TopK(7, per_table=True) == TopK(rows=7, per_table=True)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("budget", [{"rows": 7}, {"rows": 1}, {"fraction": 0.3}, {"fraction": 1.0}, {"num_bytes": 200}])
@pytest.mark.parametrize("per_table", [False, True])
def test_the_agreed_choice_is_the_sorted_one(world_size: int, budget: dict[str, Any], per_table: bool) -> None:
    draw = random.Random(world_size)
    top_k = TopK(**budget, per_table=per_table)
    for _ in range(15):
        values = draw.choice(
            [[0.0, 1.0, 2.0], [-2.5, -1.0, 0.0, 3.5, float("inf")], [draw.gauss(0, 1) for _ in range(99)]]
        )
        ranks = [
            {fqn: _candidates(draw, draw.choice([0, 1, 5, 20]), 24, values) for fqn in _FQNS} for _ in range(world_size)
        ]
        answers, num_collectives = agree(top_k, ranks)
        expected = sorted_choice(top_k, ranks)
        assert [{fqn: mask.tolist() for fqn, mask in answer.items()} for answer in answers] == expected
        assert num_collectives <= 5


def _claimed(table: Candidates) -> Candidates:
    return Candidates(on_device(table.scores), on_device(table.is_due), table.row_bytes)


@pytest.mark.parametrize("budget", [{"rows": 7}, {"fraction": 0.3}, {"fraction": 1.0}, {"num_bytes": 200}])
@pytest.mark.parametrize("per_table", [False, True])
def test_the_choice_on_a_device_is_the_sorted_one(budget: dict[str, Any], per_table: bool) -> None:
    draw = random.Random(0)
    top_k = TopK(**budget, per_table=per_table)
    for _ in range(5):
        values = draw.choice([[0.0, 1.0], [-2.5, -1.0, 0.0, 3.5, float("inf")], [draw.gauss(0, 1) for _ in range(99)]])
        rank = {fqn: _candidates(draw, draw.choice([0, 1, 5, 20]), 24, values) for fqn in _FQNS}
        with find_syncs():
            answer = choose(top_k, {fqn: _claimed(table) for fqn, table in rank.items()}, _FQNS, AllRanks())
        assert [{fqn: held(mask).tolist() for fqn, mask in answer.items()}] == sorted_choice(top_k, [rank])


def test_a_choice_on_a_device_waits_equally_often_for_any_number_of_tables() -> None:
    draw = random.Random(0)
    counts = []
    for num_tables in (1, 10):
        tables = {f"t{number}": _candidates(draw, 50, 24, [-1.0, 0.5, 2.0]) for number in range(num_tables)}
        with find_syncs() as found:
            tables = {fqn: _claimed(table) for fqn, table in tables.items()}
            choose(TopK(rows=20), tables, list(tables), AllRanks())
        counts.append(len(found))
    assert counts[0] == counts[1] <= 5


def test_rows_of_different_cost_share_a_budget_in_bytes() -> None:
    due = torch.zeros(4, dtype=torch.bool)
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0])
    ranks = [{"t": Candidates(scores, due, 100), "u": Candidates(scores + 0.5, due, 10)}]
    (answer,), _ = agree(TopK(num_bytes=230), ranks)
    assert answer["u"].tolist() == [True, True, True, False]
    assert answer["t"].tolist() == [True, True, False, False]


@pytest.mark.advice("InvalidArgumentError: choose")
def test_a_failing_rank_is_reported_to_all() -> None:
    table = Candidates(torch.tensor([1.0]), torch.tensor([False]), 8)
    answers, _ = agree(TopK(rows=1), [{"t": table, "u": table}, ZeroDivisionError("my score")])
    assert isinstance(answers[0], InvalidArgumentError)
    assert "Fix the error of the rank that failed" in str(answers[0])
    assert isinstance(answers[1], ZeroDivisionError)
    answers, _ = agree(TopK(rows=1), [{"t": table, "u": table}, {"t": table, "u": table}])
    assert all(isinstance(answer, dict) for answer in answers)


def test_a_rank_that_fails_in_the_choice_itself_is_heard_by_all() -> None:
    table = Candidates(torch.tensor([1.0]), torch.tensor([False]), 8)
    broken = Candidates(torch.tensor([1.0]), torch.tensor([True, False]), 8)
    answers, _ = agree(TopK(rows=1), [{"t": table, "u": table}, {"t": broken, "u": table}])
    assert isinstance(answers[0], InvalidArgumentError)
    assert "Fix the error of the rank that failed" in str(answers[0])
    assert isinstance(answers[1], IndexError)


def test_a_rank_may_leave_a_table_to_others() -> None:
    table = Candidates(torch.tensor([1.0, 2.0]), torch.tensor([False, False]), 8)
    answers, _ = agree(TopK(rows=2), [{"t": table, "u": table}, {"u": table}])
    assert {fqn: mask.tolist() for fqn, mask in answers[0].items()} == {"t": [False, True], "u": [False, True]}
    assert {fqn: mask.tolist() for fqn, mask in answers[1].items()} == {"u": [False, False]}


def test_keys_are_ordered_as_scores() -> None:
    scores = torch.tensor([-torch.inf, -3.5, -1e-40, 0.0, 1e-40, 2.0, torch.inf])
    keys = _ordered_keys(scores)
    assert (keys[1:] > keys[:-1]).all()
    assert keys.min() >= 0
    assert keys.max() < 1 << 32
    assert _ordered_keys(torch.tensor([-0.0])) == _ordered_keys(torch.tensor([0.0]))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"rows": 1, "fraction": 0.5},
        {"rows": 0},
        {"rows": -1},
        {"rows": 0.5},
        {"num_bytes": True},
        {"num_bytes": 0},
        {"fraction": 0.0},
        {"fraction": 1.5},
        {"fraction": float("nan")},
        {"rows": 1, "max_age": 0},
    ],
)
def test_impossible_budgets_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        TopK(**arguments)


def test_one_process_is_a_world_of_one() -> None:
    ranks = AllRanks()
    assert ranks.total(torch.tensor([3])).tolist() == [3]
    assert ranks.before(torch.tensor([3])).tolist() == [0]


@pytest.mark.parametrize(("how", "error"), [("behind", "NeedsSnapshotError"), ("detached", "DetachedError")])
def test_a_rank_that_cannot_read_does_not_keep_the_others_waiting(two_ranks: RankPool, how: str, error: str) -> None:
    (first,), (second,) = two_ranks.run("tests.tracker.top_k_cases:failing_rank", how=how)
    assert "the rank that failed before it selected its rows" in first
    assert second.startswith(error)


@pytest.mark.parametrize("scored", [False, True])
def test_rows_with_another_raw_id_are_never_left_out(two_ranks: RankPool, scored: bool) -> None:
    assert all(count > 20 for count in two_ranks.run("tests.tracker.collision_cases:left_out_owners", scored=scored))


def _train(model: nn.Module, *ids: int) -> None:
    model.zero_grad()
    model(torch.tensor([ids])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_rows_that_change_while_a_score_reads_another_consumer_are_sent_later() -> None:
    model = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True))
    tracker = ModelDeltaTracker(model, ["first", "second"])

    def score(fqn: str, rows: DeltaRows) -> Tensor:
        _train(model, 5)
        tracker.get_delta("second")
        return torch.zeros(len(rows))

    _train(model, 2)
    assert tracker.get_delta("first", top_k=TopK(rows=8, score=score))["0"].ids.tolist() == [2]
    assert tracker.get_delta_ids("first")["0"].tolist() == [5]
    assert tracker.get_delta_ids("second")["0"].tolist() == []


@pytest.mark.advice("StaleDeltaError: LogConsumers._current", "InvalidArgumentError: LogConsumers.find")
@pytest.mark.parametrize("call", ["get_delta", "clear", "remove_consumer"])
def test_a_score_that_changes_its_own_consumer_makes_the_read_stale(call: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True))
    tracker = ModelDeltaTracker(model, ["first", "second"])

    def score(fqn: str, rows: DeltaRows) -> Tensor:
        _train(model, 5)
        getattr(tracker, call)("first")
        _train(model, 6)
        return torch.zeros(len(rows))

    _train(model, 2)
    with pytest.raises(InvalidArgumentError if call == "remove_consumer" else StaleDeltaError):
        tracker.get_delta("first", top_k=TopK(rows=8, score=score))
    if call != "remove_consumer":
        assert tracker.get_delta_ids("first")["0"].tolist() == [6]
    assert tracker.get_delta_ids("second")["0"].tolist() == [2, 5, 6]
