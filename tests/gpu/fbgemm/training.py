"""Cases of training with FBGEMM's kernels; each runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage, TrackingMode
from delta_tracker.sharding.watcher import Watcher
from tests.fake_streams.simulation import fake_streams
from tests.gpu.devices import IS_CUDA, OF_MODULES, no_sync, slow_down, wait
from tests.gpu.waits import run_asleep
from tests.models import Spec, Table, batch, kernels_of, shard

# FBGEMM's LARS multiplies the learning rate by 0.001 and the ratio of two norms.
_RATES = {"LarsSGD": 100.0}


def spec_of(world_size: int, *, bag: bool, **kwargs: Any) -> Spec:
    """A model with tables on all ranks, two of them in one kernel, in bags with rows of different widths."""
    dtype = kwargs.pop("dtype", "FP32")
    last = world_size - 1
    dim = 16 if bag else 8  # other collections concatenate the rows of all tables
    tables = [
        Table("narrow", 90, f"table:{last}", dtype=dtype),
        Table("first", 300, "table:0", dim=dim, dtype=dtype),
        Table("row", 310, "row", dim=dim, dtype=dtype),
    ]
    # On one device, each rank is a host of its own: torchrec puts the shards of rank r of a host on cuda:r.
    return Spec(tables, bag=bag, local_size=1 if IS_CUDA else None, device=str(OF_MODULES), **kwargs)


def bits(model: nn.Module) -> list[Tensor]:
    """Return the bits of all rows and of all optimizer states of this rank, from kernels without pending writes."""
    wait()  # a prefetch may write to the cache that is flushed here
    found = []
    for kernel in kernels_of(model.module.ec):
        kernel.flush()
        states = kernel.emb_module.split_optimizer_states()
        tensors = (*kernel.split_embedding_weights(), *(each for slot in states for each in slot))
        found += [each.detach().cpu().contiguous().view(torch.uint8).clone() for each in tensors]
    return found


def rows_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of this rank's rows of each table, read from its kernels."""
    wait()
    found = {}
    for kernel in kernels_of(model.module.ec):
        kernel.flush()
        names = [table.name for table in kernel.config.embedding_tables]
        found |= {
            name: each.detach().cpu().clone()
            for name, each in zip(names, kernel.split_embedding_weights(), strict=True)
        }
    return found


def changed_rows(before: Tensor, now: Tensor) -> list[int]:
    """Return the rows whose bits differ."""
    differs = before.contiguous().view(torch.uint8) != now.contiguous().view(torch.uint8)
    return differs.any(dim=1).nonzero().flatten().tolist()


def exact(
    rank: int, world_size: int, optimizer: str, bag: bool, kernel: str, dtype: str, directory: str, num_steps: int = 4
) -> int:
    """Reported rows are those whose bits changed, and training without trackers has the same bits."""
    rate = _RATES.get(optimizer, 0.1)
    spec = spec_of(world_size, bag=bag, kernel=kernel, optimizer=optimizer, dtype=dtype)
    batches = [batch(spec, torch.Generator().manual_seed(rank * 100 + n), size=20) for n in range(num_steps)]

    def train(after_step: Callable[[nn.Module], object]) -> list[Tensor]:
        torch.manual_seed(1)  # rows of float16 are rounded at random
        for features in batches:
            model(features).backward()
            after_step(model)
        return bits(model)

    model = shard(spec, rate)
    expected = train(bits)
    model = shard(spec, rate)
    storage = Storage(f"file://{directory}")
    modes = [TrackingMode.ID_ONLY, TrackingMode.EMBEDDING]
    trackers = {mode: ModelDeltaTracker(model, ["reader", "stream"], mode=mode) for mode in modes}
    publisher = Publisher(trackers[TrackingMode.ID_ONLY], storage, "stream")
    publisher.snapshot()
    held = {"before": rows_of(model), "changed": 0}

    def check(model: nn.Module) -> None:
        now = rows_of(model)
        for mode, tracker in trackers.items():
            tracker.step()
            delta = tracker.get_delta("reader", with_values=True)
            for name, rows in now.items():
                found = delta[f"ec.{'embedding_bags' if bag else 'embeddings'}.{name}"]
                changed = changed_rows(held["before"][name], rows)
                ids = found.ids.tolist()
                missing, extra = set(changed) - set(ids), set(ids) - set(changed)
                assert not missing, f"{name}, {mode}: rows {sorted(missing)} are missing"
                assert not extra, f"{name}, {mode}: rows {sorted(extra)} did not change"
                assert torch.equal(found.values.cpu(), rows[ids]), f"{name}, {mode}: other values"
                if found.states is not None:
                    assert torch.equal(found.states.cpu(), held["before"][name][ids]), f"{name}: other old states"
                held["changed"] += len(changed)
        publisher.publish()
        held["before"] = now

    tracked = train(check)
    assert all(map(torch.equal, expected, tracked)), "the tracker or the publisher changed the training"
    publisher.flush()
    if rank == 0:
        name_of = f"ec.{'embedding_bags' if bag else 'embeddings'}."
        dtypes = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
        served = {name_of + t.name: torch.zeros(t.rows, t.dim, dtype=dtypes[dtype]) for t in spec.tables}
        Predictor(served, storage).sync()
        for name, rows in held["before"].items():
            offset = trackers[TrackingMode.ID_ONLY].shards[name_of + name].row_offset
            assert torch.equal(served[name_of + name][offset : offset + len(rows)], rows), name
    publisher.close()
    assert [tracker.num_hook_errors for tracker in trackers.values()] == [0, 0]
    return held["changed"]


