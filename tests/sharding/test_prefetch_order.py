"""A flush of cached rows never overlaps a prefetch of the same kernel."""

from __future__ import annotations

import random

import fbgemm_gpu  # noqa: F401  it has the operators
import pytest
import torch
from torch import Tensor

from delta_tracker.sharding.kernel_memory import reading_in_place
from delta_tracker.sharding.row_cache import between_prefetches
from tests.fake_streams.cached_kernel import CachedKernel
from tests.fake_streams.simulation import fake_streams
from tests.sweeps import SWEEPS_ARE_WHOLE

_ORDERS = 1000 if SWEEPS_ARE_WHOLE else 32
_ROWS, _SLOTS, _BATCH = 24, 6, 3
_CUDA = torch.device("cuda", 0)


def _train(seed: int) -> None:
    """Train as a pipeline that prefetches the next batch does, and read the rows at random places of a step."""
    draw = random.Random(seed)
    rows = torch.arange(_ROWS * 2.0).view(_ROWS, 2)
    kernel = CachedKernel(rows, _SLOTS)
    prefetches, current = torch.cuda.Stream(), torch.cuda.current_stream()
    reads: list[tuple[Tensor, Tensor]] = []

    def batch(before: list[int]) -> list[int]:
        """Return rows that need different slots. FBGEMM evicts no row of the batch that is trained."""
        kept = {row % _SLOTS: row for row in before}
        slots = draw.sample(range(_SLOTS), _BATCH)
        return [kept.get(slot, slot + _SLOTS * draw.randrange(_ROWS // _SLOTS)) for slot in slots]

    def prefetch(ids: list[int]) -> None:
        with torch.cuda.stream(prefetches):
            kernel.prefetch(_there(ids), forward_stream=current)

    def read() -> None:
        """Read all rows as a cut does, or as a hook does."""
        memory, ids = kernel.kernel, list(range(_ROWS))
        if draw.random() < 0.6:
            reads.append((memory.weight(0).clone(), rows.clone()))
        else:
            with reading_in_place():
                reads.append((memory.rows(0, _there(ids)), rows.clone()))

    prefetches.wait_stream(current)
    following = batch([])
    prefetch(following)
    for step in range(5):
        current.wait_stream(prefetches)
        ids, following = following, batch(following)
        prefetch(following)
        looked_up, expected = kernel.lookup(_there(ids)), rows[ids]
        reads.append((looked_up, expected))
        read()
        rows[ids] = rows[ids] + 100 * (step + 1)
        kernel.backward(_there(ids), rows[ids].pin_memory().to(_CUDA, non_blocking=True))
        read()
    current.wait_stream(prefetches)
    kernel.flush()
    reads.append((kernel.split_embedding_weights()[0], rows))
    for found, expected in reads:
        assert torch.equal(found.cpu(), expected)


def _there(ids: list[int]) -> Tensor:
    return torch.tensor(ids).pin_memory().to(_CUDA, non_blocking=True)


@pytest.mark.sweep("long")
def test_reads_and_prefetches_in_any_order_corrupt_no_row() -> None:
    for seed in range(_ORDERS):
        with fake_streams(seed):
            _train(seed)


def test_a_kernel_that_does_not_prefetch_waits_for_nothing() -> None:
    with fake_streams(0) as devices:
        kernel = CachedKernel(torch.zeros(4, 2), 2)
        before = len(torch.cuda.current_stream().queue.pending)
        with between_prefetches(kernel):
            pass
        assert len(torch.cuda.current_stream().queue.pending) == before
        assert devices.num_waits <= 3


def test_later_prefetches_wait_even_if_the_work_fails() -> None:
    with fake_streams(0) as devices:
        devices.scheduler._eagerness = 0.0
        kernel = CachedKernel(torch.zeros(4, 2), 2)
        kernel.prefetch_stream = torch.cuda.Stream()
        with pytest.raises(IndexError), between_prefetches(kernel):
            kernel.lxu_cache_weights.add_(1).size(9)
        assert not kernel.prefetch_stream.query()
