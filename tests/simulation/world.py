"""The run of a schedule.

Besides the rules of ``rules.py``, a predictor reaches its target without an operator when faults end, and a failed call
raises an error of the library and changes no version. No damaged copy in a cache is reported while the origin is right.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_tracker import Retention, Storage
from delta_tracker.errors import (
    CorruptPartError,
    DeltaTrackerError,
    FencedError,
    HeldVersionError,
    InvalidArgumentError,
    MalformedError,
    MissingTableError,
    MissingVersionError,
    ModelMismatchError,
    OlderCopyError,
    SinkError,
    StaleCacheError,
    StorageError,
)
from delta_tracker.monitor import Monitor
from delta_tracker.stream.format import part_writer
from delta_tracker.stream.maintenance.retention import retain
from tests.simulation.bucket import Pace
from tests.simulation.disk import FAULTS, Fault, disk
from tests.simulation.history import History, Key, Place, RuleError
from tests.simulation.operators import Refused, follow, ignore
from tests.simulation.previous import begin_with_previous, check_previous, previous
from tests.simulation.reader import Reader, Saved, Settings
from tests.simulation.roles import (
    COMMANDS,
    KEEPING_MIRROR,
    PUBLISHER,
    RECOVERY,
    RESTORE,
    STANDBY,
    UPKEEP,
    Roles,
    opening,
)
from tests.simulation.rules import check, check_partial
from tests.simulation.served import Choice, InterruptionError, ServedRows, ServedTables
from tests.simulation.stores import Entry, Store
from tests.simulation.targets import reached, targets
from tests.simulation.threads import SCHEDULER, Clock
from tests.simulation.trainer import SHAPES, Copy, Trainer, num_batches
from tests.simulation.values import TABLE_CHOICES, Operation, Schedule
from tests.simulation.web import Web

if TYPE_CHECKING:
    from tests.simulation.job import JobTrainer

_MOST_READERS = 5
_ROUNDS, _ROUND_SECONDS = 90, 15.0  # longer than all pauses of a reader together
_NUM_STAYS = 2  # rounds at the end of which a predictor is at its target
_SINGLE_ROUNDS = 3  # in which one version is applied, so that the rules see it
_FOLLOW_ROUNDS, _FOLLOW_SECONDS = 200, 10.0
_FOLLOWED_SECONDS = 8.0  # more than two polls and a look for a pin
_HASHED_BYTES = part_writer.HASHED_BYTES
_POINTER_SECONDS = 2000.0  # in which a pointer names a version, also after failures
_ORPHAN_SECONDS = 90_000.0  # after which an object that nobody names is deleted
_SECONDS = (1.0, 6.0, 12.0, 35.0, 120.0, 700.0)
_CLOCK_SECONDS = 60.0  # greatest difference of two clocks
_AGAIN_SECONDS = 310.0  # after which a predictor doubts a copy again
_CATCH_UP = 10  # versions, after which a predictor takes a merged entry instead of them
_PACES = (0.5, 3.0, 9.0, 40.0)  # seconds of a piece of a response. Four of 9 s take too long, and one of 40 s
_CALL_SECONDS = 3600.0  # in which a call of a predictor ends, also if the store is slow
_OFFSETS = (-29.5, 29.5, -29.5, 29.5, -8.0, 8.0, 0.0)  # of wall clocks: two of them may differ by a minute
CALLS: Counter[str] = Counter()
"""Number of calls of the library in all runs of this process, by kind. Threads that follow poll besides."""
_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that does not hold.

    Args:
        rule: name of the rule.
        text: what was seen.
        number: number of the operation, counted from 0; that of all operations for the end of the run.
    """

    rule: str
    text: str
    number: int


