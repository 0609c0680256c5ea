"""Publish tables that are sharded over two ranks; each rank tracks and publishes its own rows, without a gather.

Shows local and global ids, one version from all ranks with the dense parameters of the same cut, and an unsharded
predictor with the rows of all ranks. Run it:
``torchrun --standalone --nproc-per-node 2 -m examples.sharded``
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, Predictor, Publisher

TABLES = {"user": 1000, "movie": 500}
COLUMNS = 8


class Model(nn.Module):
    """Two tables and a linear layer on top."""

    def __init__(self, device: str) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=num_rows, embedding_dim=COLUMNS, feature_names=[name])
            for name, num_rows in TABLES.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.dense = nn.Linear(COLUMNS * len(TABLES), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the mean score of a batch."""
        return self.dense(self.tables(features).values()).mean()


def main() -> None:
    """Train on every rank, publish, and compare a predictor with this rank's shards."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    url = [f"file://{tempfile.mkdtemp()}"]  # the same location for all ranks, such as s3://bucket/prefix
    dist.broadcast_object_list(url)

    model = shard(Model("meta"))
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url[0], dense=model.module.dense)
    publisher.snapshot()

    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(batch(generator)).backward()
        tracker.step()
    for fqn, num_rows in tracker.num_pending().items():
        spec = tracker.shards[fqn]
        print(f"rank {rank}: {fqn} rows {spec.row_offset}+{spec.num_rows}, {num_rows} of them changed", flush=True)
    manifest = publisher.publish()
    if rank == 0:
        print(f"version {manifest.version}: {manifest.num_rows} rows in {len(manifest.parts)} parts")

    served = Model("cpu")
    Predictor(served, url[0]).sync()
    for fqn, spec in tracker.shards.items():
        theirs = served.get_parameter(f"{fqn}.weight")[spec.row_offset : spec.row_offset + spec.num_rows]
        assert theirs.equal(tracker.read_rows(fqn).reshape(spec.num_rows, COLUMNS)), fqn
    assert manifest.kind == "delta"
    assert manifest.pending_rows == 0
    print(f"rank {rank}: the predictor equals this rank's shards bit for bit", flush=True)
    publisher.close()
    dist.destroy_process_group()


def shard(model: Model) -> DistributedModelParallel:
    """Shard users by rows over all ranks, and put movies on the last rank."""
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.1})
    world_size = dist.get_world_size()
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.tables,
        {"user": row_wise(), "movie": table_wise(rank=world_size - 1)},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    plans = ShardingPlan({"tables": plan})
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plans, sharders=[sharder])


def batch(generator: torch.Generator, size: int = 16) -> KeyedJaggedTensor:
    """Return a batch with one random id per feature and example."""
    ids = torch.cat([torch.randint(0, num_rows, (size,), generator=generator) for num_rows in TABLES.values()])
    return KeyedJaggedTensor(list(TABLES), ids, lengths=torch.ones(len(ids), dtype=torch.int64))


if __name__ == "__main__":
    main()
