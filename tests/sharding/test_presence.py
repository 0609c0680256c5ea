"""Modules of TorchRec in a model: their tables are found by name, also where fbgemm does not hold them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from delta_tracker.predictor.served_model import check_targets, find_targets
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import TableSpec


def _manifest(*names: str, num_rows: int = 20, dim: int = 4, dtype: torch.dtype = torch.float32) -> Manifest:
    tables = {name: TableSpec(name, num_rows, dim, dtype) for name in names}
    return Manifest(stream="", generation=0, writer="", version=0, kind="delta", created=0.0, tables=tables)


@pytest.mark.parametrize("bag", [False, True])
def test_unsharded_collections_are_found_by_their_names(bag: bool) -> None:
    kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if bag else (EmbeddingCollection, EmbeddingConfig)
    tables = [config(name=name, num_embeddings=20, embedding_dim=4, feature_names=[name]) for name in ("a", "b")]
    model = nn.ModuleDict({"ec": kind(tables=tables), "over": nn.Linear(4, 2)})
    targets = find_targets(model)
    holder = "embedding_bags" if bag else "embeddings"
    assert set(targets) == {f"ec.{holder}.a", f"ec.{holder}.b", "over"}
    target = targets[f"ec.{holder}.b"]
    check_targets(_manifest(f"ec.{holder}.a", f"ec.{holder}.b"), targets)
    target.write(torch.tensor([2, 7]), torch.full((2, 4), 3.0), (0, 4))
    weight = getattr(model["ec"], holder)["b"].weight
    assert weight[[2, 7]].eq(3).all()
    assert weight.eq(3).sum() == 8
