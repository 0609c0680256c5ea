"""A fence orders the use of memory by several CUDA streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from delta_tracker.buffers.cuda_fence import StreamFence
from delta_tracker.buffers.host_copy import HostCopy, side_stream
from delta_tracker.monitor.device.metrics import DeviceSum, reader_of
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.publisher.host_copies import HostCopier
from tests.fake_streams.simulation import fake_streams

_SEEDS = range(10)
_OTHER = torch.device("cuda", 1)


def test_devices_without_streams_are_ignored() -> None:
    fence = StreamFence(list)
    fence.guard([torch.device("cpu"), torch.device("lazy")])
    fence.enter(1)
    fence.leave(1)
    fence.leave(2)


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_use_waits_for_the_use_on_another_stream(seed: int) -> None:
    with fake_streams(seed):
        memory = torch.zeros(8, device="cuda")
        fence = StreamFence(lambda: [memory])
        fence.guard([memory.device])
        streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        for number in range(9):
            with torch.cuda.stream(streams[number * number % 3]):
                fence.enter()
                memory.mul_(2).add_(number)
        fence.enter()
        assert memory.tolist() == [2.0**8 * sum(number / 2**number for number in range(9))] * 8


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_use_that_continues_is_waited_for_when_it_has_ended(seed: int) -> None:
    """A read between the first hook of a batch and its write must not hide the write from the next read."""
    with fake_streams(seed):
        memory = torch.zeros(8, device="cuda")
        fence = StreamFence(lambda: [memory])
        fence.guard([memory.device])
        reader = torch.cuda.Stream()
        fence.enter(7)
        with torch.cuda.stream(reader):
            fence.enter()
        memory.fill_(3)
        fence.leave(7)
        with torch.cuda.stream(reader):
            fence.enter()
            assert memory.tolist() == [3] * 8


@pytest.mark.parametrize("seed", _SEEDS)
def test_memory_that_another_stream_uses_is_not_reused(seed: int) -> None:
    with fake_streams(seed):
        held = [torch.full((8,), 5.0, device="cuda")]
        fence = StreamFence(lambda: held)
        fence.guard([held[0].device])
        fence.enter()
        with torch.cuda.stream(torch.cuda.Stream()):
            fence.enter()
            copied = held[0] + 1
            held.clear()
            assert copied.tolist() == [6] * 8


@pytest.mark.parametrize("seed", _SEEDS)
def test_each_device_has_its_own_order(seed: int) -> None:
    with fake_streams(seed, num_devices=2):
        memories = [torch.zeros(8, device=f"cuda:{index}") for index in range(2)]
        fence = StreamFence(lambda: memories)
        fence.guard(each.device for each in memories)
        fence.enter()
        for number in range(3):
            with torch.cuda.stream(torch.cuda.Stream(1 if number == 1 else 0)):
                fence.enter()
                for memory in memories:
                    memory.add_(1)
        fence.enter()
        assert [memory.tolist() for memory in memories] == [[3] * 8] * 2


def test_a_captured_stream_waits_for_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA invalidates a capture if the captured stream waits for work that is not captured."""
    with fake_streams(0):
        memory = torch.zeros(8, device="cuda")
        fence = StreamFence(lambda: [memory])
        fence.guard([memory.device])
        fence.enter()
        captured = torch.cuda.Stream()
        with monkeypatch.context() as patched, torch.cuda.stream(captured):
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            fence.enter()
        assert not captured.queue.pending
        assert fence.last_stream(memory.device) == torch.cuda.default_stream()


@pytest.mark.parametrize("what", ["reader", "copy", "sums"])
def test_no_thread_changes_to_the_device_of_another_rank(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.stream() sets the former device at exit. CUDA creates a context of hundreds of MB there."""
    entered = []

    def enter(stream: Any) -> Any:
        entered.append((torch.cuda.current_device(), stream.device.index))
        return devices.entered(stream)

    def work() -> None:  # the current device of a new thread is the first one
        if what == "reader":
            assert HostCopier().reader(_OTHER)(memory).tolist() == [1] * 8
        elif what == "copy":
            assert HostCopy(memory, stream=side_stream(_OTHER)).result().tolist() == [1] * 8
        else:
            stat.update(memory)
            reader_of(monitor).begin()
            assert reader_of(monitor).finish(wait=True)

    monitor = Monitor()
    stat = DeviceSum("s", monitor=monitor)
    with fake_streams(0, num_devices=2) as devices:
        memory = torch.ones(8, device=_OTHER)
        monkeypatch.setattr(torch.cuda, "stream", enter)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert entered
    assert all(current == own for current, own in entered)
