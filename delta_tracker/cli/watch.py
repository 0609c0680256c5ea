"""Incremental reader of the newest entries of a stream, and the data that the screen of ``top`` shows."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from msgspec import to_builtins

from delta_tracker.cli.entries import Amount, Entry, total
from delta_tracker.cli.predictors import SeenPredictor, Skews
from delta_tracker.errors import MalformedError, MissingVersionError, StreamReplacedError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import next_entry
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.source import Source
from delta_tracker.types import TableSpec

_MAX_READS = 500  # per refresh, so that a long log does not block the screen
_MIN_KEPT, _MAX_KEPT = 100, 5000
_CHECK_SECONDS = 10.0
_NUM_LISTED = 20


class Watch:
    """Incremental reader of the newest entries of a stream, for computing rates over a time window.

    Call :meth:`refresh` periodically. The reader retains the entries of the time window before the last refresh, and
    some older ones.

    Attributes:
        head: newest entry that has been read; None if no entry has been read.
        entries: newest entries in ascending order, at most 5,000.
        tables: spec of each table by FQN, according to the newest entry that contains tables.
        changed: for each table by FQN, the newest delta that contains rows of the table.
        is_complete: True if the last :meth:`refresh` read up to the newest entry of the log.
        skews: differences between the clocks of the publishers and the store's clock.
        fault: description of the malformed entry at which the last backward read of the log stopped; None if there was
            none.
        starts: number of times that :meth:`refresh` has read the log backwards from the newest entry.
    """

    def __init__(self, log: StreamLog, window_seconds: float) -> None:
        self.head: Manifest | None = None
        self.entries: deque[Entry] = deque(maxlen=_MAX_KEPT)
        self.tables: Mapping[str, TableSpec] = {}
        self.changed: dict[str, Entry] = {}
        self.is_complete = False
        self.skews = Skews()
        self.fault: str | None = None
        self.starts = 0
        self._source = Source(0, log.storage, log=log)
        self._window_seconds = window_seconds
        self._next_check = 0.0

    def refresh(self, now: float) -> None:
        """Read the entries that were committed since the last call, at most 500.

        The first call reads the log backwards from the newest entry instead. Later calls also do so if the stream was
        replaced or the next entry is missing.

        Args:
            now: Unix time in seconds, according to the store's clock.
        """
        try:
            if self.head is None:
                self._begin(now)
            else:
                self._read_newer(self.head)
        except (MissingVersionError, StreamReplacedError):
            self._begin(now)
        while len(self.entries) > _MIN_KEPT and self.entries[1].committed < now - self._window_seconds:
            self.entries.popleft()

    def recent(self, now: float) -> list[Entry]:
        """Return the snapshots and deltas in the time window that ends at the Unix time ``now``."""
        return [each for each in self.entries if each.kind != "claim" and each.committed > now - self._window_seconds]

    def newest(self, count: int) -> list[Entry]:
        """Return the newest ``count`` entries, newest first."""
        return list(islice(reversed(self.entries), count))

    def seconds(self, now: float) -> float:
        """Return the length in seconds of the part of the time window that the retained entries cover, at least 1.

        The entries cover the whole window if the oldest one was committed before the window began.
        """
        oldest = self.entries[0].committed if self.entries else now
        return min(self._window_seconds, max(1.0, now - oldest))

    def amounts(self, now: float) -> dict[str, Amount]:
        """Return the amount of data of each table in the deltas of the time window, by FQN."""
        found = total(entry.tables for entry in self.recent(now) if entry.kind == "delta")
        return {fqn: Amount() for fqn in self.tables} | found

    def _read_newer(self, head: Manifest) -> None:
        """Read the entries after ``head``, at most 500.

        Also check, at most every 10 seconds, for a replaced stream and missing entries. This check may list the log.
        """
        self.is_complete = False
        is_due = time.monotonic() >= self._next_check
        for _ in range(_MAX_READS):
            position = Position.after(head)
            entry = next_entry(self._source.log, position, self._source.next(position, looks_for_gap=is_due))
            if entry is None:
                self.is_complete = True
                self._next_check = time.monotonic() + _CHECK_SECONDS if is_due else self._next_check
                return
            self._take(entry)
            head = entry

    def _begin(self, now: float) -> None:
        head = self._source.log.head()
        if head is None:
            return
        found, fault = [head], None
        while len(found) < _MAX_READS and (len(found) < _MIN_KEPT or found[-1].committed >= now - self._window_seconds):
            try:
                before = None if found[-1].version == 0 else self._source.log.read(found[-1].version - 1)
            except MalformedError as error:
                fault = f"{error.problem}. {error.remedy}."
                break
            if before is None:
                break
            found.append(before)
        self.fault = fault
        self.starts += 1
        self.is_complete = True
        self.entries.clear()
        self.changed.clear()
        self.tables = {}
        for manifest in reversed(found):
            self._take(manifest)
        self._next_check = time.monotonic() + _CHECK_SECONDS

    def _take(self, manifest: Manifest) -> None:
        entry = Entry.of(manifest)
        self.head = manifest
        self.entries.append(entry)
        self.skews.add(entry)
        self.tables = manifest.tables or self.tables
        if entry.kind == "delta":
            self.changed.update(dict.fromkeys(entry.tables, entry))


@dataclass(slots=True)
class TopView:
    """Data that the screen of ``top`` shows after one refresh.

    Args:
        url: URL of the stream.
        now: time of the refresh in Unix seconds, according to the store's clock.
        watch: reader of the newest entries.
        predictors: predictors with a heartbeat in the last hour.
        num_gone: number of predictors whose last heartbeat is older than an hour.
        skews: descriptions of clocks that differ from the store's clock by more than a minute.
        problem: message to show, for example the error of the last read; None if there is no message.
        read: time of the last successful read, in Unix seconds. Rates are averages over the time window before it.
    """

    url: str
    now: float
    watch: Watch
    predictors: list[SeenPredictor] = field(default_factory=list)
    num_gone: int = 0
    skews: list[str] = field(default_factory=list)
    problem: str | None = None
    read: float = field(kw_only=True)

    @property
    def head(self) -> Manifest:
        """Newest entry that ``watch`` has read."""
        assert self.watch.head is not None, "the view is made after a refresh"
        return self.watch.head

    def rates(self) -> tuple[float, float, float]:
        """Return the average numbers of versions, rows and bytes per second, in this order, in the time window."""
        recent, seconds = self.watch.recent(self.read), self.watch.seconds(self.read)
        sums = len(recent), sum(entry.num_rows for entry in recent), sum(entry.num_bytes for entry in recent)
        versions, rows, num_bytes = (each / seconds for each in sums)
        return versions, rows, num_bytes

    def to_dict(self) -> dict[str, object]:
        """Return the data as a JSON object. Times are Unix seconds. Rates are averages over ``window_seconds``."""
        watch, head, seconds = self.watch, self.head, self.watch.seconds(self.read)
        versions: list[dict[str, object]] = [to_builtins(entry) for entry in watch.newest(_NUM_LISTED)]
        for each in versions:
            del each["tables"]
        names = ("versions_per_second", "rows_per_second", "bytes_per_second")
        return {
            "time": self.now,
            "read": self.read,
            "url": self.url,
            "stream": head.stream,
            "head": versions[0] | {"age_seconds": max(0.0, self.now - head.committed)},
            "window_seconds": seconds,
            **dict(zip(names, self.rates(), strict=True)),
            "tables": {
                fqn: {
                    "rows_per_second": amount.rows / seconds,
                    "bytes_per_second": amount.num_bytes / seconds,
                    "last_version": watch.changed[fqn].version if fqn in watch.changed else None,
                }
                for fqn, amount in watch.amounts(self.read).items()
            },
            "versions": versions,
            "predictors": [predictor.to_dict() for predictor in self.predictors],
            "predictors_gone": self.num_gone,
            "starts": watch.starts,
            "skews": self.skews,
            "problem": self.problem,
        }
