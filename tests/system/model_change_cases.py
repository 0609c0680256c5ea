"""Processes of a rollout of a changed model.

``python -m tests.system.model_change_cases trainer URL FOLDER MODEL`` publishes until it is killed, and keeps its
tables as of each version. ``... predictor URL FOLDER MODEL RULE NAME`` serves until it is killed, and writes its
tables, its version and its status again and again.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher
from delta_tracker.predictor.model_fit import OnModelChange

SIZES = {
    "old": {"kept": (20, 4), "wider": (20, 4), "removed": (20, 4)},
    "new": {"kept": (20, 4), "wider": (20, 8), "added": (20, 4)},
}


def build(which: str) -> nn.ModuleDict:
    """Return the old or the new model."""
    torch.manual_seed(1)
    return nn.ModuleDict({name: nn.EmbeddingBag(*size, mode="sum") for name, size in SIZES[which].items()})


def save(value: object, path: Path) -> None:
    """Write a file as a whole."""
    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def tables_of(model: nn.ModuleDict) -> dict[str, Tensor]:
    """Return a copy of the tables by name."""
    return {name: module.weight.detach().clone() for name, module in model.items()}


def trainer(url: str, folder: Path, which: str) -> None:
    """Train a batch for each version."""
    model = build(which)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url, dense=False)
    for batch in itertools.count():
        optimizer.zero_grad()
        cast("Tensor", sum(module(torch.tensor([[batch % 20, 7]])).sum() for module in model.values())).backward()
        optimizer.step()
        tracker.step()
        version = publisher.publish().version
        save(tables_of(model), folder / f"{version}.trained")
        time.sleep(0.05)


def predictor(url: str, folder: Path, which: str, rule: OnModelChange, name: str) -> None:
    """Follow the stream, from the saved position and tables if there are some."""
    model = build(which)
    follower = Predictor(ModelTarget(model, on_model_change=rule), url, name=name)
    saved = folder / f"{name}.served"
    if saved.exists():
        held: dict[str, Any] = torch.load(saved, weights_only=False)
        model.load_state_dict({f"{fqn}.weight": table for fqn, table in held["tables"].items()})
        follower.load_state_dict(held["state"])
    follower.follow(poll_seconds=0.02)
    follower.wait(timeout=60)
    while True:
        with follower.reading() as served:
            held = {"version": served.version, "applying": served.applying, "tables": tables_of(model)}
            held["state"] = follower.state_dict()
        status = follower.status()
        save({**held, "differences": status.differences, "error": status.error, "pid": os.getpid()}, saved)
        time.sleep(0.02)


if __name__ == "__main__":
    role, where, path, *rest = sys.argv[1:]
    {"trainer": trainer, "predictor": predictor}[role](where, Path(path), *rest)  # type: ignore[operator]
