"""Cases for predictors of sharded and quantized models, which must equal trainers with other shardings."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import PartialRowsError
from delta_tracker.predictor.served_model import find_targets
from delta_tracker.row_target import TensorTarget
from delta_tracker.sharding.discover import discover
from delta_tracker.sharding.weights import column_views
from tests.models import Spec, Table, batch, shard
from tests.sharding.quantized import memory, quantize, shard_quantized
from tests.tracker.conformance_cases import hosts


def _spec(shardings: dict[str, str], *, bag: bool, kernel: str, dim: int, local_size: int | None = None) -> Spec:
    tables = [
        Table(name, 9 + number % 9, sharding, dim=dim) for number, (name, sharding) in enumerate(shardings.items())
    ]
    return Spec(tables, bag=bag, kernel=kernel, local_size=local_size)


def _train(model: nn.Module, spec: Spec, generator: torch.Generator, tracker: ModelDeltaTracker) -> None:
    model(batch(spec, generator)).backward()
    tracker.step()


def whole_tables(model: nn.Module) -> dict[str, Tensor]:
    """Return every table of a sharded model, assembled from all ranks; NaN where no rank holds it."""
    held = [
        (fqn, shard.spec.row_offset, columns, view.clone())
        for fqn, shard in discover(model).shards.items()
        for columns, view in zip(shard.spec.columns, column_views(shard), strict=True)
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, held)
    tables = {fqn: torch.full((table.num_rows, table.dim), torch.nan) for fqn, table in discover(model).tables.items()}
    for fqn, row, columns, view in (block for blocks in every for block in blocks):
        tables[fqn][row : row + len(view), columns[0] : columns[1]] = view
    return tables


def clear(model: nn.Module) -> None:
    for target in find_targets(model).values():
        assert isinstance(target, TensorTarget)
        for region in target.regions:
            region.memory.fill_(-1)


def sharded(
    rank: int,
    world_size: int,
    url: str,
    shardings: list[str],
    bag: bool,
    kernels: list[str],
    dim: int = 8,
    local_size: int | None = None,
) -> dict[str, Any]:
    """Combine every sharding of the trainer with every sharding of the server; each pair is one table of a model."""
    pairs = [(mine, theirs) for mine in shardings for theirs in shardings]
    names = [f"t{number}" for number in range(len(pairs))]
    specs = [
        _spec(dict(zip(names, plan, strict=True)), bag=bag, kernel=kernel, dim=dim, local_size=local_size)
        for plan, kernel in zip(zip(*pairs, strict=True), kernels, strict=True)
    ]
    with hosts(rank, local_size or world_size):
        trainer, server = shard(specs[0]), shard(specs[1])
    clear(server)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(trainer, ["stream"]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        predictor = Predictor(server, url)
        num_rows = []
        for number in range(4):
            for _ in range(number):
                _train(trainer, specs[0], generator, tracker)
            publisher.publish() if number else publisher.snapshot()
            predictor.sync()
            num_rows.append(predictor.manifest.num_rows)
            wanted, found = whole_tables(trainer), whole_tables(server)
            assert wanted.keys() == found.keys()
            for fqn, table in wanted.items():
                pair = pairs[int(fqn.rsplit(".t", 1)[1])]
                assert not table.isnan().any(), (number, pair)
                assert torch.equal(found[fqn], table), (number, pair)
        publisher.close()
    held = {fqn: target.rows for fqn, target in find_targets(server).items() if target.columns}
    return {"rows": num_rows, "held": len(held), "tables": len(pairs)}


def quantized(rank: int, world_size: int, url: str, bag: bool, kind: str, server: str | None) -> list[int]:
    """Train a sharded model; on each rank a quantized model must equal the trainer's tables, quantized again."""
    spec = _spec({"row": "row", "column": "column:0,1", "stacked": "column:1,1", "first": "table:0"},
                 bag=bag, kernel="fused", dim=16)  # fmt: skip

    def model_of(tables: dict[str, Tensor]) -> nn.Module:
        named = {fqn.rsplit(".", 1)[1]: table for fqn, table in tables.items()}
        model = quantize(named, kind, bag=bag, split=server is not None)
        return model if server is None else shard_quantized(model, server)

    trainer = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    model = model_of({fqn: torch.zeros_like(table) for fqn, table in whole_tables(trainer).items()})
    num_rows = []
    with ModelDeltaTracker(trainer, ["stream"]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        predictor = Predictor(model, url)
        for number in range(4):
            for _ in range(number):
                _train(trainer, spec, generator, tracker)
            publisher.publish() if number else publisher.snapshot()
            predictor.sync()
            num_rows.append(predictor.manifest.num_rows)
            for held, wanted in zip(memory(model), memory(model_of(whole_tables(trainer))), strict=True):
                assert torch.equal(held, wanted), number
        publisher.close()
    return num_rows


def partial(rank: int, world_size: int, url: str) -> str:
    """Without fused kernels a row may change in one column shard only; such rows need a snapshot."""
    spec = _spec({"column": "column:0,1"}, bag=True, kernel="dense", dim=8)
    trainer = shard(spec)
    model = quantize({"column": torch.zeros(9, 8)}, "int8", bag=True)
    with ModelDeltaTracker(trainer, ["stream"]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        predictor = Predictor(model, url)
        publisher.snapshot()
        good = predictor.sync()
        if rank == 0:
            ((_, view),) = [(fqn, view) for fqn in tracker.tables for view in tracker.live.column_views(fqn)]
            view[3] += 1
        tracker.step()
        publisher.publish()
        message = ""
        try:
            predictor.sync()
        except PartialRowsError as error:
            message = str(error)
        assert predictor.version == good
        publisher.snapshot()
        Predictor(model, url).sync()
        (table,) = whole_tables(trainer).values()
        wanted = quantize({"column": table}, "int8", bag=True)
        assert all(torch.equal(held, new) for held, new in zip(memory(model), memory(wanted), strict=True))
        publisher.close()
    return message


def caches(rank: int, world_size: int, kernel: str) -> list[str]:
    """Write rows to a table of a kernel with a cache, and return the calls that would flush or empty the cache."""
    model = shard(_spec({"row": "row", "other": "row"}, bag=True, kernel=kernel, dim=8))
    (each,) = discover(model).kernels
    tbe = each.module.emb_module
    number = [fqn for fqn, _ in each.slots].index("ec.embedding_bags.row")
    num_rows = [spec[0] for spec in tbe.embedding_specs]
    events: list[str] = []
    tbe.flush, tbe.reset_cache_states = (functools.partial(events.append, name) for name in ("flush", "reset"))
    # FBGEMM has no caches on the CPU: give the kernel one of two slots, with the table's last row in the second one.
    last = sum(num_rows[: number + 1]) - 1
    state = torch.tensor([0 if number else num_rows[0], last])
    tbe.embedding_specs = [(*spec[:2], EmbeddingLocation.MANAGED_CACHING, spec[3]) for spec in tbe.embedding_specs]
    tbe.lxu_cache_weights, tbe.lxu_cache_state = torch.zeros(2, 8), state
    del tbe.total_cache_hash_size  # a buffer without a cache, otherwise a number
    tbe.total_cache_hash_size = sum(num_rows)

    def lookup(numbers: torch.Tensor, state: torch.Tensor, invalid: int) -> torch.Tensor:
        assert invalid == sum(num_rows)
        return (numbers.unsqueeze(1) == state).int() @ torch.tensor([1, 2], dtype=torch.int32) - 1

    with mock.patch.object(torch.ops.fbgemm, "lxu_cache_lookup", lookup):
        target = find_targets(model)["ec.embedding_bags.row"]
        first, end = target.rows
        target.write(slice(first, end), torch.full((end - first, 8), 5.0), (0, 8))
        target.write(torch.tensor([end - 1]), torch.full((1, 3), 7.0), (2, 5))
    assert bool((tbe.split_embedding_weights()[number][:-1] == 5).all())
    row = [5.0, 5.0, 7.0, 7.0, 7.0, 5.0, 5.0, 5.0]
    assert tbe.split_embedding_weights()[number][-1].tolist() == row
    assert tbe.lxu_cache_weights.tolist() == [[0.0] * 8, row]
    return events
