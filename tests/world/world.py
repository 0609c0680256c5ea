"""The run of a schedule, and the rules that hold in it.

- Each served row is the trainer's at the version that the predictor states.
- A predictor never goes back, in (stream, version), without an order: a pin, its own rollback or a promotion.
- When faults end, it reaches its target without an operator.
- A failed call raises an error of the library, and changes no version.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_tracker import Retention, Storage
from delta_tracker.cli.main import main
from delta_tracker.errors import DeltaTrackerError, FencedError, StorageError
from delta_tracker.stream.maintenance.retention import retain
from tests.world.clock import CLOCK, wait_for_threads
from tests.world.reader import Reader, Settings
from tests.world.stores import Entry, Store
from tests.world.trainer import Copy, Trainer
from tests.world.values import Operation, Schedule
from tests.world.web import web

_MOST_READERS = 5
_ROUNDS, _ROUND_SECONDS = 90, 15.0  # longer than all pauses of a reader together
_SECONDS = (1.0, 6.0, 12.0, 35.0, 120.0, 700.0)
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


class RuleError(Exception):
    """Raised when a rule does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule, self.text = rule, text


def run(schedule: Schedule, say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Run a schedule; return the rules that do not hold. A predictor is removed after its first one.

    Args:
        schedule: what happens.
        say: called with a line for each operation.
    """
    with tempfile.TemporaryDirectory(dir=_FOLDER, prefix="world-") as folder:
        world = World(Path(folder), schedule, say)
        try:
            for operation in schedule.operations:
                world.apply(operation)
            world.finish()
        except RuleError as error:
            world.found(error.rule, error.text)
        except Exception as error:  # noqa: BLE001  an operation expects the errors of the library
            frames = traceback.extract_tb(error.__traceback__)
            world.found("unexpected error", f"{type(error).__name__}: {error} at {frames[-1].name} {frames[-1].lineno}")
        finally:
            world.close()
    return world.findings


class World:
    """One trainer, three stores and some predictors.

    Args:
        folder: directory of the stores.
        schedule: settings.
        say: called with a line for each operation.
    """

    def __init__(self, folder: Path, schedule: Schedule, say: Callable[[str], None]) -> None:
        CLOCK.restart(schedule.seed)
        self._schedule, self._say = schedule, say
        self._stores = [Store(folder / name) for name in "abc"]
        self._primary = self._stores[0]
        self._cache = folder / "cache"
        self._web = web() if schedule.has_web else None
        if self._web is not None:
            self._web.serve(self._stores)
        self._copies: dict[tuple[str, int], Copy] = {}
        self._claims: set[tuple[str, int]] = set()
        self._streams: list[str] = []  # each was forked from the one before it
        self._head: tuple[str, int] | None = None  # newest entry of the trainer's stream
        self._orders: list[dict[str, Any]] = []
        self._readers: list[Reader] = []
        self._former: list[Trainer] = []  # replaced, with a publisher
        self._num_joined = self._num_done = 0
        self.findings: list[Finding] = []
        self.trainer = Trainer(schedule, schedule.seed)

    def close(self) -> None:
        """Close all publishers."""
        for trainer in (*self._former, self.trainer):
            trainer.discard()

    def found(self, rule: str, text: str) -> None:
        """Keep that a rule does not hold."""
        self.findings.append(Finding(rule, text, self._num_done))
        self._say(f"FOUND {rule}: {text}")

    def apply(self, operation: Operation) -> None:
        """Run one operation. An operation that cannot apply does nothing."""
        said = getattr(self, f"_{operation.kind}")(operation.who, operation.choice)
        for store in self._stores:
            store.date()
        self._say(f"{self._num_done} {' '.join(map(str, operation))}: {said or 'nothing'}")
        self._num_done += 1

    # The trainer

    def _train(self, who: int, choice: int) -> str:
        self.trainer.train(choice)
        return "trained"

    def _spoil(self, who: int, choice: int) -> str:
        self.trainer.train(choice, scale=float("nan"))
        return "trained with NaN"

    def _publish(self, who: int, choice: int) -> str:
        self.trainer.train(choice)
        return str(self._commit("publish"))

    def _snapshot(self, who: int, choice: int) -> str:
        return str(self._commit("snapshot"))

    def _commit(self, call: str) -> Exception | str:
        """Publish a version and keep its copy. Return the error, or what was published."""
        trainer = self.trainer
        if self._primary.is_unmounted and trainer.publisher is None:
            return "unmounted"  # a publisher that starts would create the directory
        try:
            if trainer.publisher is None:
                self._claimed(trainer.open(self._primary.url).version)
            manifest = getattr(trainer.publisher, call)()
        except FencedError as error:
            raise RuleError("publisher", f"fenced without another publisher: {error}") from error
        except DeltaTrackerError as error:
            return error
        key = manifest.stream, manifest.version
        if self._head is None:
            self._streams.append(manifest.stream)
        elif key != (self._head[0], self._head[1] + 1):
            raise RuleError("publisher", f"published {key} after {self._head}")
        self._head, self._copies[key] = key, Copy(trainer.model.copy())
        self._wait_for_pointer(key[1])
        return f"{manifest.kind} {manifest.version}"

    def _claimed(self, version: int) -> None:
        """Record a claim, which changes no row."""
        if self._head is None:
            return
        stream, before = self._head
        if version != before + 1:
            raise RuleError("publisher", f"claimed version {version} after {before}")
        self._copies[stream, version] = self._copies[self._head]
        self._claims.add((stream, version))
        self._head = stream, version

    def _wait_for_pointer(self, version: int) -> None:
        """Wait until the publisher's thread has written the pointer, so that each run is the same."""
        for _ in range(2000 if self._schedule.has_web else 0):
            if self._primary.pointed() == version:
                return
            wait_for_threads()
        if self._schedule.has_web:
            raise RuleError("pointer", f"the pointer does not name version {version} after two seconds")

    def _restart_trainer(self, who: int, choice: int) -> str:
        mode = choice % 4
        if mode == 3:
            return self._succeed_alive(choice)
        self.trainer.discard()
        if mode == 1 and self._schedule.states and not self._primary.is_lost:
            return self._restore(self._primary, choice)
        if mode == 2:
            self.trainer = Trainer(self._schedule, self._schedule.seed + choice)
            return "new weights"
        return "closed"

    def _succeed_alive(self, choice: int) -> str | None:
        """Start another trainer while the publisher of this one lives, as if it had been taken for dead."""
        former = self.trainer
        if former.publisher is None:
            return None
        self.trainer = Trainer(self._schedule, self._schedule.seed + choice)
        answer = self._commit("publish")
        if isinstance(answer, str):
            self._former.append(former)
            return f"new weights, {answer}"
        self.trainer.discard()
        if self._is_claimed_since(former):
            former.discard()
        else:
            self.trainer = former
        return f"failed: {answer}"

    def _is_claimed_since(self, former: Trainer) -> bool:
        return self._head is None or former.publisher is None or former.publisher.version != self._head[1]

    def _publish_former(self, who: int, choice: int) -> str | None:
        """Let a trainer publish that another one has replaced."""
        if not self._former:
            return None
        former = self._former[who % len(self._former)]
        former.train(choice)
        try:
            manifest = former.publisher.publish() if former.publisher is not None else None
        except DeltaTrackerError as error:
            return f"refused: {type(error).__name__}"
        raise RuleError("fence", f"a replaced publisher has published {manifest}")

    def _restore(self, store: Store, choice: int) -> str:
        trainer = Trainer(self._schedule, self._schedule.seed + choice)
        try:
            key = trainer.restore(store.url)
        except DeltaTrackerError as error:
            return f"not restored: {error}"
        self.trainer.discard()
        self.trainer = trainer
        difference = self._copies[key].difference(trainer.model.copy(), None)
        if difference is not None:
            raise RuleError("restore", f"version {key[1]} is restored, but {difference}")
        return f"restored version {key[1]}"

    # Maintenance and operators

    def _mirror(self, who: int, choice: int) -> str | None:
        index = self._stores.index(self._primary)
        store = self._stores[(index + 1 + who % 2) % 3]
        if store.is_lost or store.is_unmounted or self._primary.is_lost:
            return None
        keeps = ["--keep-versions", str(2 + choice % 3)] if choice % 5 == 0 else []
        return f"{store.path.name}: {self._command('mirror', '--once', self._primary.url, store.url, *keeps)[1]}"

    def _compact(self, who: int, choice: int) -> str:
        return self._command("compact", self._primary.url, "--fold", ("0.2", "1e9")[choice % 2])[1]

    def _retain(self, who: int, choice: int) -> str | None:
        if not self._primary.is_healthy:
            return None
        bounds = Retention(versions=1 + choice % 3, grace_seconds=(0.0, 10.0, 600.0)[choice // 3 % 3])
        return f"deleted {retain(Storage(self._primary.url), bounds).versions} versions"

    def _pin(self, who: int, choice: int) -> str | None:
        if self._head is None:
            return None
        return self._order("rollback", self._primary.url, str(max(0, self._head[1] - choice % 5)), "--replace")

    def _release_pin(self, who: int, choice: int) -> str:
        return self._order("release", self._primary.url)

    def _order(self, *words: str) -> str:
        code, text = self._command(*words, "--json")
        if code == 0:
            self._orders.append(json.loads(text))
        return text

    def _promote(self, who: int, choice: int) -> str | None:
        """Continue at a mirror of the lost primary."""
        found = [store for store in self._stores if store.is_healthy and store.has_log()]
        if not self._primary.is_lost or not found or self._head is None:
            return None
        store = found[who % len(found)]
        self.trainer.discard()
        said = self._restore(store, choice) if self._schedule.states and choice % 2 else "continues"
        newest = max((each for each in store.entries() if not each.is_merged), key=lambda each: each.version)
        if newest.stream != self._head[0]:
            return None  # a mirror of a former stream
        code, text = self._command("mirror", "--promote", store.url, "--json")
        if code != 0:
            raise RuleError("promotion", text)
        fork = json.loads(text)
        self._primary = store
        self._streams.append(fork["stream"])
        key = fork["stream"], fork["version"]
        self._copies[key] = self._copies[newest.stream, newest.version]
        self._claims.add(key)
        self._head = key
        return f"{store.path.name} after version {newest.version}, trainer {said}"

    def _command(self, *words: str) -> tuple[int, str]:
        """Run the command line; return its exit code, and the last line of its output or errors."""
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(words)
        lines = (output if code == 0 else errors).getvalue().splitlines()
        return code, lines[-1] if lines else "done"

    # Stores

    def _damage(self, who: int, choice: int) -> None:
        self._stores[who % 3].damage(choice)

    def _forge(self, who: int, choice: int) -> str | None:
        store = self._stores[who % 2]
        return f"pointer of {store.path.name}" if self._web is not None and store.forge(choice) else None

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
        return self._primary.path.name

    def _advance(self, who: int, choice: int) -> str:
        CLOCK.advance(_SECONDS[choice % len(_SECONDS)])
        return f"{CLOCK.now:.0f}"

    # Predictors

    def _join(self, who: int, choice: int) -> str | None:
        if len(self._readers) == _MOST_READERS:
            return None
        settings = Settings.of(who, choice, self._stores, self._cache, self._web)
        with self._answers() as errors:
            self._readers.append(Reader(f"r{self._num_joined}", settings))
            self._num_joined += 1
        return str(errors or self._readers[-1].describe())

    def _restart(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None:
            return None
        keeps, turns = choice % 3 != 0, choice % 2 == 0
        index = self._readers.index(reader)
        with self._answers() as errors:
            self._readers[index] = reader.restarted(keeps=keeps, turns=turns)
        return f"{self._readers[index].describe()} {'with' if keeps else 'without'} its state {errors or ''}"

    def _sync(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        return None if reader is None else self._synced(reader, (None, None, 1, 2)[choice % 4])

    def _synced(self, reader: Reader, limit: int | None = None) -> str:
        with self._answers() as errors:
            reader.predictor.sync(limit)
        self._check(reader)
        return f"{reader.name} at {reader.floor} {errors or ''}"

    def _roll_back(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None or reader.floor is None:
            return None
        before, version = reader.predictor.version, max(0, reader.floor[1] - choice % 4)
        with self._answers() as errors:
            reader.predictor.rollback(version)
        if not errors:
            reader.own, reader.num_orders, reader.is_free = version, len(self._orders), False
            reader.floor, reader.may_serve_held = (reader.floor[0], version), True
        elif not isinstance(errors[0], StorageError) and reader.predictor.version != before:
            raise RuleError("failed call", f"rollback to {version} raised {errors[0]} and changed the version")
        self._check(reader)
        return f"{reader.name} to {version} {errors or ''}"

    def _release(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None:
            return None
        reader.predictor.release()
        reader.own, reader.is_free = None, True
        return reader.name

    def _accept(self, who: int, choice: int) -> str | None:
        reader = self._reader(who)
        if reader is None or not reader.settings.has_gate or reader.floor is None:
            return None
        reader.predictor.accept(reader.floor[1] + 1)
        reader.may_serve_held = True
        return f"{reader.name} accepts {reader.floor[1] + 1}"

    def _reader(self, who: int) -> Reader | None:
        return self._readers[who % len(self._readers)] if self._readers else None

    @contextlib.contextmanager
    def _answers(self) -> Iterator[list[DeltaTrackerError]]:
        """Context manager that keeps an error of the library, which the call may raise."""
        errors: list[DeltaTrackerError] = []
        try:
            yield errors
        except DeltaTrackerError as error:
            errors.append(error)

    # Rules

    def _check(self, reader: Reader) -> None:
        """Check a predictor after a call, and remove it if a rule does not hold."""
        try:
            self._check_rules(reader)
        except RuleError as error:
            self._readers.remove(reader)
            self.found(error.rule, error.text)

    def _check_rules(self, reader: Reader) -> None:
        version, stream = reader.predictor.version, reader.predictor.status().stream
        if version is None or stream is None:
            if reader.floor is not None:
                raise RuleError("backwards", f"{reader.describe()} from {reader.floor} to no version")
            return
        copy = self._copies.get((stream, version))
        if copy is None:
            raise RuleError("rows", f"{reader.describe()} states version {version}, which was not committed")
        held = reader.held()
        difference = copy.difference(held, self._schedule.encoding)
        if difference is not None:
            raise RuleError("rows", f"{reader.describe()} at version {version}: {difference}")
        if reader.settings.has_gate and not reader.may_serve_held and not Copy(held).is_finite:
            raise RuleError("gate", f"{reader.describe()} serves the NaN of version {version}")
        key = self._streams.index(stream), version
        if reader.floor is not None and key < reader.floor and not self._is_pinned_to(reader, stream, version):
            is_first = reader.is_restored and len(reader.settings.stores) > 1
            rule = "backwards after a restart" if is_first else "backwards"
            raise RuleError(rule, f"{reader.describe()} from {reader.floor} to {key} without an order")
        self._check_bounds(reader, stream, version)
        reader.is_restored = reader.is_restored and key == reader.floor
        reader.floor = key

    def _is_pinned_to(self, reader: Reader, stream: str, version: int) -> bool:
        """Return True if an order has sent a predictor to a version."""
        return reader.settings.follows_pins and any(
            (each["kind"], each["stream"], each["version"]) == ("pin", stream, version) for each in self._orders
        )

    def _check_bounds(self, reader: Reader, stream: str, version: int) -> None:
        canary, own = reader.settings.canary, reader.own
        later = self._streams[self._streams.index(stream) :]  # a canary counts the versions of the log
        newest = max(each for name, each in self._copies if name in later)
        if canary is not None and own is None and version + canary > newest:
            raise RuleError("canary", f"{reader.describe()} at version {version} of {newest}")
        stays = own is not None and not reader.settings.follows_pins and stream == self._streams[0]
        if stays and version != own:
            raise RuleError("rollback", f"{reader.describe()} left version {own} for {version}")

    # The end

    def finish(self) -> None:
        """End all faults, publish once more, and wait until each predictor reaches its target."""
        for store in self._stores:
            store.repair()
        is_clean = self._publish_last()
        self._wait_for_all(is_clean=is_clean)
        if not self._primary.is_lost and self._release_all():
            self._wait_for_all(is_clean=is_clean)

    def _wait_for_all(self, *, is_clean: bool) -> None:
        """Let the mirrors copy everything, and wait for each predictor."""
        for store in self._stores:
            if store is not self._primary and store.has_log() and not store.is_lost and not self._primary.is_lost:
                self._mirror_last(store)
        for store in self._stores:
            store.date()
        for reader in list(self._readers):
            if is_clean or not reader.settings.has_gate:
                self._wait(reader)

    def _release_all(self) -> bool:
        """End all pins and rollbacks, after a snapshot. Return False if there are none."""
        order = self._primary.orders()[-1:]
        is_pinned = bool(order) and self._head is not None and order[0]["stream"] == self._head[0]
        is_pinned = is_pinned and order[0]["kind"] == "pin"
        rolled_back = [reader for reader in self._readers if reader.own is not None]
        if not is_pinned and not rolled_back:
            return False
        self._commit_last("snapshot")
        if is_pinned:
            text = self._order("release", self._primary.url)
            self._say(f"last release: {text}")
            if self._orders[-1]["kind"] != "release":
                raise RuleError("release", text)
        for reader in rolled_back:
            reader.predictor.release()
            reader.own, reader.is_free = None, True
        return True

    def _publish_last(self) -> bool:
        """Publish a last version without NaN. Return False if no trainer can."""
        CLOCK.advance(1.0 if self._web is None else 700.0)  # the pointer follows deletions after ten minutes
        if self._web is not None:
            self._web.forget()
        if self._primary.is_lost:
            return False
        if not self.trainer.is_finite:
            self.trainer.discard()
            self.trainer = Trainer(self._schedule, self._schedule.seed + 1)
        needs_snapshot = any(each.settings.has_gate or each.settings.canary for each in self._readers)
        for call in ["snapshot", "publish", "publish"] if needs_snapshot else ["publish"]:
            self._commit_last(call)
        return True

    def _commit_last(self, call: str) -> None:
        """Publish a version; a call that fails is repeated."""
        for _ in range(3):
            self.trainer.train(1)
            answer = self._commit(call)
            self._say(f"last version: {answer}")
            if isinstance(answer, str):
                return
        raise RuleError("publisher", f"the last version was not published: {answer}")

    def _mirror_last(self, store: Store) -> None:
        """Mirror the primary until nothing is left; a mirror that has diverged is started again, as its error says."""
        for is_first in (True, False):
            code, text = self._command("mirror", "--once", self._primary.url, store.url)
            self._say(f"last mirror to {store.path.name}: {code} {text}")
            if code == 0:
                return
            if is_first and "empty destination" in text:
                store.clear()
        raise RuleError("mirror", text)

    def _wait(self, reader: Reader) -> None:
        targets = self._targets(reader)
        said = ""
        for _ in range(_ROUNDS):
            if targets is None or self._whole(reader) in targets or reader not in self._readers:
                break
            said = self._synced(reader)
            CLOCK.advance(_ROUND_SECONDS)
        self._say(f"{reader.describe()} ends at {reader.floor} of {targets}: {said}")
        if targets is not None and self._whole(reader) not in targets and reader in self._readers:
            rule = self._cause(reader, max(targets), said)
            self._readers.remove(reader)
            self.found(rule, f"{reader.describe()} at {reader.floor} instead of {sorted(targets)}: {said}")

    def _cause(self, reader: Reader, target: tuple[int, int], said: str) -> str:
        """Return the rule that a predictor breaks which does not reach its target."""
        stores, floor = reader.settings.stores, reader.floor
        has_others = len(stores) > 1
        causes = {
            "behind a promotion": floor is not None and floor[0] < target[0],
            "behind at a lost source": any(store.is_lost for store in stores),
            "behind at a mirror": "StreamReplacedError" in said and has_others,
            "behind a forged pointer": reader.settings.web is not None and any(store.was_forged for store in stores),
            "behind over http": reader.settings.web is not None,
            "beyond a pin": floor is not None and floor > target and has_others,
            "behind at a shorter mirror": has_others and "Error" not in said,
        }
        return next((rule for rule, is_it in causes.items() if is_it), "behind")

    def _whole(self, reader: Reader) -> tuple[int, int] | None:
        """Return the stream and version of a predictor, without the claims that change no row."""
        return None if reader.floor is None else self._without_claims(*reader.floor)

    def _without_claims(self, order: int, version: int) -> tuple[int, int]:
        while (self._streams[order], version) in self._claims:
            order -= (self._streams[order], version - 1) not in self._copies
            version -= 1
        return order, version

    def _targets(self, reader: Reader) -> set[tuple[int, int]] | None:
        """Return the streams and versions at which a predictor may end, None if nothing leads it anywhere."""
        stores = [store for store in reader.settings.stores if not store.is_lost]
        entries = [entry for store in stores for entry in store.entries()]
        orders = [self._streams.index(each.stream) for each in entries if each.kind == "snapshot"]
        if not orders or (reader.floor is not None and reader.floor[0] > max(orders)):
            return None
        order = max(orders)
        stream = self._streams[order]
        entries = [each for each in entries if each.stream == stream]
        newest = max(each.version for each in entries)
        start = reader.floor[1] if reader.floor is not None and reader.floor[0] == order else None
        reached = _reached(entries, start, newest - (reader.settings.canary or 0))
        own = reader.floor if reader.own is not None else None
        found = {self._without_claims(order, max(reached))} if reached and own is None else set()
        if own is not None:
            found.add(self._without_claims(*own))
            if own[0] != order and reached:
                found.add(self._without_claims(order, max(reached)))
        if reader.settings.follows_pins:
            found |= self._pinned(reader, stores, order, found)
        return found or None

    def _pinned(
        self, reader: Reader, stores: list[Store], order: int, found: set[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """Return the targets of the newest order of all, and of the newest one that the stores have."""
        shown = [each for store in stores for each in store.orders()]
        visible = max(shown, key=lambda each: each["counter"], default=None)
        newest = [each for each in (visible, *self._orders[-1:]) if each is not None]
        stream = self._streams[order]
        pinned = {(order, each["version"]) for each in newest if (each["kind"], each["stream"]) == ("pin", stream)}
        is_certain = len(pinned) == 1 and visible == newest[-1] and not reader.is_free
        if is_certain and reader.own is None:
            found.clear()
        return pinned


def _reached(entries: list[Entry], start: int | None, bound: int) -> set[int]:
    """Return all versions up to a bound to which entries lead, by brute force."""
    found = {each.version for each in entries if each.kind == "snapshot" and each.version <= bound}
    found |= set() if start is None else {start}
    size = -1
    while size < len(found):
        size = len(found)
        for each in entries:
            if each.version <= bound and any(each.first - 1 <= before < each.version for before in found):
                found.add(each.version)
    return found
