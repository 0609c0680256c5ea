"""Memory that is lent again: only once nobody holds it, and not for ever."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from delta_tracker.row_memory import RowMemory, new_rows

_LARGE = 5 << 20


def test_memory_is_lent_again_once_nobody_holds_it() -> None:
    memory = RowMemory()
    first = memory.lend(_LARGE)
    place = first.ctypes.data
    tensor = torch.from_numpy(first).view(torch.float32).view(-1, 4)[10:20]
    del first
    assert memory.lend(_LARGE).ctypes.data != place, "a tensor still refers to it"
    del tensor
    gc.collect()
    places = {memory.lend(_LARGE).ctypes.data for _ in range(4)}
    assert place in places | {memory.lend(_LARGE + 1000).ctypes.data}
    assert memory.num_bytes < 3 * _LARGE


def test_what_two_hold_at_a_time_never_overlaps() -> None:
    memory = RowMemory()
    held = [memory.lend(_LARGE) for _ in range(5)]
    for number, each in enumerate(held):
        each[:] = number
    assert [int(each[-1]) for each in held] == [0, 1, 2, 3, 4]


def test_memory_that_is_not_asked_for_any_more_goes_back() -> None:
    memory = RowMemory()
    memory.lend(40 * _LARGE)
    for _ in range(8):
        memory.lend(_LARGE)
    assert memory.num_bytes < 2 * _LARGE


def test_reads_of_many_tables_keep_all_of_their_memory() -> None:
    memory = RowMemory()
    sizes = [_LARGE * (1 + number) for number in range(12)]
    places = []
    for _ in range(3):
        held = [memory.lend(size) for size in sizes]
        places.append([each.ctypes.data for each in held])
        del held
    assert sorted(places[1]) == sorted(places[2])


def test_no_more_is_kept_than_may_be() -> None:
    memory = RowMemory(max_bytes=3 * _LARGE)
    held = [memory.lend(_LARGE) for _ in range(4)]
    assert memory.num_bytes <= 3 * _LARGE
    assert len({each.ctypes.data for each in held}) == 4
    assert len(memory.lend(4 * _LARGE)) == 4 * _LARGE
    assert memory.num_bytes <= 3 * _LARGE


def test_threads_never_get_the_same_memory() -> None:
    memory = RowMemory()
    torn = []

    def work(number: int) -> None:
        for _ in range(200):
            each = memory.lend(_LARGE)
            each[:: 1 << 12] = number
            if not bool((each[:: 1 << 12] == number).all()):
                torn.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn


@pytest.mark.parametrize("like", [torch.empty(0, 64), torch.empty(3, 2, 8, dtype=torch.float16), torch.empty(5)])
@pytest.mark.parametrize("num_rows", [0, 7, 3 << 20])
def test_new_rows_are_like_the_old(like: torch.Tensor, num_rows: int) -> None:
    rows = new_rows(num_rows, like)
    assert (rows.dtype, rows.shape[1:], len(rows)) == (like.dtype, like.shape[1:], num_rows)


def test_large_rows_come_from_memory_that_is_used_again() -> None:
    like = torch.empty(0, 64)
    places = {new_rows(1 << 15, like).data_ptr() for _ in range(5)}
    assert len(places) == 1
