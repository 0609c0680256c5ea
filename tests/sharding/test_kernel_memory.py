"""Each kernel is split into tables once, is flushed once per cut, and is never flushed by a hook."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker.sharding import kernel_memory
from delta_tracker.sharding.kernel_memory import Kernel, one_cut
from tests.ranks import RankPool

_CASES = "tests.sharding.kernel_memory_cases"
_ONCE = {"flush": 2}  # the model has two kernels


@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING", "ROWWISE_ADAGRAD"])
def test_kernels_are_flushed_and_split_once_per_cut(one_rank: RankPool, tmp_path: Path, mode: str) -> None:
    for num_tables in (1, 7):
        url = f"file://{tmp_path}/{num_tables}"
        (found,) = one_rank.run(f"{_CASES}:counts", url=url, num_tables=num_tables, mode=mode)
        assert found["read"] == found["publish"] == found["read tables"] == found["read rows of tables"] == _ONCE
        assert found["snapshot"]["flush"] <= 4, "once for the copy, once for the cut"
        assert found["snapshot"].get("split_embedding_weights", 0) <= 2, "the first read"
        assert found["build"]["split_embedding_weights"] == 2, "for the shapes of the tables"


@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING", "ROWWISE_ADAGRAD"])
def test_a_step_flushes_and_splits_no_kernel(one_rank: RankPool, tmp_path: Path, mode: str) -> None:
    (one,), (seven,) = (one_rank.run(f"{_CASES}:steps", num_tables=num_tables, mode=mode) for num_tables in (1, 7))
    assert one["calls"] == seven["calls"] == {}
    assert seven["num_ops"] == 7 * one["num_ops"], "an operation of each table"


def test_hooks_read_rows_in_a_cache_without_a_flush(one_rank: RankPool) -> None:
    for seed in range(3):
        one_rank.run(f"{_CASES}:in_place", seed=seed)


@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_every_cut_sees_what_its_own_flush_wrote(one_rank: RankPool, tmp_path: Path, mode: str) -> None:
    (num_flushes,) = one_rank.run(f"{_CASES}:flushed_anew", url=f"file://{tmp_path}/stream", mode=mode)
    assert num_flushes > 6


class _Counting(nn.Module):
    """A kernel of two tables whose rows say how often it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_flushes = self.num_splits = 0
        self.register_buffer("weights", torch.zeros(2))
        self.kernel = Kernel(self, (("a", 1), ("b", 1)), is_fused=False)

    @property
    def emb_module(self) -> _Counting:
        return self

    def flush(self) -> None:
        self.num_flushes += 1
        self.weights.copy_(torch.tensor([self.num_flushes, -self.num_flushes]))

    def split_embedding_weights(self) -> list[torch.Tensor]:
        self.num_splits += 1
        return [self.weights[:1].view(1, 1), self.weights[1:].view(1, 1)]

    def read(self) -> list[int]:
        with one_cut():
            return [int(self.kernel.weight(slot)) for slot in (0, 1)]


def test_a_cut_is_over_with_its_block() -> None:
    kernel = _Counting()
    with one_cut():
        assert kernel.read() == kernel.read() == [1, -1]
        with one_cut():
            assert kernel.read() == [1, -1], "an inner block belongs to the outer one"
        assert kernel.read() == [1, -1]
    with pytest.raises(ZeroDivisionError), one_cut():
        1 / kernel.num_flushes.imag
    assert kernel.read() == [2, -2]
    assert int(kernel.kernel.weight(0)) == 3, "outside of a block each read flushes"
    assert int(kernel.kernel.weight(0)) == 4
    assert kernel.num_splits == 1


def test_a_cut_of_one_thread_is_not_another_threads() -> None:
    kernel = _Counting()
    found = []
    with one_cut():
        kernel.read()
        other = threading.Thread(target=lambda: found.extend([kernel.read(), kernel.read()]))
        other.start()
        other.join()
        assert kernel.num_flushes == 3
        kernel.read()
        assert kernel.num_flushes == 3
    assert found == [[2, -2], [3, -3]]


def test_the_views_of_a_kernel_are_freed_with_it() -> None:
    kernel = _Counting()
    kernel.read()
    memory = weakref.ref(kernel.kernel)
    del kernel
    gc.collect()
    assert memory() is None


def test_views_are_split_again_once_their_memory_was_replaced(one_rank: RankPool) -> None:
    one_rank.run(f"{_CASES}:replaced")


def test_the_stub_of_a_cache_has_the_attributes_of_fbgemm(one_rank: RankPool) -> None:
    one_rank.run(f"{_CASES}:fbgemm")


@pytest.mark.parametrize("statement", [kernel_memory.one_cut, kernel_memory.reading_in_place])
def test_an_interrupted_statement_leaves_no_state(statement: Callable[[], AbstractContextManager[None]]) -> None:
    """Later reads of the thread flush the caches of kernels again, whichever line of it was interrupted."""
    for number in itertools.count():
        kernel, is_interrupted = _Counting(), _is_interrupted(statement, number)
        gc.collect()
        assert [int(kernel.kernel.rows(0, torch.tensor([0]))) for _ in range(2)] == [1, 2]
        if not is_interrupted:
            assert number > 0
            return


def _is_interrupted(statement: Callable[[], AbstractContextManager[None]], number: int) -> bool:
    """Run a statement, and interrupt it at a line by its number; return whether it has so many lines."""
    numbers = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        del arg
        is_of_it = frame.f_code.co_filename == kernel_memory.__file__
        if is_of_it and event == "line" and next(numbers) == number:
            raise KeyboardInterrupt
        return trace if is_of_it else None

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        with statement():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False
