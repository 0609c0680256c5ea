"""Training with TorchRec's pipelines on simulated streams; each case runs on every rank.

A pipeline has the streams and events of a CUDA device. Tables and batches stay in host memory, as FBGEMM's kernels
for the CPU need. ``test_pipeline_orders.py`` has device memory and the same pipelines, without FBGEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo.testing import CompileCounter
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, Publisher, Recovery
from delta_tracker.errors import UnsupportedModelError
from delta_tracker.recovery.restore import restore
from tests.fake_streams.simulation import fake_streams
from tests.gpu.fbgemm.training import Parts, changed_rows
from tests.models import Model, Spec, Table, batch, kernels_of, shard
from tests.sharding.upstream import module_of

_CUDA = torch.device("cuda", 0)
AHEAD = "TrainPipelinePEC"
STASHED = "TrainPipelineSparseDistOptStash"
LOSES_STASHES = "before torchrec 1.8, states are freed without a copy, and refused"
"""Reason to skip a test of this pipeline if :func:`loses_stashes` is True."""
ITEMS = 1 << 18  # TorchRec moves states of 1 MiB and more
_COMPILED = {"TrainPipelinePT2", "TrainPipelineSparseDistCompAutograd"}


def loses_stashes() -> bool:
    """Return True if the installed torchrec frees the states of an optimizer without a copy in host memory."""
    return metadata.version("torchrec").startswith(("1.6.", "1.7."))


def exact(rank: int, world_size: int, name: str) -> tuple[int, int] | None:
    """Compare each read with the rows that the step changed. Return the number of rows and of compiled graphs.

    Return None if this torchrec has not all stages of a ``StagedTrainPipeline``.
    """
    if " " in name and not has_stages():
        return None
    tables = [
        Table("wide", 300, "table:0", 16),
        Table("narrow", 90, f"table:{world_size - 1}"),
        Table("row", 310, "row", 16),
    ]
    spec = Spec(tables[:1] if name in _COMPILED else tables, bag=True)
    if name == AHEAD:
        spec = Spec([Table("first", 90, "row"), Table("second", 40, "row")])
    compiler, num_rows = CompileCounter(), 0
    with torch._dynamo.config.patch(optimize_ddp="python_reducer") if name in _COMPILED else nullcontext():
        model = _sharded_ahead(spec) if name == AHEAD else shard(spec)
        parts, generator = model if name == AHEAD else Parts(model), torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(model.module.dense.parameters(), lr=0.1, momentum=0.9)
        with _streams(name), ModelDeltaTracker(model) as tracker:
            parts._compiled_autograd_options = {"backend": compiler, "dynamic": True, "fullgraph": False}  # type: ignore[assignment]
            trainer = pipeline(name, parts, optimizer, compiler)
            batches, before = iter([batch(spec, generator, size=12) for _ in range(9)]), _rows(model)
            for step in range(4 if name in _COMPILED else 9):
                trainer.progress(batches)
                tracker.step()
                delta, now = tracker.get_delta(with_values=True), _rows(model)
                for table, rows in now.items():
                    (found,) = (each for fqn, each in delta.items() if fqn.endswith(f".{table}"))
                    assert found.ids.tolist() == changed_rows(before[table], rows), f"step {step}, {table}"
                    assert torch.equal(found.values, rows[found.ids])
                    num_rows += len(found)
                before = now
            assert tracker.num_hook_errors == 0
    return num_rows, compiler.frame_count


class _Counting(torch.optim.SGD):
    """Optimizer with a state in simulated device memory: the number of its steps, in each of enough items to move."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        parameter = self.param_groups[0]["params"][0]
        self.count: Any = torch.zeros(ITEMS, device=_CUDA)
        self.state[parameter]["count"] = self.count

    def step(self, closure: Any = None) -> Any:
        self.count.add_(1)
        return super().step(closure)