def run(schedule: Schedule, say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Run a schedule; return the rules that do not hold. A predictor is removed after its first one.

    Args:
        schedule: what happens.
        say: called with a line for each operation.
    """
    if schedule.has_previous:
        previous()  # its files stay open
    gc.collect()
    gc.freeze()  # torch keeps some 300 objects of each run, which later runs would search again
    before, live = _num_open(), _live()
    found = _run(schedule, say)
    gc.collect()
    gc.collect()  # what a finalizer has left
    if (num_left := _num_open() - before) > 0:
        found.append(Finding("descriptors", f"{num_left} files are open after the run", len(schedule.operations)))
    if left := _live() - live:
        found.append(Finding("memory", f"objects are left after the run: {dict(left)}", len(schedule.operations)))
    return found


def _live() -> Counter[str]:
    """Return the number of objects of the library, by class."""
    types = (type(each) for each in gc.get_objects())
    return Counter(each.__qualname__ for each in types if str(each.__module__).startswith("delta_tracker."))


def _num_open() -> int:
    """Return the number of open files of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _run(schedule: Schedule, say: Callable[[str], None]) -> list[Finding]:
    with tempfile.TemporaryDirectory(dir=_FOLDER, prefix="world-") as folder:
        world = World(Path(folder), schedule, lambda text: say(text.replace(folder, "")))
        try:
            for operation in schedule.operations:
                world.apply(operation)
            world.finish()
        except RuleError as error:
            world.found(error.rule, error.text)
        except Exception as error:  # noqa: BLE001  an operation expects the errors of the library
            frames = traceback.extract_tb(error.__traceback__)
            world.found("unexpected error", f"{type(error).__name__}: {error} at {frames[-1].name} {frames[-1].lineno}")
        try:
            world.close()
        except RuleError as error:
            world.found(error.rule, error.text)
            world.kill()
        except Exception as error:  # noqa: BLE001  whatever keeps a world from its end
            world.found("end", f"{type(error).__name__}: {error}")
            world.kill()
    return world.findings


class World:
    """One trainer, three stores and some predictors.

    Args:
        folder: directory of the stores.
        schedule: settings.
        say: called with a line for each operation.
    """

    def __init__(self, folder: Path, schedule: Schedule, say: Callable[[str], None]) -> None:
        SCHEDULER.restart(schedule.seed)
        # Parts are too small for digests of their tensors, and so for reads of some: half of the worlds have them.
        part_writer.HASHED_BYTES = 0 if schedule.seed % 2 else _HASHED_BYTES
        self._monitor = Monitor()  # the default one knows about former runs
        self._disk = disk()
        self._disk.folder = folder
        self._schedule, self._say = schedule, say
        self._roles = Roles(schedule.lesser) if schedule.has_roles and schedule.has_buckets else None
        self._stores = [Store(folder / name, is_bucket=schedule.has_buckets, roles=self._roles) for name in "abc"]
        self._primary = self._stores[0]
        for store, number in zip(self._stores[1:], divmod(schedule.mirrored, TABLE_CHOICES)[::-1], strict=True):
            store.choice = Choice(number, is_sharded=True)
        self._cache, self._copy, self._checkpoints = folder / "cache", folder / "backup", folder / "checkpoints"
        self._web = Web() if schedule.has_web else None
        if self._web is not None:
            self._web.serve(self._stores)
        self._history = History()
        self._readers: list[Reader] = []
        self._followers: list[Reader] = []  # that have followed
        self._former: list[Trainer | JobTrainer] = []  # replaced, with a publisher
        self._standby: tuple[Any, Trainer | JobTrainer] | None = None
        self._backup: tuple[Store, Key, int] | None = None  # the store, its newest version, and the number of orders
        self._checkpoint: tuple[Path, Copy, int] | None = None  # what the trainer had then, and its model
        self._num_joined = self._num_done = 0
        self._has_damages = False  # of objects of the stores
        self._has_large_values = False  # a gate may have begun with them
        self._refused: list[Refused] = []  # by the last operation
        self._last = Operation("train", 0, 0)
        self._unforced: tuple[Any, Trainer | JobTrainer] | None = None  # standby whose takeover was refused
        self.findings: list[Finding] = []
        self._group = contextlib.ExitStack()
        if schedule.has_raw_ids and schedule.ranks == 1:
            from tests.simulation.raw_ids import process_group  # noqa: PLC0415  torchrec takes seconds

            self._group.enter_context(process_group())
        self._trainers: list[Trainer | JobTrainer] = []  # all so far
        self.trainer = self._trainer(schedule.seed, 0)

    def close(self) -> None:
        """Close all publishers."""
        self._disk.fault = None
        for reader in self._followers:
            reader.stop()
        for trainer in self._trainers:
            trainer.discard()
            trainer.end()
        self._group.close()
        if SCHEDULER.names():
            raise RuleError("threads", f"threads are left after all was closed: {SCHEDULER.names()}")
        if self._primary.is_healthy and not self._primary.has_lost_parts:
            self._check_garbage()
        self._disk.folder = None

    def _check_garbage(self) -> None:
        """Check that retention leaves no object that nobody needs, once the processes that may need them have ended."""
        self._primary.date()
        SCHEDULER.sleep(_ORPHAN_SECONDS)
        self._primary.touch()
        with self._call("retain") as errors:
            retain(Storage(self._primary.url), Retention(versions=1, grace_seconds=0.0))
        garbage = self._primary.garbage(is_pinned=self._history.pin is not None)
        if garbage and not errors:
            raise RuleError("objects", f"retention leaves {garbage}")

    def kill(self) -> None:
        """End all processes."""
        self._disk.folder = None
        for trainer in self._trainers:
            trainer.kill()

    def found(self, rule: str, text: str) -> None:
        """Keep that a rule does not hold."""
        self.findings.append(Finding(rule, text, self._num_done))
        self._say(f"FOUND {rule}: {text}")

    def apply(self, operation: Operation) -> None:
        """Run one operation. An operation that cannot apply does nothing."""
        fault = self._disk.fault
        if operation.kind != "advised":
            self._refused.clear()
            self._last, self._unforced = operation, None
        try:
            said = getattr(self, f"_{operation.kind}")(operation.who, operation.choice)
        finally:
            self._check_roles()  # first: it explains what else is found
        if fault is not None:
            self._disk.fault = None
            said = f"{said} ({fault.kind}{'' if fault.has_begun else ' not reached'})"
            self._replace_dead()
        self._say(f"{self._num_done} {' '.join(map(str, operation))}: {said or 'nothing'}")
        for reader in [reader for reader in self._readers if reader.is_following]:
            self._check(reader, is_complete=False)
        if SCHEDULER.failures:
            raise RuleError("thread", f"a thread has died: {SCHEDULER.failures!r}")
        for store in self._stores:
            store.date()
            if store.is_healthy and not store.is_whole():
                raise RuleError("partial version", f"{store.path.name} lacks objects of its newest entry")
        self._num_done += 1

    def _check_roles(self) -> None:
        """Check that no actor was refused what its role needs."""
        wrong = None if self._roles is None else self._roles.wrong()
        if wrong is not None:
            raise RuleError("role", f"{' and '.join(wrong.roles)} is refused: {wrong.verb} {wrong.name}")

    def _replace_dead(self) -> None:
        """Start another job for one of which a rank has died, and drop the others."""
        if not self.trainer.is_whole:
            self.trainer.discard()
            self.trainer = self._trainer(self._schedule.seed + self._num_done)
        if self._standby is not None and not self._standby[1].is_whole:
            self._standby = None
        self._former = [each for each in self._former if each.is_whole]

    def _fault(self, who: int, choice: int) -> None:
        """Let the next operation fail in the middle of its first call."""
        kind = "conflict" if self._schedule.has_buckets and choice % 5 == 0 else FAULTS[who % (len(FAULTS) - 1)]
        self._disk.fault = Fault(kind, choice % 9 if choice % 3 else choice % 40)

    @contextlib.contextmanager
    def _call(self, name: str, ranks: int = 1) -> Iterator[list[Exception]]:
        """Context manager that keeps an error of the library or of a table, which the call may raise."""
        CALLS[name] += ranks
        errors: list[Exception] = []
        with self._disk.call():
            try:
                yield errors
            except (DeltaTrackerError, InterruptionError, ChildProcessError) as error:
                errors.append(error)
                if isinstance(error, DeltaTrackerError):
                    self._refused.append(Refused.by(name, error))

    def _dies(self) -> bool:
        """Return True if the process of the last call has died in it. It is discarded with its requests failing."""
        fault = self._disk.fault
        return fault is not None and fault.kind == "death" and fault.has_begun and not fault.has_killed

    # The trainer

    def _trainer(self, seed: int, number: int | None = None) -> Trainer | JobTrainer:
        """Return a new trainer of a model, by default the present one."""
        number = self.trainer.number if number is None else number
        with SCHEDULER.by(Clock()):
            if self._schedule.ranks == 1:
                self._trainers.append(Trainer(self._schedule, seed, self._monitor, number))
            else:
                from tests.simulation.job import JobTrainer  # noqa: PLC0415  torchrec takes seconds

                self._trainers.append(JobTrainer(self._schedule, seed))
        return self._trainers[-1]

    def _step(self, trainer: Trainer | JobTrainer, choice: int) -> None:
        trainer.train(choice)
        CALLS["step"] += self._schedule.ranks * num_batches(choice)

    def _train(self, who: int, choice: int) -> str:
        self._step(self.trainer, choice)
        return "trained"

    def _average(self, who: int, choice: int) -> str | None:
        """Average the replicas, with the states of the optimizer or without."""
        if not self._schedule.has_replicas:
            return None
        self.trainer.average(with_states=choice % 3 > 0)
        CALLS["average"] += self._schedule.ranks
        return "averaged"

    def _spoil(self, who: int, choice: int) -> str:
        value = 1e8 if who % 3 == 0 else float("nan")
        self.trainer.spoil(choice, value, is_dense=choice % 4 == 0)
        self._has_large_values |= who % 3 == 0
        return f"trained with {value}"

    def _heal(self, who: int, choice: int) -> str:
        return "healed" if self.trainer.heal() else "nothing"

    def _read_rows(self, who: int, choice: int) -> str | None:
        """Let a program on the trainer read the rows that have changed since its last read."""
        if not self._schedule.read_mode:
            return None
        wrong = None
        with self._call("read rows", self._schedule.ranks) as errors:
            wrong = self.trainer.read()
        if wrong or errors:
            raise RuleError("changed rows", f"{wrong or errors}")
        return self._schedule.read_mode

    def _publish(self, who: int, choice: int) -> str:
        self._step(self.trainer, choice)
        return str(self._commit("publish"))

    def _burst(self, who: int, choice: int) -> str:
        """Publish several versions, enough for the upkeep of a publisher."""
        for number in range(9 + choice % 9):
            self._step(self.trainer, choice + number)
            answer = self._commit("publish")
        return str(answer)

    def _snapshot(self, who: int, choice: int) -> str:
        return str(self._commit("snapshot"))

    def _commit(self, call: str) -> Exception | str:
        """Publish a version. Return the error, or what was published."""
        trainer, history = self.trainer, self._history
        if self._primary.is_unmounted and not trainer.has_publisher:
            return "unmounted"  # a publisher that starts would create the directory
        copy, former = trainer.copy(), history.copies.get(history.head or ("", -1))
        manifest = None
        with self._call(call, self._schedule.ranks) as errors:
            trainer.open(self._primary.opened(*self._publisher_roles))
            manifest = trainer.publish(call)
        if not self._primary.is_failing:
            history.absorb(self._primary, copy)
        if self._dies() or not trainer.is_whole:
            trainer.discard()
            self.trainer = self._trainer(self._schedule.seed + self._num_done)
            return ChildProcessError("the trainer has died")
        if errors and isinstance(errors[0], FencedError):
            raise RuleError("publisher", f"fenced without another publisher: {errors[0]}")
        if manifest is None:
            return errors[0]
        if (manifest.stream, manifest.version) != history.head:
            raise RuleError("publisher", f"published version {manifest.version}, and the log ends at {history.head}")
        if manifest.kind != "snapshot" and former is not None and former.shapes != copy.shapes:
            raise RuleError("changed model", f"version {manifest.version} of changed tables is a {manifest.kind}")
        self._wait_for_pointer(manifest.version)
        return f"{manifest.kind} {manifest.version}"

    def _wait_for_pointer(self, version: int) -> None:
        """Wait until the publisher's thread has written the pointer."""
        if self._schedule.has_web and not SCHEDULER.wait(lambda: self._primary.pointed() == version, _POINTER_SECONDS):
            raise RuleError("pointer", f"the pointer does not name version {version} after {_POINTER_SECONDS:.0f} s")

    def _restart_trainer(self, who: int, choice: int) -> str:
        mode = choice % 4
        if mode == 3:
            return self._succeed_alive(choice) or "nothing"
        self.trainer.discard()
        if mode == 1 and self._schedule.states and not self._primary.is_lost:
            return self._restore(self._primary, choice)
        if mode == 2:
            self.trainer = self._trainer(self._schedule.seed + choice)
            return "new weights"
        return "closed"

    def _change_model(self, who: int, choice: int) -> str | None:
        """Start a trainer of another model: with new weights, restored, or as a standby that takes over."""
        if self._schedule.ranks > 1 or self._schedule.has_raw_ids:
            return None
        number = (self.trainer.number + 1 + choice // 3 % (len(SHAPES) - 1)) % len(SHAPES)
        can_restore = self._schedule.states and not self._primary.is_lost and not self._primary.is_unmounted
        if can_restore and choice % 3 == 1:
            self._standby = None
            said = f"{self._stand_by(who, choice, number)}, {self._take_over(who, choice // 3)}"
        else:
            self.trainer.discard()
            if can_restore and choice % 3 == 2:
                said = self._restore(self._primary, choice, number)
            else:
                self.trainer = self._trainer(self._schedule.seed + choice, number)
                said = "new weights"
        return f"model {self.trainer.number} instead of {number}: {said}"

    def _save_checkpoint(self, who: int, choice: int) -> str | None:
        """Write a checkpoint of the model, its optimizer and its tracker."""
        trainer = self.trainer
        if isinstance(trainer, Trainer) and not self._schedule.has_raw_ids:
            path = self._checkpoints / str(self._num_done)
            trainer.save(path)
            self._checkpoint = path, trainer.copy(), trainer.number
            return f"checkpoint {path.name}"
        return None

    def _load_checkpoint(self, who: int, choice: int) -> str | None:
        """Start another trainer, which loads the last checkpoint."""
        if self._checkpoint is None:
            return None
        path, copy, number = self._checkpoint
        self.trainer.discard()
        self.trainer = trainer = self._trainer(self._schedule.seed + choice, number)
        assert isinstance(trainer, Trainer), "one rank has written the checkpoint"
        trainer.load(path)
        difference = copy.lost(trainer.copy())
        if difference is not None:
            raise RuleError("checkpoint", f"checkpoint {path.name} is loaded, but {difference}")
        return f"checkpoint {path.name}"

    def _succeed_alive(self, choice: int) -> str | None:
        """Start another trainer while the publisher of this one lives, as if it had been taken for dead."""
        former, head = self.trainer, self._history.head
        if not former.has_publisher:
            return None
        self.trainer = self._trainer(self._schedule.seed + choice)
        answer = self._commit("publish")
        if isinstance(answer, str):
            self._former.append(former)
            return f"new weights, {answer}"
        self.trainer.discard()
        if head == self._history.head:
            self.trainer = former
        else:
            former.discard()
        return f"failed: {answer}"

    def _publish_former(self, who: int, choice: int) -> str | None:
        """Let a trainer publish that another one has replaced."""
        if not self._former:
            return None
        former = self._former[who % len(self._former)]
        self._step(former, choice)
        manifest = None
        with self._call("publish", self._schedule.ranks) as errors:
            manifest = former.publish("publish")
        if manifest is not None:
            raise RuleError("fence", f"a replaced publisher has published {manifest}")
        return f"refused: {errors}"

    def _restore(self, store: Store, choice: int, number: int | None = None) -> str:
        trainer = self._trainer(self._schedule.seed + choice, number)
        before = trainer.copy()
        with self._call("restore", self._schedule.ranks) as errors:
            key = trainer.restore(store.opened(RESTORE))
        if errors:
            return f"not restored: {errors[0]}"
        former, self.trainer = self.trainer, trainer
        former.discard()
        self._check_restored(key, before)
        self._check_continued(former, choice)
        return f"restored version {key[1]}"

    def _check_restored(self, key: tuple[str, int], before: Copy | None = None) -> None:
        """Check what a trainer has of a version. A changed one has the rows of both, and keeps the rest from before."""
        saved, copy = self._history.copies[key], self.trainer.copy()
        if saved.shapes != copy.shapes:
            difference = saved.difference(copy.tensors, None)
            difference = difference or (None if before is None else before.kept(saved, copy))
        else:
            difference = saved.lost(copy)
        if difference is not None:
            raise RuleError("restore", f"version {key[1]} is restored, but {difference}")

    def _check_continued(self, former: Trainer | JobTrainer, choice: int) -> None:
        """Check that a restored trainer continues as the former one does, unless that has trained since.

        NaN hides what was trained.
        """
        copy = former.copy()
        if not copy.is_finite or self.trainer.copy().lost(copy) is not None:
            return
        for trainer in (former, self.trainer):
            for number in range(2):
                self._step(trainer, 3 * (choice + number) + 2)
        difference = former.copy().lost(self.trainer.copy())
        if difference is not None:
            raise RuleError("restore", f"the restored trainer trains something else: {difference}")

    def _stand_by(self, who: int, choice: int, number: int | None = None) -> str | None:
        """Start a standby, or let it apply the new versions."""
        if not self._schedule.states or self._primary.is_unmounted:
            return None
        with self._call("standby sync", self._schedule.ranks) as errors:
            if self._standby is None:
                trainer = self._trainer(self._schedule.seed + choice, number)
                opened = self._primary.opened(*self._publisher_roles, STANDBY)
                self._standby = trainer.stand_by(opened), trainer
            self._standby[0].sync()
        if self._dies():
            self._standby = None
        return f"standby: {errors or 'follows'}"

    def _take_over(self, who: int, choice: int) -> str | None:
        """Let the standby take the place of the trainer, by force or after a silence."""
        if self._standby is None:
            return None
        (standby, trainer), former = self._standby, self.trainer
        self._standby, self._unforced, taken = None, self._standby, None
        with self._call("take over", self._schedule.ranks) as errors:
            # follow() waits for a store, and for a part.
            is_due = self._primary.is_healthy and not self._primary.has_lost_parts
            if choice % 2 or self._disk.fault is not None or not is_due:
                taken = standby.take_over(force=choice % 4 == 1)
            else:
                taken = standby.follow(silence=20.0)
        if not self._primary.is_failing:
            # A model that follows cannot be called. Without a takeover, there are only claims.
            self._history.absorb(self._primary, (former if taken is None else trainer).copy())
        if taken is None or self._dies():
            if former.has_publisher and errors:
                former.discard()  # it may be fenced
            return f"not taken over: {errors}"
        self.trainer = trainer
        self._check_restored((taken.restored.stream, taken.restored.version))
        if former.has_publisher:
            self._former.append(former)
        with self._call("take over", self._schedule.ranks) as errors:
            trainer.open(taken.recovery)
        return f"took over after version {taken.restored.version} {errors or ''}"

    # Maintenance and operators

    def _mirror(self, who: int, choice: int) -> str | None:
        store = self._mirror_of(who)
        if store.is_lost or store.is_former or store.is_unmounted or self._primary.is_lost:
            return None
        keeps = ["--keep-versions", str(2 + choice % 3)] if choice % 5 == 0 else []
        said = self._mirrored(store, *keeps)[1]
        return f"{store.path.name}: {said}"

    def _mirrored(self, store: Store, *words: str) -> tuple[int, str]:
        """Mirror the primary; return the exit code and what was said."""
        tables = [word for pattern in store.choice.patterns or () for word in ("--table", pattern)]
        found = self._command("mirror", "--once", self._primary.url, store.url, *tables, *words)
        self._check_mirror(store)
        return found

    def _check_mirror(self, store: Store) -> None:
        """Check that each entry of a mirror has the bytes that a publisher has written."""
        known = self._history.digests
        wrong = [version for version, digest in store.digests().items() if digest not in known.get(version, {digest})]
        if wrong:
            raise RuleError("mirror", f"{store.path.name} has other bytes than were published as versions {wrong}")
        if store.is_partial and store.is_healthy and (others := store.unchosen()):
            raise RuleError("mirror", f"{store.path.name} of {store.choice.patterns} has {others}")

    def _misuse_mirror(self, who: int, choice: int) -> str | None:
        """Let a command use a mirror of some tables in a way that it must refuse, without a change."""
        store = self._mirror_of(who)
        if not store.is_partial or not store.has_log() or not store.is_healthy or self._primary.is_lost:
            return None
        before, tables = store.names(), [] if choice % 6 == 1 else ["--table", "*a*"]
        is_undisturbed = self._roles is None and self._primary.is_healthy and self._disk.fault is None
        words: tuple[str, ...] = ("compact", store.url)
        if choice % 3:
            words = ("mirror", self._primary.url, store.url, *(tables if choice % 3 == 1 else ["--promote", "--force"]))
        code, text = self._command(*words, *(["--once"] if choice % 3 == 1 else []))
        if code == 0 or store.names() != before:
            raise RuleError("partial mirror", f"{words} is not refused: {text}")
        is_why = "this is a mirror of" in text or ", with which" in text
        if not is_why and is_undisturbed:
            raise RuleError("partial mirror", f"{words} is refused for another reason: {text}")
        return text

    def _mirror_of(self, who: int) -> Store:
        return self._stores[(self._stores.index(self._primary) + 1 + who % 2) % 3]

    def _compact(self, who: int, choice: int) -> str:
        return self._command("compact", self._primary.url, "--fold", ("0.2", "10", "10")[choice % 3])[1]

    def _retain(self, who: int, choice: int) -> str | None:
        if not self._primary.is_healthy:
            return None
        bounds = Retention(versions=1 + choice % 3, grace_seconds=(0.0, 0.0, 10.0, 600.0)[choice // 3 % 4])
        before, entries = self._led_to(), self._primary.entries()
        with self._call("retain") as errors, SCHEDULER.by(self.trainer.clock):
            deleted = retain(self._opened_for_retention(), bounds).versions
        self._check_retained(before)
        self._check_grace(entries, SCHEDULER.now - bounds.grace_seconds)
        return str(errors or f"deleted {deleted} versions")

    def _opened_for_retention(self) -> Storage:
        opened = self._primary.opened(UPKEEP) if self._roles is not None else self._primary.url
        return opened if isinstance(opened, Storage) else Storage(opened)

    def _led_to(self) -> set[int]:
        """Return the newest version and that of a pin, each if entries lead a new predictor there."""
        head, pin = self._history.head, self._history.pin
        wanted = {head[1] if head is not None else -1, pin.version if pin is not None else -1}
        return wanted & reached(self._primary.entries(), None)

    def _check_retained(self, before: set[int]) -> None:
        if not before <= self._led_to():
            raise RuleError("retention", f"no entries lead to versions {before - self._led_to()} after a pass")

    def _check_grace(self, before: list[Entry], latest: float) -> None:
        """Check that all entries of the log are left that follow each snapshot that was committed by a time."""
        snapshots = [each for each in before if each.kind == "snapshot" and each.committed <= latest]
        start = max((each.version for each in snapshots), default=-1)
        left = {each.version for each in self._primary.entries() if not each.is_merged}
        gone = {each.version for each in before if not each.is_merged and each.version > start} - left
        if gone:
            raise RuleError("grace", f"versions {gone} after snapshot {start} were deleted")

    def _pin(self, who: int, choice: int) -> str | None:
        if self._history.head is None:
            return None
        version = max(0, self._history.head[1] - choice % 5)
        return self._order("rollback", self._primary.url, str(version), *(["--replace"] if who else []))

    def _release_pin(self, who: int, choice: int) -> str:
        return self._order("release", self._primary.url)

    def _order(self, *words: str) -> str:
        """Write a pin or a release. If the call fails, it may have been written."""
        pin = self._history.pin
        code, text = self._command(*words, "--json")
        found = [] if self._primary.is_failing else self._history.absorb_orders(self._primary)
        if code == 0 and not found:
            raise RuleError("order", f"{words} has written nothing: {text}")
        if found and found[0].kind == "release" and pin is not None and found[0].version <= pin.bad:
            raise RuleError("order", f"{found[0]} leads to a bad version of {pin}")
        return text

    def _promote(self, who: int, choice: int) -> str | None:
        """Continue at a mirror of the lost primary, or rarely of one that can be read."""
        former, head = self._primary, self._history.head
        mirrors = [store for store in self._stores if not (store is former or store.is_former or store.is_partial)]
        found = [store for store in mirrors if store.is_healthy and any(not each.is_merged for each in store.entries())]
        if not (former.is_lost or choice % 8 == 7) or not found or head is None:
            return None
        return self._promoted(found[who % len(found)], choice)

    def _promote_lagging(self, who: int, choice: int) -> str | None:
        """Promote a mirror by force that lacks the newest versions of the primary, which can still be read or fails."""
        former, head = self._primary, self._history.head
        others = [store for store in self._stores if store is not former and store.is_healthy]
        mirrors = [store for store in others if not (store.is_former or store.is_partial)]
        found = [
            store
            for store in mirrors
            if head is not None and (newest := store.newest()) is not None and newest.version < head[1]
        ]
        if former.is_lost or not found:
            return None
        if choice % 3 == 0:
            former.fail() if choice % 2 else former.unmount()
        return self._promoted(found[who % len(found)], choice)

    def _promoted(self, store: Store, choice: int) -> str | None:
        """Continue at a mirror."""
        former, head, newest = self._primary, self._history.head, store.newest()
        # A log continues after its newest entry, also if a part of it is lost.
        if newest is None or head is None or newest.stream != head[0]:
            return None  # a mirror of a former stream
        self.trainer.discard()
        self._standby = None
        said = self._restore(store, choice) if self._schedule.states and choice % 2 else "continues"
        forced = [] if former.is_lost else ["--force"]
        code, text = self._command("mirror", former.url, store.url, "--promote", *forced, "--json")
        if code != 0 and not store.following(newest.version):
            return text
        fork = store.following(newest.version)[0]
        self._primary, former.is_former = store, True
        self._history.promoted(store, fork)
        return f"{store.path.name} after version {newest.version}, trainer {said}"

    def _rebuild(self, who: int, choice: int) -> str | None:
        """Empty a former primary, and let it be a mirror of the present one."""
        found = [store for store in self._stores if store.is_former and store is not self._primary]
        if not found or self._primary.is_lost or not self._history.has_snapshot:
            return None
        store = found[who % len(found)]
        store.renew()
        return f"{store.path.name}: {self._mirrored(store)[1]}"

    def _back_up(self, who: int, choice: int) -> str | None:
        """Copy the files of the primary."""
        head, store = self._history.head, self._primary
        if head is None or not store.is_healthy or store.has_lost_parts or not store.has_entry(*head):
            return None
        store.copy_to(self._copy)
        self._backup = store, head, len(self._history.ordered)
        return f"{store.path.name} at {head[1]}"

    def _return_backup(self, who: int, choice: int) -> str | None:
        """Replace the files of the primary by the copy, and restart the trainer, whose next version is a snapshot.

        A predictor of a lost version keeps its rows until that snapshot. The mirrors are started again.
        """
        store, history, head = self._primary, self._history, self._history.head
        if self._backup is None or head is None or store.is_lost or history.pin is not None:
            return None
        copied, backup, num_ordered = self._backup
        if copied is not store or backup[0] != head[0] or num_ordered != len(history.ordered):
            return None
        self._backup = self._disk.fault = None
        for trainer in (self.trainer, *self._former):
            trainer.discard()
        self._standby, self._former = None, []
        self._repair_all()
        readers = self._readers_after(history.place(*backup))
        store.return_from(self._copy)
        self._forget()
        SCHEDULER.sleep(2.0)  # a reader reads the pointer once per second
        for reader in readers:
            self._check_kept(reader)
        SCHEDULER.sleep(100.0)  # a lost claim delays predictors by a minute
        lost = history.returned(backup)
        readers = [each for each in readers if each in self._readers]
        befores = [lost[each.predictor.status().stream or "", each.predictor.version or 0] for each in readers]
        said = self._restore(store, choice) if self._schedule.states and choice % 2 else "continues"
        self._commit_last("snapshot")
        if choice % 3 == 0:
            readers = self._restarted_later(readers)
        for mirror in self._stores:
            if mirror is not store and mirror.has_log() and not (mirror.is_former or mirror.is_lost):
                self._mirror_last(mirror)
        self._forget()
        for reader, before in zip(readers, befores, strict=True):
            self._check_continues(reader, history.place(*backup), before)
        return f"{store.path.name} from {head[1]} to {backup[1]}, trainer {said}, {len(readers)} predictors"

    def _forget(self) -> None:
        if self._web is not None:
            self._web.forget()

    def _readers_after(self, place: Place) -> list[Reader]:
        """Return the predictors of lost versions. Those that may not follow each snapshot are removed."""
        for reader in list(self._readers):
            reader.stop()
            self._check(reader, is_complete=False)  # its thread may have applied versions since its last check
        after = [reader for reader in self._readers if reader.floor is not None and reader.floor > place]
        free = [reader for reader in after if self._is_free(reader)]
        self._readers = [reader for reader in self._readers if reader not in after or reader in free]
        return free

    def _is_free(self, reader: Reader) -> bool:
        """Return True if nothing keeps a predictor from a snapshot: it waits for ever while it cannot read a url."""
        stores = reader.settings.stores
        is_kept = reader.settings.is_bounded or reader.own is not None or reader.is_interrupted
        is_kept |= not self._fits_trainer(reader) or not all(map(reader.can_read, stores))
        return not is_kept and self._primary in stores and not any(store.is_lost for store in stores)

    def _fits_trainer(self, reader: Reader) -> bool:
        """Return True if the next version of the trainer fits the model of a predictor."""
        return reader.fits(self.trainer.copy(), self._history.head[0] if self._history.head is not None else "")

    def _check_kept(self, reader: Reader) -> None:
        """Check that a predictor keeps its version while its primary shows an older copy."""
        before = reader.floor
        for _ in range(3):
            with self._call("sync") as errors:
                reader.predictor.sync()
            self._check(reader, is_complete=False)
            if not errors or not isinstance(errors[0], StaleCacheError):
                break
            SCHEDULER.sleep(12.0)  # the fault may be that of a cache
        mirrors = [each for each in reader.settings.stores if each is not self._primary]
        is_kept = reader.floor == before and isinstance(errors[0] if errors else None, OlderCopyError)
        if not mirrors and not is_kept and reader in self._readers:
            raise RuleError("older copy", f"{reader.describe()} from {before} to {reader.floor}: {errors}")

    def _restarted_later(self, readers: list[Reader]) -> list[Reader]:
        """Publish and merge more versions than a predictor reads one by one, and restart predictors."""
        for _ in range(_CATCH_UP):
            self._commit_last("publish")
        self._compact(0, 1)
        found = []
        for reader in readers:
            index = self._readers.index(reader)
            self._restarted(reader, reader.save(), turns=False)
            found.append(self._readers[index])
        return found

    def _check_continues(self, reader: Reader, place: Place, before: Copy) -> None:
        """Check that a predictor of a lost version continues from the next snapshot, with its rows until then."""
        if reader not in self._readers:
            return
        for _ in range(_ROUNDS):
            with self._call("sync") as errors:
                reader.predictor.sync()
            if before.difference(reader.copy(), self._schedule.encoding) is not None:
                break
            SCHEDULER.sleep(_ROUND_SECONDS)
        reader.floor, reader.pinned, reader.held = place, None, None
        self._check(reader, is_complete=not errors)
        version = reader.predictor.version
        if reader in self._readers and version != (head := self._history.head or ("", -1))[1]:
            self._readers.remove(reader)
            self.found("older copy", f"{reader.describe()} at {version} instead of {head}: {errors}")

    def _command(self, *words: str) -> tuple[int, str]:
        """Run the command line; return its exit code, and the last line of its output or errors."""
        output, errors = io.StringIO(), io.StringIO()
        with (
            self._call(words[0]),
            self._opening(words),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            code = _program()(words)
        lines = (output if code == 0 else errors).getvalue().splitlines()
        said = lines[-1] if lines else "done"
        if code and said.startswith("Error: "):  # of the parser of arguments; errors of the library begin otherwise
            raise RuleError("usage", f"{words}: {said}")
        if code:
            self._refused.append(Refused.printed(words[0], said))
        return code, said

    def _opening(self, words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which a command has only the permissions of its role at each url."""
        urls = {store.url: store for store in self._stores}
        found = [urls[word] for word in words if word in urls]
        if self._roles is None:
            return contextlib.nullcontext()
        names = KEEPING_MIRROR if "--keep-versions" in words else COMMANDS[words[0]]
        return opening({store.url: store.limited(Pace(), name) for store, name in zip(found, names, strict=True)})

    @property
    def _publisher_roles(self) -> list[str]:
        return [UPKEEP if self._schedule.has_upkeep else PUBLISHER, *([RECOVERY] if self._schedule.states else [])]

    def _grant(self, who: int, choice: int) -> str | None:
        """Give each actor its whole role."""
        return "granted" if self._roles is not None and self._roles.grant() else None

    def _advised(self, who: int, choice: int) -> str | None:
        """Follow the advice of the last error of the operation before. Meanwhile, no further faults begin."""
        self._disk.fault = None
        if self._web is not None:  # no reader has a version while each copy of the pointer is damaged
            self._web.calm()
        refused, self._refused = self._refused, []
        if not refused:
            return None
        if self._primary.is_lost or (refused[-1].call in ("sync", "roll back") and not self._can_read(self._last.who)):
            ignore(refused[-1])
            return None
        return follow(refused[-1], self._last, self._done)

    def _can_read(self, who: int) -> bool:
        """Return True if a predictor reads the trainer's store and no lost or missing one, and no gate holds all."""
        reader = self._reader(who)
        if reader is None or (reader.settings.gate is not None and not self.trainer.copy().is_healthy):
            return False
        stores = reader.settings.stores
        is_gone = any(each.is_lost or each.is_former or each.is_unmounted for each in stores)
        is_gone |= not all(map(reader.can_read, stores))
        return self._primary in stores and not is_gone and self._fits_trainer(reader)

    def _done(self, kind: str, who: int, choice: int) -> list[Refused]:
        """Run an operation, and return the calls that were refused."""
        self._refused = []
        said = getattr(self, f"_{kind}")(who, choice)
        self._say(f"  {kind} {who} {choice}: {said or 'nothing'}")
        return self._refused

    def _claim(self, who: int, choice: int) -> str:
        """Let a trainer that another one has replaced build a new publisher."""
        former = self._former.pop(who % len(self._former))
        former.discard()
        if self.trainer.has_publisher:
            self._former.append(self.trainer)
        self.trainer = former
        return str(self._commit("publish"))

    def _force(self, who: int, choice: int) -> str | None:
        """Let the standby take over by force."""
        self._standby = self._unforced
        return self._take_over(who, 1)

    def _empty(self, who: int, choice: int) -> str:
        """Delete everything in a mirror."""
        store = self._mirror_of(who)
        store.repair()
        store.clear()
        return store.path.name

    def _accept_held(self, who: int, choice: int) -> str | None:
        """Accept the version that the gate of this predictor holds."""
        gated = [each for each in self._readers if each.settings.gate is not None]
        reader = self._reader(who)
        return self._accept(gated.index(reader), choice) if reader in gated else None

    def _begin_previous(self, who: int, choice: int) -> str | None:
        """Let a trainer of the previous release publish the first versions. The next one continues, or is restored."""
        schedule, store = self._schedule, self._primary
        release = previous() if schedule.has_previous and not schedule.has_raw_ids and schedule.ranks == 1 else None
        is_begun = self._history.head is not None or store.has_log()
        if release is None or schedule.encoding is not None or is_begun or not store.is_healthy:
            return None
        seeds = [choice + number for number in range(1 + choice % 4)]
        with SCHEDULER.alone():
            said = begin_with_previous(
                release, store, self._history, self.trainer.number, seeds, is_recoverable=schedule.states
            )
        return f"{said}, {self._restore(store, choice)}" if schedule.states and choice // 4 % 4 else said

    def _read_previous(self, who: int, choice: int) -> str | None:
        """Let a predictor of the previous release read a store."""
        store = self._stores[who % len(self._stores)]
        release = previous() if self._schedule.has_previous and not self._schedule.has_raw_ids else None
        if release is None or store.is_lost or store.is_partial or not store.is_healthy or store.has_lost_parts:
            return None
        with SCHEDULER.alone():
            return check_previous(release, store, self._history, self._schedule.encoding)

    # Stores

    def _damage(self, who: int, choice: int) -> None:
        self._has_damages = True
        self._stores[who % 3].damage(choice)

    def _damage_entry(self, who: int, choice: int) -> str | None:
        """Damage an entry that a mirror or a predictor may read next."""
        self._has_damages = True
        return self._primary.damage_entry(choice)

    def _forge(self, who: int, choice: int) -> str | None:
        """Replace a pointer, or write a pin of a version that is not there and delete it again."""
        self._has_damages = True
        store = self._stores[who % 2]
        if self._web is not None and choice % 3:
            return f"pointer of {store.path.name}" if store.forge(choice) else None
        if self._history.head is None or not store.is_healthy or not store.has_log():
            return None
        SCHEDULER.sleep(7.0)
        readers = [reader for reader in self._readers if reader.settings.stores == (store,)]
        with store.forged_pin(*self._history.head, "pin" if choice % 2 else "release"):
            said = [self._synced(reader, limit=1) for reader in readers]
        return f"pin of {store.path.name}: {said}"

    def _spoil_copy(self, who: int, choice: int) -> str | None:
        """Damage a copy in the cache while the origin is right."""
        return None if self._web is None else self._web.spoil(choice, is_next=who % 2 == 0)

    def _slow(self, who: int, choice: int) -> str:
        """Let each read of a predictor take its time until a repair."""
        store = self._stores[who % 3]
        store.pace.set(_PACES[choice % len(_PACES)])
        return f"{store.path.name}: {store.pace.seconds:g} s"

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """Context manager for a call of a predictor that must end, even if the stores are slow."""
        for store in self._stores:
            store.pace.deadline = SCHEDULER.now + _CALL_SECONDS
        try:
            yield
        finally:
            for store in self._stores:
                store.pace.deadline = math.inf

    def _fail(self, who: int, choice: int) -> None:
        self._stores[who % 3].fail()

    def _unmount(self, who: int, choice: int) -> None:
        self._stores[who % 3].unmount()

    def _repair(self, who: int, choice: int) -> None:
        for store in self._stores if choice % 2 else [self._stores[who % 3]]:
            store.repair()

    def _lose(self, who: int, choice: int) -> str | None:
        if all(store is self._primary or store.is_lost for store in self._stores):
            return None
        self._primary.lose()
        for former in self._former:  # nobody can repair its store
            former.discard()
        self._former = []
        return self._primary.path.name

    def _advance(self, who: int, choice: int) -> str:
        SCHEDULER.sleep(_SECONDS[choice % len(_SECONDS)])
        return f"{SCHEDULER.now:.0f}"

    def _set_clock(self, who: int, choice: int) -> str:
        """Set the wall clock of the trainer's host, or of a predictor's."""
        hosts: list[Trainer | JobTrainer | Reader] = [self.trainer, *self._readers]
        host = hosts[who % len(hosts)]
        self._history.clock_seconds = _CLOCK_SECONDS
        host.clock.offset = _OFFSETS[choice % len(_OFFSETS)]
        return f"{host.name if isinstance(host, Reader) else 'trainer'} {host.clock.offset:+g} s"

    # Predictors

    def _join(self, who: int, choice: int) -> str | None:
        if len(self._readers) == _MOST_READERS:
            return None
        stores, number = self._stores, self.trainer.number
        settings = Settings.of(choice, stores, self._cache, self._web, self._schedule, self._monitor, number)
        with self._call("predictor") as errors:
            self._readers.append(Reader.new(f"r{self._num_joined}", settings))
            self._num_joined += 1
        return str(errors or self._readers[-1].describe())

    def _restart(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None:
            return None
        if choice % 3 == 0:
            reader.kill()
        reader.stop()
        return self._restarted(reader, reader.save() if choice % 3 else None, turns=choice % 2 == 0)

    def _restarted(self, reader: Reader, saved: Saved | None, *, turns: bool) -> str:
        index = self._readers.index(reader)
        with self._call("predictor") as errors:
            self._readers[index] = reader.restarted(saved, turns=turns)
        if self._readers[index].is_killed:
            del self._readers[index]
            return f"{reader.name} does not start: {errors}"
        return f"{self._readers[index].describe()} {'without' if saved is None else 'with'} its state {errors or ''}"

    def _choose(self, who: int, choice: int) -> str | None:
        """Restart a predictor with another choice of tables, which its saved position or its row store refuses."""
        reader = self._reader(who)
        if reader is None or self._schedule.has_raw_ids or reader.settings.has_changed_model:
            return None
        reader.stop()
        saved = reader.save()
        number = (reader.settings.choice.number + 1 + choice % (TABLE_CHOICES - 1)) % TABLE_CHOICES
        stored = reader.served if isinstance(reader.served, ServedRows) else None
        after = None
        with self._call("choose") as errors:
            after = reader.choosing(number, saved)
            if stored is None:
                after.predictor.load_state_dict(saved.state)
        is_refused = bool(errors) and isinstance(errors[0], InvalidArgumentError)
        if not is_refused and (stored is None or stored.stated is not None):
            raise RuleError("choice", f"{reader.describe()} continues with choice {number}: {errors}")
        if after is None:  # a row store keeps its choice
            return f"{errors}; {self._restarted(reader, saved, turns=False)}"
        self._readers[self._readers.index(reader)] = after
        return f"{after.describe()} {errors}"

    def _change_served(self, who: int, choice: int) -> str | None:
        """Restart a predictor with the model of the trainer or another one, and a row store with another prefix."""
        reader = self._reader(who)
        if reader is None or self._schedule.ranks > 1 or self._schedule.has_raw_ids:
            return None
        number = self.trainer.number if choice % 4 < 3 else choice // 4 % len(SHAPES)
        return self._served(reader, number, has_position=choice % 2 == 0)

    def _served(self, reader: Reader, number: int, *, has_position: bool) -> str:
        reader.stop()
        saved, index = reader.save() if has_position else None, self._readers.index(reader)
        with self._call("predictor") as errors:
            self._readers[index] = reader.changed(number, saved)
        return f"{self._readers[index].describe()} {'with' if has_position else 'without'} its state {errors or ''}"

    def _follow(self, who: int, choice: int) -> str | None:
        """Let a predictor follow in a thread of its own, while other operations run."""
        reader = self._reader(who)
        if reader is None or reader.is_following:
            return None
        with self._call("follow") as errors:
            reader.follow()
            self._followers.append(reader)
        return f"{reader.name} {errors or ''}"

    def _sync(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        return None if reader is None else self._synced(reader, (None, None, 1, 2)[choice % 4])

    def _synced(self, reader: Reader, limit: int | None = None) -> str:
        if reader.is_following:
            SCHEDULER.sleep(_FOLLOWED_SECONDS)
            self._check(reader, is_complete=False)
            return f"{reader.name} followed to {reader.floor}"
        saved = reader.save() if self._disk.fault is not None else None
        with self._call("sync") as errors, SCHEDULER.by(reader.clock), self._bounded():
            if reader.floor is None and limit is None and saved is None:
                reader.predictor.sync(1)  # so that the rules see with which version it begins
                self._check(reader, is_complete=False)
            if reader in self._readers:
                reader.predictor.sync(limit)
        if self._dies():
            reader.pinned = None  # it may have left the pin for a newer one, which it has not stored yet
            reader.kill()
            return f"died; {self._restarted(reader, saved, turns=False)}"
        self._check_copies(reader, errors)
        is_interrupted = any(isinstance(each, SinkError | InterruptionError) for each in errors)
        reader.is_interrupted = is_interrupted or (reader.is_interrupted and bool(errors))
        held = next((each.version for each in errors if isinstance(each, HeldVersionError)), None)
        if reader in self._readers:
            self._check(reader, is_complete=limit is None and not errors)
            if held is not None and reader.floor is not None:
                reader.held = reader.floor[0], held
        return f"{reader.name} at {reader.floor} {errors or ''}"

    def _check_copies(self, reader: Reader, errors: list[Exception]) -> None:
        """Check that a predictor names left out parts, and reads past a damaged copy in a cache once in 5 minutes."""
        is_left_out = not all(map(reader.can_read, reader.settings.stores)) and reader.settings.web is None
        if is_left_out and not self._has_damages and any(isinstance(each, CorruptPartError) for each in errors):
            raise RuleError("copies", f"{reader.describe()} reports a left out part as a damaged one: {errors[0]}")
        slow_at = max(store.pace.slow_at for store in reader.settings.stores)  # calls of its thread may have failed
        is_due = max(reader.failed_at, slow_at) + _AGAIN_SECONDS < SCHEDULER.now
        if errors:
            reader.failed_at = SCHEDULER.now
        # Otherwise, retention may have deleted the parts of the next version, and no newer snapshot fits the model.
        is_due = is_due and not self._has_damages and self._fits_trainer(reader)
        if is_due and any(isinstance(each, CorruptPartError | MalformedError) for each in errors):
            raise RuleError("copies", f"{reader.describe()} reports a damaged copy in a cache: {errors[0]}")

    def _interrupt(self, who: int, choice: int) -> str | None:
        """Let a row store or a table fail in the middle of a version, and perhaps restart the predictor."""
        reader = self._reader(who)
        if reader is None or not isinstance(reader.served, ServedRows | ServedTables):
            return None
        reader.stop()
        reader.served.fail_after(choice % 60)
        said = self._synced(reader)
        reader.served.fail_after(None)
        if reader not in self._readers:
            return said
        return f"{said}; {self._restarted(reader, reader.save(), turns=False)}" if choice % 2 else said

    def _roll_back(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None or reader.floor is None:
            return None
        before, version = reader.predictor.version, max(0, reader.floor[1] + 1 - choice % 5)
        # Otherwise, the call first asks a row store which version it has, or another thread changes the version.
        is_known = not reader.is_interrupted and not reader.is_following
        with self._call("roll back") as errors, SCHEDULER.by(reader.clock), self._bounded():
            reader.predictor.rollback(version)
        if self._dies():
            reader.kill()
            return f"died; {self._restarted(reader, None, turns=False)}"  # no position was saved before the call
        if not errors:
            reader.own, reader.own_time, reader.known = (
                (reader.floor[0], version),
                SCHEDULER.now,
                len(self._history.orders),
            )
            reader.num_known = len(self._history.ordered)
            reader.floor, reader.may_serve_held, reader.pinned, reader.held = reader.own, True, None, None
            reader.knew_all = self._history.is_shown_by(reader.settings.stores)
        elif not isinstance(errors[0], StorageError) and reader.predictor.version != before and is_known:
            raise RuleError("failed call", f"rollback to {version} raised {errors[0]} and changed the version")
        elif reader.predictor.version != before or reader.predictor.status().pinned == version:
            return f"interrupted; {self._restarted(reader, None, turns=False)}"
        self._check(reader, is_complete=False)
        return f"{reader.name} to {version} {errors or ''}"

    def _release(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None:
            return None
        if reader.is_following:
            self._check(reader, is_complete=False)
        reader.released()
        return reader.name

    def _accept(self, who: int, choice: int) -> str | None:
        """Accept the version that a gate holds."""
        readers = [reader for reader in self._readers if reader.settings.gate is not None]
        if not readers:
            return None
        reader = readers[who % len(readers)]
        reader.stop()
        said = self._synced(reader)
        held = self._held(reader)
        if held is None or reader not in self._readers:
            return said
        reader.predictor.accept(held)
        reader.may_serve_held, reader.held = True, None
        if self._held(reader) == held:
            raise RuleError("gate", f"{reader.describe()} holds version {held}, which was accepted")
        self._check(reader, is_complete=False)
        return f"{reader.name} accepts {held}"

    def _held(self, reader: Reader) -> int | None:
        """Apply one version; return the one that the gate of a predictor holds instead."""
        self._disk.fault = None
        with self._call("sync") as errors, SCHEDULER.by(reader.clock):
            reader.predictor.sync(1)
        return next((each.version for each in errors if isinstance(each, HeldVersionError)), None)

    def _reader(self, who: int) -> Reader | None:
        return self._readers[who % len(self._readers)] if self._readers else None

    def _check(self, reader: Reader, *, is_complete: bool) -> None:
        """Check a predictor after a call, and remove it if a rule does not hold."""
        with SCHEDULER.alone():
            if reader.is_following:
                reader.predictor.status()  # waits until its thread is between two versions
            self._check_alone(reader, is_complete=is_complete)

    def _check_alone(self, reader: Reader, *, is_complete: bool) -> None:
        is_partial = reader.look() or reader.is_interrupted or reader.is_late
        try:
            if is_partial and not self._has_rows_of_one_version(reader):
                check_partial(reader, self._history, self._schedule.encoding)
                return
            check(reader, self._history, self._schedule.encoding, is_complete=is_complete)
        except RuleError as error:
            self._readers.remove(reader)
            self.found(error.rule, error.text)

    def _has_rows_of_one_version(self, reader: Reader) -> bool:
        """Return True if a predictor has all rows of the version that it states: its interrupted call had ended."""
        version, stream = reader.predictor.version, reader.predictor.status().stream
        if version is None or stream is None:
            return False
        copy = self._history.copies.get((stream, version))
        if copy is None or not reader.fits(copy, stream):
            return False
        return copy.difference(reader.copy(), self._schedule.encoding) is None

    # The end

    def _settle(self, who: int, choice: int) -> str:
        """End all faults, and wait until each predictor reaches its target."""
        self._disk.fault = None
        self._repair_all()
        self._wait_for_all(None)
        return "all at their targets"

    def finish(self) -> None:
        """End all faults, publish once more, and wait until each predictor reaches its target."""
        self._disk.fault = None
        self._repair_all()
        clean = self._publish_last()
        self._wait_for_all(clean)
        if not self._primary.is_lost and self._release_all():
            self._wait_for_all(clean)
        if self._schedule.has_changes and self._change_all():
            self._wait_for_all(clean)
        for number in range(len(self._stores) if self._schedule.has_previous else 0):
            self._say(f"previous release: {self._read_previous(number, 0)}")
        self._check_roles()

    def _repair_all(self) -> None:
        for store in self._stores:
            store.repair()
        SCHEDULER.sleep(8.0 if self._web is None else 700.0)  # the pointer follows deletions after ten minutes
        self._forget()

    def _wait_for_all(self, clean: Key | None) -> None:
        """Let the mirrors copy everything, and wait for each predictor.

        One with a gate must reach the end only if one of its stores has ``clean``, the last snapshot without NaN: a
        store of a former stream may end with a version that the gate holds for ever.
        """
        mirrors = [each for each in self._stores if each is not self._primary and each.has_log() and not each.is_former]
        for store in mirrors if self._history.has_snapshot and not self._primary.is_lost else []:
            if not store.is_lost:
                self._mirror_last(store)
        for store in self._stores:
            store.date()
        for reader in list(self._readers):
            gate = reader.settings.gate
            stores = filter(reader.can_read, reader.settings.stores)
            has_clean = clean is not None and any(store.has_entry(*clean) for store in stores)
            has_clean = has_clean and clean is not None and reader.fits(self._history.copies[clean], clean[0])
            if gate is None or (has_clean and (gate.max_drift is None or not self._has_large_values)):
                self._wait(reader)

    def _release_all(self) -> bool:
        """End all pins and rollbacks, after a snapshot. Return False if there are none."""
        is_pinned = self._history.pin is not None
        rolled_back = [reader for reader in self._readers if reader.own is not None]
        if not is_pinned and not rolled_back:
            return False
        self._commit_last("snapshot")
        if is_pinned:
            text = self._order("release", self._primary.url)
            self._say(f"last release: {text}")
            if self._history.pin is not None:
                raise RuleError("release", text)
        self._publish_for_bounds()
        for reader in rolled_back:
            reader.released()
        return True

    def _change_all(self) -> bool:
        """Restart each predictor that the newest version does not fit. Return False if there are none."""
        head = self._history.head
        copy = None if head is None else self._history.copies.get(head)
        if head is None or copy is None:
            return False
        found = [reader for reader in self._readers if not reader.fits(copy, head[0])]
        for reader in found:
            reader.stop()
            with self._call("sync") as errors:
                reader.predictor.sync()
            can_say = reader.settings.stores == (self._primary,) and not reader.settings.is_bounded
            can_say = can_say and not self._primary.is_lost
            # If retention deleted the next version, its error is raised instead of that of the newest snapshot.
            named = ModelMismatchError | MissingTableError | MissingVersionError
            is_named = any(isinstance(each, named) for each in errors)
            if can_say and reader.own is None and not is_named:
                raise RuleError("changed model", f"{reader.describe()} does not name what does not fit: {errors}")
            number = self.trainer.number
            self._say(f"last change: {self._served(reader, number, has_position=reader.name in ('r0', 'r2'))}")
        return bool(found)

    def _publish_last(self) -> Key | None:
        """Publish a last version without NaN, and return it; None if no trainer can."""
        if self._primary.is_lost:
            return None
        if not self.trainer.copy().is_healthy:
            self.trainer.discard()
            self.trainer = self._trainer(self._schedule.seed + 1)
        has_lost_parts = any(store.has_lost_parts for store in self._stores)
        self._commit_last("snapshot" if self._has_bounds or has_lost_parts else "publish")
        last = self._history.head
        self._publish_for_bounds()
        return last

    @property
    def _has_bounds(self) -> bool:
        return any(each.settings.is_bounded for each in self._readers)

    def _publish_for_bounds(self) -> None:
        """Let each canary reach the last snapshot."""
        for _ in range(2 if self._has_bounds else 0):
            # More than the seconds of a canary, and until no earlier version is newer by the clock of its publisher.
            SCHEDULER.sleep(11.0 + self._history.clock_seconds)
            self._commit_last("publish")

    def _commit_last(self, call: str) -> None:
        """Publish a version; a call that fails is repeated."""
        for _ in range(3):
            self._step(self.trainer, 1)
            answer = self._commit(call)
            self._say(f"last version: {answer}")
            if isinstance(answer, str):
                return
        raise RuleError("publisher", f"the last version was not published: {answer}")

    def _mirror_last(self, store: Store) -> None:
        """Mirror the primary until nothing is left; a mirror that has diverged is started again, as its error says."""
        for is_first in (True, False):
            code, text = self._mirrored(store)
            self._say(f"last mirror to {store.path.name}: {code} {text}")
            if code == 0:
                break
            if self._primary.has_lost_parts and not is_first:
                return  # until the next snapshot
            if not is_first or ("empty destination" not in text and not self._primary.has_lost_parts):
                raise RuleError("mirror", text)
            store.clear()
        orders = self._history.orders
        if orders and store.has_entry(orders[-1].stream, orders[-1].version) and len(store.orders()) < len(orders):
            raise RuleError("mirror", f"{store.path.name} has the version of {orders[-1]}, but not the order")

    def _wait(self, reader: Reader) -> None:
        goals = targets(reader, self._history)
        said = ""
        if goals is not None and reader.settings.kind == "follows" and not reader.is_following:
            said = self._followed(reader, goals)
        num_there = 0
        for number in range(_ROUNDS):
            if goals is not None and reader.floor is not None and reader.floor[0] > max(goals)[0]:
                goals = targets(reader, self._history)  # its thread had read a version before the store was lost
            num_there += goals is not None and self._whole(reader) in goals and self._has_returned(reader)
            if goals is None or num_there == _NUM_STAYS or reader not in self._readers:
                break
            said = self._synced(reader, 1 if number < _SINGLE_ROUNDS else None)
            SCHEDULER.sleep(_ROUND_SECONDS)
        self._say(f"{reader.describe()} ends at {reader.floor} of {goals}: {said}")
        if goals is not None and self._whole(reader) not in goals and reader in self._readers:
            rule = self._cause(reader, max(goals))
            self._readers.remove(reader)
            self.found(rule, f"{reader.describe()} at {reader.floor} instead of {sorted(goals)}: {said}")
        elif goals is not None and reader in self._readers and not self._has_returned(reader):
            self.found("first url", f"{reader.describe()} at {reader.floor} reads {reader.predictor}")

    def _has_returned(self, reader: Reader) -> bool:
        """Return True unless another url is read although the first one has the version and all later ones."""
        first, head, floor = reader.settings.stores[0], self._history.head, reader.floor
        if head is None or floor is None or not self._fits_trainer(reader) or not reader.can_read(first):
            return True
        has_both = first.has_entry(*head) and first.has_entry(self._history.streams[floor[0]], floor[1])
        has_all = not first.is_lost and not first.has_lost_parts and has_both
        url = reader.url_of(first)
        return not has_all or repr(reader.predictor).startswith(f"Predictor({url!r}")

    def _followed(self, reader: Reader, goals: set[tuple[int, int]]) -> str:
        """Let the thread of ``follow()`` reach the target, while the clock advances."""
        history, predictor = self._history, reader.predictor
        with self._call("follow") as errors:
            reader.follow()
            self._followers.append(reader)
            for _ in range(_FOLLOW_ROUNDS):
                stream, version = predictor.status().stream, predictor.version
                if stream and version is not None and history.without_claims(history.place(stream, version)) in goals:
                    break
                SCHEDULER.sleep(_FOLLOW_SECONDS)
        reader.stop()
        self._check(reader, is_complete=False)
        return f"followed to {reader.floor} {errors or ''}"

    def _cause(self, reader: Reader, target: tuple[int, int]) -> str:
        """Return the rule that a predictor breaks which does not reach its target."""
        if reader.settings.web is None:
            return "behind"
        if reader.floor is not None and reader.floor[0] < target[0]:
            return "behind a promotion over http"
        stream = self._history.streams[target[0]]
        entries = [each for store in reader.settings.stores for each in store.entries()]
        in_log = [each for each in entries if each.stream == stream and not each.is_merged]
        start = None if reader.floor is None else reader.floor[1]
        is_merged = target[1] not in reached(in_log, start)
        return "behind an order over http" if is_merged and self._history.ordered else "behind"

    def _whole(self, reader: Reader) -> tuple[int, int] | None:
        """Return the stream and version of a predictor, without the claims that change no row."""
        return None if reader.floor is None else self._history.without_claims(reader.floor)


@cache
def _program() -> Callable[[tuple[str, ...]], int]:
    """Return the function of the command line program."""
    (found,) = entry_points(group="console_scripts", name="delta-tracker")
    program: Any = found.load()
    return program  # type: ignore[no-any-return]
