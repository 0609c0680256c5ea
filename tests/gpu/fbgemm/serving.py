"""Cases of serving with FBGEMM's kernels for inference; each runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelTarget, Predictor, Storage
from tests.gpu.devices import OF_MODULES
from tests.sharding.quantized import quantize, shard_quantized
from tests.stream.streams import FQN, Writer

_NUM_ROWS, _DIM = 500, 16


def _model(table: torch.Tensor, kind: str, *, bag: bool, placement: str) -> Any:
    model = quantize({"t": table}, kind, bag=bag, device=OF_MODULES)
    return model if placement == "whole" else shard_quantized(model, "table", kernel=placement, device=OF_MODULES)


def _look_up(model: Any, ids: torch.Tensor, *, bag: bool) -> torch.Tensor:
    values = ids.to(OF_MODULES)
    lengths = torch.ones(len(ids), dtype=torch.int32, device=OF_MODULES)
    found = model(KeyedJaggedTensor(keys=["t"], values=values, lengths=lengths))
    return found.values().cpu() if bag else found["t"].values().cpu()


def follow(rank: int, world_size: int, kind: str, bag: bool, placement: str) -> int:
    """Apply a snapshot and deltas between lookups; each lookup equals that of a newly quantized model."""
    storage = Storage("memory://")
    writer = Writer(storage, _NUM_ROWS, _DIM)
    model = _model(writer.table, kind, bag=bag, placement=placement)
    fqn = f"ec.{'embedding_bags' if bag else 'embeddings'}.t"
    predictor = Predictor(ModelTarget(model, names={FQN: fqn}), storage)
    ids = torch.arange(_NUM_ROWS)
    writer.table.copy_(torch.randn(_NUM_ROWS, _DIM))
    writer.snapshot()
    for _ in range(4):
        predictor.sync()
        with predictor.reading():
            found = _look_up(model, ids, bag=bag)
        expected = _look_up(_model(writer.table, kind, bag=bag, placement="whole"), ids, bag=bag)
        assert torch.equal(found, expected)
        writer.delta(torch.randperm(_NUM_ROWS)[:200].sort().values.tolist())
    version = predictor.version
    assert version is not None
    return version