@contextmanager
def _checked_hooks() -> Iterator[list[str]]:
    """Run each hook without a wait for the device; yield the list of hooks that ran."""
    ran: list[str] = []
    contained = Watcher._contained

    def watched(self: Watcher, action: Any, *, otherwise: Any) -> Any:
        ran.append(type(self).__name__)
        with no_sync():
            return contained(self, action, otherwise=otherwise)

    with mock.patch.object(Watcher, "_contained", watched):
        yield ran


def hooks_without_syncs(
    rank: int, world_size: int, mode: str, record: str, kernel: str, bag: bool, engine: str
) -> dict[str, Any]:
    """Train with hooks that may not wait for the device; return the number of hooks, those that wait, and errors."""
    spec = spec_of(world_size, bag=bag, kernel=kernel)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode(mode), record=record, engine=engine) as tracker:
        model(batch(spec, generator)).backward()  # the first batch may compile kernels
        with _checked_hooks() as ran:
            for _ in range(3):
                model(batch(spec, generator)).backward()
                with no_sync():
                    tracker.step()
        waiting: list[str] = []
        with nullcontext() if IS_CUDA else fake_streams(1):
            for number in range(3):
                features = batch(spec, generator)
                found = run_asleep(lambda: model(features).backward())  # noqa: B023
                waiting += found.waiting if number else []  # the first one may allocate pinned memory
                tracker.step()
        rows = tracker.get_delta().num_rows
        return {"hooks": len(ran), "waiting": waiting, "errors": tracker.num_hook_errors, "rows": rows}


