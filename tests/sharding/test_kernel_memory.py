"""Each kernel is flushed and split into tables once per cut, however many tables it has, and at every cut anew."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from delta_tracker.sharding.discover import Kernel
from delta_tracker.sharding.kernel_memory import memory_of, one_cut
from tests.ranks import RankPool

_CASES = "tests.sharding.kernel_memory_cases"
_ONCE = {"flush": 2, "split_embedding_weights": 2}  # the model has two kernels


@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING", "ROWWISE_ADAGRAD"])
def test_kernels_are_flushed_and_split_once_per_cut(one_rank: RankPool, tmp_path: Path, mode: str) -> None:
    for num_tables in (1, 7):
        url = f"file://{tmp_path}/{num_tables}"
        (found,) = one_rank.run(f"{_CASES}:counts", url=url, num_tables=num_tables, mode=mode)
        assert found["read"] == found["publish"] == found["read tables"] == found["read rows of tables"] == _ONCE
        assert max(found["snapshot"].values()) <= 4, "once for the copy, once for the cut"
        keeps_states = mode != "ID_ONLY"
        assert found["train"].get("flush", 0) == (2 if keeps_states else 0)
        assert found["train"].get("split_embedding_weights", 0) == (2 if mode == "EMBEDDING" else 0)
        assert found["build"]["split_embedding_weights"] == 2


@pytest.mark.parametrize("mode", ["EMBEDDING", "ROWWISE_ADAGRAD"])
@pytest.mark.xfail(strict=True, reason="each step flushes the cache and splits the memory")
def test_a_step_flushes_and_splits_no_kernel(one_rank: RankPool, tmp_path: Path, mode: str) -> None:
    (one,), (seven,) = (
        one_rank.run(f"{_CASES}:steps", num_tables=num_tables, mode=mode) for num_tables in (1, 7)
    )
    assert one["calls"] == seven["calls"] == {}
    assert seven["num_ops"] == 7 * one["num_ops"], "an operation of each table"


@pytest.mark.promise("lossless")
@pytest.mark.xfail(strict=True, reason="hooks flush the cache in each batch")
def test_hooks_read_rows_in_a_cache_without_a_flush(one_rank: RankPool) -> None:
    for seed in range(3):
        one_rank.run(f"{_CASES}:in_place", seed=seed)


@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_every_cut_sees_what_its_own_flush_wrote(one_rank: RankPool, tmp_path: Path, mode: str) -> None:
    (num_flushes,) = one_rank.run(f"{_CASES}:flushed_anew", url=f"file://{tmp_path}/stream", mode=mode)
    assert num_flushes > 6


class _Counting:
    """A kernel of two tables whose rows say how often it was flushed."""

    def __init__(self) -> None:
        self.num_flushes = self.num_splits = 0
        self.kernel = Kernel(self, (("a", 1), ("b", 1)), is_fused=False)
        self.emb_module = SimpleNamespace()

    def flush(self) -> None:
        self.num_flushes += 1

    def split_embedding_weights(self) -> list[torch.Tensor]:
        self.num_splits += 1
        return [torch.full((1, 1), self.num_flushes), torch.full((1, 1), -self.num_flushes)]

    def read(self) -> list[int]:
        return [int(view) for view in memory_of(self.kernel).weights]


def test_a_cut_is_over_with_its_block() -> None:
    kernel = _Counting()
    with one_cut():
        assert kernel.read() == kernel.read() == [1, -1]
        with one_cut():
            assert kernel.read() == [1, -1], "an inner block belongs to the outer one"
        assert kernel.read() == [1, -1]
    assert kernel.num_splits == 1
    with pytest.raises(ZeroDivisionError), one_cut():
        1 / kernel.num_flushes.imag
    assert kernel.read() == [2, -2]
    assert kernel.read() == [3, -3], "outside of a block each read flushes"


def test_a_cut_of_one_thread_is_not_another_threads() -> None:
    kernel = _Counting()
    found = []
    with one_cut():
        kernel.read()
        other = threading.Thread(target=lambda: found.extend([kernel.read(), kernel.read()]))
        other.start()
        other.join()
        assert kernel.read() == [1, -1]
    assert found == [[2, -2], [3, -3]]
