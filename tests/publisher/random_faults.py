"""Random calls of a publisher on all ranks, with one fault at a random line of one rank.

``python -m tests.publisher.random_faults FIRST LAST [RANKS]`` runs the seeds of a range and exits with 1 if one of them
breaks a promise. Too slow for the suite: about 1.5 s per seed.

Each seed chooses a schedule of calls, a rank, and a line of that rank's publisher, tracker or process group. Before
that line, KeyboardInterrupt or MemoryError is raised once. Promises that are checked:

- Every call returns or raises a typed error, on every rank, in bounded time. ``step`` raises neither of them.
- Unless a rank was lost, at most one further version fails, and the next version has all rows.
- Every version without ``top_k`` equals the trainer at its cut, and so do the optimizer's states and the training state
  of a version that has them.
- The publisher closes and releases its consumers.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

import delta_tracker
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage, TopK, TrackingMode
from delta_tracker.errors import DeltaTrackerError, RankLostError
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.log import StreamLog
from tests.models import Spec, Table, shard
from tests.publisher.publishing_cases import assert_equal, empty_model
from tests.publisher.states_cases import replay, training_states
from tests.ranks import RankFailureError, RankPool

_PACKAGE = Path(delta_tracker.__file__).parent
_TRACED = tuple(str(_PACKAGE / name) for name in ("publisher", "tracker", "distributed.py"))
# Files whose lines allocate too little memory to fail on their own.
_NO_MEMORY = (
    "tracker/tracker.py",
    *(f"publisher/{name}.py" for name in ("publisher", "versions", "ballots", "reports", "exchange", "flight")),
    "distributed.py",
)
_ENTRIES = ("step", "call", "_checked", "publish", "snapshot", "flush")
_CALLS = {
    "step": ["step"] * 10 + ["flush"],
    "publish": ["publish", "publish", "snapshot"],
    "mixed": ["step"] * 6 + ["publish", "snapshot", "flush"],
}
_TIMEOUT = timedelta(seconds=4)
_MAX_ATTEMPTS = 40


class Fault:
    """Trace function that raises an exception once, before a line of the traced files.

    Args:
        exception: class of the exception.
        num_lines: number of lines that run before it.
    """

    def __init__(self, exception: type[BaseException], num_lines: int) -> None:
        self.exception = exception
        self.is_raised = False
        self.place = ""  # file and line
        self._num_left = num_lines

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        """Count a line, and raise the exception at the chosen one."""
        path = frame.f_code.co_filename
        if not path.startswith(_TRACED):
            return None
        if frame.f_code.co_name in _ENTRIES or (self.exception is MemoryError and path.endswith(_NO_MEMORY)):
            return self
        if event == "line" and not self.is_raised:
            self._num_left -= 1
            if self._num_left < 0:
                self.is_raised, self.place = True, f"{path}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.exception("injected")
        return self


class Counter:
    """Object of the training state with the number of batches."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Not used."""
        raise NotImplementedError


def _views(tracker: ModelDeltaTracker, fqn: str) -> list[torch.Tensor]:
    """Return live views of the values and of the states of a shard."""
    return [*tracker.column_views(fqn), *(state for states in tracker.state_views(fqn) for state in states)]


class Schedule:
    """Choices of one seed, the same on all ranks."""

    def __init__(self, seed: int, world_size: int) -> None:
        chance = random.Random(seed)
        self.top_k = chance.choice([None, TopK(rows=6)])
        bounds = {"batches": chance.choice([1, 3]), "snapshot_every": chance.choice([None, 3])}
        style = chance.choice(list(_CALLS))
        self.calls = [chance.choice(_CALLS[style]) for _ in range(40 if style == "step" else 14)]
        self.victim = chance.randrange(world_size)
        self.begin = chance.randrange(len(self.calls) - 2)
        self.fault = Fault(chance.choice([KeyboardInterrupt, MemoryError]), int(10 ** chance.uniform(0, 3.3)))
        self.cadence = Cadence(**bounds, vote_every=chance.choice([1, 2, 3]))
        self.has_states = self.top_k is None and chance.random() < 0.7
        self.is_resumed = not self.has_states and chance.random() < 0.4


