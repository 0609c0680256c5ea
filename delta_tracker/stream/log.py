"""The log of a stream, in an object store: dense entries, each created once and naming the one before it by its hash.

The protocol, for each publisher:

1. ``claim`` once. The claim is the next entry of the log and names a higher generation.
2. ``commit`` each version after its parts are written. The version's entry is created if absent.
3. Who finds the name taken reads the entry back. Its own bytes: the earlier answer was lost, and it had won. An
   earlier attempt of its own: that one had won, go on behind it. Anyone else's: it is fenced, for good.

So two publishers can race, die or sleep at any step, and the log has one history. What no entry names does not exist.

Beside the log stand merged entries, which a compaction makes of several versions. They say nothing new: a reader may
take one in place of the versions that it stands for.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, replace

import xxhash

from delta_tracker.errors import FencedError, MalformedError, NameConflictError, StorageError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.storage.storage import Storage, back_off

_DIGITS = 20  # names sort as the versions do, up to 2**63
_CLAIM_ATTEMPTS = 100  # of which each but the last ones was lost to another publisher
_REFUSALS = 5  # of one name that no listing shows
_MAX_ENTRY_BYTES = 64 << 20  # a manifest has some 300 bytes per rank and table
_ENTRY_NAME = re.compile(rf"log/([0-9]{{{_DIGITS}}})\.json")
_MERGED_NAME = re.compile(rf"merged/([0-9]{{{_DIGITS}}})-([0-9]{{{_DIGITS}}})-(delta|snapshot)\.json")


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged entry, by its name: it stands for the versions ``first`` to ``last``, or for all up to ``last``."""

    last: int
    first: int
    kind: str

    @property
    def name(self) -> str:
        """Its name in the store; names sort by ``last``."""
        return f"merged/{self.last:0{_DIGITS}d}-{self.first:0{_DIGITS}d}-{self.kind}.json"

    @classmethod
    def of(cls, manifest: Manifest) -> Merged:
        """The name that a merged entry has."""
        first = 0 if manifest.parent is None else manifest.parent.version + 1
        return cls(manifest.version, first, manifest.kind)


