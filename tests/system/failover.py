"""Trainers that fail while a standby follows them: ``python -m tests.system.failover --seeds 50``.

A seed trains one job on two ranks. The job publishes a recovery stream (fp32, with the states of the optimizers) and a
serving stream (INT8, top-k) from one tracker. A second job is its standby. Then the trainer fails: one or all ranks are
killed or stopped, or its store is cut off, or the takeover is requested while the trainer is well. A trainer that was
stopped or cut off continues before, during or after the takeover. From the claim on it trains other batches, so that
each of its late writes differs. The failed job is started again as the standby of the new trainer, which then fails
too. Two predictors follow through everything, one version at a time.

- Each stream has one history: every entry has its predecessor as parent, and generations never descend. Every version
  that a trainer saw committed is in it.
- The state after a takeover is that of the former trainer at the same batch, bit for bit. If all jobs have two ranks,
  it is also that of a run without any interruption, and so is the loss of every batch of the history.
- No acknowledged version is lost, and at most the batches of one version of work.
- Every recovery version equals the trainer's state at its batch, bit for bit. Every serving version without pending
  rows equals it within half a step of INT8. No predictor resyncs.
- A trainer that continues after the claim is fenced, and ends.

The moment of a failure is drawn as in ``tests/system/crash.py``. The parent imports everything and uses neither a store
nor a process group, so that it can fork.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import mmap
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import (
    DataPosition,
    ModelDeltaTracker,
    ModelTarget,
    Predictor,
    Publisher,
    Recovery,
    Standby,
    TopK,
    TrackingMode,
    Upkeep,
)
from delta_tracker.errors import FencedError, NoSnapshotError, RankFailedError, StorageError
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import request_takeover
from tests.stores.wrapped import WrappedStorage
from tests.stream.bounds import bound
from tests.system.crash import import_early
from tests.system.partition import Cut, CutOff, Switch
from tests.system.resume import ahead, check_state, warm_up
from tests.system.resumed_trainer import Job, Loader, Trainer, differences, whole_tables

_SILENCE_SECONDS = 2.0
_SHORT_SILENCE_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_STEP_SECONDS = 0.01  # a trainer that was cut off trains for seconds
_TIMEOUT = timedelta(seconds=30)
_LIFE_SECONDS = 120
_WAIT_SECONDS = 45.0
_NUM_SLOTS = 8
_NUM_RANKS = 4
_NUM_BATCHES = 4096
_KINDS = ("kill all", "stop all", "cut all", "kill one", "stop one", "cut first", "command")
_CUTS = (Cut.REFUSED, Cut.LATE, Cut.LOST, Cut.UNANSWERED)
_STREAMS = ("recovery", "serving")
_STARTING, _TRAINING, _FENCED = range(3)


def _array(*shape: int) -> np.ndarray:
    """Return zeros in memory that forked processes share."""
    return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape))), np.float64).reshape(shape)


class Board:
    """Memory that all processes share; one row for each job."""

    def __init__(self) -> None:
        self.state = _array(_NUM_SLOTS)
        self.generation = _array(_NUM_SLOTS)
        """Generation of the job's recovery publisher."""
        self.serving_generation = _array(_NUM_SLOTS)
        self.restored = _array(_NUM_SLOTS)
        """Number of batches of the version that the job continued."""
        self.trained = _array(_NUM_SLOTS)
        self.acknowledged = _array(_NUM_SLOTS)
        """Number of batches of the last recovery version that the job saw committed."""
        self.first_at = _array(_NUM_SLOTS)
        """Time at which the job's first version was committed."""
        self.takeover_seconds = _array(_NUM_SLOTS)
        self.losses = _array(_NUM_SLOTS, _NUM_RANKS, _NUM_BATCHES)
        self.is_ending = _array(1)
        self.ends = _array(len(_STREAMS))
        """Last version of each stream, once the last trainer has ended."""


