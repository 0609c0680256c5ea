"""Store of a stream, as a reader looks things up in it: :class:`Source`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from delta_tracker.errors import MalformedError, MissingVersionError, StorageError, StreamReplacedError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import PinFollower
from delta_tracker.stream.reading.canary import Canary, CanaryBound
from delta_tracker.stream.reading.catch_up import CatchUp
from delta_tracker.stream.reading.lineage import former_streams
from delta_tracker.stream.reading.path import readable
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.reading.seen import Look
from delta_tracker.stream.reading.settling import Settling
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import skew_problem

_logger = logging.getLogger(__name__)

_LIST_SECONDS = 60.0  # after which a log that seems to have no newer version, or its former streams, are listed


class Source:
    """Store of a stream, and what a reader keeps about its log between two rounds.

    Attributes:
        bound: newest version that a canary may apply; None without one.
        settling: doubt of faults that a cache can cause, for a store that cannot list.
        has_listed: True if a check for a gap had to list the log in this round of the reader, which sets it to False.
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
        self.bound = None if canary is None else CanaryBound(canary, self.log)
        self.catch_up = CatchUp(self.log, None if self.bound is None else self.bound.allows)
        self.pins = PinFollower(runtime=runtime)
        self.settling = Settling(clock=runtime.monotonic)
        self.has_listed = False
        self._runtime = runtime
        self._held: Manifest | None = None  # entry of a position that was saved without its generation
        self._lineage: tuple[str, float, tuple[str, ...]] | None = None  # stream, time of the search, former streams
        self._listed_at = runtime.monotonic()  # of the last listing by a check for a gap, or of the construction
        self._skewed = ""  # last publisher whose skew was logged
        own = self.log
        self._answers: Mapping[str, Callable[[Any], object]] = {
            "ahead": self.catch_up.find,
            "allows": lambda entry: self.bound is None or self.bound.allows(entry),
            "former_streams": self.former_streams,
            "generation": self._generation,
            "merged": lambda after: own.merged(after=after),
            "versions": lambda after: own.versions(after=after),
            "head": lambda _: own.head(),
            "newest_snapshot": lambda _: own.newest_snapshot(),
            "read": own.read,
            "read_merged": own.read_merged,
            "is_committed": own.is_committed,
        }

    def through(self, storage: Storage) -> Source:
        """Return the same source, read through another view of its store."""
        other = Source(self.number, storage, self.canary, runtime=self._runtime)
        other.pins = self.pins
        return other

    @property
    def canary(self) -> Canary | None:
        """Distance that the reader keeps from the newest version; None if it keeps none."""
        return None if self.bound is None else self.bound.canary

    @property
    def url(self) -> str:
        """Url of the store."""
        return self.storage.url

    def answer(self, look: Look) -> object:
        """Look up what a reader needs, except for the next entry and orders."""
        return self._answers[look.about](look.subject)

    def next(self, position: Position, *, looks_for_gap: bool) -> Manifest | None:
        """See :meth:`SeenLog.next`. Logs once per publisher that its clock differs from the store's."""
        version = position.link.version + 1
        entry = self.log.read(version) if self.log.is_listed or self.log.may_have(version) else None
        if entry is None and looks_for_gap:
            self._check_gap(position)
        if entry is not None and entry.writer != self._skewed:
            problem = skew_problem(f"the publisher of generation {entry.generation}", entry.skew)
            if problem is not None:
                self._skewed = entry.writer
                _logger.warning("%s: url=%s", problem, self.storage.url)
        return entry

    def former_streams(self, head: Manifest) -> tuple[str, ...]:
        """Return the former streams of the newest entry's stream. They are searched for once per minute."""
        now = self._runtime.monotonic()
        if self._lineage is None or self._lineage[0] != head.stream or now - self._lineage[1] >= _LIST_SECONDS:
            self._lineage = head.stream, now, former_streams(self.log, head)
        return self._lineage[2]

    def known_former_streams(self) -> tuple[str, ...]:
        """Return the former streams of the last minute, or of the last search if the log cannot be read now."""
        if self._lineage is None or self._runtime.monotonic() - self._lineage[1] >= _LIST_SECONDS:
            with suppress(MalformedError, StorageError):
                if (head := self.log.head()) is not None:
                    self.former_streams(head)
        return () if self._lineage is None else self._lineage[2]

    def _generation(self, position: Position) -> int | None:
        if self._held is None or not position.names(self._held):
            self._held = readable(self.log.read, position.version)
        return self._held.generation if self._held is not None and position.names(self._held) else None

    def _check_gap(self, position: Position) -> None:
        """Raise an error if the entry after a position was deleted, or if the log was replaced.

        Nothing is listed if the pointer object shows no newer version, and the log has the last applied entry:
        retention deletes in ascending order. It keeps claims, so that a claim proves this only with an entry before it,
        see :meth:`StreamLog.is_surely_newest`. Once per minute, the log is listed in any case, because other programs
        may delete entries in any order.
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
