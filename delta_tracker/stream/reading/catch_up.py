"""Search for entries that replace many versions at once, so that a reader catches up faster: :class:`CatchUp`."""

from delta_tracker.stream.format.manifest import Manifest, Merged, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import Allows, is_next, readable
from delta_tracker.stream.reading.position import Position

_MIN_MERGED = 8  # fewer versions are read one by one
_LIST_VERSIONS = 64  # the merged entries are listed once while a reader applies this many versions
_MAX_SIZED = 64  # versions whose sizes are read, to compare them with a snapshot's


class CatchUp:
    """Finder of merged deltas and snapshots in one log that replace many versions at once."""

    def __init__(self, log: StreamLog, allows: Allows) -> None:
        self._log = log
        self._allows = allows
        self._bound = -1  # version up to which find() leads
        self._merged: list[Merged] = []
        self._listed_at = -_LIST_VERSIONS  # version at which the merged entries were listed
        self._avoided: set[str] = set()  # names of entries that could not be applied or read

    def find(self, position: Position) -> Manifest | None:
        """Return an entry to apply instead of many versions: a merged delta or a snapshot. Return None without one.

        Chooses the longest merged delta that replaces at least 8 versions. Prefers a snapshot with a higher version if
        it is in the log, or if it is a merged snapshot and smaller than the entries up to it. The size of more than 64
        entries is estimated. Skips entries that could not be applied or read.
        """
        held = position.version
        if self._bound < held + _MIN_MERGED:  # otherwise, it need not be looked for again
            self._bound = self._log.newest_version(held)
        if self._bound < held + _MIN_MERGED:
            return None
        if not self._listed_at <= held < self._listed_at + _LIST_VERSIONS:
            self._listed_at, self._merged = held, self._log.merged(after=held)
            self._avoided.clear()
        merged = self._newest_merged("delta", held + _MIN_MERGED - 1, position)
        snapshot = self._snapshot(position, held if merged is None else merged.version)
        if snapshot is not None and self._is_smaller(snapshot, position, merged):
            return snapshot
        return merged

    def avoid(self, entry: Manifest) -> None:
        """Make :meth:`find` skip ``entry``, which cannot be applied, for the next 64 versions at most."""
        self._avoided.add(_name(entry))

    def _newest_merged(self, kind: str, after: int, position: Position) -> Manifest | None:
        for each in reversed(self._merged):
            if each.kind != kind or each.first > position.version + 1 or not after < each.last <= self._bound:
                continue
            entry = None if each.name in self._avoided else readable(self._log.read_merged, each)
            if entry is None:
                self._avoided.add(each.name)
            elif self._is_ahead(entry, position):
                return entry
        return None

    def _snapshot(self, position: Position, after: int) -> Manifest | None:
        merged = self._newest_merged("snapshot", after, position)
        after = after if merged is None else merged.version
        entry = readable(self._log.read, self._bound)
        while entry is not None and entry.snapshot is not None and entry.snapshot > after:
            snapshot = readable(self._log.read, entry.snapshot)
            if snapshot is not None and _name(snapshot) not in self._avoided and self._is_ahead(snapshot, position):
                return snapshot
            entry = readable(self._log.read, entry.snapshot - 1)
        return merged

    def _is_ahead(self, entry: Manifest, position: Position) -> bool:
        leads_on = is_next(entry, position) if entry.kind == "delta" else entry.stream == position.stream
        return leads_on and self._allows(entry)

    def _is_smaller(self, snapshot: Manifest, position: Position, merged: Manifest | None) -> bool:
        """Return True if ``snapshot`` is in the log, or is smaller than ``merged`` plus the versions after it."""
        if snapshot.merges is None:
            return True
        num_bytes = 0 if merged is None else merged.num_bytes
        first = position.version if merged is None else merged.version
        for number, version in enumerate(range(first + 1, snapshot.version + 1), start=1):
            if num_bytes > snapshot.num_bytes:
                return True
            entry = readable(self._log.read, version)
            if entry is None:
                return True
            num_bytes += entry.num_bytes
            if number == _MAX_SIZED:
                so_far = num_bytes - (0 if merged is None else merged.num_bytes)
                num_bytes += so_far * (snapshot.version - version) // number
                break
        return num_bytes > snapshot.num_bytes


def _name(entry: Manifest) -> str:
    return entry_name(entry.version) if entry.merges is None else Merged.of(entry).name