@dataclass(eq=False)
class Slot:
    """One job: its ranks, which are forked together."""

    number: int
    world_size: int
    switches: list[Switch]
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    is_killed: bool = False

    def poll(self) -> bool:
        """Return True if all ranks have ended."""
        for pid in self.pids:
            if pid not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[pid] = status
        return len(self.codes) == len(self.pids)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some or all ranks that have not ended."""
        self.poll()
        for rank, pid in enumerate(self.pids):
            if pid not in self.codes and (ranks is None or rank in ranks):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all ranks, and wait until they have ended."""
        self.is_killed = True
        self.signal(signal.SIGKILL)
        while not self.poll():
            time.sleep(0.001)

    def cut(self, cut: Cut, ranks: Sequence[int] | None = None) -> None:
        """Cut the store of some or all ranks off."""
        for rank, switch in enumerate(self.switches):
            if ranks is None or rank in ranks:
                switch.turn(cut)


@dataclass(frozen=True)
class Plan:
    """What a seed does.

    Args:
        seed: the seed.
        job: what all jobs train.
        every: number of batches of a recovery version.
        world_sizes: number of ranks of each job, in the order of their starts.
        silence_seconds: silence after which a standby takes over.
        num_handovers: number of trainers that fail.
    """

    seed: int
    job: Job
    every: int
    world_sizes: Sequence[int]
    silence_seconds: float
    num_handovers: int

    @property
    def is_mixed(self) -> bool:
        """True if the jobs have different numbers of ranks."""
        return len(set(self.world_sizes)) > 1

    @classmethod
    def of(cls, seed: int, *, is_short: bool) -> Plan:
        """Return the plan of a seed; a short one has one failure."""
        draw = random.Random(f"failover of {seed}")
        job = Job.of(seed)
        sizes = [2] * _NUM_SLOTS
        if job.extra == "grid":
            job = replace(job, extra="none")
        if job.extra != "dense" and draw.random() < 0.35:  # the optimizer of a dense kernel needs the same shards
            sizes[1] = draw.choice([1, 4])
        silence = _SHORT_SILENCE_SECONDS if is_short else _SILENCE_SECONDS
        return cls(seed, job, draw.randrange(1, 4), sizes, silence, 1 if is_short else 2)


