"""Factorization machine whose parameters are all in embedding tables.

Shapes: ``F`` features, ``B`` ratings, ``D`` columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor


class FactorizationMachine(nn.Module):
    """Factorization machine with one table per feature: column 0 of a row is its linear term, the others its factors.

    Args:
        table_rows: rows of each feature's table.
        dim: ``D``.
        device: device of the tables; ``meta`` for a model that will be sharded.
    """

    def __init__(self, table_rows: Mapping[str, int], dim: int, device: torch.device) -> None:
        super().__init__()
        self.features = list(table_rows)
        self.ec = EmbeddingCollection(
            device=device,
            tables=[
                EmbeddingConfig(
                    name=name,
                    num_embeddings=num_rows,
                    embedding_dim=dim,
                    feature_names=[name],
                    init_fn=partial(nn.init.normal_, std=0.01),
                )
                for name, num_rows in table_rows.items()
            ],
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return ``[B]`` logits: the linear terms, and the dot product of each pair of factors."""
        embeddings = self.ec(features)
        rows = torch.stack([embeddings[name].values() for name in self.features])  # [F, B, D]
        factors = rows[..., 1:]
        pairs = (factors.sum(0).square() - factors.square().sum(0)) / 2
        return rows[..., 0].sum(0) + pairs.sum(-1)

    def jagged(self, ids: Tensor) -> KeyedJaggedTensor:
        """Return ``[F, B]`` ids as the input of :meth:`forward`."""
        return KeyedJaggedTensor(self.features, ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32))
