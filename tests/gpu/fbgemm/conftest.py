"""Ranks of the tests with FBGEMM's kernels. On CUDA, all ranks share one device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gpu.devices import IS_CUDA, KIND
from tests.ranks import RankPool

if IS_CUDA:
    # Every rank's shards are on cuda:0, as if each rank were the only one of its host.
    os.environ["DELTA_TRACKER_DEVICE"] = KIND

    @pytest.fixture(scope="session")
    def one_rank() -> Iterator[RankPool]:
        """A world of one process, with NCCL for tensors on the device."""
        pool = RankPool(1, backend="cpu:gloo,cuda:nccl")
        yield pool
        pool.stop()
