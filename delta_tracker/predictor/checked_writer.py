"""Validation and write of versions: :class:`CheckedWriter`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from delta_tracker.errors import StreamReplacedError
from delta_tracker.predictor.gate import GateKeeper
from delta_tracker.predictor.identities import identities_after
from delta_tracker.predictor.version_writer import VersionWriter
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_buffer import PartBuffer
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.reading.orders import Followed
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage


class CheckedWriter:
    """Target of a reader that validates each version completely before its first row; see :class:`Target`."""

    def __init__(self, writer: VersionWriter, gate: GateKeeper | None, cache: HostCache | None) -> None:
        self._writer = writer
        self._gate = gate
        self._cache = cache
        self._storage: Storage | None = None  # that the buffer was filled from
        self._buffer = PartBuffer()

    @property
    def position(self) -> Position | None:
        """Position of the rows; None before the first version."""
        return self._writer.position

    @property
    def followed(self) -> Followed | None:
        """Last order that was followed, as it was saved with the position."""
        return self._writer.followed

    def follow(self, followed: Followed) -> None:
        """Save with the position which order was followed."""
        self._writer.follow(followed)

    def restore(self) -> None:
        """Read the position again if it is unknown."""
        self._writer.restore()

    def restart(self) -> None:
        """Drop what was read from a store, because it is read again from another one."""
        self._buffer = PartBuffer()

    def apply(self, entry: Manifest, storage: Storage, *, is_elsewhere: bool) -> None:
        """Read and validate a version, then write it. See :meth:`VersionWrite.apply`."""
        self._writer.restore()  # an earlier attempt may have failed after its first row
        if self._writer.leaves_rows(entry):
            raise StreamReplacedError(storage.url, entry.version)
        gate = self._gate if entry.kind != "claim" else None
        write = self._writer.resolve(entry)
        if gate is not None:
            gate.recall(entry)
        contents = self._contents(entry, storage)
        measure = {} if gate is None else gate.check(entry, contents)
        write.apply(contents, is_elsewhere=is_elsewhere)
        if gate is not None:
            gate.passed(entry, measure)

    def check_path(self, entries: Sequence[Manifest], storage: Storage) -> Iterator[Manifest]:
        """Read and validate the versions of a path. Yields each before its check. Nothing is written."""
        self._writer.restore()
        identities = self._writer.identities
        for entry in entries:
            yield entry
            write, identities = self._writer.resolve(entry), identities_after(entry, identities)
            write.check(self._contents(entry, storage))

    def write_path(self, entries: Sequence[Manifest], storage: Storage) -> None:
        """Write the versions of a path that was checked. The gate only records their values."""
        writes = [self._writer.resolve(entry) for entry in entries]
        if self._gate is not None:
            self._gate.restart()
        for entry, write in zip(entries, writes, strict=True):
            contents = self._contents(entry, storage)
            write.apply(contents, is_elsewhere=entry.kind == "snapshot")
            if self._gate is not None:
                self._gate.passed(entry, self._gate.measure(entry, contents)[0])

    def _contents(self, entry: Manifest, storage: Storage) -> Contents:
        """Return the contents of a version, read through the host cache if there is one."""
        if storage is not self._storage:  # the buffer may hold a part of the former one
            self._storage, self._buffer = storage, PartBuffer()
        if self._cache is not None:
            storage = self._cache.over(storage, entry)
        return Contents(storage, entry, buffer=self._buffer)
