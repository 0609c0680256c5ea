"""Training with TorchRec's pipelines on simulated streams; each case runs on every rank.

A pipeline has the streams and events of a CUDA device. Tables and batches stay in host memory, as FBGEMM's kernels
for the CPU need. ``test_pipeline_orders.py`` has device memory and the same pipelines, without FBGEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker
from tests.fake_streams.simulation import fake_streams
from tests.gpu.fbgemm.training import Parts, changed_rows, rows_of
from tests.models import Spec, Table, batch, shard
from tests.sharding.upstream import module_of

_CUDA = torch.device("cuda", 0)
_COMPILED = {"TrainPipelinePT2", "TrainPipelineSparseDistCompAutograd"}


def exact(rank: int, world_size: int, name: str) -> tuple[int, int] | None:
    """Compare each read with the rows that the step changed. Return the number of rows and of compiled graphs.

    Return None if this torchrec has not all stages of a ``StagedTrainPipeline``.
    """
    if " " in name and not has_stages():
        return None
    wide = Table("wide", 300, "table:0", 16)
    others = [Table("narrow", 90, f"table:{world_size - 1}"), Table("row", 310, "row", 16)]
    spec = Spec([wide, *(others if name not in _COMPILED else [])], bag=True)
    compiler, num_rows = CompileCounter(), 0
    with torch._dynamo.config.patch(optimize_ddp="python_reducer") if name in _COMPILED else nullcontext():
        model = shard(spec)
        parts, generator = Parts(model), torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(parts.dense.parameters(), lr=0.1, momentum=0.9)
        with _streams(name), ModelDeltaTracker(model) as tracker:
            parts._compiled_autograd_options = {"backend": compiler, "dynamic": True, "fullgraph": False}  # type: ignore[assignment]
            trainer = pipeline(name, parts, optimizer, compiler)
            batches, before = iter([batch(spec, generator, size=12) for _ in range(9)]), rows_of(model)
            for step in range(4 if name in _COMPILED else 9):
                trainer.progress(batches)
                tracker.step()
                delta, now = tracker.get_delta(with_values=True), rows_of(model)
                for table, rows in now.items():
                    found = delta[f"ec.embedding_bags.{table}"]
                    assert found.ids.tolist() == changed_rows(before[table], rows), f"step {step}, {table}"
                    assert torch.equal(found.values, rows[found.ids])
                    num_rows += len(found)
                before = now
            assert tracker.num_hook_errors == 0
    return num_rows, compiler.frame_count


def _streams(name: str) -> AbstractContextManager[Any]:
    if name in _COMPILED:  # torch.compile compiles nothing in a mode, as that of the simulation
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(fake_streams(0))
    stack.enter_context(mock.patch.object(Tensor, "record_stream", return_value=None))
    stack.enter_context(mock.patch.object(KeyedJaggedTensor, "to", lambda features, *_, **__: features))
    return stack


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
