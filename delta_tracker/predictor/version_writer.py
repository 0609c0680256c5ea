"""Validation and write of versions, whether to a model in this process or to a row store: :class:`VersionWriter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from delta_tracker.errors import StreamReplacedError
from delta_tracker.predictor.gate import GateKeeper
from delta_tracker.predictor.identities import identities_after, version_owners
from delta_tracker.predictor.served_model import Receiver
from delta_tracker.predictor.status import Served
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.format.part_buffer import PartBuffer
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.reading.reader import Positioned
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Identity


class Destination(Positioned, Protocol):
    """Destination of the versions: a model in this process or a row store.

    The methods are called in one thread at a time, except :meth:`reading`. Any thread may read the attributes.
    """

    manifest: Manifest | None
    """Manifest of the last applied snapshot or delta; None before the first."""
    identities: Mapping[str, Identity]
    """Table FQN to the buckets by which unknown raw ids are routed now."""

    @property
    def is_reading(self) -> bool:
        """True if this thread is inside :meth:`reading`."""

    def reading(self) -> AbstractContextManager[Served]:
        """Return a context manager that blocks writes during lookups; see :meth:`Predictor.reading`."""

    def state_dict(self) -> dict[str, str | int]:
        """Return the stream position; see :meth:`Predictor.state_dict`."""

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Restore the stream position; see :meth:`Predictor.load_state_dict`."""

    def resolve(self, manifest: Manifest) -> Receiver:
        """Return what a version is written to. Raise ModelMismatchError if it does not fit."""

    def leaves_rows(self, manifest: Manifest) -> bool:
        """Return True if rows of a replaced version may remain once ``manifest`` is applied; see :func:`replaces`."""

    def write(self, receiver: Receiver, contents: Contents, *, is_elsewhere: bool) -> None:
        """Check and write a version, and advance the position when it is complete.

        If it is no successor of the applied version (``is_elsewhere``) and its write is interrupted, only the same
        version or a snapshot can be applied next.
        """


class VersionWriter:
    """Target of a reader that checks all of a version, also by the ``gate``, before it writes to ``destination``."""

    def __init__(self, destination: Destination, *, gate: GateKeeper | None, cache: HostCache | None) -> None:
        self.destination = destination
        self.gate = gate
        self._cache = cache
        self._storage: Storage | None = None  # that the buffer was filled from
        self._buffer = PartBuffer()

    def restart(self) -> None:
        """Drop what was read from a store, because it is read again from another one."""
        self._buffer = PartBuffer()

    def apply(self, entry: Manifest, storage: Storage, *, is_elsewhere: bool) -> None:
        """Read and validate a version, then write it."""
        self.destination.restore()  # an earlier attempt may have failed after its first row
        if self.destination.leaves_rows(entry):
            raise StreamReplacedError(storage.url, entry.version)
        gate = self.gate if entry.kind != "claim" else None
        receiver = self.destination.resolve(entry)
        if gate is not None:
            gate.recall(entry)
        contents = self._contents(entry, storage)
        measure = {} if gate is None else gate.check(entry, contents)
        self.destination.write(receiver, contents, is_elsewhere=is_elsewhere)
        if gate is not None:
            gate.passed(entry, measure)

    def check_path(self, entries: Sequence[Manifest], storage: Storage) -> Iterator[Manifest]:
        """Read and validate the versions of a path. Yields each before its check. Nothing is written."""
        self.destination.restore()
        identities = self.destination.identities
        for entry in entries:
            yield entry
            receiver, identities = self.destination.resolve(entry), identities_after(entry, identities)
            contents = self._contents(entry, storage)
            receiver.place(contents)
            version_owners(contents)

    def write_path(self, entries: Sequence[Manifest], storage: Storage) -> None:
        """Write the versions of a path that was checked. The gate only records their values."""
        receivers = [self.destination.resolve(entry) for entry in entries]
        if self.gate is not None:
            self.gate.restart()
        for entry, receiver in zip(entries, receivers, strict=True):
            contents = self._contents(entry, storage)
            self.destination.write(receiver, contents, is_elsewhere=entry.kind == "snapshot")
            if self.gate is not None:
                self.gate.passed(entry, self.gate.measure(entry, contents)[0])

    def _contents(self, entry: Manifest, storage: Storage) -> Contents:
        """Return the contents of a version, read through the host cache if there is one."""
        if storage is not self._storage:  # the buffer may hold a part of the former one
            self._storage, self._buffer = storage, PartBuffer()
        if self._cache is not None:
            storage = self._cache.over(storage, entry)
        return Contents(storage, entry, buffer=self._buffer)


def replaces(manifest: Manifest, begun: Link, generation: int) -> bool:
    """Return True if a claim or delta belongs to a history without ``begun``, a version that is written in part.

    ``begun`` is then another entry with the same number, or a later one of a lower ``generation``. Only a snapshot
    replaces all of its rows.
    """
    if manifest.kind == "snapshot":
        return False
    is_fenced = begun.version > manifest.version and generation < manifest.generation
    return is_fenced or (begun.version == manifest.version and begun != manifest.link)
