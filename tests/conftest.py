"""Fixtures: pools of ranks and servers that all tests of a session share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.ranks import RankPool
from tests.servers import S3, s3_server

# The ranks inherit it: the order in which TorchRec's reshard sends depends on the hashes of strings, and it hangs where
# ranks differ.
os.environ.setdefault("PYTHONHASHSEED", "0")

# A shell that starts the tests in the background has them ignore it, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """A world of four processes, which start at the first case that runs on them."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A bucket of a server on loopback."""
    with s3_server() as bucket:
        yield bucket
