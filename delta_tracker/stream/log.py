"""The log of a stream: dense entries, each created exactly once.

The protocol, for each publisher:

1. ``claim`` once. The claim is the next entry of the log and names a higher generation.
2. ``commit`` each version after its parts are written. The version's entry is created if absent.
3. Who finds the name taken reads the entry back. Its own bytes: the earlier answer was lost, and it had won. An
   earlier attempt of its own: that one had won, go on behind it. Anyone else's: it is fenced, for good.

So two publishers can race, die or sleep at any step, and the log has one history. What no entry names does not exist.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import replace

from delta_tracker.errors import FencedError, MalformedError, MissingVersionError, StorageError
from delta_tracker.stream.manifest import Manifest
from delta_tracker.stream.storage import Storage

_PREFIX = "log"
_DIGITS = 20  # names sort as the versions do, up to 2**63
_SUFFIX = ".json"
_MAX_ENTRY_BYTES = 64 << 20  # a manifest has some 200 bytes per rank and table


_ENTRY_NAME = re.compile(rf"{_PREFIX}/([0-9]{{{_DIGITS}}}){re.escape(_SUFFIX)}")


class StreamLog:
    """Entries of the stream in ``storage``, for reading and, once claimed, for writing."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def read(self, version: int) -> Manifest | None:
        """The entry of a version, None if there is none.

        Raises:
            MalformedError: if it does not follow the format, or is another version's.
            StorageError: if the store cannot be read.
        """
        name = _name(version)
        data = self.storage.read(name, max_bytes=_MAX_ENTRY_BYTES)
        if data is None:
            return None
        manifest = Manifest.from_json(name, data.tobytes())
        if manifest.version != version:
            raise MalformedError(name, f"it says that it is version {manifest.version}")
        return manifest

    def versions(self, *, after: int = -1) -> list[int]:
        """The versions above ``after`` that the store holds, ascending. Lists the store: slow where it is remote.

        Names that are no version's are passed over: whatever else lies there does not exist.

        Raises:
            StorageError: if the store cannot be listed.
        """
        names = self.storage.names(_PREFIX, after=_name(after) if after >= 0 else None)
        return [int(match[1]) for match in map(_ENTRY_NAME.fullmatch, names) if match is not None]

    def head(self) -> Manifest | None:
        """The newest entry, None in an empty store.

        Raises:
            MalformedError, StorageError: as :meth:`read`.
        """
        versions = self.versions()
        return self.read(versions[-1]) if versions else None

    def newest_snapshot(self) -> Manifest | None:
        """The newest snapshot of an unbroken log, None if there is none.

        Raises:
            MissingVersionError: if a version between it and the head is gone.
            MalformedError, StorageError: as :meth:`read`.
        """
        head = max(self.versions(), default=-1)
        for version in range(head, -1, -1):
            manifest = self.read(version)
            if manifest is None:
                raise MissingVersionError(version, head)
            if manifest.kind == "snapshot":
                return manifest
        return None

    def claim(self) -> Claim:
        """Take the stream over, or start it: the next entry names a generation above the head's.

        Raises:
            MalformedError, StorageError: as :meth:`read`.
        """
        writer = secrets.token_hex(16)
        while True:
            head = self.head()
            entry = Manifest(
                stream=secrets.token_hex(16) if head is None else head.stream,
                generation=1 if head is None else head.generation + 1,
                writer=writer,
                version=0 if head is None else head.version + 1,
                kind="claim",
                created=time.time(),
            )
            if self._create(entry):
                return Claim(self, entry)

    def _create(self, entry: Manifest) -> bool:
        """Create an entry; False if its name is taken by another one, also where the store's answer was lost."""
        data = entry.to_json()
        try:
            if self.storage.create(_name(entry.version), data):
                return True
        except StorageError:
            there = self.storage.read(_name(entry.version), max_bytes=_MAX_ENTRY_BYTES)
            if there is None:
                raise
        else:
            there = self.storage.read(_name(entry.version), max_bytes=_MAX_ENTRY_BYTES)
        return there is not None and there.tobytes() == data


class Claim:
    """The right to write to a stream, until a newer generation takes it."""

    def __init__(self, log: StreamLog, entry: Manifest) -> None:
        self._log = log
        self._head = entry
        self._fenced: FencedError | None = None

    @property
    def head(self) -> Manifest:
        """The newest entry that this claim has written."""
        return self._head

    def commit(self, entry: Manifest) -> Manifest:
        """Append a version. Its stream, generation, writer and version are filled in.

        Returns:
            The entry as committed.

        Raises:
            FencedError: if a newer generation has the stream; nothing was committed, now or ever after.
            MalformedError: if no reader would accept the entry; nothing was committed.
            StorageError: if the store fails and the entry is not seen in it.
        """
        if self._fenced is not None:
            raise self._fenced
        while True:
            head = self._head
            entry = replace(
                entry,
                stream=head.stream,
                generation=head.generation,
                writer=head.writer,
                version=head.version + 1,
                created=time.time(),
            )
            Manifest.from_json(_name(entry.version), entry.to_json())  # what readers refuse would end the stream
            if self._log._create(entry):  # noqa: SLF001  the two classes are one protocol
                self._head = entry
                return entry
            taken = self._log.read(entry.version)
            if taken is None or taken.writer != head.writer:
                owner = taken.generation if taken is not None else head.generation
                self._fenced = FencedError(head.generation, owner, entry.version)
                raise self._fenced
            self._head = taken


def _name(version: int) -> str:
    return f"{_PREFIX}/{version:0{_DIGITS}d}{_SUFFIX}"
