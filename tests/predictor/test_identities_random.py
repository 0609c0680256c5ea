"""Random histories of owners: no raw id ever reads the row of another one, and each complete version is exact."""

from __future__ import annotations

import pytest

from tests.predictor.identity_histories import Follower, History, Schedule
from tests.sweeps import SWEEPS_ARE_WHOLE

_NUM_STEPS = 40  # per history
_NUM_HISTORIES = 50 if SWEEPS_ARE_WHOLE else 8  # per part


@pytest.mark.sweep("long")
@pytest.mark.parametrize("part", range(10 if SWEEPS_ARE_WHOLE else 1))
def test_random_owners_never_read_the_row_of_another(part: int) -> None:
    for seed in range(part * _NUM_HISTORIES, (part + 1) * _NUM_HISTORIES):
        Schedule(History(seed), Follower).run(_NUM_STEPS)
