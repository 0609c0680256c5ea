"""Pointer object ``control/head.json``: a hint with the newest entry of a log, for readers that cannot list.

No writer depends on it. It may be missing, late, or older than one that was read before, so a reader takes the maximum
of what it has read, and checks every object that the pointer leads to.
"""

from __future__ import annotations

from dataclasses import dataclass

from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.storage.storage import Storage

POINTER_NAME = "control/head.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointedSnapshot:
    """Newest snapshot to start from.

    Args:
        version: version of the snapshot.
        merged: True if it is a merged snapshot, False if it is an entry of the log.
    """

    version: Count
    merged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPointer:
    """Contents of the pointer object.

    Args:
        stream: id of the stream.
        generation: generation of the newest entry.
        version: version of the newest entry.
        xxh3: hash of the newest entry.
        oldest: lowest version from which the log has all entries up to ``version``.
        snapshot: newest snapshot to start from; None if there is none.
        merged: first and last version of each merged delta that no other one covers, ascending by the last.
        time: Unix time of the writer's host, in seconds; informative.
    """

    stream: Hex
    generation: Count
    version: Count
    xxh3: Hex
    oldest: Count
    snapshot: PointedSnapshot | None
    merged: tuple[tuple[Count, Count], ...]
    time: Time


class PointerView:
    """Maximum of the pointers that one reader has read. Thread-safe.

    Args:
        storage: store of the stream.
        seconds: minimum time between two reads.
    """

    def __init__(self, storage: Storage, *, seconds: float = 1.0) -> None:
        self._storage = storage
        self._seconds = seconds

    def newest(self, *, is_due: bool = True, past_cache: bool = False) -> HeadPointer | None:  # noqa: ARG002  skeleton
        """Return the maximum of the pointers read so far; None if there was none."""
        return None

    def saw(self, entry: Manifest) -> None:
        """Record that an entry exists."""
