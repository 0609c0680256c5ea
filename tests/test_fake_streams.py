"""The simulated streams find races of programs that forget a wait, and none in the same programs with all waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.fake_streams.cuda import FakeDevices
from tests.fake_streams.simulation import fake_streams
from tests.sweeps import SWEEPS_ARE_WHOLE

_ORDERS = 1000 if SWEEPS_ARE_WHOLE else 20
_CUDA = torch.device("cuda", 0)

# Each program returns True if its result is right. If ``has_waits`` is False, it lacks the waits that it needs.
Program = Callable[[FakeDevices, bool], bool]


def _read_after_write(devices: FakeDevices, has_waits: bool) -> bool:
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    table = torch.zeros(4, 2, device=_CUDA)
    producer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(producer):
        table.add_(1)
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(consumer):
        if has_waits:
            done.wait()
        seen = table[1:3].clone()
        return seen.cpu().eq(1).all().item()


def _write_after_read(devices: FakeDevices, has_waits: bool) -> bool:
    other = torch.cuda.Stream()
    table = torch.ones(4, 2, device=_CUDA)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        seen = table.index_select(0, torch.tensor([2, 0], device=_CUDA))
    if has_waits:
        torch.cuda.current_stream().wait_stream(other)
    table.fill_(5)
    with torch.cuda.stream(other):
        return seen.tolist() == [[1, 1], [1, 1]]


def _copy_to_host(devices: FakeDevices, has_waits: bool) -> bool:
    table = torch.arange(6, device=_CUDA)
    host = torch.empty(6, dtype=torch.int64, pin_memory=True)
    host.copy_(table * 2, non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    if has_waits:
        done.synchronize()
    return host.tolist() == [0, 2, 4, 6, 8, 10]


def _copy_by_to(devices: FakeDevices, has_waits: bool) -> bool:
    host = torch.ones(6, device=_CUDA).to("cpu", non_blocking=True)
    if has_waits:
        torch.cuda.synchronize()
    return host.tolist() == [1] * 6


def _copy_from_host(devices: FakeDevices, has_waits: bool) -> bool:
    host = torch.ones(6).pin_memory()
    table = host.to(_CUDA, non_blocking=True)
    if has_waits:
        torch.cuda.current_stream().synchronize()
    host.zero_()
    return table.tolist() == [1] * 6


def _free(devices: FakeDevices, has_waits: bool) -> bool:
    other = torch.cuda.Stream()
    table = torch.ones(6, device=_CUDA)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        seen = table + 1
    if has_waits:
        table.record_stream(other)
    del table
    with torch.cuda.stream(other):
        return seen.tolist() == [2] * 6


def _torn(devices: FakeDevices, has_waits: bool) -> bool:
    """A row is read while it is written: the result may be old or new, but also both."""
    other = torch.cuda.Stream()
    table = torch.zeros(3, 4, device=_CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        table.copy_(torch.ones(3, 4).pin_memory(), non_blocking=True)
    if has_waits:
        torch.cuda.current_stream().wait_stream(other)
    seen = table.clone().cpu()
    return len(seen.unique()) == 1


def _thread(devices: FakeDevices, has_waits: bool) -> bool:
    """Another thread uses the default stream, whatever stream this thread has chosen."""
    found = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        table = torch.full((3,), 7.0, device=_CUDA)
        done = side.record_event()

        def read() -> None:
            if has_waits:
                torch.cuda.current_stream().wait_event(done)
            found.append(table.tolist())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    return found == [[7, 7, 7]]


_PROGRAMS: list[Program] = [
    _read_after_write,
    _write_after_read,
    _copy_to_host,
    _copy_by_to,
    _copy_from_host,
    _free,
    _torn,
    _thread,
]


def _is_right(program: Program, seed: int, *, has_waits: bool) -> bool:
    with fake_streams(seed, may_race=lambda _: not has_waits) as devices:
        return program(devices, has_waits)


@pytest.mark.sweep("long")
@pytest.mark.parametrize("program", _PROGRAMS)
def test_a_race_is_found_and_a_wait_removes_it(program: Program) -> None:
    assert not all(_is_right(program, seed, has_waits=False) for seed in range(200))
    assert all(_is_right(program, seed, has_waits=True) for seed in range(_ORDERS))


@pytest.mark.parametrize("program", _PROGRAMS)
def test_one_run_shows_a_race_in_any_order(program: Program) -> None:
    for seed in range(10):
        with fake_streams(seed, may_race=lambda _: True) as devices:
            program(devices, False)
        assert devices.races, seed


def test_a_wait_runs_what_it_must_and_nothing_else() -> None:
    for seed in range(10):
        with fake_streams(seed) as devices:
            devices.scheduler._eagerness = 0.0
            first, second = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(second):
                other = torch.zeros(2, device=_CUDA)
                event = second.record_event()
                late = other + 1
            with torch.cuda.stream(first):
                first.wait_event(event)
                table = torch.ones(2, device=_CUDA)
                assert not first.query()
                first.synchronize()
            assert first.query()
            assert event.query()
            assert not second.query(), "no wait for it"
            assert other.held.tolist() == [0, 0]
            assert late.held.tolist() != [1, 1]
            assert table.held.tolist() == [1, 1]
        assert late.held.tolist() == [1, 1], "the end of the simulation runs the rest"


def test_waits_operations_and_pageable_copies_are_counted() -> None:
    with fake_streams(0) as devices:
        table = torch.zeros(8, 4, device=_CUDA)
        assert (devices.num_operations, devices.num_waits, devices.num_pageable) == (1, 0, 0)
        table.index_copy_(0, torch.tensor([3]).pin_memory().to(_CUDA, non_blocking=True), table[:1])
        assert (devices.num_operations, devices.num_waits, devices.num_pageable) == (3, 0, 0)
        table.copy_(torch.ones(8, 4))
        assert (devices.num_operations, devices.num_waits, devices.num_pageable) == (4, 1, 1)
        assert table.sum().item() == 32
        assert (devices.num_operations, devices.num_waits) == (5, 2)
        assert (table > 0).nonzero().shape == (32, 2)
        assert devices.num_waits == 3


def test_devices_are_told_apart() -> None:
    with fake_streams(1, num_devices=2):
        left, right = (torch.ones(3, device=f"cuda:{index}") for index in range(2))
        assert (left.device.index, right.device.index) == (0, 1)
        with pytest.raises(RuntimeError, match="same device"):
            left + right
        with pytest.raises(RuntimeError, match="same device"):
            left + torch.ones(3)
        with torch.cuda.device(1):
            assert torch.cuda.current_stream().device == right.device
            assert torch.zeros(2, device="cuda").device == right.device


def test_an_error_of_an_operation_is_raised_by_the_next_wait() -> None:
    with pytest.raises(IndexError), fake_streams(3):
        torch.zeros(3, device=_CUDA).index_select(0, torch.tensor([9], device=_CUDA)).cpu()


def test_cuda_is_as_before_afterwards() -> None:
    before = torch.cuda.Stream, torch.cuda.current_stream, threading.Thread.run
    with fake_streams(0):
        assert torch.cuda.is_available()
    assert (torch.cuda.Stream, torch.cuda.current_stream, threading.Thread.run) == before


def test_streams_of_a_priority_are_returned_in_turn() -> None:
    with fake_streams(0):
        streams = [torch.cuda.Stream() for _ in range(33)]
        assert streams[32] == streams[0]
        assert torch.cuda.Stream(priority=-1) not in streams


def test_a_tensor_that_moves_to_the_host_frees_its_memory() -> None:
    with fake_streams(0):
        tensor = torch.ones(2, 3, device="cuda")
        storage, host = tensor.untyped_storage(), tensor.cpu()
        size = storage.size()
        storage.resize_(0)
        assert (storage.size(), storage.data_ptr()) == (0, 0)
        tensor.data = host
        assert not tensor.is_cuda
        assert torch.equal(tensor + 1, host + 1)
        storage.resize_(size)
        empty = torch.tensor([], device=0)
        tensor.data = empty.set_(storage, 0, (2, 3), (3, 1))
        assert tensor.is_cuda
        assert not torch.equal(tensor.cpu(), host)
        tensor.copy_(host)
        assert torch.equal(tensor.cpu(), host)