class Member:
    """One rank of a job."""

    def __init__(self, root: Path, plan: Plan, board: Board, slot: Slot, rank: int) -> None:
        self._root, self._plan, self._board, self._slot, self._rank = root, plan, board, slot, rank
        torch.set_num_threads(1)
        os.environ["LOCAL_WORLD_SIZE"] = str(slot.world_size)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{root}/group-{slot.number}",
            rank=rank,
            world_size=slot.world_size,
            timeout=_TIMEOUT,
        )
        self._trainer = Trainer(plan.job)
        self._tracker = ModelDeltaTracker(self._trainer.model, _STREAMS, mode=TrackingMode.EMBEDDING)
        self._position = DataPosition(self._trainer.loader)
        self._tracker.attach_data(self._position)
        self._objects = Recovery(
            training_state=self._trainer.training_state,
            rank_state=self._trainer.rank_state | {"random": RandomStates()},
            heartbeat_seconds=plan.silence_seconds / 5,
        )
        self._stores = {
            name: WrappedStorage(Storage(f"file://{root}/{name}", create=True), CutOff(slot.switches[rank]))
            for name in _STREAMS
        }
        self._num_batches = 0
        self._num_published = 0
        self._others = iter(Loader(self._trainer.spec, plan.seed + 777))
        self._recovery: Publisher
        self._serving: Publisher

    def live(self) -> None:
        """Train until the job is fenced or told to end."""
        if self._slot.number == 0:
            self._open(self._stores["recovery"], self._stores["serving"])
        else:
            self._take_over()
        try:
            self._train()
        except FencedError:
            self._board.state[self._slot.number] = _FENCED

    def _take_over(self) -> None:
        warm_up(self._trainer, self._plan.job)
        standby = Standby(
            self._trainer.model,
            self._stores["recovery"],
            tracker=self._tracker,
            recovery=self._objects,
            data=self._position,
            ignore=("random",) if self._plan.is_mixed else (),
            serving=[self._stores["serving"]],
            name=f"standby-{self._slot.number}",
            look_seconds=_LOOK_SECONDS,
            timeout=_TIMEOUT,
        )
        taken = standby.follow(silence=self._plan.silence_seconds)
        standby.close()
        torch.save(self._trainer.record(), self._root / f"taken-{self._slot.number}-{self._rank}.pt")
        assert self._position.num_batches == taken.restored.num_batches
        self._num_batches = taken.restored.num_batches
        if self._rank == 0:
            self._board.restored[self._slot.number] = self._num_batches
            self._board.takeover_seconds[self._slot.number] = taken.seconds
        self._open(taken.recovery, *taken.serving)

    def _open(self, recovery: Any, serving: Any) -> None:
        self._recovery = Publisher(
            self._tracker,
            recovery,
            "recovery",
            recovery=self._objects,
            upkeep=Upkeep(compact_every=3 if self._plan.seed % 5 == 1 else None),
            timeout=_TIMEOUT,
        )
        self._serving = Publisher(
            self._tracker, serving, "serving", encoding=Encoding.INT8, top_k=TopK(rows=6), timeout=_TIMEOUT
        )
        self._publish_all()
        if self._rank == 0:
            number = self._slot.number
            self._board.first_at[number] = time.monotonic()
            self._board.generation[number] = self._recovery.generation
            self._board.serving_generation[number] = self._serving.generation
            self._board.state[number] = _TRAINING

    def _train(self) -> None:
        for features in ahead(self._position, self._plan.job.num_ahead):
            if self._is_ending():
                break
            loss = self._trainer.step(next(self._others) if self._is_former() else features)
            self._tracker.step()
            self._board.losses[self._slot.number, self._rank, self._num_batches] = loss
            self._num_batches += 1
            if self._rank == 0:
                self._board.trained[self._slot.number] = self._num_batches
            self._publish()
            time.sleep(_STEP_SECONDS)
        self._publish_all()
        if self._rank == 0:
            self._board.ends[:] = self._recovery.version, self._serving.version
        self._serving.close()
        self._recovery.close()

    def _is_ending(self) -> bool:
        """Return rank 0's view of the flag on every rank."""
        flag = torch.tensor(self._board.is_ending[0])
        dist.broadcast(flag, 0)
        return bool(flag)

    def _is_former(self) -> bool:
        """Return True if another job has claimed the recovery stream. Does not use the store that can be cut off."""
        head = json.loads((self._root / "recovery" / _last_entry(self._root)).read_text())
        return bool(head["generation"] > self._recovery.generation)

    def _publish(self) -> None:
        """Publish, and train on if the store is cut off.

        Between two recovery versions, the serving stream gets versions that a takeover has to take back.
        """
        is_due = self._num_batches % self._plan.every == 0
        self._num_published += is_due
        try:
            if is_due:
                self._publish_recovery()
            if not is_due or (self._plan.every == 1 and self._num_published % 2 == 0):
                self._publish_serving()
        except FencedError:
            raise
        except (StorageError, RankFailedError):
            if not (self._root / f"cut-{self._slot.number}").exists():
                raise

    def _publish_all(self) -> None:
        self._publish_recovery()
        while self._publish_serving().pending_rows:
            pass

    def _publish_recovery(self) -> None:
        self._save_record()
        is_snapshot = self._plan.seed % 5 == 3 and self._num_published % 6 == 5
        self._acknowledge("recovery", self._recovery.snapshot() if is_snapshot else self._recovery.publish())
        if self._rank == 0:
            self._board.acknowledged[self._slot.number] = self._num_batches

    def _publish_serving(self) -> Any:
        self._save_record()
        manifest = self._serving.publish()
        self._acknowledge("serving", manifest)
        return manifest

    def _save_record(self) -> None:
        """Save the state before a publish, because a version may be committed without an answer."""
        path = self._root / f"record-{self._slot.number}-{self._num_batches}-{self._rank}.pt"
        draft = path.with_suffix(".draft")  # a kill while it is saved again must not damage it
        torch.save(self._trainer.record(), draft)
        draft.replace(path)

    def _acknowledge(self, stream: str, manifest: Any) -> None:
        if self._rank == 0:
            with (self._root / f"acknowledged-{stream}").open("a") as file:
                file.write(json.dumps([manifest.version, manifest.link.xxh3]) + "\n")


