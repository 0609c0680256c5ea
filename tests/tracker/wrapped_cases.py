"""Collections inside other modules of TorchRec, and unusual batches: reported rows are those that changed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker
from tests.models import with_kernel
from tests.tracker.tracking_cases import _Copy, rows_of

_ROWS, _NAMES, _LENGTH = 17, ("row", "last"), 4
_FUSED = {"learning_rate": 0.1}
_OTHERS = {
    "column_wise": column_wise(ranks=[0, 1]),
    "table_column_wise": column_wise(ranks=[1, 0]),
    "table_row_wise": table_row_wise(host_index=0),
    "grid_shard": grid_shard(host_indexes=[0]),
}


class _Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.tables(features)
        found = getattr(found, "wait", lambda: found)()
        values = found.values()
        rows = [values] if isinstance(values, Tensor) else [each.values() for each in values]
        return torch.cat([each.reshape(-1) for each in rows]).square().sum()


def _tables(kind: str) -> tuple[nn.Module, Any]:
    """Return unsharded tables and their sharder."""
    meta = torch.device("meta")
    settings = [{"name": name, "num_embeddings": _ROWS, "embedding_dim": 8, "feature_names": [name]} for name in _NAMES]
    if kind in ("feature processors", "variable batch"):
        is_weighted = kind == "feature processors"
        bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(**each) for each in settings], is_weighted=is_weighted, device=meta
        )
        if not is_weighted:
            return bags, EmbeddingBagCollectionSharder(fused_params=dict(_FUSED))
        processors = PositionWeightedModuleCollection(dict.fromkeys(_NAMES, _LENGTH))
        inner = EmbeddingBagCollectionSharder(fused_params=dict(_FUSED))
        return (
            FeatureProcessedEmbeddingBagCollection(bags, processors),
            FeatureProcessedEmbeddingBagCollectionSharder(inner),
        )
    rows = EmbeddingCollection(tables=[EmbeddingConfig(**each) for each in settings], device=meta)
    sharder = EmbeddingCollectionSharder(fused_params=dict(_FUSED), use_index_dedup=kind == "repeated ids removed")
    if kind == "pec":
        wrapper = import_module("torchrec.modules.pec_embedding_modules").PECEmbeddingCollection
        return wrapper(rows), import_module("torchrec.distributed.pec_embedding").PECEmbeddingCollectionSharder(sharder)
    return rows, sharder


def _batch(kind: str, rank: int, generator: torch.Generator) -> KeyedJaggedTensor:
    sizes = {"uneven batches": [2 + 3 * rank] * 2, "variable batch": [2, 3 + rank]}.get(kind, [3, 3])
    lengths = [torch.randint(0, _LENGTH, (size,), generator=generator) for size in sizes]
    values = torch.cat([torch.randint(0, _ROWS, (int(each.sum()),), generator=generator) for each in lengths])
    if kind == "pec":  # looks rows up twice
        values = values % 5
    strides = {"stride_per_key_per_rank": [[size] for size in sizes]} if kind == "variable batch" else {}
    if strides:
        longest = max(sizes)
        strides["inverse_indices"] = (
            list(_NAMES),
            torch.stack([torch.arange(longest) % size for size in sizes]),
        )
    return KeyedJaggedTensor(keys=list(_NAMES), values=values, lengths=torch.cat(lengths), **strides)


def _unique(ends: Tensor, _: Tensor, offsets: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Remove repeated ids of each table with one feature, as FBGEMM does on CUDA only.

    Args:
        ends: ``[T + 1]``, number of rows of all tables before each.
        offsets: ``[T * B + 1]``.
        ids: ``[N]``.

    Returns:
        Lengths and offsets of the unique ids, these ids, and the index of each of ``ids`` in them.
    """
    num_tables = len(ends) - 1
    size = (len(offsets) - 1) // num_tables
    joined, reverse = (ids + ends[:-1].repeat_interleave(offsets[::size].diff())).unique(return_inverse=True)
    tables = torch.bucketize(joined, ends[1:], right=True)
    counts = tables.bincount(minlength=num_tables)[:, None]
    lengths = (counts // size + (torch.arange(size) < counts % size)).flatten()
    return lengths, nn.functional.pad(lengths.cumsum(0), (1, 0)), joined - ends[tables], reverse


def exact(rank: int, world_size: int, kind: str, sharding: str = "", num_steps: int = 4) -> int | None:
    """Each read has the rows that differ, and no other. Return their number; None if torchrec lacks the kind."""
    if kind == "pec" and find_spec("torchrec.modules.pec_embedding_modules") is None:
        return None
    library = torch.library.Library("fbgemm", "IMPL")  # until this call returns
    if kind == "repeated ids removed":
        library.impl("jagged_unique_indices", _unique, "CPU")
    torch.manual_seed(0)
    tables, sharder = _tables(kind)
    places = {"row": with_kernel(row_wise(), "fused"), "last": with_kernel(table_wise(rank=world_size - 1), "fused")}
    if kind == "pec":  # it supports row-wise sharding only
        places["last"] = with_kernel(row_wise(), "fused")
    if sharding == "data_parallel":
        places["row"] = with_kernel(data_parallel(), "dense")
    elif sharding:
        places["row"] = with_kernel(_OTHERS[sharding], "fused", sharding)
    plan = construct_module_sharding_plan(
        tables, places, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    model = DistributedModelParallel(
        _Model(tables), device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    generator = torch.Generator().manual_seed(rank)
    num_rows = 0
    with ModelDeltaTracker(model) as tracker:
        copy = _Copy(tracker, "default")
        for _ in range(num_steps):
            model(_batch(kind, rank, generator)).backward()
            tracker.step()
            copy.read({fqn: set() for fqn in tracker.tables})
            num_rows += copy.open[0].num_rows
            copy.commit()
            for fqn, now in rows_of(tracker).items():
                assert torch.equal(copy.rows[fqn], now), fqn
        assert tracker.num_hook_errors == 0
        dist.barrier()
        return num_rows
