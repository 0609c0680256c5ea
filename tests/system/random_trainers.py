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
import faulthandler
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist

from delta_tracker import Delta, ModelDeltaTracker, Publisher, Recovery, TopK, TrackingMode, restore
from delta_tracker.errors import (
    DeltaTrackerError,
    InvalidArgumentError,
    NeedsSnapshotError,
    RankLostError,
    StaleDeltaError,
)
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.ranks import RankFailureError, RankPool
from tests.servers import S3, Proxy, proxy, s3_server
from tests.stores.wrapped import WrappedStorage
from tests.system.random_fault import RankFault
from tests.system.random_job import Job, sum_of_columns
from tests.system.random_mirror import Copy, Cut, Followers, Mirror, Whole, check_blocks, gathered
from tests.system.random_models import Trained, draw_specs, every, local_size

_TIMEOUT = timedelta(seconds=8)
_LIFE_SECONDS = 100.0
_MAX_ATTEMPTS = 120  # with top_k, all rows of a model take some
_READERS = ("a", "b")
_CONSUMERS = ("stream", *_READERS)
_IN_CALLS = ("exception", "interrupt")
_IN_PUBLISHING = (*_IN_CALLS, "store", "disk", "s3")
_EVENTS = {
    "train": 8, "accumulate": 1.5, "hold": 1.5, "evaluate": 1, "write": 0.5, "revert": 0.7, "load": 0.4, "publish": 2.5,
    "snapshot": 0.6, "flush": 0.4, "read": 3, "abort": 1, "top_k": 1.5, "clear": 0.2, "rejoin": 0.2, "compact": 0.3,
    "follow": 1.5, "replace": 0.5, "save": 0.8,
}  # fmt: skip
# Events before which the backward pass of a lookup that is held runs.
_UPDATES = ("train", "accumulate", "hold", "write", "revert", "load", "save", "snapshot")


