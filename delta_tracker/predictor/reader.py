"""Reader of a stream, which decides which version to apply next and applies it: :class:`Reader`."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from delta_tracker.errors import (
    CorruptPartError,
    HeldVersionError,
    InvalidArgumentError,
    LeftOutPartError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    StaleCacheError,
    StorageError,
    StreamError,
    kind_of,
    without_traceback,
)
from delta_tracker.predictor.predictor_gauges import PredictorGauges
from delta_tracker.predictor.version_writer import VersionWriter
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.pin import newest_pin
from delta_tracker.stream.reading.decide import FAULTS, Apply, Fail, Fault, Reread, Rule, Stay, View, next_reader_action
from delta_tracker.stream.reading.orders import OrderPolicy, Orders
from delta_tracker.stream.reading.path import last_with_rows, path_to
from delta_tracker.stream.reading.position import Position, Rows
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.reading.seen import SeenLog
from delta_tracker.stream.reading.source import Source, Sources
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

# Number of consecutive versions after which a reader looks for a merged version or a snapshot that leads further.
_CATCH_UP = 8
_SPREAD_SECONDS = 1.0  # a read past a cache waits up to this long: many readers meet a fault at the same time
_IGNORED_SECONDS = 60.0  # between two looks for a pin that is not followed
_SURVEY_SECONDS = 60.0  # between two looks at the other sources while the current one shows nothing new


@dataclass(slots=True, eq=False)
class _Round:
    """State of one round of a reader. A round that bypasses a cache always checks for a gap.

    Args:
        view: input of the next decision.
        looks_for_gap: argument of :meth:`Reader.advance`.
        retry: source from which to read a faulty version next.
        has_waited: True after the wait before the first object is read again.
    """

    view: View
    looks_for_gap: bool
    retry: Source | None = None
    has_waited: bool = False


class Reader:
    """Reader of a stream for one predictor. It decides which version to apply next and applies it.

    Each call of :meth:`advance` is a round. Not thread-safe, except :meth:`release` and the attributes.

    Attributes:
        pinned: version of the pin or rollback that applies to the reader; None if there is none.
        why: last decision and its reason as text; empty before the first decision, and after :meth:`release`.
    """

    def __init__(
        self,
        sources: Sources,
        writer: VersionWriter,
        gauges: PredictorGauges,
        policy: OrderPolicy,
        *,
        skips_versions: bool = True,
        runtime: Runtime = REAL,
    ) -> None:
        self.sources = sources
        self.runtime = runtime
        self.orders = Orders(policy, sources.all)
        self.resyncs = Resyncs()
        self.ignored = IgnoredPins(runtime.monotonic)
        self.pinned: int | None = None
        self.why = ""
        self.writer = writer
        self.gauges = gauges
        self._skips_versions = skips_versions
        self._in_a_row = _CATCH_UP  # versions applied since the end of the log was seen
        self._num_failures = 0  # consecutive rounds that failed
        self._surveyed_at = float("-inf")  # monotonic time of the last look at all sources
        self._is_checked = True  # False if the model was not compared with a loaded position, or was changed since
        self.orders.load(writer.destination.written)

    @property
    def source(self) -> Source:
        """Source that the reader currently follows."""
        return self.sources.current

    @property
    def storage(self) -> Storage:
        """Store of :attr:`source`."""
        return self.sources.current.storage

    @property
    def position(self) -> Position | None:
        """Stream position of the rows that were written; None before the first version."""
        return self.writer.destination.position

    @property
    def version(self) -> int | None:
        """Last applied version; None before the first version."""
        position = self.position
        return None if position is None else position.link.version

    def advance(self, *, looks_for_gap: bool) -> bool:
        """Apply the next version, or all versions that lead to a pin. Return False if there is nothing to apply.

        If ``looks_for_gap`` is True and the next version is missing, check whether the version was deleted or is not
        committed yet. Raises StreamError if a fault prevents the reader from applying a version.
        """
        destination = self.writer.destination
        destination.restore()
        if not self._is_checked and destination.position is not None:
            self._check_loaded(destination.position)
        try:
            has_moved = self._run(self._begin(destination.position, looks_for_gap=looks_for_gap))
            if self.orders.policy.follows_pins and (followed := self.orders.record(self.position)) is not None:
                destination.save_order(followed)
        except StreamError as error:
            self.why = f"{Rule.FAULT.value}: {type(error).__name__}"
            if isinstance(error, HeldVersionError) and self.writer.gate is not None:
                self.writer.gate.held = without_traceback(error)  # it would keep the rows of the version alive
            if isinstance(error, StaleCacheError):
                raise
            if not isinstance(error, NoSnapshotError | StorageError):
                self._num_failures = 0  # the store can be read
                raise
            self._num_failures += 1
            if isinstance(error, StorageError):
                self.sources.failed(self.source)
            elif self.orders.policy.own is None:
                self.pinned = None  # the stream of an interrupted move to a pin has ended
            raise
        self._num_failures = 0
        return has_moved

    def rollback(self, version: int) -> None:
        """Return to ``version``, and apply no other version until :meth:`release`. See :meth:`Predictor.rollback`."""
        self.writer.destination.restore()
        source, path = self._path_back(version)
        if source.canary is not None and not source.allows(path[-1]):
            text = f"Pass an older version: a canary stays {source.canary.text} behind the newest one"
            raise InvalidArgumentError("version", version, text)
        for _ in self.writer.check_path(path, source.storage):
            pass
        if source is not self.source:
            self._continue_from(source)
        self.orders.roll_back(path[-1])
        self.pinned, self.why = version, f"pinned to version {version}"
        self.writer.write_path(path, self.storage)
        _logger.warning("rolled back to version %d of %s", version, self.storage.url)

    def release(self) -> None:
        """End the rollback; without a rollback, ignore the current pin. Takes effect in the next round. Thread-safe."""
        self.orders.release()
        self.pinned, self.why = None, ""

    def loaded(self) -> None:
        """Reset the reader. Call this after the destination has loaded a saved position."""
        self.orders.load(self.writer.destination.written)
        self._in_a_row = _CATCH_UP
        self._is_checked = False
        self.source.fault_delay.clear()

    def newest(self) -> list[Manifest]:
        """Return the entries that ``start()`` checks: the pinned entry, or the newest snapshot and the newest entry.

        Without a pin, entries up to the current position are left out. During a rollback, the list is empty.
        """
        if self.orders.begin().own is not None:
            return []
        log = self.source.log
        order = self.orders.newest(self.source.number)
        pinned = None if order is None or order.kind != "pin" else log.read(order.version)
        if pinned is not None and order is not None and pinned.stream == order.stream:
            return [pinned]
        after = -1 if self.version is None else self.version
        found = [each for each in (log.newest_snapshot(), log.head()) if each is not None and each.version > after]
        return [each for each in found if self.source.allows(each)]

    def _path_back(self, version: int) -> tuple[Source, list[Manifest]]:
        """Return the first source that contains ``version`` of the reader's stream, and the entries that lead to it."""
        sources, errors = self.sources.due(), dict[Source, Exception]()
        for source in sources:
            try:
                self.orders.newest(source.number, at_once=True)  # the rollback overrules it
            except StorageError as error:
                errors[source] = error
        for source in sources[: None if self.position else 1]:
            try:
                if source not in errors:
                    return source, path_to(source.log, version, position=self.position)
            except (InvalidArgumentError, StreamError) as error:
                errors[source] = error
        raise errors[sources[0]]

    def _check_loaded(self, position: Position) -> None:
        """Compare the model with the entry of a loaded position, in the first source that contains it."""
        for source in self.sources.due():
            with suppress(MalformedError, StorageError):
                entry = last_with_rows(source.log, source.log.read(position.version))
                if entry is not None and entry.stream == position.stream:
                    self._is_checked = True
                    self.writer.keeps_rows(entry)
                    return

    # One round

    def _notice_change(self, state: _Round) -> bool:
        """Check a model after one of its tensors was replaced. Return True if only a snapshot can be applied next."""
        if state.view.position is None:
            return False
        self._is_checked = False
        self._check_loaded(state.view.position)
        state.view, before = replace(state.view, position=self.position), state.view
        return state.view.position != before.position

    def _begin(self, position: Position | None, *, looks_for_gap: bool) -> _Round:
        sources = self.sources.due()
        for each in sources:
            each.has_listed = False  # a round at a pin checks for no gap
        is_usable = position is not None and position.rows is not Rows.MIXED
        view = View(
            self._unseen(sources),
            position,
            self.orders.begin(),
            num_failures=self._num_failures,
            looks_for_gap=looks_for_gap,
            catches_up=self._skips_versions and is_usable and self._in_a_row >= _CATCH_UP,
            is_partial=len(sources) < len(self.sources.all),
            surveys=len(sources) > 1 and self.runtime.monotonic() - self._surveyed_at >= _SURVEY_SECONDS,
            followed=self.orders.followed,
        )
        if view.catches_up:
            self._in_a_row = 0
        self.gauges.age.empty_poll = self.sources.current.lag.empty_poll
        return _Round(view, looks_for_gap)

    def _unseen(self, sources: Iterable[Source]) -> tuple[SeenLog, ...]:
        return tuple([SeenLog(each, self.orders, not each.storage.lists) for each in sources])

    def _run(self, state: _Round) -> bool:
        while True:
            decision = next_reader_action(state.view)
            match decision:
                case Apply():
                    if self._apply(state, decision):
                        return True
                case Reread():
                    self._reread(state, decision)
                case Stay() if (
                    state.looks_for_gap and self.writer.destination.notice_move() and self._notice_change(state)
                ):
                    pass  # the next decision is to begin with a snapshot
                case Stay():
                    self._stay(state, decision)
                    return False
                case Fail(error) if (fault := self._unread_fault(state.view, error)) is not None:
                    self._reread(state, Reread(state.view.logs[0], fault))  # another fault was accepted before
                case Fail():
                    if state.view.surveys and decision.ends_survey:
                        self._surveyed_at = self.runtime.monotonic()
                    self._log_skipped(state, decision.error)
                    raise decision.error

    def _unread_fault(self, view: View, error: StreamError) -> StreamError | None:
        found = [each.error for each in view.faults if each.number == view.logs[0].number]  # of resyncs, for example
        return self.source.fault_delay.unread((error, *found), view.position)

    def _apply(self, state: _Round, decision: Apply) -> bool:
        """Apply entries. If one has a fault, record the fault for the next decision and return False."""
        storage, entries = decision.log.source.storage, decision.entries
        entry = entries[0]
        first = next((each for each in entries if each.kind != "claim"), entry)  # the first with rows
        try:
            if decision.order is None:
                keeps_rows = self.writer.apply(entry, storage, is_elsewhere=decision.is_elsewhere)
            elif keeps_rows := first.kind != "delta" or self.writer.keeps_rows(first):
                for entry in self.writer.check_path(entries, storage):  # noqa: B007  the faulty one, after an error
                    pass
                self.orders.start(decision.order)
                self.pinned = decision.order.version
                self.writer.write_path(entries, storage)
        except (*FAULTS, StorageError) as error:
            if isinstance(error, StaleCacheError):
                raise
            self._failed(state, decision, entry, without_traceback(error))
            return False
        if not keeps_rows:
            state.view = replace(state.view, position=self.position)
            return False
        self._applied(state, decision)
        return True

    def _failed(self, state: _Round, decision: Apply, entry: Manifest, error: StreamError) -> None:
        self.writer.destination.restore()  # some rows may have been written
        if isinstance(error, LeftOutPartError):
            self.sources.failed(self.sources.all[decision.log.number])
        if decision.rule is Rule.CATCH_UP:
            decision.log.source.catch_up.avoid(entry)
            _logger.info("cannot catch up with version %d: %s", entry.version, str(error))
        elif decision.rule is not Rule.NEXT:
            self.resyncs.log_once(logging.WARNING, "cannot resync with version %d: %s", error, entry.version)
        view = state.view
        if self.position != view.position:
            self._log_skipped(state, None)
            view = replace(view, logs=self._unseen([log.source for log in view.logs]))
        for log in view.logs:
            log.answers.pop("order", None)  # one may have been made meanwhile, which comes before a resync
        faults = (*view.faults, Fault(decision.log.number, entry, error))
        state.view = replace(view, faults=faults, position=self.position)

    def _applied(self, state: _Round, decision: Apply) -> None:
        before, last = state.view.position, decision.entries[-1]
        version = None if before is None else before.link.version
        source = self._use(state, decision.log)
        if not source.log.is_listed:
            source.log.pointer.note_entry(last)  # it may have been read from another view of the store
            source.fault_delay.clear()
        self.why = f"applied version {last.version}: {decision.rule.value}"
        match decision.rule:
            case Rule.NEXT:
                self._in_a_row += not state.has_waited  # a version that a cache delayed shows no distance
            case Rule.START:
                self._in_a_row = _CATCH_UP
                if version is not None:
                    _logger.warning("%s: url=%s former=%s", self.why, self.storage.url, version)
            case Rule.CATCH_UP:
                self._in_a_row = _CATCH_UP
                self.gauges.recorder.merged_catch_ups.cell().add(1)
                kind = last.kind if last.merges is None else f"merged {last.kind}"
                _logger.info("caught up from version %s to %d with a %s", version, last.version, kind)
            case Rule.PIN:
                _logger.warning("rolled back to version %d of %s", last.version, self.storage.url)
            case Rule.RELEASE | Rule.SUCCESSION:
                _logger.warning("%s: url=%s former=%s", self.why, self.storage.url, version)
        self.resyncs.logged.clear()
        if decision.cause is not None:
            self.resyncs.add(self.storage.url, decision.cause, version, last.version)
            self.gauges.resynced(decision.cause)
        self.pinned = None if decision.order is None else decision.order.version

    def _stay(self, state: _Round, stay: Stay) -> None:
        if stay.pinned is None:
            self._in_a_row = 0
        if state.view.surveys:
            self._surveyed_at = self.runtime.monotonic()
        if state.looks_for_gap:
            source, position = self.sources.current, state.view.position
            if self.gauges.served is None:
                self.gauges.read_loaded(source.log, position)
            if not self.orders.policy.follows_pins:
                self.ignored.check(source.storage, position)
            source.fault_delay.clear()
        self._use(state, stay.log)
        if stay.why != self.why:
            _logger.log(logging.DEBUG if stay.rule is Rule.NEWEST else logging.INFO, "reader waits: %s", stay.why)
        self.pinned, self.why = stay.pinned, stay.why

    def _reread(self, state: _Round, reread: Reread) -> None:
        """Reread the object that may have caused a fault, first from the cache, then bypassing the cache.

        Raises StaleCacheError if no object is left to retry, but a stale cache may still be the cause.
        """
        source, again = self.sources.all[reread.log.number], state.retry
        state.retry = None
        if again is None:
            counts = self.gauges.recorder.past_cache_reads.cell().add
            faults = [reread.error, *reread.log.errors]
            reread_store = source.fault_delay.reread(faults, state.view.position, source.storage, counts)
            if reread_store is None:
                self._accept_fault(state, source, reread.error)
                return
            again = source.through(reread_store)
            if not state.has_waited:
                state.has_waited = True
                self.runtime.sleep(self.runtime.uniform(0, _SPREAD_SECONDS))
                again, state.retry = source, again
        self.writer.restart()  # it may hold pieces of the faulty object
        self._log_skipped(state, reread.error)
        logs = self._unseen([again if log.number == source.number else log.source for log in state.view.logs])
        state.view = replace(state.view, logs=logs, faults=(), looks_for_gap=True, catches_up=False)

    def _accept_fault(self, state: _Round, source: Source, fault: StreamError) -> None:
        fault_delay = source.fault_delay
        if not fault_delay.is_over and not self._is_retired():
            raise StaleCacheError(source.storage.url, _subject(fault), fault_delay.seconds)
        logs = (replace(log, may_be_stale=log.may_be_stale and log.number != source.number) for log in state.view.logs)
        state.view = replace(state.view, logs=tuple(logs))

    def _is_retired(self) -> bool:
        """Return True if the pointer, read bypassing the caches, shows that retention has deleted the next version."""
        position, pointer = self.position, self.source.log.pointer
        if position is None or self.source.fault_delay.has_read_pointer:
            return False
        self.source.fault_delay.has_read_pointer = True
        self.gauges.recorder.past_cache_reads.cell().add(1)
        claimed = pointer.newest(past_cache=True)
        if claimed is None or claimed.may_have(position.version + 1):
            return False
        confirmed = self.source.log.pointed(is_due=False)
        return confirmed is not None and not confirmed.may_have(position.version + 1)

    def _use(self, state: _Round, log: SeenLog) -> Source:
        """Switch to the source of ``log``, and return it. Log a message for each source that could not be read."""
        self._log_skipped(state, None)
        if log.source.number != self.sources.current.number:
            self._continue_from(self.sources.all[log.number])
        return self.sources.current

    def _continue_from(self, source: Source) -> None:
        _logger.warning("continue from another source: url=%s former=%s", source.storage.url, self.storage.url)
        self.sources.use(source)
        source.lag.empty_poll = None
        source.fault_delay.clear()
        self._surveyed_at = float("-inf")  # the former one may have what this one lacks
        self.gauges.failed_over(source.storage.url)

    def _log_skipped(self, state: _Round, raised: StreamError | None) -> None:
        for log in state.view.logs:
            for error in log.errors:
                if not isinstance(error, MalformedError | StorageError):
                    continue
                if log.number != self.source.number:
                    self.sources.failed(log.source)
                if error is not raised:
                    level = logging.WARNING if isinstance(error, MalformedError) else logging.INFO
                    self.resyncs.log_once(level, "skipped what cannot be read: %s", error)