class _Count:
    """What a publisher saves of a :class:`_Counting` optimizer, because it accepts no tensor of the simulation."""

    def __init__(self, optimizer: _Counting | None = None) -> None:
        self._optimizer = optimizer
        self.found: Any = None
        self.num_moved = 0

    def state_dict(self) -> dict[str, Tensor]:
        if self._optimizer is None:
            return {"count": torch.zeros(ITEMS)}
        count = self._optimizer.count
        self.num_moved += not count.is_cuda
        return {"count": count.cpu() if count.is_cuda else count.host}

    def load_state_dict(self, state: Any) -> None:
        self.found = state["count"]
        if self._optimizer is not None:
            self._optimizer.count.copy_(self.found)


def stashed(rank: int, world_size: int, url: str, seed: int) -> int:
    """Publish the state of an optimizer that the pipeline moves to host memory, and restore it, also in the pipeline.

    Return the number of versions whose state was in host memory.
    """
    spec = Spec([Table("wide", 300, "table:0", 16)], bag=True)
    model, again = shard(spec), shard(spec)
    parts, generator = Parts(model), torch.Generator().manual_seed(rank)
    for each in (model, again) * 2:  # before that, restore() refuses DistributedDataParallel
        each(batch(spec, generator)).backward()
    with _streams(STASHED, seed), ModelDeltaTracker(model) as tracker:
        optimizer = _Counting(parts.dense.parameters())
        saved = _Count(optimizer)
        trainer = pipeline(STASHED, parts, optimizer)
        batches = iter([batch(spec, generator, size=12) for _ in range(11)])
        recovery = Recovery(rank_state={"count": saved})
        publisher = Publisher(tracker, url, recovery=recovery)
        for _ in range(9):
            trainer.progress(batches)
            tracker.step()
            publisher.publish()
        publisher.close()
        num_moved = saved.num_moved
        trainer.progress(batches)
        restore(model, url, 5, tracker=tracker, recovery=recovery)
        trainer.progress(batches)
        end_stashes()
        torch.cuda.synchronize()
        assert torch.equal(optimizer.count.host, torch.full((ITEMS,), 6.0))
    for version in range(1, 10):  # 0 is the claim
        loaded = _Count()
        restore(again, url, version, recovery=Recovery(rank_state={"count": loaded}))
        assert torch.equal(loaded.found, torch.full((ITEMS,), float(version))), f"version {version}"
    return num_moved


def freed(rank: int, world_size: int, url: str) -> str:
    """Free the states of a fused optimizer, as a pipeline that moves them does. Return the publisher's error."""
    spec = Spec([Table("wide", 300, "table:0", 16)], bag=True)
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, recovery=Recovery())
        publisher.publish()
        (state,) = model.fused_optimizer.state.values()
        storage = state["wide.momentum1"].local_shards()[0].tensor.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        with pytest.raises(UnsupportedModelError) as caught:
            publisher.publish()
        storage.resize_(num_bytes)  # as without the fused optimizer in the pipeline
        assert publisher.publish() is not None
        publisher.close()
    return str(caught.value)


class _Ahead(nn.Module):
    """A model whose collection looks up rows of the next batch that this batch does not change."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        module: Any = import_module("torchrec.modules.pec_embedding_modules")
        self.ec = module.PECEmbeddingCollection(Model(spec, "meta").ec)
        self.dense = nn.Linear(spec.tables[0].dim, 1)
        self._features = spec.features

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        found = self.ec(features)
        loss = self.dense(torch.cat([found[name].values() for name in self._features])).sum()
        return loss, loss.detach()


def _sharded_ahead(spec: Spec) -> DistributedModelParallel:
    torch.manual_seed(0)
    model, world_size = _Ahead(spec), dist.get_world_size()
    for weight in model.ec.parameters():
        apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    sharder = import_module("torchrec.distributed.pec_embedding").PECEmbeddingCollectionSharder()
    shardings = {table.name: row_wise() for table in spec.tables}
    sizes = {"local_size": world_size, "world_size": world_size, "device_type": "cpu"}
    plan = ShardingPlan({"ec": construct_module_sharding_plan(model.ec, shardings, sharder=sharder, **sizes)})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def _rows(model: Any) -> dict[str, Tensor]:
    """Return a copy of this rank's rows of each table."""
    collection = getattr(model.module.ec, "_embedding_collection", model.module.ec)
    return {
        table.name: weight.detach().clone()
        for kernel in kernels_of(collection)
        for table, weight in zip(kernel.config.embedding_tables, kernel.split_embedding_weights(), strict=True)
    }