def _last_entry(root: Path, stream: str = "recovery") -> str:
    """Return the path of the newest entry, relative to the stream."""
    return f"log/{max(os.listdir(root / stream / 'log'))}"  # noqa: PTH208  called for each batch


def _member(root: Path, plan: Plan, board: Board, slot: Slot, rank: int) -> None:
    Member(root, plan, board, slot, rank).live()


def _serve(root: Path, plan: Plan, board: Board) -> None:
    """Follow both streams, one version at a time, and save the tables after each."""
    torch.set_num_threads(1)
    spec = plan.job.spec(2)
    kind = "embedding_bags" if spec.bag else "embeddings"
    tables = {f"ec.{kind}.{each.name}": (each.rows, each.dim) for each in spec.tables}
    held = {name: {fqn: torch.full(shape, -1.0) for fqn, shape in tables.items()} for name in _STREAMS}
    predictors = {name: Predictor(ModelTarget(held[name], dense=False), f"file://{root}/{name}") for name in _STREAMS}
    seen: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in _STREAMS}
    while not all(board.ends) or any(
        (predictors[name].version or 0) < end for name, end in zip(_STREAMS, board.ends, strict=True)
    ):
        num_applied = 0
        for name, predictor in predictors.items():
            held_version = predictor.version
            try:
                version = predictor.sync(limit=1)
            except NoSnapshotError:  # the trainer is starting
                continue
            if version != held_version:
                num_applied += 1
                seen[name][version] = {fqn: table.clone() for fqn, table in held[name].items()}
        if not num_applied:
            time.sleep(0.02)
    status = {name: predictor.status() for name, predictor in predictors.items()}
    torch.save(
        {name: (seen[name], status[name].resyncs, status[name].last_resync) for name in _STREAMS}, root / "served.pt"
    )


def _request(root: Path) -> None:
    storage = Storage(f"file://{root}/recovery")
    head = StreamLog(storage).head()
    assert head is not None
    request_takeover(storage, head, force=True)


