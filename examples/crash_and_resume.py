"""A trainer is killed and resumes on another number of ranks; the predictor comes back from a future that is no more.

Two ranks publish at every third batch, keep a checkpoint at every tenth, and are killed after the 25th: version 8 then
holds batches that no checkpoint has. One rank resumes from batch 20. Its first version carries what was pending in the
checkpoint, and every row that the lost batches had changed, as a delta. Run it, with any new folder::

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
    """Train, from the newest checkpoint if there is one."""
    dist.init_process_group("gloo")
    rank, url = dist.get_rank(), f"file://{folder.resolve()}/stream"
    served = torch.zeros(NUM_ROWS, COLUMNS)
    predictor = Predictor({TABLE: served}, url)  # in life a process of its own, which no crash of a trainer touches
    saved = sorted(path.parent for path in folder.glob("checkpoint-*/.metadata"))
    if saved:
        predictor.sync()  # as it stood when the trainer died
        report(rank, f"the predictor holds version {predictor.version}, of a trainer that is gone")

    model = sharded_model()
    tracker = ModelDeltaTracker(model, consumers=["stream"])
    if saved:
        tracked = SavedTracker(tracker, saved[-1])
        dcp.load({"model": model, "optimizer": model.fused_optimizer, "tracker": tracked}, checkpoint_id=saved[-1])
        report(rank, f"{dist.get_world_size()} rank resumes at batch {tracker.num_batches}")
    publisher = Publisher(tracker, url)  # built once the tracker is restored: it now marks what the stream had later

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
    """One table, by rows over all ranks."""
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
    """Print a line once."""
    if rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the stream and the checkpoints")
    parser.add_argument("--die-after", type=int, help="the batch after which every rank kills itself")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.die_after)
