"""The sweep of a mirror: killed, or its stores fail, before, within and after each storage operation.

Runs one point in nine with exceptions instead of kills; ``make test-sweeps`` runs all of them, and kills processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.stores.rules import Killed
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.system.mirror_sweep import Scenario, check_killed, fail_at, kill_at, points_of

_EVERY = 1 if SWEEPS_ARE_WHOLE else 9


def _die() -> None:
    raise Killed


@pytest.mark.sweep("short")
@pytest.mark.promise("atomic")
@pytest.mark.parametrize("is_merged", [False, True])
def test_a_killed_mirror_leaves_a_prefix_and_is_completed(tmp_path: Path, is_merged: bool) -> None:
    scenario = Scenario(is_merged=is_merged)
    points, _ = points_of(scenario, tmp_path)
    assert {when for _, when in points} == {"before", "within", "after"}
    for index, point in enumerate(points[::_EVERY]):
        with pytest.raises(Killed):
            kill_at(scenario, tmp_path / f"{index}", point, _die)
        check_killed(scenario, tmp_path / f"{index}")


@pytest.mark.sweep("short")
@pytest.mark.parametrize("is_source", [False, True])
def test_a_mirror_continues_after_a_failure_of_a_store(tmp_path: Path, is_source: bool) -> None:
    scenario = Scenario(is_merged=False)
    points = points_of(scenario, tmp_path)[is_source]
    for index, point in enumerate(points[1::_EVERY]):
        fail_at(scenario, tmp_path / f"{index}", point, is_source=is_source)


@pytest.mark.sweep("short", only=True)
@pytest.mark.timeout(300)
def test_every_kill_of_a_process(tmp_path: Path) -> None:
    run = forked.run("tests.system.mirror_sweep", str(tmp_path), timeout_seconds=290)
    assert run.returncode == 0, run.stderr
