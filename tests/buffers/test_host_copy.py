"""A copy to the host is complete when it says so, and the thread that starts it does not wait."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.buffers.host_copy import HostCopy, side_stream
from tests.fake_streams.simulation import fake_streams
from tests.syncs import find_syncs, on_device


def test_a_copy_on_other_devices_than_cuda_is_made_when_it_is_needed() -> None:
    with find_syncs():
        source = on_device(torch.arange(3))
        with find_syncs() as found:
            copy = HostCopy(source, stream=side_stream(source.device))
            assert not copy.is_done
            assert not copy.is_running
            assert copy.num_bytes == 0
        assert not found
        with find_syncs() as found:
            assert copy.result().tolist() == [0, 1, 2]
            assert copy.is_done
            assert copy.result() is copy.result()
        assert len(found) == 1


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_copy_has_the_values_of_the_queued_work(seed: int, aside: bool) -> None:
    """Also if its source is freed before it is complete, on the device that is not the current one."""
    with fake_streams(seed, num_devices=2) as devices:
        source = torch.zeros(8, device="cuda:1")
        for _ in range(3):
            source += 1
        copy = HostCopy(source, stream=side_stream(source.device) if aside else None)
        del source
        later = torch.full((8,), 9.0, device="cuda:1")
        assert devices.num_waits == 0
        if copy.is_done:
            assert not copy.is_running
            assert devices.num_waits == 0
        assert copy.result().tolist() == [3.0] * 8
        assert copy.is_done
        assert copy.num_bytes == 32
        assert devices.num_pageable == 0
        assert later.tolist() == [9.0] * 8


def test_a_side_stream_is_none_of_the_streams_of_training() -> None:
    """Neither of those that TorchRec and NCCL ask for, also if torch's pool has returned all its streams before."""
    with fake_streams(0, pool=(1, 4)):
        others = [torch.cuda.current_stream(), *(torch.cuda.Stream(priority=each) for each in (0, -1, -3))]
        assert side_stream(torch.device("cuda", 0)) not in others
        assert torch.cuda.Stream() in others