class Parts(nn.Module):
    """The model with a loss and an output, as TorchRec's pipelines need."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ec, self.dense = model.module.ec, model.module.dense
        self.is_bag = model.module.is_bag

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        embedded = self.ec(features)
        rows = embedded.values() if self.is_bag else torch.cat([each.values().flatten() for each in embedded.values()])
        loss = self.dense(rows.reshape(-1, self.dense.in_features)).sum()
        return loss, loss.detach()


PIPELINES = {
    "base": TrainPipelineBase,
    "sparse dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "semi sync": TrainPipelineSemiSync,
}


def pipeline(rank: int, world_size: int, name: str, kernel: str, mode: str, directory: str) -> int:
    """Each read between steps has the rows that changed since the last one; a predictor follows all of them."""
    spec = spec_of(world_size, bag=True, kernel=kernel)
    model = shard(spec)
    parts = Parts(model)
    generator = torch.Generator().manual_seed(rank)
    batches = iter([batch(spec, generator, size=12) for _ in range(9)])
    optimizer = torch.optim.SGD(parts.dense.parameters(), lr=0.1)
    trainer = (
        PIPELINES[name](parts, optimizer, OF_MODULES, execute_all_batches=True)
        if name != "base"
        else (TrainPipelineBase(parts, optimizer, OF_MODULES))
    )
    num_changed = 0
    with ModelDeltaTracker(model, ["reader", "stream"], mode=TrackingMode(mode)) as tracker:
        publisher = Publisher(tracker, Storage(f"file://{directory}"), "stream")
        publisher.snapshot()
        before = rows_of(model)
        for step in range(8):
            trainer.progress(batches)
            tracker.step()
            delta = tracker.get_delta("reader", with_values=True)
            publisher.snapshot() if step == 5 else publisher.publish()
            now = rows_of(model)
            for table, rows in now.items():
                changed = changed_rows(before[table], rows)
                found = delta[f"ec.embedding_bags.{table}"]
                assert set(changed) <= set(found.ids.tolist()), f"step {step}, {table}: rows are missing"
                assert len(changed) == len(found), f"step {step}, {table}: {len(found)} rows instead of {len(changed)}"
                assert torch.equal(found.values.cpu(), rows[found.ids.cpu()])
                num_changed += len(changed)
            before = now
        publisher.close()
        assert tracker.num_hook_errors == 0
        dist.barrier()
        tables = {f"ec.embedding_bags.{table.name}": torch.zeros(table.rows, table.dim) for table in spec.tables}
        Predictor(tables, f"file://{directory}").sync()
        for table, rows in before.items():
            offset = tracker.shards[f"ec.embedding_bags.{table}"].row_offset
            assert torch.equal(tables[f"ec.embedding_bags.{table}"][offset : offset + len(rows)], rows)
    return num_changed


def snapshots_during_prefetch(rank: int, world_size: int, directory: str) -> int:
    """Snapshots flush a cache while the next batch's rows are prefetched into it on another stream."""
    spec = spec_of(world_size, bag=True, kernel="fused_uvm_caching")
    model, twin = shard(spec), shard(spec)
    kinds = []
    for number, each in enumerate((model, twin)):
        parts = Parts(each)
        generator = torch.Generator().manual_seed(rank)
        batches = iter([batch(spec, generator, size=60) for _ in range(12)])
        optimizer = torch.optim.SGD(parts.dense.parameters(), lr=0.1)
        trainer = PrefetchTrainPipelineSparseDist(parts, optimizer, OF_MODULES, execute_all_batches=True)
        tracker = ModelDeltaTracker(each) if number == 0 else None
        publisher = None if tracker is None else Publisher(tracker, f"file://{directory}")
        for _ in range(10):
            trainer.progress(batches)
            slow_down(5)
            if publisher is not None:
                publisher.snapshot()
        if publisher is not None:
            publisher.close()
        kinds.append(bits(each))
    assert all(map(torch.equal, *kinds)), "a flush during a prefetch changed rows"
    tables = {f"ec.embedding_bags.{table.name}": torch.zeros(table.rows, table.dim) for table in spec.tables}
    return Predictor(tables, f"file://{directory}").sync()


def compiled(rank: int, world_size: int, backend: str, full: bool, autograd: bool) -> int | None:
    """Rows that a compiled model reports are those that changed. Return None if it cannot be compiled at all."""
    spec = Spec([Table("a", 100, "table:0"), Table("b", 30, "table:0")], bag=True, device=str(OF_MODULES))
    model = shard(spec)
    (kernel,) = kernels_of(model.module.ec)
    generator = torch.Generator().manual_seed(rank)

    def train(features: KeyedJaggedTensor) -> Tensor:
        return kernel(features).sum()

    torch._dynamo.reset()
    try:
        torch.compile(train, backend=backend, fullgraph=full)(batch(spec, generator, size=8))
    except torch._dynamo.exc.TorchDynamoException:
        return None
    num_changed = 0
    with ModelDeltaTracker(model) as tracker:
        call = torch.compile(train, backend=backend, fullgraph=full)
        with torch._dynamo.config.patch(compiled_autograd=autograd):
            for _ in range(3):
                before = rows_of(model)
                features = batch(spec, generator, size=8)
                features.length_per_key()
                call(features).backward()
                delta = tracker.get_delta()
                for name, rows in rows_of(model).items():
                    changed = changed_rows(before[name], rows)
                    assert delta[f"ec.embedding_bags.{name}"].ids.tolist() == changed, name
                    num_changed += len(changed)
        assert tracker.num_hook_errors == 0
    return num_changed