class StreamLog:
    """Entries of the stream in ``storage``, for reading and, once claimed, for writing."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._parsed: tuple[str, Manifest] | None = None  # the entry that was read last, with its name

    def read(self, version: int) -> Manifest | None:
        """The entry of a version, None if there is none.

        Raises:
            MalformedError: if it does not follow the format, or is another version's.
            StorageError: if the store cannot be read.
        """
        name = entry_name(version)
        manifest = self._read(name)
        if manifest is not None and (manifest.version != version or manifest.merges is not None):
            raise MalformedError(name, f"it says that it is version {manifest.version}, merged: {manifest.merges}")
        return manifest

    def versions(self, *, after: int = -1) -> list[int]:
        """The versions above ``after`` that the store holds, ascending. Lists the store: slow where it is remote.

        Names that are no version's are passed over: whatever else lies there does not exist.

        Raises:
            StorageError: if the store cannot be listed.
        """
        names = self.storage.names("log", after=entry_name(after) if after >= 0 else None)
        return [int(match[1]) for match in map(_ENTRY_NAME.fullmatch, names) if match is not None]

    def head(self) -> Manifest | None:
        """The newest entry, None in an empty store.

        Raises:
            MalformedError, StorageError: as :meth:`read`.
        """
        while versions := self.versions():
            head = self.read(versions[-1])
            if head is not None:
                return head
            # The head is never taken away: it was one when it was listed, long ago.
        return None

    def merged(self, *, after: int = -1) -> list[Merged]:
        """The merged entries that end above ``after``, by their end. Lists the store.

        Raises:
            StorageError: if the store cannot be listed.
        """
        names = self.storage.names("merged", after=f"merged/{after + 1:0{_DIGITS}d}")
        matches = [match for match in map(_MERGED_NAME.fullmatch, names) if match is not None]
        return [Merged(int(match[1]), int(match[2]), match[3]) for match in matches]

    def read_merged(self, merged: Merged) -> Manifest | None:
        """A merged entry, None if there is none.

        Raises:
            MalformedError: if it does not follow the format, or stands for other versions than its name says.
            StorageError: if the store cannot be read.
        """
        manifest = self._read(merged.name)
        if manifest is not None and (manifest.merges is None or Merged.of(manifest) != merged):
            raise MalformedError(merged.name, f"it stands for {manifest.parent} to {manifest.merges}")
        return manifest

    def create_merged(self, manifest: Manifest) -> bool:
        """Create a merged entry; False if there is one for these versions.

        Raises:
            MalformedError: if no reader would accept the entry.
            StorageError: if the store fails and the entry is not seen in it.
        """
        name = Merged.of(manifest).name
        parse_manifest(name, manifest.to_json())
        return self._create(name, manifest.to_json())

    def newest_snapshot(self) -> Manifest | None:
        """The newest snapshot that a reader can start from, in the log or merged; None if there is none.

        Raises:
            MalformedError, StorageError: as :meth:`read`.
        """
        head = self.head()
        if head is None:
            return None
        in_log = -1 if head.snapshot is None else head.snapshot
        for merged in reversed(self.merged(after=in_log)):
            if merged.kind == "snapshot" and merged.last <= head.version:
                manifest = self.read_merged(merged)
                if manifest is not None and manifest.stream == head.stream:
                    return manifest
        return self.read(in_log) if in_log >= 0 else None

    def longest_merged(self, version: int) -> Manifest | None:
        """The merged delta that takes a reader of ``version`` furthest, None if there is none.

        Raises:
            MalformedError, StorageError: as :meth:`read`.
        """
        for merged in reversed(self.merged(after=version)):
            if merged.kind == "delta" and merged.first <= version + 1:
                manifest = self.read_merged(merged)
                if manifest is not None:
                    return manifest
        return None

    def is_committed(self, entry: Manifest) -> bool:
        """Return whether an entry that was read is part of the log. Lists the log.

        Use it for claims. A publisher that read the head long ago may have created its claim at a name that retention
        has freed since. The log then continues above the claim, and no entry names it. Entries of other kinds need no
        check: retention does not free the names at which they could be created late.

        Raises:
            MalformedError: if the next entry does not follow the format.
            StorageError: if the store cannot be read.
        """
        # Listed first: an entry that is committed in between must not look like a gap.
        if not self.versions(after=entry.version):
            return True
        following = self.read(entry.version + 1)
        return following is not None and following.parent == entry.link

    def precedes_claim(self, entry: Manifest) -> bool:
        """Return whether the next entry is a claim. Retention then keeps ``entry``, but not its parts.

        Raises:
            MalformedError, StorageError: as :meth:`read`.
        """
        following = self.read(entry.version + 1)
        return following is not None and following.kind == "claim"

    def claim(self) -> Claim:
        """Take the stream over, or start it: the next entry names a generation above the head's.

        Raises:
            NameConflictError: if the name of the next entry is refused, though no entry of that name is listed.
            MalformedError, StorageError: as :meth:`read`. If the store failed, the claim may have been created.
        """
        writer = secrets.token_hex(16)
        refused, name = 0, ""
        for _ in range(_CLAIM_ATTEMPTS):
            head = self.head()
            next_name = entry_name(0 if head is None else head.version + 1)
            refused, name = (refused + 1 if name == next_name else 0), next_name
            if refused == _REFUSALS:
                raise NameConflictError(self.storage.url, name, refused)
            entry = Manifest(
                stream=secrets.token_hex(16) if head is None else head.stream,
                generation=1 if head is None else head.generation + 1,
                writer=writer,
                version=0 if head is None else head.version + 1,
                kind="claim",
                parent=None if head is None else head.link,
                snapshot=None if head is None else head.snapshot,
                created=time.time(),
            )
            claimed = self._append(entry)
            if claimed is not None:
                return Claim(self, *claimed)
            back_off(refused + 1)
        raise StorageError(self.storage.url, f"others took {name}, the last of {_CLAIM_ATTEMPTS} names to claim")

    def _append(self, draft: Manifest) -> tuple[Manifest, bytes] | None:
        """Make ``draft`` the entry of its version. Return the entry and its bytes; None if another one is, or was.

        Raises:
            MalformedError: if no reader would accept it, so that it would end the stream; nothing was created.
            StorageError: if the store fails; the entry may have been created.
        """
        name, data = entry_name(draft.version), draft.to_json()
        entry = parse_manifest(name, data)
        if not self._create(name, data):
            return None
        return (entry, data) if self._confirm(entry) else None

    def _confirm(self, entry: Manifest) -> bool:
        """Return whether an entry that was just seen to be there is part of the log. Delete it if it is not.

        The log may have continued long ago, and retention may have freed the name at which this entry was created.
        The head is never deleted, so an entry of the log is the head or the next entry names it. Other entries than
        claims are compared with their parent first, which needs no listing: it is the publisher's own last entry, and
        retention removes it before it frees the name of this one. A claim's parent proves nothing, because it may be
        an entry that retention keeps.
        """
        if entry.kind != "claim" and entry.parent is not None:
            parent = self.storage.read(entry_name(entry.parent.version), max_bytes=_MAX_ENTRY_BYTES)
            if parent is not None and xxhash.xxh3_128_hexdigest(parent.data) == entry.parent.xxh3:
                return True
        if self.is_committed(entry):
            return True
        self.storage.delete(entry_name(entry.version))
        return False

    def _read(self, name: str) -> Manifest | None:
        data = self.storage.read(name, max_bytes=_MAX_ENTRY_BYTES)
        if data is None:
            return None
        digest = xxhash.xxh3_128_hexdigest(data.data)
        parsed = self._parsed  # another thread may replace it
        if parsed is None or (parsed[0], parsed[1].xxh3) != (name, digest):
            parsed = self._parsed = name, parse_manifest(name, data.tobytes())
        return parsed[1]

    def _create(self, name: str, data: bytes) -> bool:
        """Create an entry; False if its name is taken by another one, also where the store's answer was lost."""
        try:
            if self.storage.create(name, data):
                return True
        except NameConflictError:
            raise
        except StorageError:
            there = self.storage.read(name, max_bytes=_MAX_ENTRY_BYTES)
            if there is None:
                raise
        else:
            there = self.storage.read(name, max_bytes=_MAX_ENTRY_BYTES)
        return there is not None and there.tobytes() == data


