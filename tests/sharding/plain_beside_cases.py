"""Case for plain modules beside sharded collections of TorchRec."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker


def beside(rank: int, world_size: int) -> list[str]:
    """Return the tracked tables; a warning names the plain table."""
    del rank, world_size
    table = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=4, feature_names=["t"])
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=[table]), "plain": nn.EmbeddingBag(4, 4)})
    sharded = DistributedModelParallel(model, device=torch.device("cpu"))
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("delta_tracker").addHandler(handler)
    try:
        tracked = list(ModelDeltaTracker(sharded).tables)
    finally:
        logging.getLogger("delta_tracker").removeHandler(handler)
    assert messages == [
        "not tracked, because the model has sharded collections: plain; publish these tables with dense=..."
    ]
    return tracked
