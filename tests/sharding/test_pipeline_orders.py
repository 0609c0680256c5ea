"""TorchRec's train pipelines on simulated streams: reads are exact in any order, and nothing of the library races.

The streams, events and waits are those of TorchRec's own classes. The collection is sharded for them; its table has
rows in host memory and a cache on the device, of plain torch operations, because FBGEMM has this kernel on CUDA only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import fbgemm_gpu  # noqa: F401  it has the operators
import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import LazyAwaitable, NoWait, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.streamable import Pipelineable

from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.watcher import HookContext
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.fake_streams.cached_kernel import CachedKernel, is_own_race
from tests.fake_streams.simulation import fake_streams
from tests.sharding.pipelines_cases import ITEMS, STASHED, end_stashes, has_stages, pipeline
from tests.sharding.upstream import installed
from tests.sweeps import SWEEPS_ARE_WHOLE

_ORDERS = 300 if SWEEPS_ARE_WHOLE else 4
_ROWS, _SLOTS, _BATCH, _STEPS = 24, 6, 3, 5
_NAMES = [
    "PrefetchTrainPipelineSparseDist",
    "StagedTrainPipeline input",
    "StagedTrainPipeline lookup",
    "StagedTrainPipeline prefetch",
    "TrainEvalHybridPipelineBase",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistBwdOpt",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistOptStash",
    "TrainPipelineSparseDistT",
]


class _Ids(Pipelineable):
    """Batch of one feature."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def to(self, device: Any, non_blocking: bool = False) -> _Ids:
        return _Ids(self._ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self._ids.record_stream(stream)

    def values(self) -> Tensor:
        return self._ids

    def length_per_key(self) -> list[int]:
        return [_BATCH]


class _LookupFunction(torch.autograd.Function):
    """Lookup, and an update of the rows in the backward pass: ``row -= gradient``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kernel: CachedKernel, ids: Tensor, written: Callable[[Tensor], None]) -> Any:
        ctx.kernel, ctx.ids, ctx.written = kernel, ids, written
        return kernel.lookup(ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.written(ctx.ids)
        ctx.kernel.backward(ctx.ids, ctx.kernel.lookup(ctx.ids) - gradient)
        return None, None, None, None


class _Lookups(nn.Module):
    """TorchRec's module around a kernel. Autograd runs its node, with all hooks, on the stream of the forward pass."""

    def __init__(self, kernel: CachedKernel, written: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.emb_module, self._written = kernel, written
        self.flush, self.split_embedding_weights = kernel.flush, kernel.split_embedding_weights
        self._outside: list[Any] = []
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, features: _Ids) -> Tensor:
        if self.emb_module.prefetch_stream is None:
            self.emb_module.prefetch(features.values())
        found = _LookupFunction.apply(self._anchor, self.emb_module, features.values(), self._written)
        own = torch.cuda.current_stream()

        def enter(gradients: Any) -> None:
            own.wait_stream(torch.cuda.current_stream())
            gradients[0].record_stream(own)
            self._outside.append(torch.cuda.current_stream())
            torch.cuda.set_stream(own)

        found.grad_fn.register_prehook(enter)
        return found

    def leave(self, *_: Any) -> None:
        """End the autograd node of a lookup, after the hooks of the library."""
        torch.cuda.set_stream(self._outside.pop())


class _Output(LazyAwaitable[KeyedTensor]):
    """Rows of a table-wise table, with the tensor at which a pipeline may call a function in the backward pass."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        request: Any = Request(None, rows.device)  # type: ignore[arg-type]
        self._rows = request.dummy_tensor = rows
        self._awaitables = [SimpleNamespace(_tensor_awaitable=request)]
        self._sharding_types = ["table_wise"]

    def _wait_impl(self) -> KeyedTensor:
        return KeyedTensor(["t"], [2], self._rows)


class _Collection(ShardedModule):  # type: ignore[type-arg]
    def __init__(self, lookups: _Lookups) -> None:
        super().__init__()
        self.lookups = lookups

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return nn.Module

    def create_context(self) -> Any:
        return EmbeddingBagCollectionContext()

    def input_dist(self, ctx: Any, features: _Ids) -> Any:  # type: ignore[override]
        return KJTListSplitsAwaitable([NoWait(NoWait(_Ids(features.values().clone())))], ctx)

    def prefetch(self, dist_input: Any, forward_stream: Any = None, ctx: Any = None) -> None:
        self.lookups.emb_module.prefetch(dist_input[0].values(), forward_stream)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        found = self.lookups(dist_input[0])
        found.grad_fn.register_hook(self.lookups.leave)
        return found

    def output_dist(self, ctx: Any, output: Any) -> Any:
        return _Output(output)


class _Model(nn.Module):
    def __init__(self, lookups: _Lookups) -> None:
        super().__init__()
        self.ec = _Collection(lookups)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        loss = self.ec(features).values().sum()
        return loss, loss.detach()


class _Run:
    """Training with a pipeline, and reads between its calls. Host tensors have the rows as of the launched updates."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._draw = random.Random(seed)
        self._rows = torch.arange(_ROWS * 2.0).view(_ROWS, 2)
        self._changed: set[int] = set()
        self._reads: list[tuple[Tensor, Tensor, list[int], Tensor]] = []
        self._batches: list[list[int]] = []
        self._kernel = CachedKernel(self._rows, _SLOTS)
        self._written = iter(self._batches)
        lookups = _Lookups(self._kernel, self._write)
        self._memory = Kernel(lookups, (("t", 1),), is_fused=True)
        store = SegmentStore(_ROWS, "cuda", engine="torch")
        self._log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
        context = HookContext(self._log.writes, Recorder("tracker", self._log, monitor=Monitor()))
        self._hook = PostLookupHook(self._memory, context, lookups=False)
        self._num_steps = torch.zeros(ITEMS if name == STASHED else 1, device="cuda")
        self.state = {"parameter": {"num_steps": self._num_steps}}
        torch.cuda.synchronize()
        self._pipeline = pipeline(name, _Model(lookups), self)

    def go(self) -> None:
        batches = self._all_batches()
        for _ in range(_STEPS):
            self._pipeline.progress(batches)
            self._maybe_read(0.5)
        self._hook.remove()
        self._read()
        end_stashes()
        torch.cuda.synchronize()
        assert self._num_steps.is_cuda == (self._name != STASHED)
        assert set(self._num_steps.tolist()) == {_STEPS}
        self._kernel.flush()
        assert torch.equal(self._kernel.split_embedding_weights()[0].cpu(), self._rows)
        for ids, rows, changed, expected in self._reads:
            assert ids.tolist() == changed
            assert torch.equal(rows.cpu(), expected)

    # What a pipeline uses of an optimizer

    param_groups = ()

    def zero_grad(self) -> None:
        self._maybe_read(0.3)

    def step(self) -> None:
        self._num_steps.add_(1)
        self._maybe_read(0.3)

    def _all_batches(self) -> Iterator[_Ids]:
        """Yield batches. FBGEMM evicts no row of the batch that is trained: rows in the same slot are the same."""
        kept: dict[int, int] = {}
        for _ in range(_STEPS):
            slots = self._draw.sample(range(_SLOTS), _BATCH)
            ids = [kept.get(slot, slot + _SLOTS * self._draw.randrange(_ROWS // _SLOTS)) for slot in slots]
            kept = {row % _SLOTS: row for row in ids}
            self._batches.append(ids)
            yield _Ids(torch.tensor(ids).pin_memory())

    def _write(self, _: Tensor) -> None:
        ids = next(self._written)  # pipelines train the batches in order
        self._rows[ids] -= 1
        self._changed |= set(ids)

    def _maybe_read(self, probability: float) -> None:
        if self._draw.random() < probability:
            self._read()

    def _read(self) -> None:
        found = self._log.consumers.read("a")
        ids, changed = found.rows["t"].ids, sorted(self._changed)
        self._reads.append((ids, self._memory.rows(0, ids), changed, self._rows[changed]))
        self._log.consumers.commit(found)
        self._changed = set()


@pytest.mark.sweep("long")
@pytest.mark.parametrize("name", _NAMES)
def test_reads_during_training_are_exact(name: str) -> None:
    if name.partition(" ")[0] not in installed("pipelines") or (" " in name and not has_stages()):
        pytest.skip(f"this torchrec has no {name}")
    for seed in range(_ORDERS):
        with fake_streams(seed, may_race=is_own_race):
            _Run(name, seed).go()


def test_one_run_of_torchrecs_pipeline_shows_lookups_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostLookupHook, "_pre_lookup", lambda *_: None)
    for seed in range(10):
        with fake_streams(seed, may_race=lambda _: True) as devices, suppress(AssertionError):
            _Run("TrainPipelineFusedSparseDist", seed).go()
        assert not all(map(is_own_race, devices.races)), seed
