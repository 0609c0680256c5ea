"""The checks of the endurance run; ``.ci/run`` runs it for a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.endurance import Endurance
from tests.system.endurance_processes import Paths

_FLAT: dict[str, Any] = {
    "trainer MB": 400.0,
    "kept MB": 300.0,
    "files": 500,
    "stream MB": 200.0,
    "latency p50 ms": 40,
    "latency p99 ms": 400,
}


def _problems(last: dict[str, Any]) -> list[str]:
    run = Endurance(Paths(Path(), Path()), 0, 7200.0, can_fill=False)
    run.check_growth({"quarters": [_FLAT, _FLAT, last, last]})
    return run.problems


def test_what_stays_the_same_is_no_problem() -> None:
    assert _problems(_FLAT) == []


@pytest.mark.parametrize("name", _FLAT)
def test_growth_is_a_problem(name: str) -> None:
    (problem,) = _problems(_FLAT | {name: 3 * _FLAT[name]})
    assert problem.startswith(f"{name} grew from")


@pytest.mark.parametrize("name", _FLAT)
def test_a_missing_figure_is_a_problem(name: str) -> None:
    (problem,) = _problems(_FLAT | {name: None})
    assert name in problem