def _fork(action: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(_LIFE_SECONDS)
        action()
        code = 0
    except BaseException:  # noqa: BLE001  the parent reads it
        log.write_text(traceback.format_exc())
    finally:
        os._exit(code)


class Run:
    """The parent of all jobs of a seed.

    Args:
        root: directory for everything.
        plan: what the seed does.
    """

    def __init__(self, root: Path, plan: Plan) -> None:
        self._root, self._plan = root, plan
        self.board = Board()
        self.slots: list[Slot] = []
        self._draw = random.Random(f"faults of {plan.seed}")
        self._others: dict[str, int] = {}
        self.covered: Counter[str] = Counter()
        self.chain: list[Slot] = []
        """Jobs that trained, in order."""
        self._failing: Slot | None = None
        self._continue_at: float | None = None
        self._continues_at_claim = False
        self._continued_with: float | None = None  # batches that were acknowledged when the trainer continued
        self.seconds: list[tuple[str, float, float]] = []
        """Kind of each failure, seconds until the new trainer had published to both streams, and of the takeover."""

    def run(self) -> None:
        """Run all jobs; raise the first failure."""
        try:
            self._others["predictors"] = self._fork("predictors", partial(_serve, self._root, self._plan, self.board))
            trainer = self._start()
            self.chain.append(trainer)
            self._wait(lambda: self.board.state[trainer.number] == _TRAINING, "the first trainer did not start")
            for number in range(self._plan.num_handovers):
                trainer = self._hand_over(trainer, number)
                self.chain.append(trainer)
            for each in self.slots:
                if each is not trainer:
                    each.kill()  # a second standby
            self._wait(lambda: self.board.trained[trainer.number] >= self.board.restored[trainer.number] + 6, "the end")
            self.board.is_ending[0] = 1
            self._wait(trainer.poll, "the last trainer did not end")
            self._wait(lambda: self._has_ended("predictors"), "the predictors did not reach the last version")
        finally:
            self._end()
        self._check_errors()

    def _hand_over(self, trainer: Slot, order: int) -> Slot:
        """Let the trainer fail; return the new trainer, after the former one has ended."""
        board, draw = self.board, self._draw
        self._failing, self._continued_with = trainer, None
        standby = next((each for each in self.slots if each is not trainer and not each.poll()), None) or self._start()
        goal = board.trained[trainer.number] + draw.randrange(2, 16)
        self._wait((self._root / f"recovery/predictors/standby-{standby.number}.json").exists, "no standby")
        self._wait(lambda: board.trained[trainer.number] >= goal or self._new(trainer) is not None, "training hangs")
        time.sleep(draw.random() * 0.05)
        kind = _KINDS[self._plan.seed % len(_KINDS)] if order == 0 else draw.choice(_KINDS)
        if self._new(trainer) is not None:
            self.covered["early false alarm"] += 1
            kind = "none"
        num_trained, began = board.trained[trainer.number], time.monotonic()
        if kind != "none":
            began = self._fail(trainer, kind)
        is_unlucky = kind != "command" and self._plan.seed % 6 == 5 and order == 0
        if is_unlucky:
            self._wait(lambda: self._claimed(trainer) or self._survives(trainer), "no claim")
            standby.kill()
            self.covered["winner killed"] += 1
            began, kind = time.monotonic(), "winner"
            self._start()
        if trainer.poll() and draw.random() < 0.3:
            self._start()  # two standbys
            self.covered["two standbys"] += 1
        self._wait(lambda: self._new(trainer) is not None or self._survives(trainer), f"no takeover after {kind}")
        if self._new(trainer) is None:
            self.covered[f"survived {kind}"] += 1
            num_trained, began, kind = board.trained[trainer.number], time.monotonic(), "kill all"
            trainer.kill()
            self._wait(lambda: self._new(trainer) is not None, "no takeover after the second failure")
        new = self._new(trainer)
        assert new is not None
        self.covered[kind] += 1
        number = new.number
        if kind != "none":
            self.seconds.append((kind, board.first_at[number] - began, board.takeover_seconds[number]))
        self._check_lost(trainer, new, num_trained, kind)
        self._continue_after(trainer, draw.random() * 0.5)
        self._wait(trainer.poll, f"the former trainer did not end after {kind}")
        if not trainer.is_killed:
            assert board.state[trainer.number] == _FENCED, f"{kind}: the former trainer was not fenced"
            self.covered["fenced"] += 1
        return new

    def _fail(self, trainer: Slot, kind: str) -> float:
        """Let a trainer fail, and plan when it continues; return the time of the failure."""
        draw = self._draw
        verb, _, which = kind.partition(" ")
        ranks = {"all": None, "one": [draw.randrange(trainer.world_size)], "first": [0], "": None}[which]
        if verb == "kill":
            trainer.is_killed = True
            trainer.signal(signal.SIGKILL, ranks)
        elif verb == "stop":
            trainer.signal(signal.SIGSTOP, ranks)
        elif verb == "cut":
            (self._root / f"cut-{trainer.number}").touch()
            cut = draw.choice(_CUTS)
            self.covered[cut.name] += 1
            trainer.cut(cut, ranks)
        else:
            self._others["request"] = self._fork("request", partial(_request, self._root))
        began = time.monotonic()
        moment = draw.choice(["early", "during", "during", "after", "after"])
        if verb in ("stop", "cut"):
            self.covered[f"continued {moment}"] += 1
            if moment == "early":
                self._continue_at = began + draw.uniform(0.2, self._plan.silence_seconds)
            self._continues_at_claim = moment == "during"
        return began

    def _continue_after(self, trainer: Slot, seconds: float) -> None:
        """Let a former trainer continue, if it does not do so yet, after some seconds."""
        if not trainer.is_killed:
            time.sleep(seconds)
        self._continue_at, self._continues_at_claim = None, False
        self._continue(trainer)

    def _continue(self, trainer: Slot) -> None:
        trainer.cut(Cut.NONE)
        trainer.signal(signal.SIGCONT)

    def _poll(self) -> None:
        """Let the failing trainer continue if it is time."""
        trainer = self._failing
        if trainer is None:
            return
        if self._continues_at_claim and self._claimed(trainer):
            self._continues_at_claim = False
            self._continue_at = time.monotonic() + self._draw.random() * 0.05
        if self._continue_at is not None and time.monotonic() >= self._continue_at:
            self._continue_at = None
            self._continued_with = self.board.acknowledged[trainer.number]
            self._continue(trainer)

    def _survives(self, trainer: Slot) -> bool:
        """Return True if the trainer continued early, and has published again without a takeover."""
        before = self._continued_with
        return before is not None and self.board.acknowledged[trainer.number] > before and not self._claimed(trainer)

    def _claimed(self, trainer: Slot) -> bool:
        head = json.loads((self._root / "recovery" / _last_entry(self._root)).read_text())
        return bool(head["generation"] > self.board.generation[trainer.number])

    def _new(self, trainer: Slot) -> Slot | None:
        """Return the job that trains after ``trainer``, None before."""
        generation = self.board.generation
        for slot in self.slots:
            if self.board.state[slot.number] and generation[slot.number] > generation[trainer.number]:
                return slot
        return None

    def _check_lost(self, trainer: Slot, new: Slot, num_trained: float, kind: str) -> None:
        """Check that no acknowledged version is lost, and at most the work of one version."""
        restored, acknowledged = self.board.restored[new.number], self.board.acknowledged[trainer.number]
        assert restored >= acknowledged, f"{kind}: restored at {restored}, acknowledged {acknowledged}"
        if kind != "none":
            lost = num_trained - restored
            assert lost <= self._plan.every, f"{kind}: {lost} batches are lost, a version has {self._plan.every}"
            self.covered["batches lost"] += max(0, int(lost))

    def _start(self) -> Slot:
        number = len(self.slots)
        world_size = self._plan.world_sizes[number]
        slot = Slot(number, world_size, [Switch() for _ in range(world_size)])
        self.slots.append(slot)
        for rank in range(world_size):
            action = partial(_member, self._root, self._plan, self.board, slot, rank)
            slot.pids.append(self._fork(f"job-{number}-{rank}", action))
        return slot

    def _fork(self, name: str, action: Callable[[], None]) -> int:
        return _fork(action, self._root / f"{name}.log")

    def _wait(self, is_done: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not is_done():
            self._poll()
            self._check_errors()
            if time.monotonic() > deadline:
                raise AssertionError(f"{failure}: {self._state()}")
            time.sleep(0.002)

    def _state(self) -> str:
        board = self.board
        shown = [
            f"job {each.number}: state {board.state[each.number]:.0f}, generation {board.generation[each.number]:.0f}, "
            f"restored {board.restored[each.number]:.0f}, trained {board.trained[each.number]:.0f}, "
            f"acknowledged {board.acknowledged[each.number]:.0f}, ended {each.poll()}, codes {each.codes}"
            for each in self.slots
        ]
        return "; ".join(shown)

    def _check_errors(self) -> None:
        """Raise what a process raised that was not killed and whose ranks were not."""
        excused = {
            f"job-{slot.number}-{rank}.log" for slot in self.slots if slot.is_killed for rank in range(_NUM_RANKS)
        }
        for path in self._root.glob("*.log"):
            if path.name not in excused:
                raise AssertionError(f"{path.stem}: {path.read_text()}")

    def _has_ended(self, name: str) -> bool:
        pid = self._others[name]
        if pid and os.waitpid(pid, os.WNOHANG)[0]:
            self._others[name] = 0
        return not self._others[name]

    def _end(self) -> None:
        for slot in self.slots:
            slot.signal(signal.SIGCONT)
            slot.kill()
        for name, pid in self._others.items():
            if pid and not self._has_ended(name):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _train_uninterrupted(root: Path, job: Job, cuts: Sequence[int], num_batches: int, rank: int) -> None:
    """Train without the library; write the state after each of ``cuts`` batches, and the losses."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", init_method=f"file://{root}/oracle", rank=rank, world_size=2, timeout=_TIMEOUT)
    trainer = Trainer(job)
    batches, losses = iter(trainer.loader), []
    for number in range(num_batches + 1):
        if number in cuts:
            torch.save(trainer.record(), root / f"oracle-{number}-{rank}.pt")
        if number < num_batches:
            losses.append(trainer.step(next(batches)))
    torch.save(losses, root / f"oracle-losses-{rank}.pt")


class Judge:
    """Checks of a run, after all its processes have ended.

    Args:
        root: directory of the run.
        plan: what the seed did.
        board: memory of the processes.
        chain: jobs that trained, in order.
    """

    def __init__(self, root: Path, plan: Plan, board: Board, chain: Sequence[Slot]) -> None:
        self._root, self._plan, self._board, self._chain = root, plan, board, chain
        self._served = torch.load(root / "served.pt", weights_only=False)
        # If a job died between its two claims, the generations of the streams differ.
        self._publishers = {
            stream: {int(generations[slot.number]): slot for slot in chain}
            for stream, generations in (("recovery", board.generation), ("serving", board.serving_generation))
        }

    def check(self) -> None:
        """Check everything; write what was compared to ``judged.json``."""
        counts: Counter[str] = Counter()
        for stream in _STREAMS:
            log = StreamLog(Storage(f"file://{self._root}/{stream}"))
            entries = [log.read(version) for version in log.versions()]
            self._check_history(stream, entries)
            counts += self._check_served(stream, entries)
        # The serving stream continues with deltas. A recovery version before its first one does not know its position,
        # and a recovery snapshot does not show which rows changed.
        pairs = itertools.pairwise(int(self._board.restored[slot.number]) for slot in self._chain)
        num_unknown = sum(restored == former for former, restored in pairs)
        if counts["recovery snapshot"] == 1:
            assert counts["serving snapshot"] <= 1 + num_unknown, f"{counts['serving snapshot']} serving snapshots"
        for former, slot in zip(self._chain, self._chain[1:], strict=False):
            self._check_taken(former, slot)
        if not self._plan.is_mixed:
            counts["losses"] = self._check_losses()
        (self._root / "judged.json").write_text(json.dumps(counts))

    def _check_history(self, stream: str, entries: Sequence[Any]) -> None:
        links = {entry.version: entry.link.xxh3 for entry in entries}
        for before, entry in itertools.pairwise(entries):
            assert entry.parent == before.link, f"{stream}: version {entry.version} does not follow its predecessor"
            assert entry.generation == before.generation + (entry.kind == "claim"), (stream, before, entry)
        for line in (self._root / f"acknowledged-{stream}").read_text().splitlines():
            version, xxh3 = json.loads(line)
            assert links.get(version) == xxh3, f"{stream}: acknowledged version {version} is not in the history"

    def _check_served(self, stream: str, entries: Sequence[Any]) -> Counter[str]:
        seen, resyncs, last_resync = self._served[stream]
        assert not resyncs, f"{stream}: {resyncs} resyncs, the last: {last_resync}"
        counts: Counter[str] = Counter()
        for entry in entries:
            if entry.kind == "claim" or entry.version not in seen:  # a merged entry was applied
                continue
            counts[f"{stream} {entry.kind}"] += 1
            if stream == "serving" and entry.pending_rows:
                continue
            records = self._records(self._publishers[stream][entry.generation], entry.batches[1])
            for table, (rows, _) in whole_tables(records).items():
                (found,) = (held for fqn, held in seen[entry.version].items() if fqn.endswith(f".{table}"))
                what = f"{table} of {stream} version {entry.version} of generation {entry.generation}"
                if stream == "recovery":
                    assert torch.equal(found, rows), what
                else:
                    assert bool(((found - rows).abs() <= bound(rows, Encoding.INT8)).all()), what
            counts[f"{stream} compared"] += 1
        return counts

    def _check_taken(self, former: Slot, slot: Slot) -> None:
        """Check that a job continued from the state that its predecessor had at the same batch."""
        records = self._records(former, int(self._board.restored[slot.number]))
        is_same = former.world_size == slot.world_size
        for rank in range(slot.world_size):
            found = torch.load(self._root / f"taken-{slot.number}-{rank}.pt", weights_only=False)
            if self._plan.is_mixed:  # no random numbers are restored
                for record in (*records, found):
                    record.pop("random", None)
            check_state(records, found, rank if is_same else None)

    def _check_losses(self) -> int:
        """Check states and losses against the uninterrupted run; return the number of losses."""
        num_checked = 0
        ends = [int(self._board.restored[slot.number]) for slot in self._chain[1:]]
        ends.append(int(self._board.trained[self._chain[-1].number]))
        for rank in range(2):
            losses = torch.load(self._root / f"oracle-losses-{rank}.pt")
            for slot, end in zip(self._chain, ends, strict=True):
                first = int(self._board.restored[slot.number])
                found = self._board.losses[slot.number, rank, first:end].tolist()
                assert found == losses[first:end], f"losses of job {slot.number} from batch {first}"
                num_checked += len(found)
                expected = torch.load(self._root / f"oracle-{first}-{rank}.pt", weights_only=False)
                (record,) = self._records(slot, first, rank)
                lines = differences(expected, record, f"job {slot.number} at batch {first}")
                assert not lines, lines[:10]
        return num_checked

    def _records(self, slot: Slot, num_batches: int, rank: int | None = None) -> list[dict[str, Any]]:
        ranks = range(slot.world_size) if rank is None else [rank]
        paths = [self._root / f"record-{slot.number}-{num_batches}-{each}.pt" for each in ranks]
        return [torch.load(path, weights_only=False) for path in paths]


def _await(root: Path, actions: Mapping[str, Callable[[], None]]) -> None:
    """Fork a process for each action, wait for all, and raise what one raised."""
    pids = [_fork(action, root / f"{name}.log") for name, action in actions.items()]
    for pid in pids:
        os.waitpid(pid, 0)
    for name in actions:
        if (log := root / f"{name}.log").exists():
            raise AssertionError(f"{name}: {log.read_text()}")


def run(plan: Plan, root: Path) -> Run:
    """Run all jobs of a seed, and check everything; raise the first failure."""
    done = Run(root, plan)
    try:
        done.run()
        board, chain = done.board, done.chain
        if not plan.is_mixed:
            cuts = [int(board.restored[slot.number]) for slot in chain]
            end = int(board.trained[chain[-1].number])
            body = partial(_train_uninterrupted, root, plan.job, cuts, end)
            _await(root, {f"oracle-{rank}": partial(body, rank) for rank in range(2)})
        _await(root, {"judge": Judge(root, plan, board, chain).check})
    except AssertionError as error:
        raise AssertionError(f"seed {plan.seed} ({dict(done.covered)}): {error}") from error
    done.covered += Counter(json.loads((root / "judged.json").read_text()))
    done.covered["mixed"] += plan.is_mixed
    return done


def summary(seconds: Sequence[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """Return p50, maximum and number of the seconds of each kind of failure, of all failures, and of the takeovers.

    Args:
        seconds: see :attr:`Run.seconds`.
    """
    kinds: dict[str, list[float]] = {}
    for kind, whole, takeover in seconds:
        kinds.setdefault(kind.partition(" ")[0], []).append(whole)
        if kind != "command":
            kinds.setdefault("all failures", []).append(whole)
        kinds.setdefault("from the decision on", []).append(takeover)
    return {
        kind: {"p50": round(statistics.median(found), 2), "max": round(max(found), 2), "count": len(found)}
        for kind, found in sorted(kinds.items())
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds, and print what they covered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="one failure for each seed, and less silence")
    parser.add_argument("--keep", action="store_true", help="keep the directory of a seed that fails")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import_early()
    covered: Counter[str] = Counter()
    seconds: list[tuple[str, float, float]] = []
    for seed in range(options.first, options.first + options.seeds):
        root, begin, is_right = Path(tempfile.mkdtemp(prefix="failover-")), time.monotonic(), False
        try:
            done = run(Plan.of(seed, is_short=options.short), root)
            is_right = True
        finally:
            if is_right or not options.keep:
                shutil.rmtree(root, ignore_errors=True)
        covered += done.covered
        seconds += done.seconds
        print(
            json.dumps(
                {
                    "seed": seed,
                    "seeds": seed + 1 - options.first,
                    "seconds": round(time.monotonic() - begin, 1),
                    "takeovers": [[kind, *(round(each, 2) for each in found)] for kind, *found in done.seconds],
                    **covered,
                }
            ),
            flush=True,
        )
    print(json.dumps(summary(seconds)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
