"""Loop of a reader: look, decide, act. See :class:`Reader`."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    StaleCacheError,
    StorageError,
    StreamError,
    kind_of,
    unraised,
)
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.interruption import sleep
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import PinFollower
from delta_tracker.stream.reading.decide import decide
from delta_tracker.stream.reading.decisions import (
    FAULTS,
    Apply,
    Doubt,
    Fail,
    Fault,
    Order,
    Policy,
    Rule,
    Stay,
    View,
)
from delta_tracker.stream.reading.lag import Lag
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.reading.position import Position, Rows
from delta_tracker.stream.reading.seen import Failed, Look, SeenLog
from delta_tracker.stream.reading.settling import Settling
from delta_tracker.stream.reading.source import Source
from delta_tracker.stream.reading.sources import Sources
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

# Number of consecutive versions after which a reader looks for a merged version or a snapshot that leads further.
_CATCH_UP = 8
# A read past a cache waits up to this long: many readers of one cache meet a fault at the same time.
_SPREAD_SECONDS = 1.0
_SURVEY_SECONDS = 60.0  # between two looks at the other sources while the current one shows nothing new


class Target(Protocol):
    """What a reader applies versions to, such as the tables of a model."""

    @property
    def position(self) -> Position | None:
        """Position of the rows; None before the first version."""

    def restore(self) -> None:
        """Read the position again if it is unknown, for example after an error of a row store."""

    def apply(self, entry: Manifest, storage: Storage, *, is_elsewhere: bool) -> None:
        """Read and validate a version, then write it. Nothing is written if it is invalid."""

    def check_path(self, entries: Sequence[Manifest], storage: Storage) -> None:
        """Read and validate versions that an order leads to. Nothing is written."""

    def write_path(self, entries: Sequence[Manifest], storage: Storage) -> None:
        """Write versions that were checked. Bypasses the gate."""

    def restart(self) -> None:
        """Drop what was read from a store, because it is read again from another one."""


class Observer(Protocol):
    """Metrics of a reader."""

    def resynced(self, fault: Exception) -> None:
        """Count a resync and the fault that caused it."""

    def caught_up(self) -> None:
        """Count an entry that replaced many versions."""

    def read_past_cache(self, num_objects: int) -> None:
        """Count objects that were read past a cache after a fault."""

    def failed_over(self, url: str) -> None:
        """Count a change of the source."""

    def looks(self, rested: tuple[int, float] | None) -> None:
        """Note the version after which the last look found no entry, and its monotonic time; see ``Reader.rested``."""

    def rests(self, log: StreamLog, position: Position | None) -> None:
        """Note that nothing newer than a position was found."""


class Reader:
    """Reader of one stream: it decides what to apply, and applies it to a target.

    Each call of :meth:`advance` is a round. It looks at the log until a decision can be made, acts, and forgets what it
    saw. Not thread-safe, except :meth:`release` and the attributes.

    Args:
        sources: stores of the stream.
        target: what the versions are applied to.
        observer: metrics.
        follows_pins: True to obey pins and releases.
        is_canary: True if the reader stays behind the newest version.
        skips_versions: True to apply entries that replace several versions when the reader is far behind.

    Attributes:
        policy: what this process wants.
        pins: reader of pins; None to ignore them.
        settling: doubt of the current source; None if it is not behind a cache.
        lag: measurement of the lag.
        rested: version after which the last look found no entry, and the monotonic time at which that began; None if it
            found one since.
        resyncs: number of resyncs.
        last_resync: description of the last resync; empty before the first.
        pinned: version at which an order keeps the reader, or to which it goes; None without one.
        obeyed: counter of the last pin or release that was followed; 0 before the first.
    """

    def __init__(
        self,
        sources: Sources,
        target: Target,
        observer: Observer,
        *,
        follows_pins: bool = False,
        is_canary: bool = False,
        skips_versions: bool = True,
    ) -> None:
        self.sources = sources
        self._target = target
        self._observer = observer
        self.policy = Policy(follows_pins=follows_pins, is_canary=is_canary)
        self.pins = PinFollower() if follows_pins else None
        self.settling = _settling(sources.current)
        self.lag = Lag()
        self.rested: tuple[int, float] | None = None
        self.resyncs = 0
        self.last_resync = ""
        self.pinned: int | None = None
        self.obeyed = 0
        self._skips_versions = skips_versions
        self._in_a_row = _CATCH_UP  # versions applied since the end of the log was seen
        self._known_counter = 0  # of the newest order when a round ended
        self._num_failures = 0  # consecutive rounds that failed
        self._surveyed_at = time.monotonic()
        self._logged: set[tuple[object, ...]] = set()  # faults that were logged since the last applied version

    @property
    def source(self) -> Source:
        """Source that is followed."""
        return self.sources.current

    @property
    def storage(self) -> Storage:
        """Store that is followed."""
        return self.sources.current.storage

    def advance(self, *, looks_for_gap: bool) -> bool:
        """Apply the next version, or several at once. Return False if there is nothing to apply.

        Args:
            looks_for_gap: True to check, if the next version is missing, whether it was deleted or is not committed
                yet.

        Raises:
            StreamError: if nothing can be applied because of a fault.
        """
        self._target.restore()
        try:
            has_moved = _Round(self, looks_for_gap=looks_for_gap).run()
        except StaleCacheError:
            raise
        except (NoSnapshotError, StorageError):
            self._num_failures += 1
            raise
        self._num_failures = 0
        return has_moved

    def rollback(self, version: int) -> None:
        """Return to a version, and stay there until :meth:`release`.

        Raises:
            StreamError, InvalidArgumentError: if the version cannot be reached. Nothing was changed.
        """
        self._target.restore()
        position, log = self._target.position, self.source.log
        order = None if self.pins is None else self.pins.order(self.storage)
        path = path_to(log, version, position=position)
        bound = self.source.bound
        if bound is not None and not bound.allows(path[-1]):
            text = f"Pass an older version: a canary stays {bound.canary.text} behind the newest one"
            raise InvalidArgumentError("version", version, text)
        self._target.check_path(path, self.storage)
        counter = max(0 if order is None else order.counter, 0 if self.policy.own is None else self.policy.own.counter)
        own = Order(counter, "pin", path[-1].stream, version, None, version, is_own=True)
        self.policy, self.pinned = replace(self.policy, own=own), version
        self._target.write_path(path, self.storage)
        _logger.warning("rolled back to version %d of %s", version, self.storage.url)

    def release(self) -> None:
        """End a rollback of this process. Without one, end the pin that is followed, for this process."""
        if self.policy.own is not None:
            self.policy = replace(self.policy, own=None)
        else:
            self.policy = replace(self.policy, released=max(self.policy.released, self.obeyed))
        self.pinned = None

    def loaded(self) -> None:
        """Begin anew, because the target has another position."""
        self.obeyed, self._in_a_row = 0, _CATCH_UP
        if self.settling is not None:
            self.settling.clear()

    def newest(self) -> list[Manifest]:
        """Return the entries that the reader would go to: that of a pin, or the newest snapshot and the newest entry.

        Only entries above the position are returned, and none after a rollback.
        """
        if self.policy.own is not None:
            return []
        log, bound = self.source.log, self.source.bound
        order = None if self.pins is None else self.pins.order(self.storage)
        pinned = None if order is None or order.kind != "pin" else log.read(order.version)
        if pinned is not None and order is not None and pinned.stream == order.stream:
            return [pinned]
        after = -1 if self._target.position is None else self._target.position.version
        found = [each for each in (log.newest_snapshot(), log.head()) if each is not None and each.version > after]
        return found if bound is None else [each for each in found if bound.allows(each)]

    @property
    def position(self) -> Position | None:
        """Position of the target."""
        return self._target.position

    @property
    def version(self) -> int | None:
        """Last applied version; None before the first."""
        position = self._target.position
        return None if position is None else position.version

    def measure_lag(self) -> tuple[int, float]:
        """Return the number of committed versions that are not applied, and the age of the oldest one in seconds.

        Raises:
            StreamError: if the log cannot be read, or ends before the last applied version.
        """
        return self.lag.of(self.source.log, self.version)

    def saw_next(self, version: int, entry: Manifest | None, began: float) -> None:
        """Record a look for the next entry, which began at a monotonic time."""
        self.rested = (version - 1, began) if entry is None else None
        if entry is not None:
            self.lag.saw(version, began)

    def applied(self, decision: Apply, before: Position | None, order: Order | None) -> None:
        """Record that entries were applied."""
        source, last = self.sources[decision.number], decision.entries[-1]
        if source is not self.source:
            self._use(source)
        if not source.log.is_listed:
            source.log.pointer.saw(last)  # it may have been read from another view of the store
        if self.settling is not None:
            self.settling.clear()
        self._logged.clear()
        match decision.rule:
            case Rule.NEXT:
                self._in_a_row += 1
            case Rule.START:
                self._in_a_row = _CATCH_UP
            case Rule.CATCH_UP:
                self._in_a_row = _CATCH_UP
                self._observer.caught_up()
                kind = last.kind if last.merges is None else f"merged {last.kind}"
                text = "caught up from version %s to %d with a %s"
                _logger.info(text, None if before is None else before.version, last.version, kind)
            case Rule.PIN:
                _logger.warning("rolled back to version %d of %s", last.version, self.storage.url)
        if decision.cause is not None:
            self._resynced(decision.cause, None if before is None else before.version, last.version)
        self.pinned = None if decision.order is None else decision.order.version
        self.obeys(order)

    def _resynced(self, fault: StreamError, before: int | None, after: int) -> None:
        self.resyncs += 1
        self._observer.resynced(fault)
        self.last_resync = f"version {before} to {after}: {type(fault).__name__}: {fault}"
        _logger.warning("resync of %s from version %s to %s: %s", self.storage.url, before, after, str(fault))

    def obeys(self, order: Order | None) -> None:
        """Record the counter of an order if it is followed."""
        self._known_counter = 0 if order is None else order.counter
        if order is not None and order.is_followed_by(self._target.position):
            self.obeyed = max(self.obeyed, order.counter)

    def is_retired(self) -> bool:
        """Return True if retention has deleted the next version, by the pointer past the caches."""
        position, settling, log = self._target.position, self.settling, self.source.log
        if position is None or settling is None or not settling.may_read_pointer():
            return False
        self._observer.read_past_cache(1)
        claimed = log.pointer.newest(past_cache=True)
        if claimed is None or claimed.oldest <= position.version + 1:
            return False
        confirmed = log.pointed(is_due=False)
        return confirmed is not None and confirmed.oldest > position.version + 1

    def newest_order(self, storage: Storage) -> Order | None:
        """Return the newest pin or release that is known. If a forged one was dropped, forget what was done for it."""
        if self.pins is None:
            return None
        pin = self.pins.order(storage)
        if (last := self.pins.take_drop()) is not None:
            self.obeyed = min(self.obeyed, last)
            own = self.policy.own
            if own is not None:
                own = replace(own, counter=min(own.counter, last))
            self.policy = replace(self.policy, own=own, released=min(self.policy.released, last))
        return None if pin is None else replace(Order.of(pin), is_new=pin.counter != self._known_counter)

    def named(self, order: Order, source: Source) -> Manifest | None:
        """Return the entry that a pin or a release names; None if the log does not have it."""
        entry = source.log.read(order.version)
        is_there = entry is not None and (entry.stream, entry.link) == (order.stream, order.link)
        if self.pins is not None and order.pin is not None:
            (self.pins.confirm if is_there else self.pins.doubt)(order.pin)
        return entry if is_there else None

    def _use(self, source: Source) -> None:
        """Follow another source, which leads on from the position."""
        former = self.source
        _logger.warning("continue from another source: url=%s former=%s", source.storage.url, former.storage.url)
        if self._num_failures:
            self.sources.failed(former)
        self.sources.use(source)
        self.rested, self.settling = None, _settling(source)
        self._observer.failed_over(source.storage.url)

    def _log_once(self, level: int, text: str, error: StreamError, *what: object) -> None:
        """Log a fault once until the next version is applied."""
        key = text, *what, *kind_of(error)
        if key not in self._logged:
            self._logged.add(key)
            # As text, because a log handler may keep its arguments, and with the error the rows of the version.
            _logger.log(level, text, *what, str(error))


class _Round:
    """One round of a reader: what it has seen, and which faults it has met.

    Args:
        reader: the reader.
        looks_for_gap: see :meth:`Reader.advance`.
    """

    def __init__(self, reader: Reader, *, looks_for_gap: bool) -> None:
        self._reader = reader
        self._sources = {each.number: each for each in reader.sources.due()}
        self._retry: Source | None = None  # source to read a faulty version from next
        self._skipped: list[StreamError] = []  # errors of looks
        self._has_waited = False  # before the first object was read again
        self._order: Order | None = None
        now = time.monotonic()
        position, is_behind = reader.position, reader._in_a_row >= _CATCH_UP and reader._skips_versions
        self._view = View(
            tuple(map(self._unseen, self._sources.values())),
            position,
            reader.policy,
            num_failures=reader._num_failures,
            looks_for_gap=looks_for_gap,
            catches_up=is_behind and position is not None and position.rows is not Rows.MIXED,
            surveys=looks_for_gap and len(self._sources) > 1 and now - reader._surveyed_at >= _SURVEY_SECONDS,
        )
        if self._view.catches_up:
            reader._in_a_row = 0
        reader._observer.looks(reader.rested)
        if self._view.surveys:
            reader._surveyed_at = now

    def run(self) -> bool:
        """Look, decide and act until something was applied, or nothing can be. Return True if it was applied."""
        try:
            while True:
                decision = decide(self._view)
                match decision:
                    case Look():
                        self._look(decision)
                    case Apply():
                        if self._apply(decision):
                            self._log_skipped(None)
                            return True
                    case Doubt():
                        self._doubt(decision)
                    case Stay():
                        self._stay(decision)
                        return False
                    case Fail():
                        self._log_skipped(decision.error)
                        raise decision.error
        finally:
            settling = self._reader.settling
            if settling is not None:
                self._reader._observer.read_past_cache(settling.take_count())

    def _unseen(self, source: Source) -> SeenLog:
        is_current = source.number == self._reader.source.number
        is_doubted = is_current and self._reader.settling is not None
        return SeenLog(source.number, source.storage.url, is_doubted)

    def _look(self, look: Look) -> None:
        """Look up what the next decision needs."""
        reader, source, question = self._reader, self._sources[look.number], look.question
        began = time.monotonic()
        answer: object
        try:
            if question.about == "order":
                answer = self._order = reader.newest_order(source.storage)
            elif question.about == "named":
                answer = reader.named(question.subject, source)
            else:
                answer = source.answer(question, self._view.position)
        except StreamError as error:
            answer = Failed(error)
            self._skipped.append(error)
            if look.number != reader.source.number and isinstance(error, MalformedError | StorageError):
                reader.sources.failed(source)
                _logger.info("another source cannot be used: url=%s error=%s", source.storage.url, error)
        if question.about == "next" and look.number == reader.source.number:
            reader.saw_next(question.subject, answer if isinstance(answer, Manifest) else None, began)
        logs = [
            replace(log, answers=MappingProxyType({**log.answers, question: answer})) if log.number == look.number else log
            for log in self._view.logs
        ]
        self._view = replace(self._view, logs=tuple(logs))

    def _log_skipped(self, raised: StreamError | None) -> None:
        """Log which entries could not be read, except for the error that is raised."""
        for error in self._skipped:
            if isinstance(error, MalformedError | StorageError) and error is not raised:
                level = logging.WARNING if isinstance(error, MalformedError) else logging.INFO
                self._reader._log_once(level, "skipped what cannot be read: %s", error)

    def _apply(self, decision: Apply) -> bool:
        """Apply entries. Return False if one of them has a fault, which the next decision takes into account."""
        target, storage, entries = self._reader._target, self._sources[decision.number].storage, decision.entries
        before = self._view.position
        try:
            if decision.order is not None:
                target.check_path(entries, storage)
                target.write_path(entries, storage)
            else:
                target.apply(entries[0], storage, is_elsewhere=decision.is_elsewhere)
        except StreamError as error:
            if isinstance(error, StaleCacheError) or not isinstance(error, (*FAULTS, StorageError)):
                raise
            self._failed(decision, error)
            return False
        self._reader.applied(decision, before, self._order)
        return True

    def _failed(self, decision: Apply, error: StreamError) -> None:
        reader, entry = self._reader, decision.entries[0]
        if decision.rule is Rule.CATCH_UP:
            self._sources[decision.number].catch_up.avoid(entry)
            _logger.info("cannot catch up with version %d: %s", entry.version, str(error))
        elif decision.rule is not Rule.NEXT:
            reader._log_once(logging.WARNING, "cannot resync with version %d: %s", error, entry.version)
        faults = (*self._view.faults, *(Fault(decision.number, each, unraised(error)) for each in decision.entries))
        if reader.position != self._view.position:
            self._view = replace(self._view, logs=tuple(map(self._unseen, self._sources.values())))
        # An order may have been made meanwhile, which comes before a resync.
        logs = tuple(log.without("order") for log in self._view.logs)
        self._view = replace(self._view, logs=logs, faults=faults, position=reader.position)

    def _stay(self, stay: Stay) -> None:
        reader = self._reader
        reader._in_a_row = 0
        if self._view.looks_for_gap:
            reader._observer.rests(reader.source.log, reader.position)
            if reader.settling is not None:
                reader.settling.clear()
        if stay.number != reader.source.number:
            reader._use(self._sources[stay.number])
        reader.pinned = stay.pinned
        reader.obeys(self._order)

    def _doubt(self, doubt: Doubt) -> None:
        """Read what may have caused a fault again: first from the cache, because another reader may have replaced it.

        Raises:
            StaleCacheError: if all of it was read past the cache, and the fault may still be that of a cache.
        """
        reader, settling, source = self._reader, self._reader.settling, self._reader.source
        assert settling is not None, "only the source behind a cache is doubted"
        again, self._retry = self._retry, None
        if again is None:
            doubted = settling.doubt(doubt.error, self._view.position, source.storage)
            if doubted is None:
                self._believe(doubt)
                return
            again = source.through(doubted)
            if not self._has_waited:
                self._has_waited = True
                sleep(random.uniform(0, _SPREAD_SECONDS))  # noqa: S311  no secret
                again, self._retry = source.through(source.storage), again
        reader._target.restart()  # it may hold pieces of the faulty object
        self._sources[source.number] = again
        self._view = replace(
            self._view, logs=tuple(map(self._unseen, self._sources.values())), faults=(), looks_for_gap=True
        )

    def _believe(self, doubt: Doubt) -> None:
        reader, settling = self._reader, self._reader.settling
        assert settling is not None, "checked before"
        if not settling.is_over and not reader.is_retired():
            raise StaleCacheError(reader.storage.url, _subject(doubt.error), settling.seconds)
        self._view = replace(self._view, logs=tuple(replace(log, is_doubted=False) for log in self._view.logs))


def _settling(source: Source) -> Settling | None:
    return None if source.storage.lists else Settling()


def _subject(fault: StreamError) -> str:
    """Return what a fault is about, for a message."""
    if isinstance(fault, CorruptPartError | MalformedError):
        return fault.path
    return f"version {fault.version}" if isinstance(fault, MissingVersionError) else "the last applied version"