def _no_record(tensor: Tensor, stream: Any) -> None:
    """Replace ``record_stream`` of a host tensor."""


def _streams(name: str, seed: int = 0) -> AbstractContextManager[Any]:
    if name in _COMPILED:  # torch.compile compiles nothing in a mode, as that of the simulation
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(fake_streams(seed))
    stack.callback(end_stashes)
    stack.enter_context(mock.patch.object(Tensor, "record_stream", _no_record))
    stack.enter_context(mock.patch.object(KeyedJaggedTensor, "to", lambda features, *_, **__: features))
    return stack


def order_stashes() -> None:
    """Let later restores of optimizer states follow their copies to host memory. TorchRec before 1.9 does not."""
    for manager in _stash_managers():
        if manager.is_enabled():
            manager.thread_submit(lambda: None).result()
            torch.cuda.current_stream().wait_stream(manager.d2h_stream())


def end_stashes() -> None:
    """Drop the thread and the streams of TorchRec's stashes, which belong to one simulation."""
    for manager in _stash_managers():
        if manager._stash_executor is not None:
            manager._stash_executor.shutdown()
        manager.reset()


def _stash_managers() -> list[Any]:
    name = "torchrec.distributed.memory_stashing"
    return [import_module(name).MemoryStashingManager] if find_spec(name) else []


def pipeline(name: str, model: nn.Module, optimizer: Any, compiler: Any = "eager") -> Any:
    """Return a pipeline, on simulated streams unless it compiles.

    Args:
        name: name of TorchRec's class; for a ``StagedTrainPipeline`` also what its last stage does.
    """
    name, _, stage = name.partition(" ")
    if stage:
        return _staged(model, optimizer, stage)
    options: dict[str, Any] = {
        "TrainPipelinePT2": {"compile_configs": TorchCompileConfig(backend=compiler, compile_on_iter=2)},
        "TrainPipelineSemiSync": {"start_batch": 3},
        "TrainPipelineSparseDistBwdOpt": {"site_fqn": "ec"},
        "TrainPipelineSparseDistOptStash": {"site_fqn": "ec"},
    }.get(name, {})
    kind = getattr(import_module(module_of(name)), name)
    made = kind(model, optimizer, torch.device("cpu") if name in _COMPILED else _CUDA, **options)
    if name in _COMPILED:
        torch._logging.set_logs()  # one of them logs its graphs
    return made


def has_stages() -> bool:
    """Return True if this torchrec has all stages of a ``StagedTrainPipeline``."""
    return hasattr(getattr(_stages(), "SparseDataDistUtil", None), "start_embedding_lookup_stage")


def _stages() -> Any:
    name = "torchrec.distributed.train_pipeline.pipeline_stage"
    return import_module(name) if find_spec(name) else None


def _staged(model: nn.Module, optimizer: Any, stage: str) -> Any:
    """Return a ``StagedTrainPipeline`` with lookups or prefetches ahead, and the training step after it."""
    module = _stages()
    copies, inputs, ahead = (torch.cuda.Stream() for _ in range(3))
    streams = {"lookup": {"embedding_lookup_stream": ahead}, "prefetch": {"prefetch_stream": ahead}}
    sparse = module.SparseDataDistUtil(model, inputs, **streams.get(stage, {}))
    stages = [
        module.PipelineStage("copy", lambda features: features.to(_CUDA, non_blocking=True), copies),
        sparse.start_sparse_data_dist_stage(),
    ]
    if stage != "input":
        run = sparse.prefetch if stage == "prefetch" else sparse.start_embedding_lookup
        stages.append(module.PipelineStage(stage, run, ahead))
    staged = import_module(module_of("StagedTrainPipeline")).StagedTrainPipeline(stages)

    class Trainer:
        def progress(self, batches: Iterator[Any]) -> None:
            features = staged.progress(batches)
            optimizer.zero_grad()
            model(features)[0].backward()
            optimizer.step()

    return Trainer()
