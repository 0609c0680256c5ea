"""Random trainers on real ranks with faults on one of them: ``python -m tests.system.random_trainers --seeds 40``.

A seed is a trainer with two or three lives on 1, 2 or 4 ranks, each with a new sharding plan, see
``tests/system/random_models.py``. A life begins with a new model, a checkpoint of the model and the tracker, or a
version of the stream (``restore``). In random order, its ranks train, accumulate gradients, evaluate, write to weights,
load states, publish, save checkpoints, and read as several consumers, with committed and aborted reads. At a random
moment one rank has a fault:

- ``exception``, ``interrupt``: MemoryError, RuntimeError or KeyboardInterrupt at a random line of a public call;
- ``hook``: the same exceptions at a random line of the row sets and stores, during a forward or backward pass;
- ``store``, ``disk``: the rank's store raises, or the system reports that the disk is full during its writes;
- ``s3``: a proxy between the rank and a real S3 server answers with 500.

Then the life continues or ends without any call to the library. Promises that are checked against the mirror in
``tests/system/random_mirror.py``:

- The tables of each predictor equal the trainer's at the cut of its version, bit for bit, or within the bound of an
  encoding, except for as many rows as the version counts as pending.
- The delta of a consumer has all rows that differ from what it has, and, without a fault, only rows that were written.
- After a fault, at most one further version fails, and the next versions have all rows.
- A restored model equals the mirror, and its consumers have the same pending rows, at any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist

import delta_tracker
from delta_tracker import Encoding, ModelDeltaTracker, Publisher, TopK, TrackingMode, restore
from delta_tracker.errors import DeltaTrackerError, NeedsSnapshotError, RankLostError, StaleDeltaError
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.storage.storage import Storage
from tests.publisher.publishing_cases import _Failing
from tests.publisher.random_faults import Fault
from tests.ranks import RankFailureError, RankPool
from tests.servers import S3, Proxy, proxy, s3_server
from tests.system.random_mirror import Blocks, Copy, Cut, Follower, Mirror, Whole, check_blocks, gathered
from tests.system.random_models import (
    Collection,
    Model,
    build,
    draw_batch,
    draw_collections,
    draw_specs,
    local_blocks,
    local_size,
    ordinary_optimizers,
)

_TIMEOUT = timedelta(seconds=8)
_LIFE_SECONDS = 100.0
_MAX_ATTEMPTS = 30
_CONSUMERS = ("stream", "a", "b")
_FAULTS = ("exception", "interrupt", "disk", "s3", "hook", "store")
_MODES = (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING, TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF)
_HOOK_FILES = ("tracker/store", "tracker/row_sets", "tracker/change_log.py")
_EVENTS = {
    "train": 8, "accumulate": 1.5, "hold": 1.5, "evaluate": 1, "write": 0.5, "load": 0.4, "publish": 2.5,
    "snapshot": 0.6, "flush": 0.4, "read": 3, "abort": 1, "top-k": 0.7, "clear": 0.2, "compact": 0.3, "follow": 1.5,
    "replace": 0.5, "save": 0.8,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What all lives of a seed have in common.

    Args:
        seed: the seed.
        mode: mode of the tracker.
        world_sizes: number of ranks of each life.
        collections: the model.
        fault: kind of the fault in each life.
        begins: how each life begins: "new", "checkpoint" or "stream".
        publishing: arguments of the publisher.
        encodings: encoding by FQN.
        max_bytes: argument of the tracker.
    """

    seed: int
    mode: TrackingMode
    world_sizes: tuple[int, ...]
    collections: tuple[Collection, ...]
    fault: str
    begins: tuple[str, ...]
    publishing: Mapping[str, Any]
    encodings: Mapping[str, Encoding]
    max_bytes: int | None

    @classmethod
    def of(cls, seed: int) -> Job:
        """Return the job of a seed."""
        draw = random.Random(f"job of {seed}")
        mode = draw.choices(_MODES, [3, 3, 1, 1])[0]
        has_grid = seed % 8 == 7
        world_sizes = (4 if has_grid else 2, *draw.choices([1, 2, 4], k=draw.choice([1, 2])))
        has_states = draw.random() < 0.5
        collections = draw_collections(draw, mode, world_sizes, has_dense=not has_states, has_grid=has_grid)
        later = [
            draw.choice(["stream", "stream", "checkpoint"] if has_states else ["checkpoint"] * 5 + ["new"])
            for _ in world_sizes[1:]
        ]
        has_top_k = not has_states and draw.random() < 0.3
        encodings: dict[str, Encoding] = {}
        if not has_states and draw.random() < 0.35:
            for collection in collections:
                for layout in collection.layouts:
                    kinds = [Encoding.F16, Encoding.BF16, Encoding.INT8] + [Encoding.INT4] * (layout.table.dim % 4 == 0)
                    encodings[collection.fqn(layout.table.name)] = draw.choice(kinds)
        publishing = {
            "states": "optimizer" if has_states else None,
            "top_k": TopK(
                rows=draw.choice([5, 20]), score=None if mode is not TrackingMode.ID_ONLY else _sum_of_columns
            )
            if has_top_k
            else None,
            "encoding": encodings or None,
            "cadence": Cadence(
                batches=draw.choice([1, 2, 4]), snapshot_every=draw.choice([None, 4]), vote_every=draw.choice([1, 1, 2])
            ),
            "retention": Retention(versions=3, grace_seconds=0) if draw.random() < 0.3 else None,
            "compact_every": draw.choice([None, None, 2, 3]),
            "skip_unchanged": draw.choice([None, None, "bytes", "digest"]),
        }
        return cls(
            seed,
            mode,
            world_sizes,
            tuple(collections),
            _FAULTS[seed % len(_FAULTS)],
            ("new", *later),
            publishing,
            encodings,
            draw.choice([None, None, None, None, 30_000]),
        )

    @property
    def has_states(self) -> bool:
        """Whether the versions have the states of the optimizers."""
        return self.publishing["states"] is not None

    @property
    def has_dense(self) -> bool:
        """Whether the stream has the dense layers."""
        return self.seed % 2 == 0

    def describe(self) -> str:
        """Return the job in a few lines."""
        lines = [
            f"{self.mode.name}, ranks {self.world_sizes}, begins {self.begins}, fault {self.fault}, {self.max_bytes=}"
        ]
        lines.append(", ".join(f"{name}={value}" for name, value in self.publishing.items() if value is not None))
        for life, world_size in enumerate(self.world_sizes):
            for collection, spec in zip(
                self.collections, draw_specs(self.draw(life), self.collections, world_size), strict=True
            ):
                kind = f"bag {collection.pooling}" if collection.is_bag else "sequence"
                lines.append(f"life {life}, {collection.name}: {kind}{' weighted' * collection.is_weighted}")
                lines += [
                    f"    {table.name}: {table.rows} x {table.dim} {table.dtype}, {table.sharding}, {table.kernel}, "
                    f"{layout.optimizer}, features {table.features}"
                    for layout, table in zip(collection.layouts, spec.tables, strict=True)
                ]
        return "\n".join(lines)

    def draw(self, life: int) -> random.Random:
        """Return the random generator of a life, the same on all ranks."""
        return random.Random(f"life {life} of {self.seed}")