class Claim:
    """The right to write to a stream, until a newer generation takes it.

    Args:
        log: the stream.
        entry: the claim.
        data: its bytes.
    """

    def __init__(self, log: StreamLog, entry: Manifest, data: bytes) -> None:
        self._log = log
        self._head = entry
        self._data = data
        self._fenced: FencedError | None = None

    @property
    def head(self) -> Manifest:
        """The newest entry that this claim has written."""
        return self._head

    @property
    def data(self) -> bytes:
        """The bytes of what :meth:`commit` returned last, or of the claim, as they are in the log."""
        return self._data

    def commit(self, entry: Manifest) -> Manifest:
        """Append a version. Its place in the stream, and the time of its creation, are filled in.

        Returns:
            The entry as committed.

        Raises:
            FencedError: if a newer generation has the stream; nothing was committed, now or ever after.
            NameConflictError: if the store refuses the name of the entry and shows no entry; nothing was committed.
            MalformedError: if no reader would accept the entry; nothing was committed.
            StorageError: if the store fails. If it failed after the entry was created, readers may have it; the next
                commit continues behind it.
        """
        if self._fenced is not None:
            raise self._fenced
        while True:
            head = self._head
            version = head.version + 1
            draft = replace(
                entry,
                stream=head.stream,
                generation=head.generation,
                writer=head.writer,
                version=version,
                parent=head.link,
                snapshot=version if entry.kind == "snapshot" else head.snapshot,
                created=time.time(),
            )
            committed = self._log._append(draft)  # noqa: SLF001  the two classes are one protocol
            if committed is not None:
                self._head, self._data = committed
                return self._head
            taken = self._log.read(version)
            if taken is None or taken.writer != head.writer or not self._log._confirm(taken):  # noqa: SLF001  as above
                is_other = taken is not None and taken.writer != head.writer
                newest = (taken if is_other else self._log.head()) or head
                if taken is None and newest.link == head.link:  # it was refused, and now nothing is there
                    raise NameConflictError(self._log.storage.url, entry_name(version), 1)
                self._fenced = FencedError(head.generation, newest.generation, newest.version)
                raise self._fenced
            self._head = taken


def entry_name(version: int) -> str:
    """Name of a version's entry in the store."""
    return f"log/{version:0{_DIGITS}d}.json"


def part_name(version: int, generation: int, author: str) -> str:
    """A new name for a part of a version, which nothing else ever has.

    Args:
        version: the version, or one below the one that will name it.
        generation: of the publisher.
        author: who writes it, such as ``r3`` for rank 3.
    """
    return f"parts/{version:0{_DIGITS}d}-g{generation}-{author}-{secrets.token_hex(8)}.safetensors"
