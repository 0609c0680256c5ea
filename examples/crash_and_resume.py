"""Kill a trainer and resume it on another number of ranks; the predictor returns to the resumed trainer's state.

Two ranks publish every third batch, save a checkpoint every tenth, and are killed after batch 25. Version 8 then has
batches that are in no checkpoint. One rank resumes from batch 20. Its first version is a delta with the rows that were
pending in the checkpoint and all rows that the lost batches had changed. Run it with a new folder::

    torchrun --standalone --nproc-per-node 2 -m examples.crash_and_resume FOLDER --die-after 25
    torchrun --standalone --nproc-per-node 1 -m examples.crash_and_resume FOLDER
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.integrations.dcp import SavedTracker

NUM_ROWS, COLUMNS = 5000, 8
TABLE = "embeddings.user"
PUBLISH_EVERY, SAVE_EVERY, NUM_BATCHES = 3, 10, 40


def main(folder: Path, die_after: int | None) -> None:
    """Train from the newest checkpoint, if there is one."""
    dist.init_process_group("gloo")
    rank, url = dist.get_rank(), f"file://{folder.resolve()}/stream"
    served = torch.zeros(NUM_ROWS, COLUMNS)
    predictor = Predictor({TABLE: served}, url)  # usually in its own process, which survives the trainer
    saved = sorted(path.parent for path in folder.glob("checkpoint-*/.metadata"))
    if saved:
        predictor.sync()  # the state at the crash
        report(rank, f"the predictor is at version {predictor.version}, from the killed trainer")

    model = sharded_model()
    tracker = ModelDeltaTracker(model, consumers=["stream"])
    if saved:
        tracked = SavedTracker(tracker, saved[-1])
        dcp.load({"model": model, "optimizer": model.fused_optimizer, "tracker": tracked}, checkpoint_id=saved[-1])
        report(rank, f"{dist.get_world_size()} rank resumes at batch {tracker.num_batches}")
    publisher = Publisher(tracker, url)  # after the restore: marks the rows of versions newer than the checkpoint

    while tracker.num_batches < NUM_BATCHES:
        generator = torch.Generator().manual_seed(1000 * tracker.num_batches + rank)
        ids = torch.randint(0, NUM_ROWS, (32,), generator=generator)
        features = KeyedJaggedTensor(["user"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        model(features)["user"].values().sum().backward()
        tracker.step()
        if tracker.num_batches % PUBLISH_EVERY == 0:
            manifest = publisher.publish()
            report(rank, f"batch {tracker.num_batches}: version {manifest.version}, {manifest.kind}")
            predictor.sync()
            if saved:
                assert manifest.kind == "delta"
                spec = tracker.shards[TABLE]
                assert served[spec.row_offset :][: spec.num_rows].equal(tracker.read_rows(TABLE))
        if tracker.num_batches % SAVE_EVERY == 0:
            path = folder / f"checkpoint-{tracker.num_batches:06}"
            dcp.save({"model": model, "optimizer": model.fused_optimizer, "tracker": tracker}, checkpoint_id=path)
        if tracker.num_batches == die_after:
            report(rank, f"killed after batch {die_after}")
            os.kill(os.getpid(), signal.SIGKILL)
    publisher.close()
    report(rank, "after each version the predictor equals the trainer bit for bit")
    dist.destroy_process_group()


def sharded_model() -> DistributedModelParallel:
    """Return a model with one table, sharded by rows over all ranks."""
    config = EmbeddingConfig(name="user", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["user"])
    collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    world_size = dist.get_world_size()
    sharder: Any = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        {"user": row_wise()},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    plans = ShardingPlan({"": plan})
    return DistributedModelParallel(collection, device=torch.device("cpu"), plan=plans, sharders=[sharder])


def report(rank: int, line: str) -> None:
    """Print a line on rank 0."""
    if rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the stream and the checkpoints")
    parser.add_argument("--die-after", type=int, help="batch after which every rank kills itself")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.die_after)
