"""Random calls of a publisher on all ranks, with one fault of one rank at a random moment.

``python -m tests.publisher.random_faults FIRST LAST [RANKS [KIND ...]]`` runs the seeds of a range, with faults of all
kinds or of some, and exits with 1 if one of them breaks a promise. About 1.5 s per seed.

Each seed chooses a schedule of calls, a rank, a kind of fault, and a line of that rank's publisher, tracker or process
group, or an operation of its store. There the fault happens once:

=============  =========================================================================================
``interrupt``  KeyboardInterrupt is raised before the line
``memory``     MemoryError is raised before the line
``killed``     the process is killed
``stopped``    the process is stopped until the other ranks have lost it
``store``      some operations of the rank's store fail, or their answers are lost
``fenced``     another publisher claims the stream
=============  =========================================================================================

Promises that are checked:

- Every call returns or raises a typed error, on every rank, in bounded time. ``step`` raises none of them.
- Unless a rank was lost, at most one further version fails, and the next version has all rows.
- If a rank was lost, the other ranks raise RankLostError. A new publisher of all ranks publishes all rows. After a kill
  it belongs to a new job, which may continue from a checkpoint.
- A publisher whose stream was claimed is fenced on all ranks in the same call, and then commits no version.
- Every version without ``top_k`` equals the trainer at its cut, and so do the optimizer's states and the training state
  of a version that has them.
- The publisher closes and releases its consumers.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

import delta_tracker
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Recovery, Storage, TopK, TrackingMode, Upkeep
from delta_tracker.errors import DeltaTrackerError, RankLostError
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.log import StreamLog
from tests.models import Spec, Table, shard
from tests.publisher.publishing_cases import assert_equal, empty_model
from tests.publisher.states_cases import replay, training_states
from tests.ranks import RankFailureError, RankPool
from tests.stores.rules import calls, fails, loses_answers, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.waiting import eventually

_PACKAGE = Path(delta_tracker.__file__).parent
_TRACED = tuple(str(_PACKAGE / name) for name in ("publisher", "tracker"))
# Files whose lines allocate too little memory to fail on their own.
_NO_MEMORY = (
    *(f"tracker/{name}.py" for name in ("tracker", "hooks", "progress", "live_tables")),
    *(f"publisher/{name}.py" for name in ("publisher", "versions", "reports", "exchange", "flight")),
    "tracker/rank_group.py",
)
_ENTRIES = ("step", "call", "_checked", "publish", "snapshot", "flush")
_CALLS = {
    "step": ["step"] * 10 + ["flush"],
    "publish": ["publish", "publish", "snapshot"],
    "mixed": ["step"] * 6 + ["publish", "snapshot", "flush"],
}
KINDS = ("interrupt", "memory", "killed", "stopped", "store", "fenced")
_TIMEOUT = timedelta(seconds=8)  # also of the construction, on a busy machine
_MODULE = "tests.publisher.random_faults"
_SLACK_SECONDS = 25.0  # on a busy machine
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
                self.happen()
        return self

    def happen(self) -> None:
        """Raise the exception."""
        raise self.exception("injected")


class _Deed(Fault):
    """Function that is called once, before a line of the traced files or an operation of a store."""

    def __init__(self, action: Callable[[], object], num_lines: int) -> None:
        super().__init__(BaseException, num_lines)
        self._action = action

    def happen(self) -> None:
        """Call the function."""
        self.is_raised = True
        self._action()


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
    return [*tracker.live.column_views(fqn), *(state for states in tracker.live.state_views(fqn) for state in states)]


class Schedule:
    """Choices of one seed, the same on all ranks."""

    def __init__(self, seed: int, world_size: int, kinds: Sequence[str]) -> None:
        chance = random.Random(seed)
        self.kind = chance.choice(kinds)
        self.loses_rank = self.kind in ("killed", "stopped")
        self.top_k = chance.choice([None, TopK(rows=6)])
        bounds = {"batches": chance.choice([1, 3]), "snapshot_every": chance.choice([None, 3])}
        style = chance.choice(list(_CALLS))
        self.calls = [chance.choice(_CALLS[style]) for _ in range(40 if style == "step" else 14)]
        self.victim = chance.randrange(world_size)
        self.begin = chance.randrange(len(self.calls) - 2)
        self.num_lines = int(10 ** chance.uniform(0, 3.3))
        # Number of the operation of the store before which the fault happens, in a thread of the publisher.
        self.operation = chance.choice([None, chance.randrange(1, 6)])
        kinds_of_operations = chance.choice([("put",), ("create",), ()])
        fault, count = chance.choice([fails, loses_answers]), chance.choice([1, 2, 5])
        self.rule = fault(nth(range(1, count + 1), on(*kinds_of_operations)))
        self.cadence = Cadence(**bounds, vote_every=chance.choice([1, 2, 3]))
        self.has_states = self.top_k is None and chance.random() < 0.7
        self.is_resumed = not self.has_states and chance.random() < 0.4 and not self.loses_rank
        self.checkpoint = None if self.has_states else chance.choice([None, chance.randrange(self.begin + 1)])

    def fault(self, url: str, storage: WrappedStorage) -> Fault:
        """Return the fault of the rank."""
        if self.kind in ("interrupt", "memory"):
            return Fault(KeyboardInterrupt if self.kind == "interrupt" else MemoryError, self.num_lines)
        number = signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP
        action: Callable[[], object] = lambda: os.kill(os.getpid(), number)  # noqa: E731
        if self.kind == "store":
            action = lambda: storage.rules.append(self.rule)  # noqa: E731
        elif self.kind == "fenced":
            action = lambda: StreamLog(Storage(url)).claim()  # noqa: E731
        return _Deed(action, self.num_lines)


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
    bounded: bool = True  # False while this rank may be stopped
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
        begin = time.monotonic()
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
        finally:
            seconds = time.monotonic() - begin
            if self.bounded and seconds > _TIMEOUT.total_seconds() + _SLACK_SECONDS:
                self.broken.append(f"{name} took {seconds:.1f} s")
        return False

    @property
    def is_lost(self) -> bool:
        """True if a rank was lost."""
        return isinstance(self.publisher.error, RankLostError)

    def recover(self, url: str, world_size: int) -> bool:
        """Publish until no row is pending on any rank; return False if a rank was lost."""
        failed = 0
        for _ in range(_MAX_ATTEMPTS):
            worked = self.call("publish")
            head = StreamLog(Storage(url)).head()
            assert head is not None
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, (worked, head.pending_rows, self.is_lost, self.publisher.version))
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


class _Job:
    """One rank's trainer, which is the same for the same seed."""

    def __init__(self, rank: int, world_size: int, url: str, seed: int, kinds: Sequence[str]) -> None:
        faulthandler.dump_traceback_later(150)
        self.schedule = schedule = Schedule(seed, world_size, kinds)
        self.rank, self.world_size, self.url = rank, world_size, url
        torch.manual_seed(seed)
        spec = Spec([Table("t", 40, "row"), Table("u", 12, f"column:0,{world_size - 1}"), Table("v", 30, "table:0")])
        self.tracker = ModelDeltaTracker(shard(spec), mode=TrackingMode.EMBEDDING)
        self.counter = Counter()
        self.storage = WrappedStorage(Storage(url, create=True))
        self.fault = schedule.fault(url, self.storage)
        self.generator = torch.Generator().manual_seed(seed * 10 + rank)

    def build(self) -> Publisher:
        recovery = Recovery(rank_state={"counter": self.counter}) if self.schedule.has_states else None
        return Publisher(
            self.tracker,
            self.storage,
            top_k=self.schedule.top_k,
            cadence=self.schedule.cadence,
            timeout=_TIMEOUT,
            upkeep=Upkeep(pointer_seconds=None),
            recovery=recovery,
        )

    def run(self, *, is_built: bool = True) -> Run:
        publisher: Any = self.build() if is_built else None
        return Run(self.rank, self.tracker, publisher, self.generator, self.counter)

    @property
    def _checkpoint(self) -> Path:
        return Path(self.url.removeprefix("file://")).parent / f"checkpoint-{self.rank}"

    def call_all(self, run: Run) -> int | None:
        """Make the calls of the schedule until a rank is lost; return the number of the call that was fenced."""
        schedule, fault, is_victim = self.schedule, self.fault, self.rank == self.schedule.victim
        run.bounded = not (is_victim and schedule.kind == "stopped")
        fenced = None
        for number, name in enumerate(schedule.calls):
            run.train()
            if schedule.kind == "killed" and number == schedule.checkpoint:
                torch.save(self.tracker.state_dict(), self._checkpoint)
            was_raised = fault.is_raised
            if is_victim and number >= schedule.begin and not was_raised:
                self._arm(number)
            run.call(name)
            sys.settrace(None)
            if fault.is_raised and not was_raised and schedule.kind == "interrupt" and name != "step":
                run.call(name)  # as after Ctrl-C in a notebook; the other ranks wait for this rank
            if fenced is None and run.publisher.is_fenced:
                fenced = number
            if run.is_lost and schedule.loses_rank:
                break
        self.storage.rules.clear()
        return fenced

    def _arm(self, number: int) -> None:
        """Let the fault happen in the next call, or at an operation of the store from now on."""
        operation = self.schedule.operation
        if not isinstance(self.fault, _Deed) or operation is None:
            sys.settrace(self.fault)
        elif number == self.schedule.begin:
            self.storage.rules.append(calls(nth(operation), before=lambda _: self.fault.happen()))

    def lose(self, run: Run) -> None:
        """Lose the rank now if it was not lost yet. The other ranks publish until they notice it."""
        if self.rank == self.schedule.victim and not self.fault.is_raised:
            self.fault.happen()
        for _ in range(4):
            if run.is_lost:
                return
            run.train()
            run.call("publish")
        run.broken.append(f"no rank is lost: {run.publisher.error!r}")

    def resume_stopped(self, run: Run) -> None:
        """Continue the rank that was stopped, and publish with a new publisher on all ranks."""
        folder, victim = self._checkpoint.parent, self.schedule.victim
        if self.rank == victim:
            (folder / "resumed").touch()
        else:
            (folder / f"lost-{self.rank}").touch()
            eventually(lambda: len(list(folder.glob("lost-*"))) == self.world_size - 1)
            pid = int((folder / "pid").read_text())
            eventually(lambda: os.kill(pid, signal.SIGCONT) or (folder / "resumed").exists())
        run.bounded = True
        dist.barrier()
        self.renew(run)

    def replace_fenced(self, run: Run, fenced: int | None) -> None:
        """Check that all ranks are fenced in the same call, and build a new publisher."""
        run.train()
        run.call("publish")
        if fenced is None and run.publisher.is_fenced:
            fenced = len(self.schedule.calls)
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, (self.fault.is_raised, fenced))
        is_claimed = any(each[0] for each in every)
        if len({each[1] for each in every}) > 1 or is_claimed != (fenced is not None):
            run.broken.append(f"the stream was claimed or not, and the ranks were fenced in the calls {every}")
        self.renew(run)

    def renew(self, run: Run) -> None:
        """Build a new publisher on all ranks, at the same batch."""
        run.publisher.close()
        numbers: list[Any] = [None] * self.world_size
        dist.all_gather_object(numbers, self.tracker.num_batches)
        while self.tracker.num_batches < max(numbers):
            run.train()
        run.publisher = self.build()

    def finish(self, run: Run) -> tuple[bool, list[str]]:
        """Check that all rows are published; return True if a rank was lost, and the broken promises."""
        is_kept = run.recover(self.url, self.world_size)
        if is_kept:
            run.compare(self.url, has_top_k=self.schedule.top_k is not None)
            if self.schedule.has_states:
                run.compare_states(self.url)
        dist.barrier()
        return not is_kept, self.end(run)

    def end(self, run: Run) -> list[str]:
        """Close the publisher, and return the broken promises."""
        run.publisher.close()
        if self.tracker.consumers != ("default",):
            run.broken.append(f"consumers are left: {self.tracker.consumers}")
        self.tracker.detach()
        faulthandler.cancel_dump_traceback_later()
        return run.broken

    def resumed(self) -> Run:
        """Train all batches again, in a new job, which may load the checkpoint of the killed one."""
        run = self.run(is_built=False)
        if self._checkpoint.exists():
            assert self.schedule.checkpoint is not None
            for _ in range(self.schedule.checkpoint + 1):
                run.train()
            self.tracker.load_state_dict(torch.load(self._checkpoint, weights_only=False))
        while self.tracker.num_batches < len(self.schedule.calls) + 4:
            run.train()
        run.publisher = self.build()
        return run