def _sum_of_columns(_: str, rows: Any) -> Tensor:
    return rows.values.float().sum(1).abs()


class _HookFault(Fault):
    """Fault in the files that hooks call."""

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        path = frame.f_code.co_filename
        folder = str(Path(delta_tracker.__file__).parent)
        is_traced = any(path.startswith(f"{folder}/{name}") for name in _HOOK_FILES)
        return super().__call__(frame, event, arg) if is_traced else None


class Trouble:
    """Fault of one rank in one life, and when it begins.

    Args:
        kind: one of ``_FAULTS``.
        draw: random generator of the life.
        storage: store of this rank.
        faults: proxy in front of the store; None without one.
        is_victim: whether it is this rank's.
    """

    def __init__(
        self, kind: str, draw: random.Random, storage: Storage, faults: Proxy | None, *, is_victim: bool
    ) -> None:
        self.kind = kind
        self._storage = storage
        self._faults = faults
        self._is_victim = is_victim
        self.begin = draw.randrange(3, 12)
        self._num_left = draw.randrange(1, 4)  # calls of the publisher in which the store fails
        self._num_bytes = int(10 ** draw.uniform(0, 4))
        self._num_errors = draw.choice([1, 3, 8, 30])
        self._operation = draw.choice(["put", "create"])
        exception = KeyboardInterrupt if kind == "interrupt" else draw.choice([MemoryError, RuntimeError])
        self.trace = (_HookFault if kind == "hook" else Fault)(exception, int(10 ** draw.uniform(0, 3.3)))
        self._max_calls = 12  # in which the line is reached, or never
        self.is_over = False
        self.hit = ""

    @property
    def is_traced(self) -> bool:
        """Whether an exception is raised at a line."""
        return self.kind in ("exception", "interrupt", "hook")

    @contextlib.contextmanager
    def active(self, name: str, kinds: Sequence[str]) -> Iterator[None]:
        """Have the fault in a block of this rank, if it is of these kinds."""
        if self.is_over or self.kind not in kinds:
            yield
            return
        with ExitStack() as stack:
            if self._is_victim:
                self.hit = name
                if self.is_traced:
                    sys.settrace(self.trace)
                    stack.callback(sys.settrace, None)
                elif self.kind == "store":
                    stack.enter_context(mock.patch.object(self._storage, "fails", [self._operation]))
                elif self.kind == "disk":
                    stack.enter_context(_full_disk(self._num_bytes))
                elif self._faults is not None:
                    self._faults.errors = self._num_errors
                    stack.callback(setattr, self._faults, "errors", 0)
            yield

    def advance(self) -> bool:
        """Count a call with the fault; return True if it was the last. A collective."""
        if self.is_traced:
            self._max_calls -= 1
            is_over = self.trace.is_raised or self._max_calls == 0
        else:
            self._num_left -= 1
            is_over = self._num_left == 0
        self.is_over = any(_every(is_over if self._is_victim else False))
        return self.is_over


