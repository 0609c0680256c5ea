"""Cases that train with torch.compile or compiled autograd, on one rank."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from tests.models import Spec, Table, batch, kernels_of, lookups_of, shard
from tests.sharding.replicated import replicate

_BACKWARD = "split_embedding{}_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper"


@cache
def _register_fakes() -> None:
    """Register the shapes that FBGEMM's operators return. FBGEMM registers them in its builds for CUDA only."""

    def bag(weights: Tensor, *args: Any) -> Tensor:
        dim_offsets, num_columns, offsets = args[5], args[6], args[10]
        return weights.new_empty((offsets.numel() - 1) // (dim_offsets.numel() - 1), num_columns)

    def no_bag(weights: Tensor, *args: Any) -> Tensor:
        return weights.new_empty(args[7].numel(), args[5])

    register = torch.library.register_fake
    register("fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper", bag)
    register("fbgemm::split_embedding_nobag_codegen_forward_unweighted_pt2_wrapper", no_bag)
    for kind in ("", "_nobag"):
        register(f"fbgemm::{_BACKWARD.format(kind)}", lambda gradient, *_: gradient.new_empty(0))


def _compile(what: str, model: Any, **options: Any) -> None:
    """Compile a part of the model in place."""
    (kernel,), (lookup,) = kernels_of(model.module.ec), lookups_of(model.module.ec)
    parts: dict[str, nn.Module] = {"tbe": kernel.emb_module, "kernel": kernel, "lookup": lookup, "model": model}
    if what == "forward":
        kernel.forward = torch.compile(kernel.forward, **options)
    else:
        parts[what].compile(**options)


def compiled(
    rank: int,
    world_size: int,
    what: str | None = None,
    backend: str = "aot_eager",
    fullgraph: bool = False,
    autograd: bool = False,
    bag: bool = True,
    num_warm: int = 0,
) -> dict[str, Any]:
    """Train three batches, and return the numbers of changed and reported rows by batch, and of errors in hooks.

    Args:
        rank: not used.
        world_size: not used.
        what: the part of the model that is compiled; None for none.
        backend: backend of the compiler.
        fullgraph: True to allow no graph breaks.
        autograd: True to compile the backward pass too.
        bag: kind of the collection.
        num_warm: number of batches before the tracker is created, each with a tracker of its own.
    """
    _register_fakes()
    torch._dynamo.reset()
    spec = Spec([Table("a", 50, "table:0"), Table("b", 50, "table:0")], bag=bag)
    options = {"backend": backend, "fullgraph": fullgraph}
    generator = torch.Generator().manual_seed(0)
    changed, reported = [], []
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = shard(spec)
        if what is not None:
            _compile(what, model, **options)
        for _ in range(num_warm):
            with ModelDeltaTracker(model):
                model(batch(spec, generator)).backward()
        with ModelDeltaTracker(model) as tracker:
            for _ in range(3):
                before = tracker.read_tables()
                loss = model(batch(spec, generator))
                with compiled_autograd._enable(torch.compile(**options)) if autograd else contextlib.nullcontext():
                    loss.backward()
                tracker.step()
                now = tracker.read_tables()
                changed.append([int((now[fqn] != before[fqn]).any(dim=1).sum()) for fqn in now])
                reported.append([len(rows) for rows in tracker.get_delta().values()])
            errors = tracker.num_hook_errors
    torch._dynamo.reset()
    assert all(min(counts) > 0 for counts in changed)
    return {"changed": changed, "reported": reported, "errors": errors}


def compiled_tables(rank: int, world_size: int) -> dict[str, list[int]]:
    """Return the ids that are reported after a sync of replicas and after a write, if the tables' module is compiled.

    ``torch.compile`` replaces the module by another one that contains it.
    """

    def add_one(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.data.add_(1)

    model = replicate(Spec([Table("a", 5, "table:0")]), 1, custom_all_reduce=add_one)
    (kernel,) = kernels_of(model.module.ec)
    kernel._emb_module = torch.compile(kernel._emb_module)
    with ModelDeltaTracker(model) as tracker:
        model.sync()
        (synced,) = tracker.get_delta_ids().values()
        with torch.no_grad():
            kernel.split_embedding_weights()[0][3] += 1
        (written,) = tracker.get_delta_ids().values()
    return {"synced": synced.tolist(), "written": written.tolist()}


def compiled_names(rank: int, world_size: int, what: str, directory: str) -> list[str]:
    """Follow a model whose collection, or everything, was wrapped by torch.compile; return the names in the stream."""
    model = shard(Spec([Table("a", 5, "table:0")]))
    tracked: nn.Module = model
    if what == "collection":
        model.module.ec = torch.compile(model.module.ec)
    else:
        tracked = torch.compile(model)
    with ModelDeltaTracker(tracked) as tracker:
        publisher = Publisher(tracker, f"file://{directory}", dense=tracked)
        manifest = publisher.snapshot()
        served = {"ec.embeddings.a": torch.zeros(5, 8), "dense.weight": torch.zeros(1, 8), "dense.bias": torch.zeros(1)}
        Predictor(served, f"file://{directory}").sync()
        publisher.close()
        (rows,) = tracker.read_tables().values()
        assert torch.equal(served["ec.embeddings.a"], rows)
    return [*manifest.tables, *manifest.dense]