@dataclass(slots=True)
class Run:
    """One rank's calls of a publisher, and the broken promises that were seen.

    Versions up to ``begin`` are of an earlier publisher, and are not compared.
    """

    rank: int
    tracker: ModelDeltaTracker
    publisher: Publisher
    generator: torch.Generator
    counter: Counter
    begin: int = 0
    broken: list[str] = field(default_factory=list)
    held: dict[int, dict[str, list[torch.Tensor]]] = field(default_factory=dict)

    def train(self) -> None:
        """Change three rows of each shard and their states, and remember all of them by the number of batches.

        Some rows change to one of two values, so that versions have rows whose stored bytes did not change.
        """
        for fqn, shard_ in self.tracker.shards.items():
            if shard_.num_rows:
                ids = torch.randint(0, shard_.num_rows, (3,), generator=self.generator)
                for view in _views(self.tracker, fqn):
                    change = torch.rand(3, view.shape[1], generator=self.generator)
                    view.data[ids] = torch.where(change[:, :1] < 0.5, view.data[ids] + change, change[:, :1].round())
                self.tracker.mark_changed(fqn, ids)
        self.tracker.step()
        self.counter.number = self.tracker.num_batches
        views = {fqn: _views(self.tracker, fqn) for fqn in self.tracker.shards}
        self.held[self.tracker.num_batches] = {fqn: [view.clone() for view in each] for fqn, each in views.items()}

    def resume(self, build: Callable[[], Publisher]) -> None:
        """Publish two versions and go back to the first, so that the next version of a new publisher repairs."""
        self.train()
        self.publisher.publish()
        values = {fqn: [view.clone() for view in _views(self.tracker, fqn)] for fqn in self.tracker.shards}
        state = self.tracker.state_dict()
        self.train()
        self.begin = self.publisher.publish().version
        self.publisher.close()
        for fqn, held in values.items():
            for view, value in zip(_views(self.tracker, fqn), held, strict=True):
                view.data.copy_(value)
        self.tracker.load_state_dict(state)
        self.publisher = build()

    def call(self, name: str) -> bool:
        """Call a method of the publisher; return False if it raised a typed error or the injected one."""
        try:
            getattr(self.publisher, name)()
        except DeltaTrackerError as error:
            if name == "step":
                self.broken.append(f"step raised {error!r}")
        except KeyboardInterrupt:
            pass
        except MemoryError as error:
            if name == "step":
                self.broken.append(f"step raised {error!r}")
        else:
            return True
        return False

    def recover(self, url: str, world_size: int) -> bool:
        """Publish until no row is pending on any rank; return False if a rank was lost."""
        failed = 0
        for _ in range(_MAX_ATTEMPTS):
            worked = self.call("publish")
            head = StreamLog(Storage(url)).head()
            assert head is not None
            every: list[Any] = [None] * world_size
            is_lost = isinstance(self.publisher.error, RankLostError)
            dist.all_gather_object(every, (worked, head.pending_rows, is_lost, self.publisher.version))
            if any(each[2] for each in every):
                return False
            failed += not all(each[0] for each in every)
            if all(each[0] and each[1] == 0 for each in every) and len({each[3] for each in every}) == 1:
                break
        else:
            self.broken.append(f"rows are pending after {_MAX_ATTEMPTS} versions: {self.publisher.error!r}")
        if failed > 1:
            self.broken.append(f"{failed} versions failed after the fault")
        return True

    def compare(self, url: str, *, has_top_k: bool) -> None:
        """Apply each version and compare it with the trainer at its cut; with ``top_k``, only the last version."""
        model = empty_model(self.tracker)
        predictor = Predictor(model, url)
        while predictor.version != self.publisher.version:
            predictor.sync(limit=1)
            manifest = predictor.manifest
            if manifest is None or manifest.kind == "claim" or manifest.version <= self.begin or has_top_k:
                continue
            for fqn, shard_ in self.tracker.shards.items():
                rows = slice(shard_.row_offset, shard_.row_offset + shard_.num_rows)
                for (first, end), view in zip(shard_.columns, self.held[manifest.batches[1]][fqn], strict=False):
                    if not torch.equal(model[fqn][rows, first:end], view):
                        self.broken.append(f"version {manifest.version} differs from the trainer: {fqn}")
        assert_equal(self.tracker, model)

    def compare_states(self, url: str) -> None:
        """Compare the states and the training state of each version with those of this rank at its cut."""
        for entry, held in replay(url):
            number = entry.batches[1]
            for fqn, shard_ in self.tracker.shards.items():
                rows = slice(shard_.row_offset, shard_.row_offset + shard_.num_rows)
                # After the values, the one state of each column range.
                states = self.held[number][fqn][len(shard_.columns) :]
                for columns, state in zip(shard_.columns, states, strict=True):
                    place = entry.states[fqn].columns.index(columns)
                    if not torch.equal(held[fqn][1][rows, place : place + 1], state):
                        self.broken.append(f"version {entry.version} has other states than the trainer: {fqn}")
            if training_states(url, entry)[self.rank]["rank"] != {"counter": {"number": number}}:
                self.broken.append(f"version {entry.version} has another training state than the trainer")


