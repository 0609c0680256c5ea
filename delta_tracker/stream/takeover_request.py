"""Records that a standby reads: versions and heartbeats of the stream's publisher, and requests to take over.

A request is the object ``control/takeover.json``, a JSON object with the fields of :class:`TakeoverRequest`. It names
the generation to fence, so that only one standby takes over and the object does not have to be deleted.
"""

import time
from dataclasses import dataclass

from msgspec.json import encode

from delta_tracker.errors import StorageError
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import (
    Heartbeat,
    check_predictor_name,
    heartbeat_path,
    read_record,
    see_publisher,
    write_heartbeat,
)
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer

_REQUEST_NAME = "control/takeover.json"


@dataclass(frozen=True, slots=True)
class PublisherActivity:
    """Last activity of a stream's publisher, as returned by :meth:`PublisherObserver.observe`."""

    head: Manifest  # newest entry
    silent_seconds: float  # time since `last`, by the store's clock
    # time of the newest entry or, if it is later, its publisher's last heartbeat, in Unix seconds by the store's clock
    last: float
    heartbeat_seconds: float | None  # time between two heartbeats of the publisher; None if it is unknown


class PublisherObserver:
    """Observer of the versions and heartbeats of a stream's publisher, for a standby.

    All times are taken from the store's clock. To get the current time, each call of :meth:`observe` writes the
    predictor heartbeat ``name``. :meth:`observe` raises StorageError if the store cannot be reached.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        check_predictor_name(name)
        self._storage = storage
        self._name = name
        self._log = StreamLog(storage)
        self._head: Manifest | None = None  # newest entry of the last look

    def observe(self, version: int | None = None, error: str | None = None) -> PublisherActivity | None:
        """Return the publisher's last activity; None if there is no stream.

        ``version`` and ``error`` are the standby's last applied version and current error. They are written in the
        heartbeat ``name`` before the publisher's activity is read.
        """
        if not self._storage.has_directory("log"):
            return None
        now = self._store_time(version, error)
        head = self._head = self._log.head()
        if head is None:
            return None
        beat, modified = see_publisher(self._storage, head) or (None, None)
        last = max((time for time in (head.modified, modified) if time is not None), default=now)
        return PublisherActivity(head, max(0.0, now - last), last, None if beat is None else beat.seconds or None)

    def _store_time(self, version: int | None, error: str | None) -> float:
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
        write_heartbeat(self._storage, beat)
        stored = self._storage.stat(heartbeat_path(self._name))
        if stored is None:
            raise StorageError(self._storage.url, f"{heartbeat_path(self._name)} is missing after it was written")
        return stored.modified


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverRequest:
    """Request to a standby to take over from the publisher of ``generation``."""

    stream: Hex  # id of the stream
    generation: Count  # generation of the publisher
    time: Time  # Unix time of the host that made the request, in seconds
    # True to fence the publisher even if it is alive. Otherwise, the request lapses when the publisher leaves an entry
    # or a heartbeat.
    force: bool = False


def request_takeover(storage: Storage, head: Manifest, *, force: bool = False) -> None:
    """Ask a standby to take over from the publisher of ``head``; with ``force``, even if that publisher is alive."""
    request = TakeoverRequest(stream=head.stream, generation=head.generation, time=time.time(), force=force)
    storage.replace(_REQUEST_NAME, encode(request))


def cancel_takeover(storage: Storage) -> bool:
    """Delete the takeover request. Return False if there is none. A standby that has read it may still take over."""
    is_there = storage.size(_REQUEST_NAME) is not None
    storage.delete(_REQUEST_NAME)
    return is_there


def read_request(storage: Storage, head: Manifest, last_sign: float) -> TakeoverRequest | None:
    """Return the request to take over from the publisher of ``head``, the newest entry; None if there is none.

    Ignores a malformed request and a request for another generation. A request without ``force`` must be newer than
    ``last_sign``, the time of the publisher's last version or heartbeat, in Unix seconds from the store's clock.
    """
    response = Transfer()
    request = read_record(storage, _REQUEST_NAME, "request", TakeoverRequest, response)
    if request is None or (request.stream, request.generation) != (head.stream, head.generation):
        return None
    has_lapsed = response.modified is None or response.modified <= last_sign
    return request if request.force or not has_lapsed else None
