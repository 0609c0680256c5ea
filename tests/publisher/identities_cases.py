"""Cases for streams of models with managed collisions; each runs on every rank.

The expected answer to a raw id is always that of the trainer's own evaluation.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.tracker.live_tables import LiveTables
from tests.publisher.publishing_cases import attempt
from tests.recovery.collision_cases import IDS, Answers, answers
from tests.tracker.collision_cases import CollisionModel, collision_batch, shard_collision


class Served:
    """Predictors of one stream: an unsharded model, and plain tensors with an index of raw ids."""

    def __init__(self, tracker: ModelDeltaTracker, url: str) -> None:
        self.model = CollisionModel(MCHManagedCollisionModule).eval()
        self.tables = {fqn: torch.full((spec.num_rows, spec.dim), -1.0) for fqn, spec in tracker.tables.items()}
        self.index = {fqn: RawIdIndex(spec.num_rows) for fqn, spec in tracker.tables.items()}
        self.predictors = [Predictor(self.model, url), Predictor(ModelTarget(self.tables, raw_ids=self.index), url)]

    def sync(self) -> int | None:
        version, other = (each.sync() for each in self.predictors)
        assert version == other
        return version

    def check(self, expected: Answers) -> None:
        """Check the answer of each predictor to each raw id."""
        found = answers(self.model)
        for fqn, table in self.tables.items():
            name = fqn.rpartition(".")[2]
            assert torch.equal(found[name], expected[name])
            assert torch.equal(table[self.index[fqn].rows_of(IDS)], expected[name])


def owner_changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return the numbers of slots that a raw id got and lost on this rank, by FQN."""
    found = {}
    for fqn, now in after.items():
        is_other = before[fqn] != now
        found[fqn] = [int((is_other & (each != NO_OWNER)).sum()) for each in (now, before[fqn])]
    return found


def entries(url: str) -> list[Manifest]:
    """Return the entries of a stream that are not claims."""
    log, found, version = StreamLog(Storage(url)), [], 0
    while (entry := log.read(version)) is not None:
        found += [entry] if entry.kind != "claim" else []
        version += 1
    return found


def served(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """After each version, every raw id gets the trainer's answer: deltas, snapshots, and an empty version."""
    url = f"file://{root}"
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url, dense=model)
    readers = Served(tracker, url) if rank == 0 else None
    before = {fqn: torch.full((spec.num_rows,), NO_OWNER) for fqn, spec in tracker.shards.items()}
    changes = []
    for number in range(14):
        for _ in range(number % 4):
            model(collision_batch(generator)).backward()
            tracker.step()
        manifest = publisher.snapshot() if number == 6 else publisher.publish()
        expected = answers(model)
        now = {fqn: view.clone() for fqn, view in tracker.live.owner_views().items()}
        changes.append(owner_changes(before, now))
        before = now
        assert (manifest.format, sorted(manifest.identities)) == (2, sorted(tracker.tables))
        assert not manifest.dense, "the mapping is not dense"
        if readers is not None:
            assert readers.sync() == manifest.version
            readers.check(expected)
    publisher.close()
    assert tracker.num_hook_errors == 0
    return {"changes": changes, "published": [dict(entry.owner_changes) for entry in entries(url)]}


def copied_while_training(rank: int, world_size: int, root: str) -> list[str]:
    """Rows and raw ids that change while a snapshot is copied are those of the version's cut."""
    url = f"file://{root}"
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url, cadence=Cadence(batches=2, snapshot_every=3))
    readers = Served(tracker, url) if rank == 0 else None
    expected: dict[int, Answers] = {}
    kinds: list[str] = []
    number = 0
    # A version takes more batches on a busy machine, and the ranks may see it in different batches.
    while number < 40 or (_lacks_versions(kinds) and number < 4000):
        number += 1
        model(collision_batch(generator)).backward()
        tracker.step()
        expected[number] = answers(model)
        publisher.step()
        if publisher.version > len(kinds):
            entry = entries(url)[-1]
            kinds.append(entry.kind)
            if readers is not None:
                assert readers.sync() == entry.version == publisher.version
                readers.check(expected[entry.batches[1]])
    publisher.close()
    dist.barrier()
    return [entry.kind for entry in entries(url)]


def _lacks_versions(kinds: list[str]) -> bool:
    """Return True if a rank has seen fewer than two snapshots or three deltas."""
    lacks = torch.tensor(int(kinds.count("snapshot") < 2 or kinds.count("delta") < 3))
    dist.all_reduce(lacks, dist.ReduceOp.MAX)
    return bool(lacks)


def resumed(rank: int, world_size: int, root: str) -> list[Any]:
    """A trainer that loads an older checkpoint takes raw ids of later versions back, without a snapshot."""
    url = f"file://{root}"
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    readers = Served(tracker, url) if rank == 0 else None
    for number in range(6):
        for _ in range(3):
            model(collision_batch(generator)).backward()
            tracker.step()
        publisher.publish()
        if number == 2:
            saved = copy.deepcopy(model.state_dict()), tracker.state_dict()
    if readers is not None:
        readers.sync()
    publisher.close()
    later = {fqn: owners.clone() for fqn, owners in tracker.live.owner_views().items()}
    tracker.detach()
    model = shard_collision(world_size)
    model.load_state_dict(saved[0])
    tracker = ModelDeltaTracker(model)
    assert any(not torch.equal(owners, later[fqn]) for fqn, owners in tracker.live.owner_views().items())
    tracker.load_state_dict(saved[1])
    publisher = Publisher(tracker, url)
    found: list[Any] = []
    for _ in range(3):
        manifest = publisher.publish()
        found.append([manifest.kind, bool(manifest.owner_changes)])
        expected = answers(model)
        if readers is not None:
            assert readers.sync() == manifest.version
            readers.check(expected)
        model(collision_batch(generator)).backward()
        tracker.step()
    publisher.close()
    return found


def differing(rank: int, world_size: int, root: str) -> str:
    """Ranks whose raw ids are divided in different ways publish nothing."""
    tracker = ModelDeltaTracker(shard_collision(world_size))
    others = {fqn: replace(each, hash_size=each.hash_size + rank) for fqn, each in tracker.live.identities.items()}
    with mock.patch.object(LiveTables, "identities", others):
        publisher = Publisher(tracker, f"file://{root}")
        message = attempt(publisher.publish)
        publisher.close()
    tracker.detach()
    return message
