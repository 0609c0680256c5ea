"""Versions with the states of the optimizers and the training state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.publisher.states_cases"


@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "Adagrad"])
def test_a_version_has_the_rows_and_states_at_its_cut(two_ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    two_ranks.run(f"{_CASES}:published", root=str(tmp_path), optimizer=optimizer)


@pytest.mark.sweep("short")
@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", *(["Adagrad", "SGD"] if SWEEPS_ARE_WHOLE else [])])
def test_a_restored_job_continues_the_stream(two_ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    two_ranks.run(f"{_CASES}:restored", root=str(tmp_path), optimizer=optimizer)


@pytest.mark.parametrize("case", ["contents", "in_progress", "wrong_order", "refused", "resumed", "merged"])
def test_case(two_ranks: RankPool, tmp_path: Path, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}", root=str(tmp_path))