class Life:
    """One rank of one life.

    Args:
        root: directory of the seed.
        job: the trainer.
        number: number of the life.
        storage: store of this rank's publisher.
        clean: the same store, without a fault.
        faults: proxy in front of the former; None without one.
    """

    def __init__(
        self, root: Path, job: Job, number: int, storage: WrappedStorage, clean: Storage, faults: Proxy | None
    ) -> None:
        self._root, self._job, self._number, self._clean = root, job, number, clean
        self._is_first = dist.get_rank() == 0
        world_size = dist.get_world_size()
        self._draw = job.draw(number)
        specs = draw_specs(self._draw, job.collections, world_size)
        self._trained = Trained(job.collections, specs, job.seed, 1000 * job.seed + 10 * number + dist.get_rank())
        self._tracker = ModelDeltaTracker(
            self._trained.model, _CONSUMERS, mode=job.mode, max_bytes=job.max_bytes, auto_compact=job.seed % 3 == 0
        )
        self._mirror = Mirror(root, number)
        is_victim = self._draw.randrange(world_size) == dist.get_rank()
        self._fault = RankFault(job.fault, self._draw, storage, faults, is_victim=is_victim)
        self._ends_with_fault = number < len(job.world_sizes) - 1 and self._draw.random() < 0.4
        self._event, self._is_settled = -1, False
        self._held: Tensor | None = None  # loss of a lookup whose backward pass has not run
        self._looked_up: list[dict[str, set[int]]] = []  # in batches whose backward pass has not run
        self.counts: Counter[str] = Counter()
        begin = {"new": dict, "checkpoint": self._load_checkpoint, "stream": self._restore}[job.begins[number]]
        had: dict[str, Whole] = begin()
        self._copies = {name: Copy(self._tracker, name, self._trained.blocks, had.get(name)) for name in _READERS}
        self._has: dict[str, Whole] = {name: gathered(copy.blocks) for name, copy in self._copies.items()}
        self._record()
        self._publisher = self._new_publisher(storage)
        self._followers = Followers(job, root, clean, self._empty) if self._is_first else None
        self._log(f"begins with {job.begins[number]}, {self._publisher!r}")

    # Beginning

    def _load_checkpoint(self) -> dict[str, Whole]:
        """Load a checkpoint of an earlier life; return what each consumer has."""
        saved = sorted(path.parent for path in self._root.glob("checkpoints/*/cut.pt"))
        path = saved[-1] if self._draw.random() < 0.7 else self._draw.choice(saved)
        state = self._state()
        dcp.load({**state, "tracker": SavedTracker(self._tracker, path)}, checkpoint_id=path)
        cut: Cut = torch.load(path / "cut.pt", weights_only=False)
        check_blocks(cut, self._trained.blocks(), has_states="fused" in state)
        self.counts[f"loaded on {dist.get_world_size()}"] += 1
        return cut.consumers

    def _restore(self) -> dict[str, Whole]:
        """Restore the newest version or an older one; return what each consumer has."""
        for _ in range(2):
            self._trained.model(self._trained.batch()).backward()
            self._trained.step()
        log = StreamLog(self._clean)
        entries = [entry for entry in map(log.read, log.versions()) if entry is not None and entry.kind != "claim"]
        newest = max(entry.version for entry in entries if entry.kind == "snapshot")
        versions = [entry.version for entry in entries if entry.version >= newest and entry.batches[1]]
        version = every(None if self._draw.random() < 0.6 or not versions else self._draw.choice(versions))[0]
        options = {"tracker": self._tracker, "recovery": self._recovery(), "timeout": _TIMEOUT}
        found = restore(self._trained.model, self._clean, version, **options)
        entry = log.read(found.version)
        assert entry is not None
        cut = self._mirror.of(entry)
        check_blocks(cut, self._trained.blocks(), has_states=True)
        for name, tensor in self._trained.dense().items():
            assert not self._job.has_dense or torch.equal(cut.dense[name], tensor), f"{name} has other values"
        assert self._tracker.num_batches == found.num_batches == entry.batches[1]
        self.counts[f"restored on {dist.get_world_size()}"] += 1
        return cut.consumers

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint has of the model; with a momentum mode, also of the fused optimizers."""
        state = {"model": self._trained.model.state_dict()}
        fused = self._trained.model.fused_optimizer.state_dict()
        # DCP cannot load the empty state of a rank without rows.
        if self._job.mode in (TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF) and fused.get("state"):
            state["fused"] = fused
        return state

    def _recovery(self) -> Recovery | None:
        """Return the optimizers whose states are published with the rows and restored; None for none."""
        if not self._job.has_states:
            return None
        assert not self._trained.split, "no table has a DENSE kernel"
        optimizers = {f"optimizer{index}": each for index, each in enumerate(self._trained.replicated)}
        return Recovery(training_state=optimizers)

    def _new_publisher(self, storage: Storage) -> Publisher:
        publisher = Publisher(
            self._tracker,
            storage,
            "stream",
            dense=self._trained.model.module.dense if self._job.has_dense else None,
            recovery=self._recovery(),
            timeout=_TIMEOUT,
            **self._job.publishing,
        )
        self._mirror.generations[publisher.generation] = self._number
        return publisher

    def _empty(self) -> dict[str, Tensor]:
        """Return tables and dense tensors of a predictor that has no version."""
        held = {
            fqn: torch.full((spec.num_rows, spec.dim), -1.0, dtype=spec.dtype)
            for fqn, spec in self._tracker.tables.items()
        }
        if self._job.has_dense:
            held |= {name: torch.full_like(each, -1.0) for name, each in self._trained.dense().items()}
        return held

    # Notes

    def _record(self) -> None:
        """Copy all tables after a batch."""
        dense = {name: tensor.clone() for name, tensor in self._trained.dense().items()}
        cut = Cut(gathered(self._trained.blocks()), dense, dict(self._has))
        self._mirror.cuts[self._tracker.num_batches] = cut

    def _log(self, text: str) -> None:
        """Write a line to the log of the seed, on rank 0."""
        if self._is_first:
            self._note(text)

    def _note(self, text: str) -> None:
        with (self._root / "events.log").open("a") as file:
            file.write(f"life {self._number}, rank {dist.get_rank()}, batch {self._tracker.num_batches}: {text}\n")

    # Calls with a fault

    @property
    def _has_fault(self) -> bool:
        """Whether this is the time of the fault."""
        return self._event >= self._fault.begin and not self._is_settled

    def _call(self, call: Callable[[], Any], kinds: Sequence[str] = _IN_CALLS) -> tuple[bool, Any]:
        """Call a method with this rank's fault, if it is of these kinds.

        Returns:
            Whether it returned, and the result or the error.
        """
        was_raised = self._fault.trace.is_raised
        try:
            with self._fault.active(kinds if self._has_fault else ()):
                return True, call()
        except (DeltaTrackerError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            is_injected = str(error) == "injected" and self._fault.trace.is_raised and not was_raised
            if is_injected or (isinstance(error, DeltaTrackerError) and self._has_fault):
                return False, error
            raise

    def _publish(self, name: str) -> None:
        """Call a method of the publisher on all ranks."""
        if self._job.has_states and self._held is not None:
            self._release()
        self._mirror.cuts[self._tracker.num_batches].consumers = dict(self._has)
        is_done, error = self._call(getattr(self._publisher, name), _IN_PUBLISHING)
        if name == "step":
            assert is_done or isinstance(error, KeyboardInterrupt), f"step raised {error!r}"
        elif isinstance(error, KeyboardInterrupt):
            # As after Ctrl-C in a notebook: the other ranks wait for this rank.
            is_done, error = self._call(getattr(self._publisher, name), ())
        self._log(f"{name}: {error!r:.120}, {self._publisher.error!r:.120}")
        if not self._has_fault:
            failure = self._publisher.error
            assert all(every(is_done and failure is None)), f"{name} failed without a fault: {error!r}, {failure!r}"
            self.counts["published"] += name != "step"

    def _ends_here(self) -> bool:
        """After an event: return whether this life ends, because of the fault. Check that the job recovers from it."""
        if not self._has_fault or not self._fault.ends():
            return False
        trace = self._fault.trace
        self.counts[f"fault {self._fault.kind}"] += any(every(trace.is_raised)) or not self._fault.is_traced
        self._note(f"the fault {self._fault.kind} ends {trace.place} {trace.exception.__name__}")
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
        batches = every(self._tracker.num_batches)
        assert len(set(batches)) == 1, f"step() counted {batches} batches"
        num_failed = 0
        for _ in range(_MAX_ATTEMPTS):
            self._mirror.cuts[self._tracker.num_batches].consumers = dict(self._has)
            is_done, error = self._call(self._publisher.publish, ())
            head = StreamLog(self._clean).head()
            assert head is not None
            is_lost = isinstance(self._publisher.error, RankLostError)
            found = every((is_done, head.pending_rows, is_lost, self._publisher.version, f"{error!r:.200}"))
            if any(each[2] for each in found):
                self._log(f"a rank was lost: {found}")
                return False
            num_failed += not all(each[0] for each in found)
            self._log(f"recover: {[each[0] or each[4] for each in found]}")
            if all(each[:2] == (True, 0) for each in found) and len({each[3] for each in found}) == 1:
                break
        else:
            raise AssertionError(f"rows are pending after {_MAX_ATTEMPTS} versions: {self._publisher.error!r}")
        assert num_failed <= 1, f"{num_failed} versions failed after the fault"
        self._follow()
        return True

    # Training

    def _forward(self) -> Tensor:
        features = self._trained.batch()
        self._looked_up.append(self._trained.looked_up(features))
        is_done, loss = self._call(lambda: self._trained.model(features), ("hook",))
        assert is_done, f"a hook raised {loss!r} into the forward pass"
        return loss

    def _backward(self, loss: Tensor) -> None:
        is_done, error = self._call(loss.backward, ("hook",))
        assert is_done, f"a hook raised {error!r} into the backward pass"
        while self._looked_up:
            ids = self._looked_up.pop()
            for copy in self._copies.values():
                copy.touch(ids)
        if self._has_fault:
            for copy in self._copies.values():
                copy.allow_all()  # a hook that fails may mark all rows

    def _advance(self) -> None:
        """Count a batch and copy the tables, so that each count of batches has one state of the tables."""
        before = self._tracker.num_batches
        self._call(self._tracker.step)
        if self._tracker.num_batches == before:
            self._tracker.step()
        self._record()

    def _release(self) -> None:
        loss, self._held = self._held, None
        assert loss is not None
        self._backward(loss)
        self._trained.step()
        self._advance()

    # Events

    def run(self) -> dict[str, Any]:
        """Run the events; return what was covered."""
        self._follow()
        if self._draw.random() < 0.7 or self._number == 0:
            self._publish("publish")
        self._save("")
        ended = "end"
        for number in range(self._draw.randrange(14, 22)):
            self._event = number
            (event,) = self._draw.choices([*_EVENTS], [*_EVENTS.values()])
            consumer = self._draw.choice(_READERS)
            if self._held is not None and event in _UPDATES:
                self._release()
            self._log(f"event {number}: {event} {consumer}")
            self._publish(event) if event == "publish" else getattr(self, f"_{event}")(consumer)
            self.counts[event] += 1
            if self._ends_here():
                ended = "fault"
                break
        if ended == "end":
            self._finish()
        if self._followers is not None:
            self._mirror.save()
            self._followers.save()
            self.counts["checked"] += self._followers.num_checked
        dist.barrier()
        self.counts["rows read"] += sum(each.num_rows for each in self._copies.values())
        return {"ended": ended, "counts": dict(self.counts)}

    def _finish(self) -> None:
        self._is_settled = True  # a fault that was not reached
        assert self._recover(), "a rank was lost without a fault"
        for name in _READERS:
            self._read(name)
        errors = sum(every(self._tracker.num_hook_errors))
        assert errors == 0 or self._job.fault == "hook", f"{errors} hooks failed"
        self._publisher.close()
        assert set(self._tracker.consumers) == set(_CONSUMERS)
        self._tracker.detach()

    def _train(self, consumer: str) -> None:
        del consumer
        self._backward(self._forward())
        self._trained.step()
        self._advance()
        self._publish("step")

    def _accumulate(self, consumer: str) -> None:
        for _ in range(2):
            self._backward(self._forward())
            if self._draw.random() < 0.4:
                self._advance()
                self._read(consumer)
        self._trained.step()
        self._advance()

    def _hold(self, consumer: str) -> None:
        """Keep the output of a forward pass, whose backward pass runs later."""
        del consumer
        self._held = self._forward()

    def _evaluate(self, consumer: str) -> None:
        del consumer
        self._trained.model.eval()
        with torch.no_grad():
            self._trained.model(self._trained.batch())
        self._trained.model.train()

    def _write(self, consumer: str) -> None:
        """Write to some rows of each block in place, to the same ones in replicas."""
        del consumer
        shared = torch.Generator().manual_seed(self._draw.randrange(1 << 30))
        with torch.no_grad():
            for fqn, _, rows, _ in self._trained.blocks():
                generator = shared if self._tracker.shards[fqn].is_replicated else self._trained.generator
                if len(rows) and torch.rand((), generator=generator) < 0.7:
                    rows[int(torch.randint(len(rows), (), generator=generator))] += 0.5
        for copy in self._copies.values():
            copy.allow_all()
        self._advance()

    def _revert(self, consumer: str) -> None:
        """Write the rows of an earlier version in place, after a consumer has read others."""
        self._publish("publish")
        cut = self._mirror.cuts[self._tracker.num_batches]
        self._backward(self._forward())
        self._trained.step()
        self._advance()
        self._read(consumer)
        with torch.no_grad():
            for fqn, (row, column), rows, _ in self._trained.blocks():
                rows.copy_(cut.tables[fqn][0][row : row + len(rows), column : column + rows.shape[1]])
        for copy in self._copies.values():
            copy.allow_all()
        self._advance()
        self._publish("publish")

    def _load(self, consumer: str) -> None:
        """Load the model's state of the newest checkpoint of this life."""
        del consumer
        state = self._state()
        path = max(path.parent for path in self._root.glob(f"checkpoints/{self._number}-*/cut.pt"))
        dcp.load(state, checkpoint_id=path)
        self._trained.model.load_state_dict(state["model"])
        for copy in self._copies.values():
            copy.allow_all()
        self._advance()

    def _snapshot(self, consumer: str) -> None:
        del consumer
        self._publish("snapshot")

    def _flush(self, consumer: str) -> None:
        del consumer
        self._publish("flush")

    def _read(self, consumer: str) -> None:
        self._take(consumer, commits=True)

    def _abort(self, consumer: str) -> None:
        self._take(consumer, commits=False)

    def _top_k(self, consumer: str) -> None:
        top_k = TopK(rows=self._draw.randrange(1, 12), score=sum_of_columns)
        self._take(consumer, commits=self._draw.random() < 0.7, top_k=top_k)

    def _take(self, name: str, *, commits: bool, top_k: TopK | None = None) -> None:
        """Read as a consumer and compare. A read with ``top_k`` is a collective, and has no fault."""
        copy = self._copies[name]
        with_values = self._draw.random() < 0.5
        # A read that commits in one call may have committed when an exception reaches the caller.
        at_once = commits and self._draw.random() < 0.5 and not (self._has_fault and self._fault.is_traced)

        def read() -> Delta:
            return self._tracker.get_delta(name, commit=at_once, with_values=with_values, top_k=top_k)

        try:
            is_done, delta = self._call(read, _IN_CALLS if top_k is None else ())
        except (NeedsSnapshotError, InvalidArgumentError) as error:  # the latter if another rank raised the former
            is_done, delta = False, error
        is_dropped = any(every(isinstance(delta, NeedsSnapshotError)))
        assert is_dropped or not isinstance(delta, InvalidArgumentError), delta
        if isinstance(delta, NeedsSnapshotError):
            assert self._job.max_bytes is not None
            self._tracker.clear(name)
            copy.reset()
        elif is_done:
            copy.check(delta)
            if not commits:
                self._tracker.abort(delta)
            else:
                self._commit(delta, is_done=at_once)
                copy.commit(delta)
        self._has[name] = gathered(copy.blocks)

    def _commit(self, delta: Delta, *, is_done: bool) -> None:
        """Commit a read; after an exception, again, unless it was committed."""
        if not is_done and not self._call(lambda: self._tracker.commit(delta))[0]:
            with contextlib.suppress(StaleDeltaError):
                self._tracker.commit(delta)

    def _clear(self, consumer: str) -> None:
        while not self._call(lambda: self._tracker.clear(consumer))[0]:
            pass
        self._copies[consumer].reset()
        self._has[consumer] = gathered(self._copies[consumer].blocks)

    def _rejoin(self, consumer: str) -> None:
        """Remove a consumer and add it again; after an exception, again, unless it was done."""
        while consumer in self._tracker.consumers:
            self._call(lambda: self._tracker.remove_consumer(consumer))
        while consumer not in self._tracker.consumers:
            self._call(lambda: self._tracker.add_consumer(consumer))
        self._copies[consumer].reset()
        self._has[consumer] = gathered(self._copies[consumer].blocks)

    def _compact(self, consumer: str) -> None:
        del consumer
        self._call(self._tracker.compact)

    def _follow(self, consumer: str = "") -> None:
        """Apply all versions to the predictors, and compare each with the mirror."""
        del consumer
        if self._followers is not None:
            self._followers.sync(self._mirror)
        dist.barrier()

    def _replace(self, consumer: str) -> None:
        self._follow(consumer)
        if self._followers is not None:
            self._followers.replace()

    def _save(self, consumer: str) -> None:
        """Save a checkpoint of the model and the tracker, and what each consumer has."""
        del consumer
        count = len(list(self._root.glob("checkpoints/*")))
        path = self._root / "checkpoints" / every(f"{self._number}-{count:03d}")[0]
        dcp.save({**self._state(), "tracker": self._tracker}, checkpoint_id=path)
        if self._is_first:
            cut = self._mirror.cuts[self._tracker.num_batches]
            torch.save(Cut(cut.tables, cut.dense, dict(self._has)), path / "cut.pt")
        dist.barrier()


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
            storage = WrappedStorage(Storage(url, create=True, fsync=False))
        else:
            server = S3(**s3)
            faults = stack.enter_context(proxy(server.port))
            clean = Storage(server.url, options=server.options)
            storage = WrappedStorage(Storage(server.url, options=server.through(faults.port)))
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
    parser.add_argument("--keep", action="store_true", help="keep the directories, with a log of the events")
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
                if not options.keep:
                    shutil.rmtree(root, ignore_errors=True)
            total["seeds"] += 1
            if options.times:
                print(f"seed {seed}: {time.monotonic() - since:.1f} s", flush=True)
    print(json.dumps({"broken": broken, "seconds": round(time.monotonic() - begin), **dict(sorted(total.items()))}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
