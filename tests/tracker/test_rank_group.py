"""Groups of ranks some of which are stopped, late or interrupted are created on all ranks or raise in bounded time."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests import forked
from tests.ranks import RankPool
from tests.tracker import rank_group_cases

_CASES = "tests.tracker.rank_group_cases"
_SWEEP = pytest.mark.sweep("short", only=True)
_PHASES = ["call 3", *(pytest.param(phase, marks=_SWEEP) for phase in ("before", "call 12", "created"))]
_FEWER_PHASES = ["call 3", *(pytest.param(phase, marks=_SWEEP) for phase in ("before", "created"))]


@pytest.mark.parametrize("phase", _PHASES)
@pytest.mark.advice("RankLostError: _Rendezvous._wait")
def test_a_rank_that_is_stopped_with_the_store_is_reported(two_ranks: RankPool, tmp_path: Path, phase: str) -> None:
    zero, one = two_ranks.run(f"{_CASES}:stopped", folder=str(tmp_path), victim=0, phase=phase, seconds=1)
    assert "the store of the default process group did not answer rank 1 within 1 s" in one["message"]
    assert "if it died, restart the job" in one["message"]
    assert one["seconds"] < 12
    assert zero["again"] == one["again"] == "2 ranks"


@pytest.mark.parametrize("phase", _FEWER_PHASES)
def test_ctrl_c_ends_the_wait_for_a_store_that_is_stopped(two_ranks: RankPool, tmp_path: Path, phase: str) -> None:
    zero, one = two_ranks.run(
        f"{_CASES}:stopped", folder=str(tmp_path), victim=0, phase=phase, seconds=60, interrupts=True
    )
    assert one["message"] == "interrupted"
    assert one["seconds"] < 12
    assert zero["again"] == one["again"] == "2 ranks"


@pytest.mark.parametrize("phase", _FEWER_PHASES)
def test_a_rank_that_is_stopped_is_reported_by_all_others(four_ranks: RankPool, tmp_path: Path, phase: str) -> None:
    results = four_ranks.run(f"{_CASES}:stopped", folder=str(tmp_path), victim=2, phase=phase, seconds=2)
    for rank in (0, 1, 3):
        assert results[rank]["message"].startswith("a rank was lost: ")
        assert results[rank]["seconds"] < 12
        did_not = "did not connect" if phase == "created" else "did not call create()"
        assert f"rank 2 {did_not}" in results[rank]["message"]
    assert [result["again"] for result in results] == ["4 ranks"] * 4


@_SWEEP
def test_a_pause_of_the_whole_machine_loses_no_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    for result in two_ranks.run(f"{_CASES}:paused", folder=str(tmp_path)):
        assert result["message"] == "created"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", _FEWER_PHASES)
def test_a_rank_that_is_killed_is_reported(tmp_path: Path, victim: int, phase: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = (3, port, str(tmp_path), victim, phase)
    processes = [forked.start(rank_group_cases.killed, rank, *body) for rank in range(3)]
    for process in processes:
        process.join(100)
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3) if rank != victim]
    for result in results:
        assert result["message"].startswith("a rank was lost: ")
        assert ("the store of the default process group " if victim == 0 else "rank 1 did not c") in result["message"]
        assert "restart the job" in result["message"]
        assert result["seconds"] < 12


@_SWEEP
def test_a_long_wait_logs_the_missing_ranks_once_and_then_their_number(four_ranks: RankPool, tmp_path: Path) -> None:
    results = four_ranks.run(f"{_CASES}:late", folder=str(tmp_path))
    for rank in (0, 2):
        assert results[rank]["logged"] == [
            f"create() waits for rank 1, 3: rank={rank}",
            f"create() waits for 1 of 4 ranks: rank={rank}",
        ]
    for rank in (0, 2, 3):
        assert "rank 1 did not call create()" in results[rank]["message"]
        assert "rank 3" not in results[rank]["message"].split("of rank")[0]
    assert [result["again"] for result in results] == ["4 ranks"] * 4


@_SWEEP
@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_gave_up_at_random_are_never_counted(four_ranks: RankPool, seed: int) -> None:
    results = four_ranks.run(f"{_CASES}:attempts", seed=seed, num_rounds=4)
    rounds = [each for result in results for each in result]
    assert {outcome for each in rounds for outcome in each["outcomes"]} <= {"lost", "interrupted", "4 ranks"}
    assert [each["again"] for each in rounds] == ["4 ranks"] * 16
