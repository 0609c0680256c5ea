"""Reuse of memory: only after its last view is gone, and within bounds."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from delta_tracker.buffers.pool import MEMORY, BufferPool, new_rows

_LARGE = 5 << 20


def _place(array: NDArray[np.uint8]) -> int:
    return array.ctypes.data


def test_memory_is_reused_after_its_last_view_is_gone() -> None:
    memory = BufferPool()
    first = memory.allocate(_LARGE)
    place = _place(first)
    view = first[100:200][::2]
    tensor = torch.from_numpy(first).view(torch.float32).view(-1, 4)[10:20]
    for held in ("the array", "a view", "a tensor"):
        assert _place(memory.allocate(_LARGE)) != place, f"{held} still refers to it"
        if held == "the array":
            del first
        elif held == "a view":
            del view
    del tensor
    gc.collect()
    both = [memory.allocate(_LARGE), memory.allocate(_LARGE + 1000)]
    assert place in map(_place, both)
    assert memory.free_bytes == 0


def test_a_debugger_that_keeps_frames_makes_no_memory_free() -> None:
    memory, frames = BufferPool(), []

    def keep(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            frames.append(frame)

    sys.setprofile(keep)
    first = memory.allocate(_LARGE)
    sys.setprofile(None)
    frames.clear()
    assert _place(memory.allocate(_LARGE)) != _place(first)


def test_buffers_in_use_never_overlap() -> None:
    memory = BufferPool()
    held = [memory.allocate(_LARGE) for _ in range(5)]
    for number, each in enumerate(held):
        each[:] = number
    assert [int(each[-1]) for each in held] == [0, 1, 2, 3, 4]


def test_memory_that_is_no_longer_requested_is_freed() -> None:
    memory = BufferPool()
    memory.allocate(40 * _LARGE)
    for _ in range(8):
        memory.allocate(_LARGE)
    assert 0 < memory.free_bytes < 2 * _LARGE
    memory.release_free()
    assert memory.free_bytes == 0


def test_reads_of_many_tables_keep_all_of_their_memory() -> None:
    memory = BufferPool()
    sizes = [_LARGE * 2**number for number in range(6)]
    places = []
    for _ in range(3):
        held = [memory.allocate(size) for size in sizes]
        places.append(sorted(map(_place, held)))
        del held
    assert places[0] == places[1] == places[2]


def test_free_memory_is_bounded() -> None:
    memory = BufferPool(max_bytes=3 * _LARGE)
    held = [memory.allocate(_LARGE) for _ in range(4)]
    assert len(set(map(_place, held))) == 4
    assert memory.free_bytes == 0
    held.clear()
    assert 0 < memory.free_bytes <= 3 * _LARGE
    assert len(memory.allocate(4 * _LARGE)) == 4 * _LARGE
    assert memory.free_bytes <= 3 * _LARGE


def test_long_lived_buffers_do_not_affect_the_memory_of_reads() -> None:
    memory = BufferPool(max_bytes=20 * _LARGE)
    states = [memory.allocate(_LARGE) for _ in range(60)]
    places = set()
    for _ in range(3):
        places.add(_place(memory.allocate(10 * _LARGE)))
    assert len(places) == 1
    assert len(states) == 60


def test_a_busy_pool_allocates_new_memory() -> None:
    memory = BufferPool()
    with memory._lock:  # as in a signal handler that interrupts a request, or in a process forked during one
        assert len(memory.allocate(_LARGE)) == _LARGE
        memory.release_free()
    assert memory.free_bytes == 0


def test_the_last_user_frees_unused_memory() -> None:
    class User:
        pass

    memory, first, second, forgotten = BufferPool(), User(), User(), User()
    for user in (first, second, second, forgotten):
        memory.join(user)
    memory.allocate(_LARGE)
    del forgotten, user
    for _ in range(2):
        memory.leave(first)
        assert memory.free_bytes >= _LARGE
    memory.leave(second)
    assert memory.free_bytes == 0


def test_requests_stay_cheap_with_many_buffers() -> None:
    """Comparing each request with each buffer would take 100 times the work for 10 times the buffers."""
    few, many = (_work_to_lend(number) for number in (100, 1000))
    assert many < 20 * few


def _work_to_lend(number: int) -> int:
    """Lend buffers and free them, three times; return the number of executed instructions of Python."""
    memory, num_done, former = BufferPool(min_bytes=1), 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_done
        frame.f_trace_opcodes = True
        num_done += event == "opcode"
        return trace

    sys.settrace(trace)
    for _ in range(3):
        held = [memory.allocate(4096) for _ in range(number)]
        held.clear()
    sys.settrace(former)
    assert memory.free_bytes >= number * 4096
    return num_done


def test_threads_never_get_the_same_memory() -> None:
    memory, held, shared = BufferPool(), set[int](), []
    guard = threading.Lock()

    def work() -> None:
        for _ in range(300):
            loan = memory.allocate(_LARGE)
            with guard:
                if _place(loan) in held:
                    shared.append(_place(loan))
                held.add(_place(loan))
            loan[:: 1 << 12] = 1
            with guard:
                held.discard(_place(loan))
            del loan

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not shared


@pytest.mark.parametrize("like", [torch.empty(0, 64), torch.empty(3, 2, 8, dtype=torch.float16), torch.empty(5)])
@pytest.mark.parametrize("num_rows", [0, 7, 3 << 20])
def test_new_rows_are_like_the_old(like: torch.Tensor, num_rows: int) -> None:
    rows = new_rows(num_rows, like)
    assert (rows.dtype, rows.shape[1:], len(rows)) == (like.dtype, like.shape[1:], num_rows)
    assert rows.is_contiguous()
    rows.fill_(1)


def test_large_rows_use_pooled_memory() -> None:
    MEMORY.release_free()
    like = torch.empty(0, 64)
    places = {new_rows(1 << 15, like).data_ptr() for _ in range(5)}
    assert len(places) == 1