class Resyncs:
    """Counter and logger of resyncs and faults. Each fault is logged once until the next version is applied."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""  # description of the last resync
        self.logged: set[tuple[object, ...]] = set()  # since the last applied version

    def add(self, url: str, fault: StreamError, before: int | None, after: int) -> None:
        """Count and log a resync from version ``before`` to version ``after``, caused by ``fault``."""
        self.count += 1
        self.last = f"version {before} to {after}: {type(fault).__name__}: {fault}"
        # As text, because a log handler may keep its arguments, and with the error the rows of the version.
        _logger.warning("resync of %s from version %s to %s: %s", url, before, after, str(fault))

    def log_once(self, level: int, text: str, error: StreamError, *what: object) -> None:
        """Log ``text``, formatted with ``what`` and ``error``, unless it was logged since the last applied version."""
        key = text, *what, *kind_of(error)
        if key not in self.logged:
            self.logged.add(key)
            _logger.log(level, text, *what, str(error))


class IgnoredPins:
    """Detector of pins that the reader does not follow. ``notice`` is a message about the newest pin, or empty."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.notice = ""
        self._monotonic = monotonic
        self._looked_at = float("-inf")

    def check(self, storage: Storage, position: Position | None) -> None:
        """Read the newest pin, at most once a minute, and log each new pin once as not followed."""
        if position is None or self._monotonic() - self._looked_at < _IGNORED_SECONDS:
            return
        self._looked_at = self._monotonic()
        with suppress(StreamError):
            pin, notice = newest_pin(storage), ""
            if pin is not None and pin.kind == "pin" and pin.stream == position.stream:
                notice = f"the pin of version {pin.version} is not followed"
            if notice and notice != self.notice:
                _logger.warning("%s, because follows_pins is False: url=%s", notice, storage.url)
            self.notice = notice


def _subject(fault: StreamError) -> str:
    if isinstance(fault, CorruptPartError | MalformedError):
        return fault.path
    return f"version {fault.version}" if isinstance(fault, MissingVersionError) else "the last applied version"
