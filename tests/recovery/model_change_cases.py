"""Restores of a job whose model or optimizer differs from the version, on each rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.recovery.restore_cases import attempt, same, spec_of, warm


def reordered(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> None:
    """Restore into an optimizer with another order of its parameters, then save the state."""
    trainer = warm(spec_of(**spec), rank, reshards=True, reverses=True)
    trainer.restore(path, ignore=["random"])
    torch.save(trainer.held(), Path(path) / f"reordered-{rank}of{world_size}.pt")
    trainer.train(1)


def changed(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Restore what the version and the job both have; save the state before and after. Then train and publish."""
    trainer = warm(spec_of(**spec), rank)
    before = trainer.held()
    refusal = attempt(partial(trainer.restore, path))
    assert same(trainer.held(), before), "nothing was restored"
    found = trainer.restore(path, on_model_change="continue")
    torch.save(before, Path(path) / f"before-{rank}of{world_size}.pt")
    torch.save(trainer.held(), Path(path) / f"after-{rank}of{world_size}.pt")
    pending = {name: trainer.tracker.num_pending(name) for name in ("main", "other")}
    trainer.train(2)
    publisher = trainer.publisher(path)
    version = publisher.publish().version
    publisher.close()
    entry = StreamLog(Storage(f"file://{path}/stream")).read(version)
    assert entry is not None
    return {"differences": found.differences, "refusal": refusal, "pending": pending, "kind": entry.kind}
