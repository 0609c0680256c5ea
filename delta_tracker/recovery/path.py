"""Find the entries of a stream to apply, to restore the training state of a version."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from delta_tracker.errors import InvalidArgumentError, MalformedError, NotRecoverableError
from delta_tracker.stream.format.manifest import STATES_FORMAT, Link, Manifest
from delta_tracker.stream.log import Merged, StreamLog, generation_error

_logger = logging.getLogger(__name__)


def recovery_path(log: StreamLog, version: int | None = None, *, applied: Manifest | None = None) -> list[Manifest]:
    """Return the entries to apply in order: a snapshot, the deltas after it, and the entry with the training state.

    The last entry is the newest one up to ``version`` that is not a claim. Merged entries are used where they replace
    several versions; an unreadable one is logged and not used. Reads only entries.

    If the rows of the model are those of ``applied``, and the log leads from it to the version by deltas, the first
    entry is ``applied`` instead of a snapshot. It is the only entry if it is that version. Otherwise, the first entry
    is a snapshot, which overwrites all rows.

    Args:
        log: log of the stream.
        version: version to restore; None for the newest.
        applied: entry of the log or merged entry, up to which all rows are written already; None if there is none.

    Returns:
        The entries, all with the same tables and states.

    Raises:
        NotRecoverableError: if the stream is empty, an entry is missing, the version has no states, or the tables,
            states or format changed since its snapshot.
        InvalidArgumentError: if ``version`` is invalid or not committed yet.
        MalformedError: if an entry does not follow the format.
        StorageError: if the store cannot be read.
    """
    head = log.head()
    if head is None:
        raise NotRecoverableError(log.storage.url, None, "the stream is empty")
    asked = head.version if version is None else version
    if type(asked) is not int or not 0 <= asked <= head.version:
        raise InvalidArgumentError("version", version, f"Pass a version up to {head.version}, the newest")
    search = _Search(log, head, asked)
    target = search.target()
    return (None if applied is None else search.path_after(applied, target)) or search.path(target)


class _Search:
    """Search for the entries that lead to one version.

    Args:
        log: log of the stream.
        head: newest entry of the stream.
        asked: version to restore.
    """

    def __init__(self, log: StreamLog, head: Manifest, asked: int) -> None:
        self._log = log
        self._head = head
        self._asked = asked

    def target(self) -> Manifest:
        """Return the entry with the training state."""
        target = self._target()
        if target.format != STATES_FORMAT:
            raise self._error(f"version {target.version} was published without states")
        if not target.training:
            raise self._error(f"version {target.version} has no training states")
        return target

    def path(self, target: Manifest) -> list[Manifest]:
        """Return the entries from a snapshot to ``target``."""
        merged = self._log.merged(after=(target.snapshot or 0) - 1)
        start = target if target.kind == "snapshot" else self._start(target, merged)
        return self._path(start, target, merged)

    def path_after(self, applied: Manifest, target: Manifest) -> list[Manifest] | None:
        """Return the entries from ``applied`` to ``target``; None if the log does not lead there by deltas."""
        if applied.link == target.link:
            return [target]
        if not (target.snapshot or 0) <= applied.version < target.version or applied.stream != target.stream:
            return None
        # A merged delta from before the place could belong to another history, of which no entry was applied.
        merged = [each for each in self._log.merged(after=applied.version) if each.first > applied.version]
        try:
            return self._path(applied, target, merged)
        except (MalformedError, NotRecoverableError) as error:
            _logger.info("version %d is restored from a snapshot: %s", target.version, str(error))
            return None

    def _path(self, start: Manifest, target: Manifest, merged: Sequence[Merged]) -> list[Manifest]:
        path = [start]
        deltas = [each for each in reversed(merged) if each.kind == "delta"]
        place = path[0].link
        passed = {place.version: place}
        while place.version < target.version:
            entry = self._longest(passed, target, deltas) or self._next(place)
            if entry.generation < path[-1].generation:
                raise generation_error(entry, path[-1])
            if entry.kind != "claim":
                path.append(entry)
            place = passed[entry.version] = entry.link
        if place != target.link:
            raise self._error(f"version {place.version} was replaced")
        for entry in path:
            if entry.schema != path[0].schema:
                reason = f"version {entry.version} has other tables, states, buckets of raw ids or another format"
                raise self._error(f"{reason} than the snapshot of version {path[0].version}")
        return path

    def _target(self) -> Manifest:
        """Return the newest entry up to the version that is not a claim."""
        link: Link | None = None
        version = self._asked
        while True:
            entry = self._entry(version, link)
            if entry is None:
                raise self._error(f"version {version} is missing")
            if entry.kind != "claim":
                return entry
            if link is None and not self._log.is_committed(entry):
                raise self._error(f"version {version} is a claim that is not part of the log")
            if entry.parent is None:
                if self._asked == self._head.version:
                    raise NotRecoverableError(self._log.storage.url, None, "the stream has only a claim")
                raise self._error("the stream has no version up to this one, only a claim")
            link, version = entry.parent, entry.parent.version

    def _entry(self, version: int, link: Link | None) -> Manifest | None:
        """Return the log entry of a version, or a merged entry that ends with it; None if there is neither."""
        found = [self._log.read(version)]
        if found == [None]:
            found = [self._read_merged(each) for each in self._log.merged(after=version - 1) if each.last == version]
        known = [each for each in found if each is not None and each.stream == self._head.stream]
        return next((each for each in known if link in (None, each.link)), None)

    def _start(self, target: Manifest, merged: Sequence[Merged]) -> Manifest:
        """Return the newest snapshot before ``target``, of the log or merged."""
        first = -1 if target.snapshot is None else target.snapshot
        for each in reversed(merged):
            if each.kind == "snapshot" and first < each.last <= target.version:
                manifest = self._read_merged(each)
                if manifest is not None and manifest.stream == target.stream:
                    return manifest
        snapshot = None if first < 0 else self._entry(first, None)
        if snapshot is None or snapshot.kind != "snapshot":
            raise self._error("it has no snapshot" if first < 0 else f"its snapshot, version {first}, is missing")
        return snapshot

    def _longest(self, passed: Mapping[int, Link], target: Manifest, deltas: Sequence[Merged]) -> Manifest | None:
        """Return the merged delta that leads furthest towards ``target``; None if there is none.

        Args:
            passed: version to link of the entries on the path so far. The last one is the end of the path.
            target: entry that must not be passed.
            deltas: references to merged deltas, from the highest last version down.
        """
        version = max(passed)
        for each in deltas:
            if each.first <= version + 1 and version < each.last <= target.version:
                entry = self._read_merged(each)
                if entry is not None and entry.stream == target.stream and entry.parent is not None:
                    known = passed.get(entry.parent.version)
                    if known in (None, entry.parent):
                        return entry
        return None

    def _next(self, place: Link) -> Manifest:
        entry = self._log.read(place.version + 1)
        if entry is None or entry.stream != self._head.stream:
            raise self._error(f"version {place.version + 1} is missing")
        if entry.parent != place:
            raise self._error(f"version {entry.version} does not follow version {place.version}")
        return entry

    def _read_merged(self, merged: Merged) -> Manifest | None:
        try:
            return self._log.read_merged(merged)
        except MalformedError as error:
            _logger.warning("a merged entry is unreadable; the versions that it replaces are used: %s", error)
            return None

    def _error(self, reason: str) -> NotRecoverableError:
        return NotRecoverableError(self._log.storage.url, self._asked, reason)
