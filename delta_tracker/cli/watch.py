"""The newest versions of a stream as they are committed: what is known already is not read again."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from delta_tracker.cli.entries import Amount, Entry
from delta_tracker.cli.followers import FollowerView
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.types import TableSpec

_MAX_READS = 500  # per refresh: a screen must not stand still until a long log is read
_MIN_KEPT, _MAX_KEPT = 100, 5000
_CHECK_SECONDS = 10.0
_NUM_LISTED = 20


class Watch:
    """The versions of the last seconds, and the newest ones before them.

    Args:
        log: the stream.
        window_seconds: how far back figures reach.

    Attributes:
        head: the newest entry that was read, None before the first.
        entries: the versions and claims that are kept, ascending; at least one from before the window if there is one.
        tables: FQN to table, as of the newest version that has any.
        changed: FQN to the newest delta that had rows of it.
        starts: how often it began anew, because the stream was replaced or had gone on without it.
    """

    def __init__(self, log: StreamLog, window_seconds: float) -> None:
        self.head: Manifest | None = None
        self.entries: deque[Entry] = deque(maxlen=_MAX_KEPT)
        self.tables: Mapping[str, TableSpec] = {}
        self.changed: dict[str, Entry] = {}
        self.starts = 0
        self._log = log
        self._window_seconds = window_seconds
        self._next_check = 0.0

    def refresh(self, now: float) -> None:
        """Read what was committed since the last call; at first the window, from the head down.

        Args:
            now: Unix seconds.

        Raises:
            MalformedError: for an entry that is none.
            StorageError: if the store cannot be read.
        """
        if self.head is None or not self._go_on(self.head):
            self._begin(now)
        while len(self.entries) > _MIN_KEPT and self.entries[1].created < now - self._window_seconds:
            self.entries.popleft()

    def recent(self, now: float) -> list[Entry]:
        """The snapshots and deltas of the window."""
        return [entry for entry in self.entries if entry.kind != "claim" and entry.created > now - self._window_seconds]

    def newest(self, count: int) -> list[Entry]:
        """The newest ``count`` entries, the newest first."""
        return list(islice(reversed(self.entries), count))

    def seconds(self, now: float) -> float:
        """How much of the window is known: less than all of it for a stream that began within it."""
        oldest = self.entries[0].created if self.entries else now
        return min(self._window_seconds, max(1.0, now - oldest))

    def amounts(self, now: float) -> dict[str, Amount]:
        """What the deltas of the window hold of each table."""
        found = {fqn: Amount() for fqn in self.tables}
        for entry in self.recent(now):
            if entry.kind == "delta":
                for fqn, amount in entry.tables.items():
                    found[fqn] = found.get(fqn, Amount()) + amount
        return found

    def pulse(self, now: float, count: int) -> list[int]:
        """Bytes of deltas in ``count`` equal spans of :meth:`seconds`, the oldest first."""
        found = Counter[int]()
        for entry in self.recent(now):
            ago = max(0.0, now - entry.created) / self.seconds(now)
            if entry.kind == "delta":  # beside a snapshot they would all look like nothing
                found[count - 1 - min(count - 1, int(ago * count))] += entry.num_bytes
        return [found[index] for index in range(count)]

    def _go_on(self, head: Manifest) -> bool:
        """Read on behind the head; False if the stream does not go on there."""
        for _ in range(_MAX_READS):
            manifest = self._log.read(head.version + 1)
            if manifest is None:
                return not self._is_elsewhere(head)
            if (manifest.stream, manifest.parent) != (head.stream, head.link):
                return False
            self._take(manifest)
            head = manifest
        return True

    def _is_elsewhere(self, head: Manifest) -> bool:
        """Whether another stream stands there now, or the log goes on behind a gap. Lists the log: not every time."""
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + _CHECK_SECONDS
        there = self._log.read(head.version)
        if there is None or there.xxh3 != head.xxh3:
            return True
        # What was committed between the probe and the listing is no gap.
        return bool(self._log.versions(after=head.version)) and self._log.read(head.version + 1) is None

    def _begin(self, now: float) -> None:
        head = self._log.head()
        if head is None:
            return
        found = [head]
        while len(found) < _MAX_READS and (len(found) < _MIN_KEPT or found[-1].created >= now - self._window_seconds):
            before = None if found[-1].version == 0 else self._log.read(found[-1].version - 1)
            if before is None:
                break
            found.append(before)
        self.starts += 1
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
        self.tables = manifest.tables or self.tables
        if entry.kind == "delta":
            self.changed.update(dict.fromkeys(entry.tables, entry))


@dataclass(slots=True)
class View:
    """What one refresh shows.

    Args:
        url: the stream's.
        now: Unix seconds.
        watch: the newest versions.
        followers: the predictors.
        num_gone: predictors that are not heard of any more.
        problem: what kept it from reading, None if nothing did.
    """

    url: str
    now: float
    watch: Watch
    followers: list[FollowerView] = field(default_factory=list)
    num_gone: int = 0
    problem: str | None = None

    def to_dict(self) -> dict[str, object]:
        """For JSON: one refresh. Times are Unix seconds, rates those of ``window_seconds``."""
        watch, now, head = self.watch, self.now, self.watch.head
        seconds, recent = watch.seconds(now), watch.recent(now)
        return {
            "time": now,
            "url": self.url,
            "stream": None if head is None else head.stream,
            "head": None
            if head is None
            else _short(watch.newest(1)[0].to_dict()) | {"age_seconds": now - head.created},
            "window_seconds": seconds,
            "versions_per_second": len(recent) / seconds,
            "rows_per_second": sum(entry.num_rows for entry in recent) / seconds,
            "bytes_per_second": sum(entry.num_bytes for entry in recent) / seconds,
            "tables": {
                fqn: {
                    "rows_per_second": amount.rows / seconds,
                    "bytes_per_second": amount.num_bytes / seconds,
                    "last_version": watch.changed[fqn].version if fqn in watch.changed else None,
                }
                for fqn, amount in watch.amounts(now).items()
            },
            "versions": [_short(entry.to_dict()) for entry in watch.newest(_NUM_LISTED)],
            "predictors": [follower.to_dict() | {"behind": follower.behind} for follower in self.followers],
            "predictors_gone": self.num_gone,
            "starts": watch.starts,
            "problem": self.problem,
        }


def _short(entry: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in entry.items() if name != "tables"}
