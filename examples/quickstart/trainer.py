"""Train a model on all ranks and publish its changed rows.

Run it in this folder: ``torchrun --nproc-per-node 2 trainer.py``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker import Cadence, ModelDeltaTracker, Publisher

# Every rank and every predictor gets the same location, such as s3://bucket/prefix.
URL = sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "quickstart"
NUM_BATCHES = 100


def main() -> None:
    """Train on this rank, and publish a version every 10 batches."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(1000, 16, sparse=True), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    random = torch.Generator().manual_seed(dist.get_rank())
    with Publisher(tracker, URL, dense=True, cadence=Cadence(batches=10)) as publisher:
        for _ in range(NUM_BATCHES):
            clicked = torch.randint(1000, (32, 4), generator=random)  # 32 examples with 4 ids each
            optimizer.zero_grad()
            model(clicked).sigmoid().log().neg().mean().backward()
            optimizer.step()
            tracker.step()  # the batch is over: its rows have their new values
            publisher.step()  # publishes if the cadence says so
        publisher.publish()  # the rows since the last version
    if dist.get_rank() == 0:
        with torch.inference_mode():
            score = model.module(torch.tensor([[7, 42]])).item()
        print(f"version {publisher.version}: score {score:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
