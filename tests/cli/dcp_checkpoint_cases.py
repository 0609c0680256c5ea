"""Cases that load an exported checkpoint into real sharded models; each runs on every rank."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from tests.recovery.restore_cases import same, spec_of, warm


def loaded(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """Load the checkpoint with TorchRec only, and save what this rank then has; return the keys of the model."""
    trainer = warm(spec_of(**spec), rank)
    state = {"model": trainer.model.state_dict()}
    if trainer.spec.optimizer != "SGD":
        state["optimizer"] = trainer.model.fused_optimizer.state_dict()
    training = {"training_state": {name: each.state_dict() for name, each in trainer.training_state.items()}}
    for each in (state, training):  # separate: DCP cannot load dicts in lists together with tables of other ranks
        dcp.load(each, checkpoint_id=Path(path) / "dcp")
    for name, each in trainer.training_state.items():
        each.load_state_dict(training["training_state"][name])
    torch.save(trainer.held(), Path(path) / f"loaded-{rank}of{world_size}.pt")
    return sorted(state["model"])


def seeded(rank: int, _world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """Start a stream from the checkpoint, and restore a delta of the stream; return the kinds of the versions."""
    trainer = warm(spec_of(**spec), rank)
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=Path(path) / "dcp")
    publisher = trainer.publisher(f"{path}/seeded")
    kinds = [publisher.publish().kind]
    first = deepcopy(trainer.held())
    trainer.train(1)
    kinds.append(publisher.publish().kind)
    publisher.close()
    other = warm(spec_of(**spec), rank)
    other.restore(f"{path}/seeded", 1)
    assert same(other.held(), first)
    other.restore(f"{path}/seeded")
    assert same(other.held(), trainer.held())
    return kinds
