"""One trainer rank: predicts each batch, then trains on it, and publishes the changed rows."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import Adagrad, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, Publisher
from examples.movielens.data import Ratings
from examples.movielens.forks import Send
from examples.movielens.metrics import serve
from examples.movielens.model import MANAGED, FactorizationMachine
from examples.movielens.settings import WORLD_SIZE, Settings

ROW_WISE = ("user", "movie")
"""Tables that are sharded by rows; each other table is on one rank."""
CPU = torch.device("cpu")


def train_and_publish(send: Send, settings: Settings, ratings: Ratings, rank: int) -> None:
    """Train, publish, and write the predictions and the final shards of this rank to the work folder."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(WORLD_SIZE))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.work / 'rendezvous'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=settings.patience_seconds),
    )
    serve(send, f"trainer-{rank}")
    model = sharded_model(ratings, settings)
    with ModelDeltaTracker(model, consumers=["stream"]) as tracker:
        publisher = Publisher(tracker, settings.stream.as_uri(), consumer="stream")
        logits = train(send, model, tracker, publisher, ratings, settings)
        publisher.close()
        save_raw_ids(tracker, settings.work, rank)
    np.save(settings.work / f"trainer-logits.{rank}.npy", logits.numpy())
    save_shards(model, settings.work, rank)
    dist.destroy_process_group()


def sharded_model(ratings: Ratings, settings: Settings) -> DistributedModelParallel:
    """Shard the model over the ranks, with a fused optimizer, which writes only the rows of a batch."""
    model = FactorizationMachine(ratings.table_rows, settings.dim, torch.device("meta"), settings.zch)
    # On a CPU, FBGEMM cannot reset the rows of evicted ids in a table with row-wise Adagrad.
    optimizer = Adagrad if settings.zch else RowWiseAdagrad
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": settings.learning_rate})
    sharders: dict[str, Any] = {"ec": EmbeddingCollectionSharder()}
    if model.mc is not None:
        inner = EmbeddingCollectionSharder(use_index_dedup=False)
        sharders["mc"] = ManagedCollisionEmbeddingCollectionSharder(ec_sharder=inner)
    world_size = dist.get_world_size()
    placement = {
        name: row_wise() if name in ROW_WISE else table_wise(rank=position % world_size)
        for position, name in enumerate(ratings.table_rows)
    }
    managed = MANAGED if settings.zch else ()
    plan = {
        module: construct_module_sharding_plan(
            getattr(model, module),
            {name: each for name, each in placement.items() if (name in managed) == (module == "mc")},
            sharder=sharder,
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        for module, sharder in sharders.items()
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(
        model, env=env, device=CPU, plan=ShardingPlan({**plan}), sharders=[*sharders.values()]
    )


def train(
    send: Send,
    model: DistributedModelParallel,
    tracker: ModelDeltaTracker,
    publisher: Publisher,
    ratings: Ratings,
    settings: Settings,
) -> Tensor:
    """Return this rank's ``[batches, B]`` logits after the warm-up; each batch is predicted before it is trained on."""
    share = settings.batch // WORLD_SIZE
    predictions = []
    for batch in range(settings.num_batches):
        since_snapshot = batch - settings.warmup_batches
        if since_snapshot == 0:
            publisher.snapshot()
        elif since_snapshot > 0 and since_snapshot % settings.every == 0:
            publisher.publish()
        mine = slice(start := batch * settings.batch + dist.get_rank() * share, start + share)
        logits = model(model.module.jagged(ratings.ids[:, mine]))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, ratings.labels[mine])
        loss.backward()  # type: ignore[no-untyped-call]  # the fused optimizer updates the rows here
        tracker.step()
        if since_snapshot >= 0:
            predictions.append(logits.detach())
        if dist.get_rank() == 0 and batch % 16 == 0:
            send({"event": "trained", "batches": batch + 1})
    publisher.publish()
    send({"event": "trained", "batches": settings.num_batches})
    return torch.stack(predictions)


def save_shards(model: DistributedModelParallel, folder: Path, rank: int) -> None:
    """Write each table's shards with TorchRec's metadata, so that the comparison does not depend on the tracker."""
    for name, sharded in model.state_dict().items():
        for shard in sharded.local_shards() if name.endswith(".weight") else ():
            row, column = shard.metadata.shard_offsets
            np.save(folder / f"shard@{name.removesuffix('.weight')}@{row}@{column}@{rank}.npy", shard.tensor.numpy())


def save_raw_ids(tracker: ModelDeltaTracker, folder: Path, rank: int) -> None:
    """Write the raw ids of this rank's rows, for the tables that have them."""
    for name, raw_ids in tracker.live.owner_views().items():
        np.save(
            folder / f"shard@{name}.raw_ids@{tracker.shards[name].row_offset}@0@{rank}.npy", raw_ids[:, None].numpy()
        )
