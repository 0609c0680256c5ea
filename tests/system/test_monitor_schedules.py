"""Random schedules of a monitor, with threads, sinks that fail, and forks: every record is counted once."""

from __future__ import annotations

import pytest

from tests.monitor.deliveries import run
from tests.monitor.hammer import hammer


def test_eight_threads_hammer() -> None:
    hammer(num_threads=8, num_records=400_000)


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules(seed: int) -> None:
    run(seed)