def case(rank: int, world_size: int, url: str, seed: int, kinds: Sequence[str]) -> tuple[bool, list[str]]:
    """Run a seed on one rank; return True if a rank was lost, and the broken promises."""
    job = _Job(rank, world_size, url, seed, kinds)
    schedule = job.schedule
    if rank == schedule.victim:
        Path(url.removeprefix("file://")).parent.joinpath("pid").write_text(str(os.getpid()))
    run = job.run()
    if schedule.is_resumed:
        run.resume(job.build)
    dist.barrier()
    fenced = job.call_all(run)
    if schedule.loses_rank:
        job.lose(run)
    if schedule.kind == "killed":
        return True, job.end(run)
    if schedule.kind == "stopped":
        job.resume_stopped(run)
    if schedule.kind == "fenced":
        job.replace_fenced(run, fenced)
    return job.finish(run)


def resumed(rank: int, world_size: int, url: str, seed: int, kinds: Sequence[str]) -> tuple[bool, list[str]]:
    """Continue a stream whose job was killed; return True if a rank was lost, and the broken promises."""
    job = _Job(rank, world_size, url, seed, kinds)
    return job.finish(job.resumed())


def run_seed(pool: RankPool, seed: int, kinds: Sequence[str] = KINDS) -> tuple[str, bool, list[str]]:
    """Run a seed on all ranks; return its kind, True if a rank was lost, and the broken promises."""
    schedule = Schedule(seed, pool.world_size, kinds)
    with tempfile.TemporaryDirectory() as directory:
        arguments: dict[str, Any] = {"url": f"file://{directory}/s", "seed": seed, "kinds": kinds}
        try:
            dies = schedule.victim if schedule.kind == "killed" else None
            answers = pool.run(f"{_MODULE}:case", dies=dies, timeout_seconds=200, **arguments)
            if dies is not None:
                answers = [each for each in answers if each is not None]
                answers += pool.run(f"{_MODULE}:resumed", timeout_seconds=200, **arguments)
        except RankFailureError as error:
            answers = [(False, [str(error)[-3000:]])]
    problems = [f"seed {seed}, {schedule.kind}: {each}" for _, said in answers for each in said]
    return schedule.kind, any(is_lost for is_lost, _ in answers), problems


def main() -> int:
    """Run the seeds, print those that broke a promise, and return the exit code."""
    first, last, *rest = sys.argv[1:]
    pool, kinds = RankPool(int(rest[0]) if rest else 2), tuple(rest[1:]) or KINDS
    seen = {kind: [0, 0, 0] for kind in kinds}
    for seed in range(int(first), int(last)):
        kind, is_lost, problems = run_seed(pool, seed, kinds)
        seen[kind] = [count + found for count, found in zip(seen[kind], (1, bool(problems), is_lost), strict=True)]
        print(f"{seed} {kind}", file=sys.stderr)
        print(*problems, sep="\n", end="\n" if problems else "", flush=True)
    pool.stop()
    for kind, (count, broken, lost) in seen.items():
        print(f"{kind}: {count} seeds, {broken} broke a promise, {lost} lost a rank")
    return 1 if any(broken for _, broken, _ in seen.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
