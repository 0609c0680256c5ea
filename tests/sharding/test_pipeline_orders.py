"""TorchRec's train pipelines on simulated streams: reads are exact in any order, and nothing of the library races.

The streams, events and waits are those of TorchRec's own classes. The collection is sharded for them; its table has
rows in host memory and a cache on the device, of plain torch operations, because FBGEMM has this kernel on CUDA only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import fbgemm_gpu  # noqa: F401  it has the operators
import pytest
import torch
from torch import Tensor

from delta_tracker.buffers.host_copy import HostCopy
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.host_copies import HostCopier, SelectedRows
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.watcher import HookContext
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.fake_streams.cached_kernel import CachedKernel, is_own_race
from tests.fake_streams.simulation import fake_streams
from tests.sharding.fake_collections import Ids, Lookups, OneTable
from tests.sharding.pipelines_cases import (
    AHEAD,
    ITEMS,
    LOSES_STASHES,
    STASHED,
    end_stashes,
    has_stages,
    loses_stashes,
    order_stashes,
    pipeline,
)
from tests.sharding.upstream import installed
from tests.sweeps import SWEEPS_ARE_WHOLE

_ORDERS = 300 if SWEEPS_ARE_WHOLE else 4
_ROWS, _SLOTS, _BATCH, _STEPS = 24, 6, 3, 5
_IN_BACKWARD = "TrainPipelineSparseDistBwdOpt"
_NAMES = [
    "PrefetchTrainPipelineSparseDist",
    "StagedTrainPipeline input",
    "StagedTrainPipeline lookup",
    "StagedTrainPipeline prefetch",
    "TrainEvalHybridPipelineBase",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePEC",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistBwdOpt",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistOptStash",
    "TrainPipelineSparseDistT",
]


class _Run:
    """Training with a pipeline, and reads between its calls. Host tensors have the rows as of the launched updates."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._draw = random.Random(seed)
        self._rows = torch.arange(_ROWS * 2.0).view(_ROWS, 2)
        self._changed: set[int] = set()
        self._num_written = 0
        self._reads: list[tuple[Tensor, SelectedRows, list[int], Tensor]] = []
        self._copier, self.copies = HostCopier(), list[HostCopy]()
        self._kernel = CachedKernel(self._rows, _SLOTS)
        lookups = Lookups(self._kernel, self._write)
        self._memory = Kernel(lookups, (("t", 1),), is_fused=True)
        store = SegmentStore(_ROWS, "cuda", engine="torch")
        self._log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
        context = HookContext(self._log.writes, Recorder("tracker", self._log, monitor=Monitor()))
        self._hook = PostLookupHook(self._memory, context, lookups=False)
        self._num_steps = torch.zeros(ITEMS if name == STASHED else 1, device="cuda")
        self.state = {"parameter": {"num_steps": self._num_steps}}
        torch.cuda.synchronize()
        self._pipeline = pipeline(name, OneTable(lookups, is_ahead=name == AHEAD), self)

    def go(self, after_step: Callable[[], None] = lambda: None) -> None:
        batches = self._all_batches()
        for _ in range(_STEPS):
            self._pipeline.progress(batches)
            after_step()
            self._maybe_read(0.5)
        self._hook.remove()
        self._read()
        end_stashes()
        torch.cuda.synchronize()
        assert self._num_steps.is_cuda == (self._name != STASHED)
        assert set(self._num_steps.tolist()) == {_STEPS}
        self._kernel.flush()
        assert torch.equal(self._kernel.split_embedding_weights()[0].cpu(), self._rows)
        assert self._num_written == _STEPS * _BATCH
        for ids, rows, changed, expected in self._reads:
            assert ids.tolist() == changed
            assert torch.equal(rows.copied, expected)

    # What a pipeline uses of an optimizer

    param_groups = ()

    def zero_grad(self) -> None:
        if self._name == STASHED:
            order_stashes()
        self._maybe_read(0.3)

    def step(self) -> None:
        self._num_steps.add_(1)
        if self._name != _IN_BACKWARD:  # no pinned memory is simulated there
            self._maybe_read(0.3)

    def _all_batches(self) -> Iterator[Ids]:
        """Yield batches. FBGEMM evicts no row of the batch that is trained: rows in the same slot are the same."""
        kept: dict[int, int] = {}
        for _ in range(_STEPS):
            slots = self._draw.sample(range(_SLOTS), _BATCH)
            ids = [kept.get(slot, slot + _SLOTS * self._draw.randrange(_ROWS // _SLOTS)) for slot in slots]
            kept = {row % _SLOTS: row for row in ids}
            yield Ids.of(ids)

    def _write(self, ids: list[int]) -> None:
        self._rows[ids] -= 1
        self._num_written += len(ids)
        self._changed |= set(ids)

    def _maybe_read(self, probability: float) -> None:
        if self._draw.random() < probability:
            self._read()

    def _read(self) -> None:
        found = self._log.consumers.read("a")
        ids, changed = found.rows["t"].ids, sorted(self._changed)
        rows = SelectedRows(self._memory.rows(0, ids))
        self.copies += self._copier.copy([rows])
        self._reads.append((ids, rows, changed, self._rows[changed]))
        self._log.consumers.commit(found)
        self._changed = set()


def _skip_unless_installed(name: str) -> None:
    if name.partition(" ")[0] not in installed("pipelines") or (" " in name and not has_stages()):
        pytest.skip(f"this torchrec has no {name}")
    if name == STASHED and loses_stashes():
        pytest.skip(LOSES_STASHES)


@pytest.mark.sweep("long")
@pytest.mark.parametrize("name", _NAMES)
def test_reads_during_training_are_exact(name: str) -> None:
    _skip_unless_installed(name)
    for seed in range(_ORDERS):
        # In every other run, all streams of TorchRec and the library are the same, as torch's pool may return it.
        with fake_streams(seed, may_race=is_own_race, pool=(1, 1) if seed % 2 else (32, 4)):
            _Run(name, seed).go()


@pytest.mark.parametrize("name", sorted({*_NAMES} - {"TrainPipelineSemiSync"}))  # it waits for the device itself
def test_a_step_waits_for_no_copy_of_a_read(name: str) -> None:
    """Also if all streams of a priority are the same, as after 32 streams of torch's pool."""
    _skip_unless_installed(name)
    num_running = 0
    with fake_streams(0, may_race=is_own_race, pool=(1, 4)) as devices:
        devices.scheduler._eagerness = 0.0  # no operation runs before another one needs it
        run = _Run(name, 0)

        def check() -> None:
            nonlocal num_running
            torch.cuda.current_stream().synchronize()
            assert all(copy.is_running for copy in run.copies)
            num_running += len(run.copies)

        run.go(check)
    assert num_running


def test_one_run_of_torchrecs_pipeline_shows_lookups_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostLookupHook, "_pre_lookup", lambda *_: None)
    for seed in range(10):
        with fake_streams(seed, may_race=lambda _: True) as devices, suppress(AssertionError):
            _Run("TrainPipelineFusedSparseDist", seed).go()
        assert not all(map(is_own_race, devices.races)), seed
