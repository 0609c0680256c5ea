"""Cases for restores of models with managed collisions; each runs on every rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, Publisher, Recovery, Standby
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.recovery.restore import restore
from delta_tracker.sharding.collision_states import collision_state
from delta_tracker.sharding.interrupted import check_complete
from tests.publisher.publishing_cases import attempt
from tests.tracker.collision_cases import collision_batch, module_of, shard_collision

IDS = torch.arange(-4, 75)  # the models are trained with the ids from 0 to 59
_TABLES = ("a", "b")

Answers = dict[str, Tensor]  # table name to the row of each raw id


def features() -> KeyedJaggedTensor:
    """Return a batch with every raw id."""
    lengths = torch.ones(len(_TABLES) * len(IDS), dtype=torch.int64)
    return KeyedJaggedTensor(list(_TABLES), IDS.repeat(len(_TABLES)), lengths=lengths)


@torch.no_grad()
def answers(model: torch.nn.Module) -> Answers:
    """Return the row that a model's evaluation reads for each raw id. A collective for a sharded model."""
    was_training = model.training
    model.eval()
    found, _ = getattr(model, "module", model).mc(features())
    held = {name: found[name].values().clone() for name in _TABLES}
    model.train(was_training)
    return held


class Trainer:
    """Model and tracker of one rank. Each batch depends on the rank and the batch's number only."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.model = shard_collision(world_size)
        self.tracker = ModelDeltaTracker(self.model)
        self.random = RandomStates()

    def train(self, first: int, end: int, seed: int = 0) -> list[float]:
        losses = []
        for number in range(first, end):
            generator = torch.Generator().manual_seed(10_000 * seed + 1000 * self.rank + number)
            loss = self.model(collision_batch(generator))
            loss.backward()
            self.tracker.step()
            losses.append(float(loss))
        return losses

    def publisher(self, path: str) -> Publisher:
        return Publisher(self.tracker, f"file://{path}", recovery=Recovery(rank_state={"random": self.random}))

    def restore(self, path: str, version: int | None = None, **kwargs: Any) -> Any:
        recovery = Recovery(rank_state={"random": self.random})
        return restore(self.model, f"file://{path}", version, tracker=self.tracker, recovery=recovery, **kwargs)

    def held(self) -> list[Any]:
        """Return all that this rank holds."""
        found: list[Any] = [torch.get_rng_state()]
        for fqn in self.tracker.shards:
            found += [view.clone() for view in self.tracker.live.column_views(fqn)]
            found += [state.clone() for each in self.tracker.live.state_views(fqn) for state in each]
        return found + [flat(collision_state(module_of(self.model, name))) for name in _TABLES]


def flat(value: Any) -> Any:
    """Return a state with lists instead of tensors."""
    if isinstance(value, Tensor):
        return value.tolist()
    return {key: flat(each) for key, each in value.items()} if isinstance(value, dict) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def continued(rank: int, world_size: int, path: str, cuts: list[int], end: int) -> dict[str, Any]:
    """Restore versions in other trainers; each trains on like the job that was never interrupted."""
    trainer = Trainer(rank, world_size)
    publisher = trainer.publisher(path)
    losses, versions, seen, owners = [], {}, {}, {}
    for number in range(end):
        if number in cuts:
            versions[number] = publisher.publish().version
            seen[number] = answers(trainer.model)
            owners[number] = owned(trainer, world_size)
        losses += trainer.train(number, number + 1)
    publisher.close()
    expected = trainer.held()
    history, wrong = [], []
    for cut in cuts:
        resumed = Trainer(rank, world_size)
        resumed.train(0, 3, seed=5)
        restored = resumed.restore(path, versions[cut])
        history.append(len(collision_state(module_of(resumed.model, "a"))["history"]))
        views = {fqn: view.clone() for fqn, view in resumed.tracker.live.owner_views().items()}
        resumed.tracker.state_dict()  # compares the raw ids
        checks = {
            "batches": restored.num_batches == cut,
            "answers": same_answers(answers(resumed.model), seen[cut]),
            "owners": same_answers(owned(resumed, world_size), owners[cut]),
            "tracked owners": same_answers(resumed.tracker.live.owner_views(), views),
            "losses": resumed.train(cut, end) == losses[cut:],
            "state": same(resumed.held(), expected),
        }
        wrong += [f"{name} after {cut} batches" for name, is_right in checks.items() if not is_right]
        resumed.tracker.detach()
    if rank == 0:
        torch.save({"answers": seen, "versions": versions, "owners": owners}, Path(path) / f"seen-{world_size}.pt")
    iteration = collision_state(module_of(trainer.model, "a"))["current_iter"]
    return {"wrong": wrong, "history": history, "iteration": iteration}


def followed(rank: int, world_size: int, path: str, num_versions: int) -> None:
    """A standby answers as the trainer after a takeover, and trains on like the trainer."""
    trainer, job = Trainer(rank, world_size), Trainer(rank, world_size)
    publisher = trainer.publisher(path)
    job.train(0, 3, seed=5)
    recovery = Recovery(rank_state={"random": job.random})
    standby = Standby(job.model, f"file://{path}", tracker=job.tracker, recovery=recovery, look_seconds=0.0)
    for number in range(num_versions):
        publisher.publish()
        if number != num_versions - 2:
            standby.sync()
        trainer.train(number, number + 1)
    version = publisher.publish().version
    seen = answers(trainer.model)
    publisher.close()
    losses = trainer.train(num_versions, num_versions + 5)
    expected = trainer.held()
    taken = standby.take_over(force=True)
    assert (taken.restored.version, taken.restored.num_batches) == (version, num_versions)
    assert same_answers(answers(job.model), seen)
    assert job.train(num_versions, num_versions + 5) == losses
    assert same(job.held(), expected)
    for each in (trainer, job):
        each.tracker.detach()


def same_answers(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resharded(rank: int, world_size: int, path: str, before: int) -> dict[str, Any]:
    """Restore the versions of more ranks: known raw ids keep their rows, and training and publishing continue."""
    saved = torch.load(Path(path) / f"seen-{before}.pt")
    found: dict[str, Any] = {}
    for cut, version in saved["versions"].items():
        trainer = Trainer(rank, world_size)
        trainer.train(0, 2, seed=3)
        logger = logging.getLogger("delta_tracker.recovery.restore")
        with mock.patch.object(logger, "warning") as warning:
            trainer.restore(path, version, ignore=["random"])
        assert warning.call_count == (rank == 0)
        rows = answers(trainer.model)
        expected = saved["answers"][cut]
        owners = owned(trainer, world_size)
        assert same_answers(owners, saved["owners"][cut]), "the owners that the first job saved"
        known = {}
        for fqn, identity in trainer.tracker.live.identities.items():
            name = fqn.rpartition(".")[2]
            assert len(identity.buckets) == world_size
            is_known = torch.zeros(len(rows[name]), dtype=torch.bool)
            is_known[4:64] = torch.isin(torch.arange(60), saved["owners"][cut][fqn])
            assert torch.equal(rows[name][is_known], expected[name][is_known])
            known[name] = int(is_known.sum())
        found[str(cut)] = known
        trainer.train(cut, cut + 6)
        assert trainer.tracker.num_hook_errors == 0
        trainer.tracker.detach()
    return found


def owned(trainer: Trainer, world_size: int) -> dict[str, Tensor]:
    """Return the raw ids of all rows at the last cut, by table. A collective."""
    found = {}
    for fqn, own in trainer.tracker.live.owner_views().items():
        every = [torch.empty_like(own) for _ in range(world_size)]
        torch.distributed.all_gather(every, own)
        found[fqn] = torch.cat(every)
    return found


def refused(rank: int, world_size: int, path: str) -> list[Any]:
    """Try to restore at more ranks; nothing is written."""
    trainer = Trainer(rank, world_size)
    trainer.train(0, 2, seed=3)
    before = trainer.held()
    message = attempt(lambda: trainer.restore(path, ignore=["random"]))
    check_complete(trainer.model)
    assert same(trainer.held(), before)
    trainer.tracker.detach()
    return [message]


def ignored(rank: int, world_size: int, path: str) -> None:
    """The raw ids of a table in ``ignore`` are not restored."""
    trainer = Trainer(rank, world_size)
    trainer.train(0, 3, seed=3)
    before = [flat(collision_state(module_of(trainer.model, name))) for name in _TABLES]
    fqn = next(fqn for fqn in trainer.tracker.tables if fqn.endswith(".a"))
    trainer.restore(path, ignore=[fqn])
    after = [flat(collision_state(module_of(trainer.model, name))) for name in _TABLES]
    assert after[0] == before[0]
    assert after[1] != before[1]
    trainer.tracker.detach()
