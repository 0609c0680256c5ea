"""A flush of cached rows never overlaps a prefetch or a lookup of the same kernel."""

from __future__ import annotations

import random
from contextlib import suppress

import fbgemm_gpu  # noqa: F401  it has the operators
import pytest
import torch
from torch import Tensor, nn

from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.kernel_memory import Kernel, reading_in_place
from delta_tracker.sharding.row_cache import between_prefetches
from delta_tracker.sharding.watcher import HookContext
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.fake_streams.cached_kernel import CachedKernel, is_own_race
from tests.fake_streams.order import passes
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


class _Lookups(nn.Module):
    """TorchRec's module around a kernel with a cache. The forward pass loads the rows of its batch into the cache."""

    def __init__(self, kernel: CachedKernel) -> None:
        super().__init__()
        self.emb_module = kernel
        self.flush, self.split_embedding_weights = kernel.flush, kernel.split_embedding_weights

    def forward(self, ids: Tensor) -> Tensor:
        self.emb_module.prefetch(ids)
        return self.emb_module.lookup(ids)


def _train_on_lookup_stream(seed: int) -> None:
    """Train as ``TrainPipelineFusedSparseDist`` does, whose lookups run on a stream that waits for no other stream.

    The backward pass of a lookup runs on its stream, too. The current stream waits for lookups, and not for the
    backward pass. Rows are read between two batches, or between lookup and backward pass.
    """
    draw = random.Random(seed)
    rows = torch.arange(_ROWS * 2.0).view(_ROWS, 2)
    kernel = CachedKernel(rows, _SLOTS)
    lookups, current = torch.cuda.Stream(), torch.cuda.current_stream()
    lookups.wait_stream(current)
    log = ChangeLog({"t": SegmentStore(_ROWS, "cuda", engine="torch")}, ["a"], delete_on_read=True, max_bytes=None)
    module = _Lookups(kernel)
    memory = Kernel(module, (("t", 1),), is_fused=True)
    hook = PostLookupHook(memory, HookContext(log.writes, Recorder("tracker", log, monitor=Monitor())), lookups=False)
    reads: list[tuple[Tensor, Tensor]] = []

    def read() -> None:
        found = log.consumers.read("a")
        reads.append((memory.weight(0).clone(), rows.clone()))
        log.consumers.commit(found)

    for step in range(5):
        slots = draw.sample(range(_SLOTS), _BATCH)
        ids = [slot + _SLOTS * draw.randrange(_ROWS // _SLOTS) for slot in slots]
        with torch.cuda.stream(lookups):
            there = _there(ids)
            reads.append((module(there), rows[ids]))
        current.wait_stream(lookups)
        if draw.random() < 0.3:
            read()
        rows[ids] = rows[ids] + 100 * (step + 1)
        with torch.cuda.stream(lookups):
            log.writes.begin_write(step, {"t": there})
            kernel.update(there, rows[ids].pin_memory().to(_CUDA, non_blocking=True))
            log.writes.end_write(step, {"t": there})
        if draw.random() < 0.7:
            read()
    hook.remove()
    torch.cuda.synchronize()
    kernel.flush()
    reads.append((kernel.split_embedding_weights()[0], rows))
    for found, expected in reads:
        assert torch.equal(found.cpu(), expected)


def _there(ids: list[int]) -> Tensor:
    return torch.tensor(ids).pin_memory().to(_CUDA, non_blocking=True)


@pytest.mark.sweep("long")
def test_reads_and_prefetches_in_any_order_corrupt_no_row() -> None:
    for seed in range(_ORDERS):
        with fake_streams(seed, may_race=is_own_race):
            _train(seed)


@pytest.mark.sweep("long")
def test_reads_and_lookups_on_a_stream_of_their_own_corrupt_no_row() -> None:
    for seed in range(_ORDERS):
        with fake_streams(seed):
            _train_on_lookup_stream(seed)


def test_one_run_shows_lookups_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostLookupHook, "_pre_lookup", lambda *_: None)
    for seed in range(10):
        with fake_streams(seed, may_race=lambda _: True) as devices, suppress(AssertionError):
            _train_on_lookup_stream(seed)
        assert any(passes(race.current_access, __file__, "forward") for race in devices.races), seed


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
