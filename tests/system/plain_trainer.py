"""Trainer of plain torch that publishes every batch until it is killed: ``python -m tests.system.plain_trainer ...``.

Each batch is a function of its number, so the rows after any batch can be computed again. With a checkpoint, the
trainer saves before every third batch and begins at the newest one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from delta_tracker import Cadence, ModelDeltaTracker, Publisher
from delta_tracker.integrations.dcp import SavedTracker

ROWS, COLUMNS = 300, 8


def build() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    """Return a model with a sparse and a dense table, and an optimizer for each. Neither has states besides rows."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"user": nn.EmbeddingBag(ROWS, COLUMNS, sparse=True), "item": nn.Embedding(ROWS, COLUMNS)})
    return model, [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in model]


def train(model: nn.ModuleDict, optimizers: list[torch.optim.Optimizer], batch: int) -> None:
    """Train on one batch."""
    ids = (torch.arange(20) * (batch + 7)) % ROWS
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss: Tensor = (model["user"](ids[None]).sum() * (batch % 5 + 1)) + model["item"](ids % (ROWS // 2)).sum() * 0.5
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def main(url: str, folder: str) -> None:
    """Train, publish and save; print the number of each batch."""
    model, optimizers = build()
    tracker = ModelDeltaTracker(model, max_bytes=1 << 20)
    saves = sorted(Path(folder).glob("*/.metadata"), key=lambda each: int(each.parent.name))
    if saves:
        path = str(saves[-1].parent)
        weights = model.state_dict()
        dcp.load({"model": weights, "tracker": SavedTracker(tracker, path)}, checkpoint_id=path, no_dist=True)
        model.load_state_dict(weights)
    publisher = Publisher(tracker, url, cadence=Cadence(batches=1))
    for batch in range(tracker.num_batches, 10_000):
        train(model, optimizers, batch)
        tracker.step()
        publisher.step()
        if batch % 3 == 0:
            state = {"model": model.state_dict(), "tracker": tracker}
            dcp.save(state, checkpoint_id=f"{folder}/{batch + 1}", no_dist=True)
        sys.stdout.write(f"{batch}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # DCP warns in a process without a group
    main(*sys.argv[1:])
