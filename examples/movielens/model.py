"""Factorization machine whose parameters are all in embedding tables.

With managed collisions (ZCH), the tables of users and movies have fewer rows than there are ids. TorchRec then gives
rows to the ids that occur often, and takes them from others.

Shapes: ``F`` features, ``B`` ratings, ``D`` columns of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

MANAGED = ("user", "movie")
"""Tables that managed collisions are for."""
EVICTION_INTERVAL = 8
"""Batches between two evictions."""


class FactorizationMachine(nn.Module):
    """Factorization machine with one table per feature: column 0 of a row is its linear term, the others its factors.

    Args:
        table_rows: rows of each feature's table.
        dim: ``D``.
        device: device of the tables; ``meta`` for a model that will be sharded.
        zch: rows of the tables ``MANAGED`` as a share of their ids; 0 for a row for each id.
    """

    def __init__(self, table_rows: Mapping[str, int], dim: int, device: torch.device, zch: float = 0.0) -> None:
        super().__init__()
        self.features = list(table_rows)
        managed = {name: table_rows[name] for name in MANAGED} if zch else {}
        plain = {name: num_rows for name, num_rows in table_rows.items() if name not in managed}
        self.ec = _collection(plain, dim, device)
        self.mc: nn.Module | None = None
        if managed:
            sizes = {name: math.ceil(num_ids * zch) for name, num_ids in managed.items()}
            collection = _collection(sizes, dim, device)
            collisions = ManagedCollisionCollection(
                {name: _collisions(sizes[name], num_ids) for name, num_ids in managed.items()},
                collection.embedding_configs(),
            )
            self.mc = ManagedCollisionEmbeddingCollection(collection, collisions)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return ``[B]`` logits: the linear terms, and the dot product of each pair of factors."""
        embeddings = dict(self.ec(features))
        if self.mc is not None:
            embeddings |= dict(self.mc(features)[0])
        rows = torch.stack([embeddings[name].values() for name in self.features])  # [F, B, D]
        factors = rows[..., 1:]
        pairs = (factors.sum(0).square() - factors.square().sum(0)) / 2
        return rows[..., 0].sum(0) + pairs.sum(-1)

    def jagged(self, ids: Tensor) -> KeyedJaggedTensor:
        """Return ``[F, B]`` ids as the input of :meth:`forward`."""
        return KeyedJaggedTensor(self.features, ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32))


def _collection(table_rows: Mapping[str, int], dim: int, device: torch.device) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=dim,
            feature_names=[name],
            init_fn=partial(nn.init.normal_, std=0.01),
        )
        for name, num_rows in table_rows.items()
    ]
    return EmbeddingCollection(device=device, tables=tables)


def _collisions(num_rows: int, num_ids: int) -> MCHManagedCollisionModule:
    """Return the mapping of ``num_ids`` raw ids to ``num_rows`` rows."""
    return MCHManagedCollisionModule(
        zch_size=num_rows,
        device=torch.device("cpu"),
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=EVICTION_INTERVAL,
        input_hash_size=num_ids,
    )
