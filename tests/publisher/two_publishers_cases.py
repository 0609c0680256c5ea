"""A case for two publishers on one tracker; it runs on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from delta_tracker import Cadence, ModelDeltaTracker, ModelTarget, Predictor, Publisher, Recovery, TopK, TrackingMode
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.models import Spec
from tests.publisher.flights import finish, flight
from tests.publisher.publishing_cases import empty_model
from tests.recovery import restore_cases
from tests.recovery.restore_cases import Trainer, same, spec_of, warm

_STEP = 0.51 / 255  # of INT8, as a part of the difference between the largest and the smallest value of a row
_TURNS = {"train": 4, "publish": 4, "snapshot": 1, "step": 2, "close": 1, "reopen": 1, "restart": 1, "kill": 1}


class _Job:
    """One rank of a job with a recovery stream (consumer ``main``) and a serving stream (``other``)."""

    def __init__(self, rank: int, path: str, spec: dict[str, Any], seed: int) -> None:
        self._rank, self._path, self._spec = rank, path, spec_of(**spec)
        self._draw = random.Random(seed)
        self._urls = {"main": f"file://{path}/stream", "other": f"file://{path}/serving"}
        self._trainer = self._made(Trainer)
        self._states: dict[int, dict[str, Any]] = {}
        self._publishers = {name: self._publisher(name) for name in self._urls}
        self._held = {name: empty_model(self._trainer.tracker) for name in self._urls}
        self._predictors = {
            name: Predictor(ModelTarget(self._held[name], dense=False), url) for name, url in self._urls.items()
        }
        self.num_killed = 0  # versions that were in progress when the job was killed
        self._train()
        for publisher in self._publishers.values():
            publisher.publish()

    def run(self, num_turns: int) -> None:
        turns, weights = list(_TURNS), list(_TURNS.values())
        for turn in [*self._draw.choices(turns, weights, k=num_turns), "restart", "kill"]:
            getattr(self, f"_{turn}")()
        for name, publisher in self._publishers.items():
            publisher.snapshot()
            self._check(name)
            assert not any(self._trainer.tracker.num_pending(name).values())
            assert self._predictors[name].status().resyncs == 0
            publisher.close()
        self._trainer.tracker.detach()

    def _made(self, make: Callable[[Spec, int], Trainer]) -> Trainer:
        with mock.patch.object(
            restore_cases, "ModelDeltaTracker", partial(ModelDeltaTracker, mode=TrackingMode.EMBEDDING)
        ):
            return make(self._spec, self._rank)

    def _publisher(self, name: str) -> Publisher:
        trainer, cadence = self._trainer, Cadence(batches=1, snapshot_every=4)
        if name == "main":
            return Publisher(
                trainer.tracker,
                self._urls[name],
                name,
                cadence=cadence,
                recovery=Recovery(training_state=trainer.training_state, rank_state=trainer.rank_state),
            )
        return Publisher(
            trainer.tracker, self._urls[name], name, top_k=TopK(rows=5), encoding=Encoding.INT8, cadence=cadence
        )

    def _drawn(self) -> str:
        """Return one of the two consumers, with an open publisher."""
        name = self._draw.choice(list(self._urls))
        if name not in self._publishers:
            self._publishers[name] = self._publisher(name)
        return name

    def _train(self) -> None:
        for _ in range(self._draw.choice([1, 1, 3])):
            self._trainer.train(1)
            self._states[self._trainer.tracker.num_batches] = deepcopy(self._trainer.held())

    def _publish(self) -> None:
        name = self._drawn()
        self._publishers[name].publish()
        self._check(name)

    def _snapshot(self) -> None:
        name = self._drawn()
        self._publishers[name].snapshot()
        self._check(name)

    def _step(self) -> None:
        """Cut versions of both streams, train while they are written, and wait for both."""
        for _ in range(self._draw.choice([1, 2])):
            self._train()
            for publisher in self._publishers.values():
                publisher.step()
        for publisher in self._publishers.values():
            publisher.flush()
        for name in self._publishers:
            self._check(name)

    def _close(self) -> None:
        name = self._draw.choice(list(self._urls))
        if name in self._publishers:
            self._publishers.pop(name).close()

    def _reopen(self) -> None:
        self._close()
        self._drawn()

    def _restart(self) -> None:
        """End the job, and restore it from the recovery stream. Both streams continue."""
        for publisher in self._publishers.values():
            publisher.close()
        self._trainer.tracker.detach()
        self._resume()

    def _kill(self) -> None:
        """End the job while versions are in progress. Some are committed, although no publisher has learned of it."""
        for name in self._urls:
            if name not in self._publishers:
                self._publishers[name] = self._publisher(name)
        self._train()
        for _ in range(self._draw.choice([2, 3, 4, 5])):
            for publisher in self._publishers.values():
                publisher.step()
                finish(publisher)  # a process is killed with its worker
            dist.barrier()
        self.num_killed += sum(flight(publisher) is not None for publisher in self._publishers.values())
        self._resume()

    def _resume(self) -> None:
        self._trainer = self._made(warm)  # with other values
        found = self._trainer.restore(self._path)
        assert same(self._trainer.held(), self._states[found.num_batches])
        self._publishers.clear()
        for name in self._draw.sample(list(self._urls), 2):
            self._publishers[name] = self._publisher(name)

    def _check(self, name: str) -> None:
        """Check that a predictor differs from the model only in rows that are pending, unless there is no version."""
        dist.barrier()  # all ranks have called flush()
        head = StreamLog(Storage(self._urls[name])).head()
        assert head is not None
        if head.kind == "claim":
            return
        assert self._predictors[name].sync() == head.version
        tracker = self._trainer.tracker
        pending = tracker.num_pending(name)
        for fqn, spec in tracker.shards.items():
            rows = slice(spec.row_offset, spec.row_offset + spec.num_rows)
            differs = torch.zeros(spec.num_rows, dtype=torch.bool)
            for (first, end), view in zip(spec.columns, tracker.live.column_views(fqn), strict=True):
                error = (self._held[name][fqn][rows, first:end] - view).abs().amax(1)
                size = (view.amax(1) - view.amin(1)) * (_STEP if name == "other" else 0)
                differs |= ~(error <= size)
            assert int(differs.sum()) <= pending[fqn], (name, fqn, differs.nonzero())


def interleaved(rank: int, world_size: int, path: str, spec: dict[str, Any], seed: int, num_turns: int) -> int:
    """Each stream's predictor differs from the model only in pending rows, in any order of calls, restarts and kills.

    Returns:
        Number of versions that were in progress when the job was killed.
    """
    job = _Job(rank, path, spec, seed)
    job.run(num_turns)
    return job.num_killed
