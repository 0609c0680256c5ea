"""Rows of a serving model are written to the table and to the kernel's cache, which is neither flushed nor emptied."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace

import fbgemm_gpu  # noqa: F401  it has the operators
import pytest
import torch
from torch import Tensor

from delta_tracker.row_target import Region, TensorTarget
from delta_tracker.sharding.row_cache import CachedTable, cached_table
from tests.fake_streams.cached_kernel import CachedKernel
from tests.fake_streams.simulation import fake_streams

_ROWS, _DIM, _SLOTS = 12, 4, 5
_CUDA = torch.device("cuda", 0)


def _there(ids: list[int]) -> Tensor:
    return torch.tensor(ids).pin_memory().to(_CUDA, non_blocking=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cached_rows_are_written_in_place(dtype: torch.dtype) -> None:
    """Rows of the cache that no write reached may be newer than the table: the trainer's cache has them."""
    for seed in range(10):
        draw = random.Random(seed)
        rows = torch.arange(_ROWS * _DIM).view(_ROWS, _DIM).to(dtype)
        with fake_streams(seed) as devices:
            kernel = CachedKernel(rows, _SLOTS, cache_dtype=torch.float32)
            cache = cached_table(kernel, 0)
            first = draw.choice([0, 100])
            region = Region((first, first + _ROWS), (0, _DIM), kernel.split_embedding_weights()[0], cache)
            target = TensorTarget(200, _DIM, dtype, [region])
            waits = devices.num_waits
            for _ in range(3):
                kernel.prefetch(_there([draw.choice([slot, slot + _SLOTS]) for slot in range(draw.randrange(1, 5))]))
                dirty = [slot + _SLOTS * draw.randrange(2) for slot in draw.sample(range(_SLOTS), 2)]
                rows[dirty] += 1
                kernel.update(_there(dirty), rows[dirty].pin_memory().to(_CUDA, non_blocking=True))
                ids = sorted(draw.sample(range(_ROWS), draw.randrange(1, _ROWS)))
                columns = draw.choice([(0, _DIM), (1, 3)])
                if draw.random() < 0.3:
                    ids = list(range(min(ids), _ROWS))
                    listed: Tensor | slice = slice(first + min(ids), first + _ROWS)
                else:
                    listed = torch.tensor(ids) + first
                rows[ids, columns[0] : columns[1]] += 50
                target.write(listed, target.prepare(rows[ids, columns[0] : columns[1]], columns), columns)
            assert devices.num_waits == waits, "writes wait for no device"
            looked_up = kernel.lookup(_there(list(range(_ROWS))))
            assert torch.equal(looked_up.cpu(), rows)
            kernel.flush()
            assert torch.equal(kernel.split_embedding_weights()[0].cpu(), rows)
            assert (kernel.num_flushes, kernel.num_resets) == (1, 0)


def test_rows_outside_the_region_are_ignored() -> None:
    with fake_streams(0):
        kernel = CachedKernel(torch.zeros(_ROWS, _DIM), _SLOTS)
        cache = cached_table(kernel, 0)
        target = TensorTarget(
            200, _DIM, torch.float32, [Region((5, 5 + _ROWS), (0, _DIM), kernel.split_embedding_weights()[0], cache)]
        )
        for ids in (torch.tensor([1, 2]), slice(0, 4), torch.tensor([30]), slice(40, 50)):
            num = len(ids) if isinstance(ids, Tensor) else ids.stop - ids.start
            target.write(ids, target.prepare(torch.ones(num, _DIM), (0, _DIM)), (0, _DIM))
        assert not kernel.lookup(_there(list(range(_ROWS)))).any().item()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_read_rounds_no_row_at_random(is_lost: bool) -> None:
    """Otherwise, it draws random numbers of training, and rows that training did not write differ between two reads."""
    with fake_streams(0):
        kernel = CachedKernel(torch.zeros(_ROWS, _DIM, dtype=torch.float16), _SLOTS, cache_dtype=torch.float32)
        kernel.stochastic_rounding = True
        flush, found = kernel.flush, []

        def noting() -> None:
            found.append(kernel.stochastic_rounding)
            flush()
            if is_lost:
                raise RuntimeError("device lost")

        kernel.flush = noting
        with pytest.raises(RuntimeError) if is_lost else nullcontext():
            kernel.kernel.weight(0)
        assert found == [False]
        assert kernel.stochastic_rounding is True


def test_only_cached_tables_have_cached_rows() -> None:
    with fake_streams(0):
        kernel = CachedKernel(torch.zeros(_ROWS, _DIM), _SLOTS)
        assert isinstance(cached_table(kernel, 0), CachedTable)
        cached, name = SimpleNamespace(name="MANAGED_CACHING"), SimpleNamespace(name="DEVICE")
        kernel.embedding_specs = [(3, 4, name, None), (5, 4, cached, None), (7, 4, name, None), (9, 4, cached, None)]
        assert [cached_table(kernel, slot) is None for slot in range(4)] == [True, False, True, False]
        assert cached_table(kernel, 3).first == 5
        kernel.embedding_specs = [("t", 3, 4, None, cached), ("u", 5, 4, None, cached)]
        assert cached_table(kernel, 1).first == 3
        kernel.lxu_cache_weights = torch.zeros(0, 0)
        assert cached_table(kernel, 0) is None
