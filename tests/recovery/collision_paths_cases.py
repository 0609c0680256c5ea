"""Cases for restores with each eviction policy, with a second consumer, and after an interruption of one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy

from delta_tracker import Delta, ModelDeltaTracker, Publisher, Recovery
from delta_tracker.errors import StorageError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.recovery import recovery_plan
from delta_tracker.recovery.random_states import RandomStates
from tests.publisher.collision_models import Model, sharded
from tests.publisher.publishing_cases import attempt
from tests.recovery.collision_cases import Trainer, answers, same, same_answers

_POLICIES: dict[str, Any] = {
    "LFU": LFU_EvictionPolicy,
    "LRU": lambda: LRU_EvictionPolicy(decay_exponent=1.0),
    "DistanceLFU": lambda: DistanceLFU_EvictionPolicy(decay_exponent=1.0),
}
_CUT, _READ, _END = 6, 9, 15  # numbers of batches


class _Job(Trainer):
    """Trainer with an eviction policy and a second consumer."""

    def __init__(self, rank: int, world_size: int, policy: str) -> None:
        self.rank = rank
        torch.manual_seed(0)
        self.model = sharded(Model(policy=_POLICIES[policy]), world_size)
        self.tracker = ModelDeltaTracker(self.model, ["stream", "other"])
        self.random = RandomStates()

    def publisher(self, path: str) -> Publisher:
        states: Any = {"random": self.random}
        return Publisher(self.tracker, f"file://{path}", "stream", recovery=Recovery(rank_state=states))

    def rest(self) -> tuple[list[float], list[Delta]]:
        """Train to the end; return the losses and what the other consumer reads."""
        losses = self.train(_CUT, _READ)
        deltas = [self.tracker.get_delta("other")]
        losses += self.train(_READ, _END)
        return losses, [*deltas, self.tracker.get_delta("other")]


def continued(rank: int, world_size: int, path: str, policy: str) -> dict[str, int]:
    """Restore a version; training, its evictions, and the reads of a second consumer continue from there."""
    job = _Job(rank, world_size, policy)
    publisher = job.publisher(path)
    job.train(0, 3)
    publisher.publish()
    job.tracker.get_delta("other")
    job.train(3, _CUT)
    version = publisher.publish().version
    losses, expected = job.rest()
    publisher.close()
    resumed = _Job(rank, world_size, policy)
    resumed.train(0, 3, seed=5)
    resumed.restore(path, version)
    found_losses, found = resumed.rest()
    assert found_losses == losses
    assert same(resumed.held(), job.held())
    counts = {"evicted": 0, "unknown": 0}
    for fqn in job.tracker.tables:
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            rows, wanted = one[fqn], other[fqn]
            assert torch.equal(rows.ids, wanted.ids)
            assert torch.equal(rows.raw_ids, wanted.raw_ids)
            # Of the rows that were pending at the restore, the raw ids of the last read are unknown.
            is_known = (rows.evicted == wanted.evicted) & (rows.admitted == wanted.admitted)
            assert bool((is_known | (rows.evicted == NO_OWNER)).all())
            assert number == 0 or bool(is_known.all())
            counts["unknown"] += int((~is_known).sum())
            counts["evicted"] += int((rows.evicted != NO_OWNER).sum())
    for each in (job, resumed):
        assert each.tracker.num_hook_errors == 0
        each.tracker.detach()
    return counts


def interrupted(rank: int, world_size: int, path: str) -> list[str]:
    """A failure between rows and raw ids on one rank: the model says so, and a second restore completes it."""
    job = _Job(rank, world_size, "LRU")
    publisher = job.publisher(path)
    job.train(0, 5)
    publisher.publish()
    publisher.close()
    expected, held = answers(job.model), job.held()
    resumed = _Job(rank, world_size, "LRU")
    resumed.train(0, 9, seed=5)

    def fail(*_: object) -> None:
        raise StorageError("memory://", "503 service unavailable")

    load = recovery_plan.load_collision_states
    with mock.patch.object(recovery_plan, "load_collision_states", fail if rank else load):
        messages = [attempt(lambda: resumed.restore(path))]
    messages.append(attempt(lambda: resumed.train(0, 1)))
    messages.append(attempt(lambda: resumed.publisher(path).publish()))
    resumed.restore(path)
    assert same_answers(answers(resumed.model), expected)
    assert same(resumed.held(), held)
    for each in (job, resumed):
        each.tracker.detach()
    return messages
