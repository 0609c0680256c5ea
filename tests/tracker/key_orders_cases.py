"""Cases for the keys under which a model and its tracker are saved and loaded by DCP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from delta_tracker import ModelDeltaTracker
from delta_tracker.integrations.dcp import SavedTracker
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.publisher.publishing_cases import attempt
from tests.tracker.checkpointing_cases import log_state, same


class _Application:
    """A model behind the interface of DCP, as in the tutorials of torch. Its state has copies of the tensors."""

    def __init__(self, model: nn.Module, *, is_copied: bool) -> None:
        self.model = model
        self._is_copied = is_copied

    def state_dict(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {"model": {name: each.clone() for name, each in state.items()} if self._is_copied else state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


class _Trainer:
    def __init__(self, rank: int, kind: str, mode: str) -> None:
        self._is_plain = kind in ("sparse", "dense")
        self._spec = Spec([Table("t0", 17, "row"), Table("t1", 10, "table:0")], bag=True)
        self._spec.kernel = "dense" if kind == "unfused" else "fused"
        torch.manual_seed(0)
        if self._is_plain:
            self.model: Any = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=kind == "sparse"), nn.Linear(4, 1))
            self._optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        else:
            self.model = shard(self._spec)
            self._optimizer = ordinary_optimizer(self.model, "SGD", lr=0.1)
        self.tracker = ModelDeltaTracker(self.model, mode=mode)
        self._draw = torch.Generator().manual_seed(rank)

    def train(self) -> None:
        self._optimizer.zero_grad()
        if self._is_plain:
            self.model(torch.randint(0, 20, (2, 3), generator=self._draw)).sum().backward()
        else:
            self.model(batch(self._spec, self._draw)).backward()
        self._optimizer.step()
        self.tracker.step()

    def state(self, form: str) -> Any:
        if form == "application":
            return _Application(self.model, is_copied=self._is_plain)
        return self.model if form == "module" else self.model.state_dict()

    def seen(self) -> tuple[Any, Any]:
        return log_state(self.tracker), self.tracker.read_tables()


def _saved(rank: int, kind: str, mode: str) -> _Trainer:
    trainer = _Trainer(rank, kind, mode)
    trainer.train()
    trainer.tracker.get_delta()
    trainer.train()
    return trainer


def _is_restored(trainer: _Trainer, saved: tuple[Any, Any]) -> bool:
    log, tables = trainer.seen()
    is_log = same(log, saved[0]) and same(saved[0], log)
    return is_log and all(torch.equal(rows, saved[1][fqn]) for fqn, rows in tables.items())


def orders(rank: int, world_size: int, path: str, *, form: str, kind: str, mode: str) -> dict[str, str]:
    """Save a model under keys before and after its tracker's, load it, and return the errors of the first attempts."""
    messages = {}
    for key in ("model", "a.model", "z"):
        source, where = _saved(rank, kind, mode), f"{path}/{key}"
        dcp.save({key: source.state(form), "tracker": source.tracker}, checkpoint_id=where)
        saved = source.seen()
        loaded = _Trainer(rank + 7, kind, mode)
        loaded.train()
        before = loaded.seen()
        states = {"tracker": SavedTracker(loaded.tracker, where), key: loaded.state(form)}
        messages[key] = attempt(lambda states=states, where=where: dcp.load(states, checkpoint_id=where))
        if messages[key] != "nothing was raised":
            assert _is_restored(loaded, before)
            dcp.load({key: states[key]}, checkpoint_id=where)
            dcp.load({"tracker": states["tracker"]}, checkpoint_id=where)
        assert _is_restored(loaded, saved), key
    return messages


class _Counter:
    """Object that has no model."""

    def __init__(self) -> None:
        self.layer, self.seen = nn.Linear(1, 1), torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def others(rank: int, world_size: int, path: str) -> str:
    """Load a tracker before an object without its model."""
    source, loaded = _saved(rank, "fused", "id_only"), _Trainer(rank + 7, "fused", "id_only")
    dcp.save({"model": source.model, "tracker": source.tracker, "z": _Counter()}, checkpoint_id=path)
    states = {"model": loaded.model, "tracker": SavedTracker(loaded.tracker, path), "z": _Counter()}
    message = attempt(lambda: dcp.load(states, checkpoint_id=path))
    assert _is_restored(loaded, source.seen())
    return message
