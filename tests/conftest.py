"""Fixtures: pools of ranks that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A world of one process."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """A world of two processes."""
    pool = RankPool(2)
    yield pool
    pool.stop()