def case(rank: int, world_size: int, url: str, seed: int) -> tuple[bool, list[str]]:
    """Run a seed on one rank; return True if a rank was lost, and the broken promises."""
    faulthandler.dump_traceback_later(50)
    schedule = Schedule(seed, world_size)
    fault = schedule.fault
    spec = Spec([Table("t", 40, "row"), Table("u", 12, f"column:0,{world_size - 1}"), Table("v", 30, "table:0")])
    tracker = ModelDeltaTracker(shard(spec), mode=TrackingMode.EMBEDDING)
    counter = Counter()
    states: dict[str, Any] = {"states": "optimizer", "rank_state": {"counter": counter}} if schedule.has_states else {}

    def build() -> Publisher:
        return Publisher(
            tracker,
            url,
            top_k=schedule.top_k,
            cadence=schedule.cadence,
            timeout=_TIMEOUT,
            pointer_seconds=None,
            **states,
        )

    run = Run(rank, tracker, build(), torch.Generator().manual_seed(seed * 10 + rank), counter)
    if schedule.is_resumed:
        run.resume(build)
    for number, name in enumerate(schedule.calls):
        run.train()
        was_raised = fault.is_raised
        if rank == schedule.victim and number >= schedule.begin and not was_raised:
            sys.settrace(fault)
        run.call(name)
        sys.settrace(None)
        if fault.is_raised and not was_raised and fault.exception is KeyboardInterrupt and name != "step":
            run.call(name)  # as after Ctrl-C in a notebook; the other ranks wait for this rank
    is_kept = run.recover(url, world_size)
    if is_kept:
        run.compare(url, has_top_k=schedule.top_k is not None)
        if schedule.has_states:
            run.compare_states(url)
    dist.barrier()
    run.publisher.close()
    if tracker.consumers != ("default",):
        run.broken.append(f"consumers are left: {tracker.consumers}")
    tracker.detach()
    faulthandler.cancel_dump_traceback_later()
    return not is_kept, run.broken


def main() -> int:
    """Run the seeds, print those that broke a promise, and return the exit code."""
    first, last, *rest = map(int, sys.argv[1:])
    pool = RankPool(rest[0] if rest else 2)
    lost = broken = 0
    for seed in range(first, last):
        with tempfile.TemporaryDirectory() as directory:
            try:
                answers = pool.run(f"{__spec__.name}:case", url=f"file://{directory}/s", seed=seed, timeout_seconds=100)
            except RankFailureError as error:
                answers = [(False, [str(error)[-3000:]])]
        problems = [f"seed {seed}, rank {rank}: {each}" for rank, (_, said) in enumerate(answers) for each in said]
        lost += any(is_lost for is_lost, _ in answers)
        broken += bool(problems)
        print(*problems, sep="\n", end="\n" if problems else "", flush=True)
    pool.stop()
    print(f"{last - first} seeds: {broken} broke a promise, {lost} lost a rank")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
