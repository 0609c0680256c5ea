"""Stores from which a reader reads a stream, and the reader's lag behind each store."""

from collections.abc import Sequence
from contextlib import suppress

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Manifest, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.reading.canary import Canary, CanaryBound
from delta_tracker.stream.reading.catch_up import CatchUp
from delta_tracker.stream.reading.fault_delay import FaultDelay
from delta_tracker.stream.reading.path import former_streams
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Location, Storage, open_storage

_LIST_SECONDS = 60.0  # after which a log that seems to have no newer version, or its former streams, are listed
_LEAST_SECONDS = 1e-6  # a lag of 0 means that all versions are applied
_FIRST_PAUSE_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 300.0


class Source:
    """Store of a stream, together with a reader's state for this store that lasts from one round to the next.

    Attributes:
        canary: distance that the reader keeps from the newest version; None for no distance.
        bound: checker of this distance; None without a canary.
        fault_delay: timer that delays the reaction to a fault that a cache can cause.
        lag: measurement of the reader's lag behind this log.
        has_listed: True if the log was listed in this round to find a gap. The reader resets it in each round.
    """

    def __init__(
        self,
        number: int,
        storage: Storage,
        canary: Canary | None = None,
        *,
        log: StreamLog | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        self.number = number
        self.storage = storage
        self.log = StreamLog(storage, runtime) if log is None else log
        self.canary = canary
        self.bound = None if canary is None else CanaryBound(canary, self.log)
        self.catch_up = CatchUp(self.log, self.allows)
        self.pins = PinReader(runtime=runtime)
        self.lag = Lag(runtime)
        self.fault_delay = FaultDelay(clock=runtime.monotonic)
        self.has_listed = False
        self._runtime = runtime
        self._lineage: tuple[str, float, tuple[str, ...]] | None = None  # stream, time of the search, former streams
        self._listed_at = runtime.monotonic()  # of the last listing by a check for a gap, or of the construction

    def through(self, storage: Storage) -> "Source":
        """Return a source that reads from ``storage``, a view of the same store, and shares the pins and the lag."""
        other = Source(self.number, storage, self.canary, runtime=self._runtime)
        other.pins, other.lag = self.pins, self.lag
        return other

    def allows(self, entry: Manifest) -> bool:
        """Return False if the reader is a canary that must not apply ``entry`` yet, otherwise True."""
        return self.bound is None or self.bound.allows(entry)

    def next(self, position: Position, *, looks_for_gap: bool) -> Manifest | None:
        """Poll for the entry after ``position``. Return the entry; None if it was not found.

        With ``looks_for_gap``, raises MissingVersionError if this entry was deleted, and StreamReplacedError if the log
        does not contain the entry at ``position``.
        """
        version, began = position.link.version + 1, self._runtime.monotonic()
        entry = self.log.read(version) if self.log.is_listed or self.log.may_have(version) else None
        self.lag.record_poll(version, is_there=entry is not None, began=began)
        if entry is None and looks_for_gap:
            self._check_gap(position)
        return entry

    def former_streams(self, head: Manifest) -> tuple[str, ...]:
        """Return the ids of the former streams of the log with the newest entry ``head``. Searches once per minute."""
        now = self._runtime.monotonic()
        if self._lineage is None or self._lineage[0] != head.stream or now - self._lineage[1] >= _LIST_SECONDS:
            self._lineage = head.stream, now, former_streams(self.log, head, self.log.readable)
        return self._lineage[2]

    def known_former_streams(self) -> tuple[str, ...]:
        """Return the result of :meth:`former_streams`, or the last result if the log cannot be read now."""
        if self._lineage is None or self._runtime.monotonic() - self._lineage[1] >= _LIST_SECONDS:
            with suppress(MalformedError, StorageError):
                if (head := self.log.head()) is not None:
                    self.former_streams(head)
        return () if self._lineage is None else self._lineage[2]

    def _check_gap(self, position: Position) -> None:
        """Raise an error if the entry after ``position`` was deleted, or if the log was replaced.

        Does not list the log if the pointer object shows no newer version and the last applied entry exists, because
        retention deletes in ascending order. (Retention keeps claims, see :meth:`StreamLog.is_surely_newest`.) Lists
        the log once per minute in any case.
        """
        held, log = position.link, self.log
        pointer = log.pointer.newest()
        if not log.is_listed:
            log.check_pointer()
        if pointer is not None and pointer.stream == position.stream and pointer.version <= held.version:
            if not log.is_listed and (pointer.version, pointer.xxh3) == (held.version, held.xxh3):
                return
            own = log.read(held.version)
            is_own = own is not None and own.xxh3 == held.xxh3
            is_due = log.is_listed and self._runtime.monotonic() - self._listed_at >= _LIST_SECONDS
            if own is not None and is_own and not is_due and (own.kind != "claim" or log.is_surely_newest(own)):
                return
        self.has_listed = log.is_listed
        self._listed_at = self._runtime.monotonic()
        if log.is_listed:  # a long log has many older entries
            head = max(log.versions(after=held.version - 1), default=-1)
        else:  # a claim of the pointer is a reason to look for the next entry, and is confirmed before a resync
            head = -1 if pointer is None else pointer.version
        present = log.read(held.version) if head == held.version else None
        if head < held.version or (present is not None and present.xxh3 != held.xxh3):
            raise StreamReplacedError(log.url, held.version)
        # A version committed between the last look and the listing is not a gap.
        if head > held.version and log.read(held.version + 1) is None:
            raise MissingVersionError(held.version + 1, head)


class Sources:
    """All stores of one stream. A reader normally reads only the current one.

    Pass urls or stores in the order of preference. A source that failed is not read for 30 s unless it is the current
    one. Each further failure doubles this time, up to 300 s. Raises InvalidArgumentError if no url is given, or if a
    url is given twice.
    """

    def __init__(
        self, url: Location | Sequence[Location], canary: Canary | None = None, *, runtime: Runtime = REAL
    ) -> None:
        given = list(url) if isinstance(url, Sequence) and not isinstance(url, str) else [url]
        if not given:
            raise InvalidArgumentError("url", given, "Pass at least one url")
        stores = [open_storage(each) for each in given]
        names = [id(each) if each.url == "memory://" else each.url.rstrip("/") for each in stores]
        if len(set(names)) < len(names):
            raise InvalidArgumentError("url", [each.url for each in stores], "Pass each store once")
        self.all = [Source(number, each, canary, runtime=runtime) for number, each in enumerate(stores)]
        self._pauses = [_FIRST_PAUSE_SECONDS] * len(stores)  # of each source, after its next failure
        self._due_at = [float("-inf")] * len(stores)  # monotonic time from which a source may be asked
        self._monotonic = runtime.monotonic
        self._since = runtime.monotonic()  # time at which the current source became it
        self.current = self.all[0]

    def due(self) -> list[Source]:
        """Return the current source, followed by the other sources that may be read, in the order of preference."""
        if len(self.all) == 1:
            return [self.current]
        now = self._monotonic()
        others = [each for each in self.all if each is not self.current and now >= self._due_at[each.number]]
        return [self.current, *others]

    def use(self, source: Source) -> None:
        """Make ``source`` the current source."""
        self.current, self._since = source, self._monotonic()

    def failed(self, source: Source) -> None:
        """Record a failure of ``source``, so that it is not read for some time. No-op during this time."""
        now, number = self._monotonic(), source.number
        if source is self.current and now - self._since > _MAX_PAUSE_SECONDS:
            self._pauses[number] = _FIRST_PAUSE_SECONDS  # it worked for a while
        if now >= self._due_at[number]:
            self._due_at[number] = now + self._pauses[number]
            self._pauses[number] = min(2 * self._pauses[number], _MAX_PAUSE_SECONDS)


class Lag:
    """Measurement of a reader's lag behind the newest version.

    The age of the oldest version that is not applied is the sum of two times. The first is the time from the commit of
    this version to the commit of the newest version, according to the store. The second is the time since the reader
    first saw the newest version, according to the reader's monotonic clock. The sum is too low by the time from the
    commit of the newest version until the reader saw it, and by up to one second if the store truncates times.

    Attributes:
        empty_poll: version after which the last poll found no entry, and the monotonic time at which the poll began;
            None if a later poll found an entry.
    """

    def __init__(self, runtime: Runtime = REAL) -> None:
        self._monotonic = runtime.monotonic
        self.empty_poll: tuple[int, float] | None = None
        self._newest = -1, 0.0  # newest version seen, and the monotonic time at which it was seen first

    def record_poll(self, version: int, *, is_there: bool, began: float) -> None:
        """Record whether a poll that began at the monotonic time ``began`` found ``version``, the next version."""
        self.empty_poll = None if is_there else (version - 1, began)
        if is_there and version > self._newest[0]:
            self._newest = version, began

    def of(self, log: StreamLog, held: int | None) -> tuple[int, float]:
        """Return the number of versions above ``held``, and the age of the oldest of these versions in seconds.

        ``held`` is the last applied version, or None. Both results are 0 if there is no newer version. Lists the log
        only if ``held`` is None or an entry is missing. Raises a StreamError if the store cannot be read, or if its log
        ends before ``held``.
        """
        began = self._monotonic()
        waiting: Sequence[int] = () if held is None else range(held + 1, log.newest_version(held) + 1)
        log.check_pointer()
        seconds = None if held is None else _seconds_between(log, waiting or (held,))
        if seconds is None:
            listed = log.versions(after=-1 if held is None else held - 1)
            log.check_pointer()
            if held is not None and not listed:
                raise StreamReplacedError(log.url, held)
            waiting = [version for version in listed if held is None or version > held]
            seconds = _seconds_between(log, waiting) if waiting else None
        newest = max([*waiting[-1:], -1 if held is None else held])
        if newest != self._newest[0]:  # a lower one is of another log
            self._newest = newest, began
        age = max(0.0, seconds or 0.0) + self._monotonic() - self._newest[1]
        return len(waiting), max(age, _LEAST_SECONDS) if waiting else 0.0


def _seconds_between(log: StreamLog, versions: Sequence[int]) -> float | None:
    """Return the seconds between the commits of the first and the last of ``versions``; None if an entry is missing."""
    first = log.storage.stat(entry_name(versions[0]))
    last = first if len(versions) == 1 else log.storage.stat(entry_name(versions[-1]))
    return None if first is None or last is None else last.modified - first.modified