@contextlib.contextmanager
def _full_disk(num_bytes: int) -> Iterator[None]:
    """Let this process write a number of bytes to files; further writes report that the disk is full."""
    write, left = os.write, num_bytes

    def limited(descriptor: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, memoryview(data)[:left])
        left -= written
        return written

    with mock.patch.object(os, "write", limited):
        yield


def _every(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


class Life:
    """One rank of one life."""

    def __init__(
        self, root: Path, job: Job, number: int, storage: Storage, clean: Storage, faults: Proxy | None
    ) -> None:
        self._root, self._job, self._number = root, job, number
        self._storage, self._clean = storage, clean
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._draw = job.draw(number)
        self._specs = draw_specs(self._draw, job.collections, self._world_size)
        self._model = build(job.collections, self._specs, job.seed)
        self._replicated, self._split = ordinary_optimizers(self._model, job.collections, self._specs)
        self._tracker = ModelDeltaTracker(
            self._model, list(_CONSUMERS), mode=job.mode, max_bytes=job.max_bytes, auto_compact=job.seed % 3 == 0
        )
        self._generator = torch.Generator().manual_seed(1000 * job.seed + 10 * number + self._rank)
        self._mirror = Mirror(root, number)
        self._trouble = Trouble(
            job.fault, self._draw, storage, faults, is_victim=self._draw.randrange(self._world_size) == self._rank
        )
        self._ends_with_fault = number < len(job.world_sizes) - 1 and self._draw.random() < 0.4
        self.counts: Counter[str] = Counter()
        bases = self._begin(job.begins[number])
        self._copies = {name: Copy(self._tracker, name, self._blocks, bases.get(name)) for name in _CONSUMERS[1:]}
        self._has: dict[str, Whole] = {name: gathered(copy.blocks) for name, copy in self._copies.items()}
        self._record()
        self._publisher = self._new_publisher()
        self._followers: list[Follower] = []
        if self._rank == 0:
            self._followers = [self._first_follower(), self._new_follower()]
        self._log(f"begins with {job.begins[number]} at batch {self._tracker.num_batches}, {self._publisher!r}")

    # Beginning

    def _begin(self, how: str) -> dict[str, Whole]:
        """Restore the state of an earlier life; return what each consumer has."""
        if how == "checkpoint":
            return self._load_checkpoint()
        if how == "stream":
            return self._restore()
        return {}

    def _load_checkpoint(self) -> dict[str, Whole]:
        saved = sorted((path.parent for path in self._root.glob("checkpoints/*/cut.pt")), key=lambda path: path.name)
        path = saved[-1] if self._draw.random() < 0.7 else self._draw.choice(saved)
        dcp.load({**self._state(), "tracker": SavedTracker(self._tracker, path)}, checkpoint_id=path)
        cut: Cut = torch.load(path / "cut.pt", weights_only=False)
        check_blocks(cut, self._blocks(), has_states="fused" in self._state())
        self.counts["checkpoints loaded"] += 1
        self.counts[f"loaded on {self._world_size}"] += 1
        return cut.consumers

    def _restore(self) -> dict[str, Whole]:
        for _ in range(2):
            self._update(self._model(self._features()))
        log = StreamLog(self._clean)
        entries = [entry for entry in map(log.read, log.versions()) if entry is not None and entry.kind != "claim"]
        newest = max(entry.version for entry in entries if entry.kind == "snapshot")
        versions = [entry.version for entry in entries if entry.version >= newest and entry.batches[1]]
        version = _every(None if self._draw.random() < 0.6 or not versions else self._draw.choice(versions))[0]
        found = restore(
            self._model,
            self._clean,
            version,
            tracker=self._tracker,
            training_state=self._training_state(),
            rank_state=self._rank_state(),
            timeout=_TIMEOUT,
        )
        entry = log.read(found.version)
        assert entry is not None
        cut = self._mirror.of(entry)
        check_blocks(cut, self._blocks(), has_states=True)
        if self._job.has_dense:
            self._check_dense(cut)
        assert self._tracker.num_batches == found.num_batches == entry.batches[1]
        self.counts["versions restored"] += 1
        self.counts[f"restored on {self._world_size}"] += 1
        return cut.consumers

    def _check_dense(self, cut: Cut) -> None:
        for name, tensor in self._dense().items():
            assert torch.equal(cut.dense[name], tensor), f"{name} was restored with other values"

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint has of the model; with a momentum mode, also of the fused optimizers."""
        state = {"model": self._model.state_dict()}
        if self._job.mode in (TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF):
            fused = self._model.fused_optimizer.state_dict()
            if fused.get("state"):  # DCP cannot load the empty state of a rank without rows
                state["fused"] = fused
        return state

    def _training_state(self) -> dict[str, Any]:
        return (
            {f"replicated{index}": each for index, each in enumerate(self._replicated)} if self._job.has_states else {}
        )

    def _rank_state(self) -> dict[str, Any]:
        return {f"split{index}": each for index, each in enumerate(self._split)} if self._job.has_states else {}

    def _new_publisher(self) -> Publisher:
        publisher = Publisher(
            self._tracker,
            self._storage,
            "stream",
            dense=self._model.module.dense if self._job.has_dense else None,
            training_state=self._training_state() or None,
            rank_state=self._rank_state() or None,
            pointer_seconds=None,
            timeout=_TIMEOUT,
            **self._job.publishing,
        )
        self._mirror.generations[publisher.generation] = self._number
        return publisher

    # Predictors, on rank 0

    def _new_follower(self) -> Follower:
        if self._job.seed % 3 == 1:
            served = Model(self._job.collections, "cpu").eval()
            for tensor in served.state_dict().values():
                tensor.fill_(-1.0)
            return self._follow(served)
        return self._follow(self._empty())

    def _first_follower(self) -> Follower:
        """Return the predictor that lives through all lives."""
        saved = self._root / "predictor.pt"
        if not saved.exists():
            return self._follow(self._empty())
        held, state = torch.load(saved, weights_only=False)
        follower = self._follow(held)
        follower.predictor.load_state_dict(state)
        return follower

    def _follow(self, model: Any) -> Follower:
        return Follower(model, self._clean, self._job.encodings, has_dense=self._job.has_dense)

    def _empty(self) -> dict[str, Tensor]:
        tables = {
            fqn: torch.full((spec.num_rows, spec.dim), -1.0, dtype=spec.dtype)
            for fqn, spec in self._tracker.tables.items()
        }
        return (
            tables | {name: torch.full_like(each, -1.0) for name, each in self._dense().items()}
            if self._job.has_dense
            else tables
        )

    # Copies

    def _blocks(self) -> Blocks:
        return local_blocks(self._model, self._job.collections)

    def _dense(self) -> dict[str, Tensor]:
        return {f"dense.{name}": tensor.detach() for name, tensor in self._model.module.dense.state_dict().items()}

    def _record(self) -> None:
        """Copy all tables after a batch."""
        tables = gathered(self._blocks())
        dense = {name: tensor.clone() for name, tensor in self._dense().items()}
        self._mirror.cuts[self._tracker.num_batches] = Cut(tables, dense, dict(self._has))

    def _log(self, text: str) -> None:
        """Write a line to the log of the seed, on rank 0."""
        if self._rank == 0:
            self._note(text)

    def _note(self, text: str) -> None:
        with (self._root / "events.log").open("a") as file:
            file.write(f"life {self._number}, rank {self._rank}, batch {self._tracker.num_batches}: {text}\n")

    # Calls with a fault

    def _call(
        self, name: str, call: Callable[[], Any], kinds: Sequence[str] = ("exception", "interrupt")
    ) -> tuple[bool, Any]:
        """Call a method of the library with this rank's fault; return whether it returned, and the result or error."""
        trouble = self._trouble
        was_raised = trouble.trace.is_raised
        try:
            with trouble.active(name, kinds if self._is_due else ()):
                result = call()
        except (DeltaTrackerError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            sys.settrace(None)
            is_injected = str(error) == "injected" and trouble.trace.is_raised and not was_raised
            if not (is_injected or (isinstance(error, DeltaTrackerError) and self._may_fail)):
                raise
            place = traceback.extract_tb(error.__traceback__)[-2:]
            self._note(f"{name} raised {error!r:.100} at {[f'{each.filename}:{each.lineno}' for each in place]}")
            return False, error
        return True, result

    @property
    def _is_due(self) -> bool:
        return self._event >= self._trouble.begin

    @property
    def _may_fail(self) -> bool:
        """Whether a call to the publisher may raise, because of the fault."""
        return self._is_due and not self._is_settled

    def _publish(self, name: str) -> None:
        """Call a method of the publisher on all ranks; after the fault, check that the stream converges."""
        if self._job.has_states and self._held is not None:
            self._release()
        self._mirror.cuts[self._tracker.num_batches].consumers = dict(self._has)
        kinds = ("exception", "interrupt", "store", "disk", "s3")
        is_done, error = self._call(name, getattr(self._publisher, name), kinds)
        if name == "step":
            assert is_done or isinstance(error, KeyboardInterrupt), f"step raised {error!r}"
        elif isinstance(error, KeyboardInterrupt):
            # As after Ctrl-C in a notebook: the other ranks wait for this rank.
            is_done, error = self._call(name, getattr(self._publisher, name), ())
        self._log(f"{name}: {error!r:.120}, {self._publisher.error!r:.120}")
        if not self._may_fail:
            failure = self._publisher.error
            assert all(_every(is_done and failure is None)), f"{name} failed without a fault: {error!r}, {failure!r}"
            self.counts["published"] += name != "step"

    def _end_fault(self) -> bool:
        """After an event with the fault: return True if this life ends."""
        trouble = self._trouble
        if self._is_settled or not self._is_due:
            return False
        if not trouble.is_over and not any(_every(trouble.hit != "")):
            return False
        if not trouble.is_over:
            is_over = trouble.advance()
            trouble.hit = ""
            if not is_over:
                return False
        raised = any(_every(trouble.trace.is_raised))
        self.counts[f"fault {trouble.kind}"] += raised or not trouble.is_traced
        self._log(f"the fault {trouble.kind} ends")
        if trouble.trace.place:
            self._note(f"it was raised at {trouble.trace.place}")
        for copy in self._copies.values():
            copy.allow_all()
        if self._ends_with_fault:
            return True
        if not self._recover():
            self.counts["ranks lost"] += 1
            return True
        self._is_settled = True
        return False

    def _recover(self) -> bool:
        """Publish until no row is pending on any rank; return False if a rank was lost."""
        if self._held is not None:
            self._release()
        batches = _every(self._tracker.num_batches)
        assert len(set(batches)) == 1, f"step() counted {batches} batches"
        num_failed = 0
        for _ in range(_MAX_ATTEMPTS):
            self._mirror.cuts[self._tracker.num_batches].consumers = dict(self._has)
            is_done, error = self._call("recover", self._publisher.publish, ())
            head = StreamLog(self._clean).head()
            assert head is not None
            is_lost = isinstance(self._publisher.error, RankLostError)
            every = _every((is_done, head.pending_rows, is_lost, self._publisher.version, repr(error)))
            if any(each[2] for each in every):
                return False
            num_failed += not all(each[0] for each in every)
            self._log(f"recover: {[each[::4] for each in every]!r:.300}")
            if all(each[0] and each[1] == 0 for each in every) and len({each[3] for each in every}) == 1:
                break
        else:
            raise AssertionError(f"rows are pending after {_MAX_ATTEMPTS} versions: {self._publisher.error!r}")
        assert num_failed <= 1, f"{num_failed} versions failed after the fault"
        self._follow_all()
        return True

    # Training

    def _features(self) -> Any:
        return draw_batch(self._job.collections, self._specs, self._generator)

    def _forward(self) -> Tensor:
        features = self._features()
        self._looked_up: dict[str, Tensor] = getattr(self, "_looked_up", {})
        for each in _every([(kjt.keys(), kjt.lengths(), kjt.values()) for kjt in features]):
            for collection, spec, (keys, lengths, values) in zip(self._job.collections, self._specs, each, strict=True):
                counts = lengths.view(len(keys), -1).sum(1).tolist()
                ids = dict(zip(keys, values.split(counts), strict=True))
                for table in spec.tables:
                    fqn = collection.fqn(table.name)
                    every = [ids[name] for name in table.features]
                    self._looked_up[fqn] = torch.cat(
                        [*([self._looked_up[fqn]] if fqn in self._looked_up else []), *every]
                    )
        is_done, loss = self._call("forward", lambda: self._model(features), ("hook",))
        assert is_done, f"a hook raised {loss!r} into the forward pass"
        return loss

    def _backward(self, loss: Tensor) -> None:
        is_done, error = self._call("backward", loss.backward, ("hook",))
        assert is_done, f"a hook raised {error!r} into the backward pass"
        for copy in self._copies.values():
            copy.touch(self._looked_up)
        self._looked_up = {}

    def _update(self, loss: Tensor) -> None:
        """Train outside of the events of a life."""
        loss.backward()
        self._step_optimizers()

    def _step_optimizers(self) -> None:
        for optimizer in (*self._replicated, *self._split):
            optimizer.step()
            optimizer.zero_grad()

    def _advance(self) -> None:
        """Count a batch and copy the tables, so that each count of batches has one state of the tables."""
        before = self._tracker.num_batches
        self._call("tracker.step", self._tracker.step)
        if self._tracker.num_batches == before:
            self._tracker.step()
        self._record()

    def _release(self) -> None:
        loss, self._held = self._held, None
        assert loss is not None
        self._backward(loss)
        self._step_optimizers()
        self._advance()

    def run(self) -> dict[str, Any]:
        """Run the events; return what was covered."""
        self._event, self._is_settled, self._held = -1, False, None
        self._follow_all()
        if self._draw.random() < 0.7 or self._number == 0:
            self._publish("publish")
        self._save()
        ended = "end"
        for number in range(self._draw.randrange(14, 22)):
            self._event = number
            (event,) = self._draw.choices(list(_EVENTS), list(_EVENTS.values()))
            consumer = self._draw.choice(_CONSUMERS[1:])
            if self._held is not None and event in ("train", "accumulate", "hold", "write", "load", "save", "snapshot"):
                self._release()
            self._log(f"event {self._event}: {event} {consumer}")
            self._do(event, consumer)
            self.counts[event] += 1
            if self._end_fault():
                ended = "fault"
                break
        if ended == "end":
            self._finish()
        if self._rank == 0:
            self._mirror.save()
            self._save_follower()
        dist.barrier()
        self.counts["checked"] += sum(each.num_checked for each in self._followers)
        self.counts["rows read"] += sum(each.num_rows for each in self._copies.values())
        return {"ended": ended, "counts": dict(self.counts)}

    def _finish(self) -> None:
        self._is_settled = True  # a fault that was not reached
        self._recover_and_read()
        self._publisher.close()
        assert self._tracker.consumers == _CONSUMERS or set(self._tracker.consumers) == set(_CONSUMERS)
        self._tracker.detach()

    def _recover_and_read(self) -> None:
        assert self._recover(), "a rank was lost without a fault"
        for name in _CONSUMERS[1:]:
            self._read(name, "commit")
        errors = sum(_every(self._tracker.num_hook_errors))
        assert errors == 0 or self._trouble.kind == "hook", f"{errors} hooks failed"

    # Events

    def _do(self, event: str, consumer: str) -> None:
        if event == "train":
            self._backward(self._forward())
            self._step_optimizers()
            self._advance()
            self._publish("step")
        elif event == "accumulate":
            for _ in range(2):
                self._backward(self._forward())
                if self._draw.random() < 0.4:
                    self._advance()
                    self._read(consumer, "commit")
            self._step_optimizers()
            self._advance()
        elif event == "hold":
            self._held = self._forward()
        elif event == "evaluate":
            self._model.eval()
            with torch.no_grad():
                self._model(self._features())
            self._model.train()
        elif event == "write":
            self._write()
        elif event == "load":
            self._load()
        elif event in ("publish", "snapshot", "flush"):
            self._flush() if event == "flush" else self._publish(event)
        elif event in ("read", "abort", "top-k"):
            self._read(consumer, {"read": "commit"}.get(event, event))
        elif event == "clear":
            while not self._call("clear", lambda: self._tracker.clear(consumer))[0]:
                pass
            self._copies[consumer].reset()
            self._has[consumer] = gathered(self._copies[consumer].blocks)
        elif event == "compact":
            self._call("compact", self._tracker.compact)
        elif event == "follow":
            self._follow_all()
        elif event == "replace":
            if self._rank == 0:
                self._followers[1].sync(self._mirror)
                self._followers[1] = self._new_follower()
        elif event == "save":
            self._save()

    def _flush(self) -> None:
        """Finish a version; an error that was kept is raised, and none is new."""
        self._publish("flush")

    def _write(self) -> None:
        """Write to some rows of each block in place, to the same ones in replicas."""
        shared = torch.Generator().manual_seed(self._draw.randrange(1 << 30))
        with torch.no_grad():
            for fqn, _, rows, _ in self._blocks():
                generator = shared if self._tracker.shards[fqn].is_replicated else self._generator
                if len(rows) and torch.rand((), generator=generator) < 0.7:
                    row = int(torch.randint(len(rows), (), generator=generator))
                    rows[row] += 0.5
        for copy in self._copies.values():
            copy.allow_all()
        self._advance()

    def _load(self) -> None:
        """Load the model's state of the newest checkpoint of this life."""
        path = self._newest_save
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        self._model.load_state_dict(state["model"])
        for copy in self._copies.values():
            copy.allow_all()
        self._advance()

    def _read(self, name: str, how: str) -> None:
        copy = self._copies[name]
        # A read with top-k is a collective: without a fault.
        top_k = TopK(rows=self._draw.randrange(1, 12), score=_sum_of_columns) if how == "top-k" else None
        with_values = self._draw.random() < 0.5
        # A read that commits in one call may have committed when an exception reaches the caller.
        is_two_phase = how != "commit" or self._draw.random() < 0.5 or (self._may_fail and self._trouble.is_traced)

        def read() -> Any:
            return self._tracker.get_delta(name, commit=not is_two_phase, with_values=with_values, top_k=top_k)

        try:
            is_done, delta = self._call("get_delta", read, () if top_k else ("exception", "interrupt"))
        except NeedsSnapshotError:
            is_done, delta = False, NeedsSnapshotError
        else:
            delta = type(delta) if isinstance(delta, NeedsSnapshotError) else delta
        if delta is NeedsSnapshotError:
            assert self._job.max_bytes is not None
            self._tracker.clear(name)
            copy.reset()
        elif is_done:
            copy.check(delta)
            if how == "abort":
                self._tracker.abort(delta)
            else:
                self._commit(delta, is_two_phase=is_two_phase)
                copy.commit(delta)
        self._has[name] = gathered(copy.blocks)

    def _commit(self, delta: Any, *, is_two_phase: bool) -> None:
        """Commit a read; after an interrupt, again, unless it was committed."""
        if is_two_phase and not self._call("commit", lambda: self._tracker.commit(delta))[0]:
            with contextlib.suppress(StaleDeltaError):
                self._tracker.commit(delta)

    def _follow_all(self) -> None:
        for follower in self._followers:
            follower.sync(self._mirror)
        dist.barrier()

    def _save(self) -> None:
        count = len(list(self._root.glob("checkpoints/*")))
        path = self._root / "checkpoints" / _every(f"{self._number}-{count:03d}")[0]
        dcp.save({**self._state(), "tracker": self._tracker}, checkpoint_id=path)
        if self._rank == 0:
            cut = self._mirror.cuts[self._tracker.num_batches]
            torch.save(Cut(cut.tables, cut.dense, dict(self._has)), path / "cut.pt")
        self._newest_save = path
        dist.barrier()

    def _save_follower(self) -> None:
        follower = self._followers[0]
        torch.save((follower.held(), follower.predictor.state_dict()), self._root / "predictor.pt")


def life(rank: int, world_size: int, root: str, seed: int, number: int, s3: dict[str, Any] | None) -> dict[str, Any]:
    """Run a life on one rank."""
    faulthandler.dump_traceback_later(_LIFE_SECONDS - 10, exit=False)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size(world_size))
    logging.disable(logging.WARNING)
    job = Job.of(seed)
    with ExitStack() as stack:
        faults = None
        if s3 is None:
            url, clean = f"file://{root}/stream", Storage(f"file://{root}/stream", create=True, fsync=False)
            storage = _Failing(url, create=True, fsync=False)
        else:
            server = S3(**s3)
            faults = stack.enter_context(proxy(server.port))
            clean = Storage(server.url, options=server.options)
            storage = _Failing(server.url, options=server.through(faults.port))
        try:
            return Life(Path(root), job, number, storage, clean, faults).run()
        finally:
            faulthandler.cancel_dump_traceback_later()


class Trainers:
    """The ranks and servers on which seeds run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pools: dict[int, RankPool] = {}
        self._s3: S3 | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._stack.close()

    def run(self, seed: int, root: Path) -> Counter[str]:
        """Run all lives of a seed; return what they covered."""
        job = Job.of(seed)
        (root / "checkpoints").mkdir()
        bucket = None
        if job.fault == "s3":
            self._s3 = self._s3 or self._stack.enter_context(s3_server())
            bucket = {"url": f"{self._s3.url}/{root.name}", "options": self._s3.options}
        covered: Counter[str] = Counter()
        for number, world_size in enumerate(job.world_sizes):
            pool = self._pools.setdefault(world_size, RankPool(world_size))
            arguments = {"root": str(root), "seed": seed, "number": number, "s3": bucket}
            answers = pool.run(f"{__spec__.name}:life", timeout_seconds=_LIFE_SECONDS, **arguments)
            covered += Counter(answers[0]["counts"])
            if answers[0]["ended"] != "end":
                pool.stop()
        return covered


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds, print those that broke a promise and what all covered, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, nargs="+", help="run these only")
    parser.add_argument("--keep", action="store_true", help="keep the directories of seeds that fail")
    parser.add_argument("--times", action="store_true", help="print the seconds of each seed")
    options = parser.parse_args(argv)
    os.environ.setdefault("PYTHONHASHSEED", "0")
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else options.seed
    total: Counter[str] = Counter()
    broken = []
    begin = time.monotonic()
    with Trainers() as trainers:
        for seed in seeds:
            root, since = Path(tempfile.mkdtemp(prefix=f"random-trainer-{seed}-")), time.monotonic()
            try:
                total += trainers.run(seed, root)
            except RankFailureError as error:
                broken.append(seed)
                events = root / "events.log"
                lines = events.read_text().splitlines() if events.exists() else []
                print(f"seed {seed} failed: python -m tests.system.random_trainers --seed {seed}")
                print(Job.of(seed).describe(), *lines[-12:], str(error)[-2500:], sep="\n", flush=True)
            finally:
                if not (options.keep and seed in broken):
                    shutil.rmtree(root, ignore_errors=True)
            total["seeds"] += 1
            if options.times:
                print(f"seed {seed}: {time.monotonic() - since:.1f} s", flush=True)
    print(json.dumps({"broken": broken, "seconds": round(time.monotonic() - begin), **dict(sorted(total.items()))}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
