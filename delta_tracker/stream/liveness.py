"""Signs of life of a stream's publisher, as a standby sees them: :class:`Liveness`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from delta_tracker.errors import StorageError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import Heartbeat, check_name, heartbeat_path, leave_heartbeat, see_publisher
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage, Transfer

_MAX_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of the publisher of a stream."""

    head: Manifest  # newest entry
    silent_seconds: float  # time since `last`, by the store's clock
    # time of the newest entry or, if it is later, its publisher's last heartbeat, in Unix seconds by the store's clock
    last: float
    heartbeat_seconds: float | None  # time between two heartbeats of the publisher; None if it is unknown


class Liveness:
    """Reader of the signs of life of a stream's publisher.

    No clock of a host is used: the time of a look is the modification time of an object that the look writes, the
    heartbeat ``name`` among those of the predictors. An observer that is cut off from the store has no verdict.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        check_name(name)
        self._storage = storage
        self._name = name
        self._log = StreamLog(storage)
        self._head: Manifest | None = None  # newest entry of the last look

    def look(self, version: int | None = None, error: str | None = None) -> Signs | None:
        """Return the signs of life; None if there is no stream.

        First leaves a heartbeat with the observer's version and error: a sign of life during the look then makes the
        publisher look alive.
        """
        if not self._storage.has_directory("log"):
            return None
        now = self._store_time(version, error)
        head = self._head = self._newest()
        if head is None:
            return None
        beat, modified = see_publisher(self._storage, head) or (None, None)
        last = max((time for time in (head.modified, modified) if time is not None), default=now)
        return Signs(head, max(0.0, now - last), last, None if beat is None else beat.seconds or None)

    def _store_time(self, version: int | None, error: str | None) -> float:
        """Leave a heartbeat, and return its modification time."""
        head = self._head
        beat = Heartbeat(
            name=self._name,
            time=time.time(),
            stream=None if head is None else head.stream,
            version=version,
            lag_versions=None if head is None or version is None else max(0, head.version - version),
            lag_seconds=None,
            resyncs=0,
            error=error,
        )
        leave_heartbeat(self._storage, beat)
        response = Transfer()
        name = heartbeat_path(self._name)
        if self._storage.read(name, max_bytes=_MAX_BYTES, transfer=response) is None or response.modified is None:
            raise StorageError(self._storage.url, f"{name} is missing after it was written")
        return response.modified

    def _newest(self) -> Manifest | None:
        """Return the newest entry, if possible without listing the log."""
        head = self._head
        there = None if head is None else self._log.read(head.version)
        if head is None or there is None or there.link != head.link:
            return self._log.head()
        while (entry := self._log.read(head.version + 1)) is not None:
            if (entry.stream, entry.parent) != (head.stream, head.link):
                return self._log.head()
            head = entry
        if head.kind == "claim" and not self._log.is_surely_newest(head):
            return self._log.head()  # retention keeps claims: it may have deleted the entries after this one
        return head
