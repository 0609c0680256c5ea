"""Heartbeats: objects that predictors write to the stream's store to show their version and their lag.

``predictors/{name}.json`` is a JSON object with the fields of :class:`Heartbeat`. It is replaced every few seconds. The
stream does not depend on heartbeats: one may be missing, old or forged. Retention deletes a heartbeat that was not
replaced for a day.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta, convert

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.parse import load_json
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import StoreClock

_logger = logging.getLogger(__name__)

_NAME = r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z"
_MAX_BYTES = 16 << 10
_MAX_TEXT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of a predictor at a point in time.

    Args:
        name: name of the predictor: a letter or digit, then up to 63 letters, digits, underscores and hyphens.
        time: Unix time of the predictor's host, in seconds. The heartbeat's age is not computed from this time, but
            from its modification time in the store.
        stream: id of the stream, None before the first version.
        version: last applied version, None before the first.
        lag_versions: number of committed versions not yet applied, None if unknown.
        lag_seconds: age of the oldest version not yet applied, None if unknown.
        resyncs: number of resyncs since the predictor's start.
        error: error that currently delays the predictor, None if there is none.
    """

    name: Annotated[str, Meta(pattern=_NAME)]
    time: Time
    stream: Hex | None
    version: Count | None
    lag_versions: Count | None
    lag_seconds: Time | None
    resyncs: Count
    error: str | None


def check_name(name: object) -> None:
    """Check that ``name`` is a valid name of a predictor.

    Raises:
        InvalidArgumentError: if the name is invalid.
    """
    if not isinstance(name, str) or re.search(_NAME, name) is None:
        raise InvalidArgumentError("name", name, "Use up to 64 letters, digits, underscores and hyphens")


def leave_heartbeat(storage: Storage, beat: Heartbeat) -> None:
    """Write a heartbeat, replacing an earlier one of the same name.

    The error in the heartbeat is truncated to 1,000 characters.

    Raises:
        StorageError: if the store cannot be written.
    """
    fields = asdict(beat) | {"error": None if beat.error is None else beat.error[:_MAX_TEXT]}
    storage.replace(_path(beat.name), json.dumps(fields).encode())


class Pulse:
    """Writer of one predictor's heartbeats. It does not raise errors of the store.

    The first of consecutive failures and the recovery are logged. Failures before the first version are not logged.

    Args:
        storage: store of the stream.
        name: name of the predictor.
        seconds: time between two heartbeats.

    Raises:
        InvalidArgumentError: if the name is invalid.
    """

    def __init__(self, storage: Storage, name: str, seconds: float = 5.0) -> None:
        check_name(name)
        self._storage = storage
        self._name = name
        self._seconds = seconds
        self._next = 0.0
        self._fails = False

    def is_due(self) -> bool:
        """Return True if it is time for the next heartbeat."""
        return time.monotonic() >= self._next

    def leave(self, **fields: Any) -> None:  # noqa: ANN401  fields of a Heartbeat
        """Write a heartbeat, except to a local directory without a log: it has no stream.

        If the directory was replaced, the heartbeat is written to the new one.

        Args:
            **fields: fields of the :class:`Heartbeat`, except ``name`` and ``time``.
        """
        self._next = time.monotonic() + self._seconds
        try:
            if not self._storage.has_directory("log"):
                return
            self._storage = self._storage.reopened()
            leave_heartbeat(self._storage, Heartbeat(name=self._name, time=time.time(), **fields))
        except StorageError as error:
            if fields["stream"] is None:
                return  # a predictor may start before the stream's directory exists
            if not self._fails:
                _logger.warning("could not write the predictor's heartbeat: %s", error)
            self._fails = True
        else:
            if self._fails:
                _logger.warning("the predictor's heartbeat is written again: name=%s", self._name)
            self._fails = False


@dataclass(frozen=True, slots=True)
class SeenHeartbeat:
    """Heartbeat with its modification time in the store.

    Args:
        beat: the heartbeat.
        modified: Unix time at which the heartbeat was written, by the store's clock, in seconds.
    """

    beat: Heartbeat
    modified: float

    @property
    def skew(self) -> float:
        """Predictor's clock minus the store's when the heartbeat was written, in seconds."""
        return self.beat.time - self.modified


def see_heartbeats(storage: Storage, clock: StoreClock, *, max_age: float = float("inf")) -> list[SeenHeartbeat | None]:
    """Return the heartbeats of a stream's predictors, sorted by object name. Logs and skips malformed heartbeats.

    Args:
        storage: store of the stream.
        clock: estimate of the store's time; it is updated with the modification times of the heartbeats.
        max_age: maximum age in seconds, by the store's clock. For an older heartbeat, which is not read, the list
            contains None.

    Raises:
        StorageError: if the store cannot be read.
    """
    began = clock.reader_time()
    listed = storage.objects("predictors")
    clock.saw("predictors", (stored.modified for stored in listed), began=began)
    found: list[SeenHeartbeat | None] = []
    for stored in listed:
        if clock.now() - stored.modified > max_age:
            found.append(None)
            continue
        try:
            data = storage.read(stored.name, max_bytes=_MAX_BYTES)
            if data is not None:
                found.append(SeenHeartbeat(_parse(stored.name, data.tobytes()), stored.modified))
        except (ValueError, RecursionError) as error:
            _logger.warning("ignored malformed heartbeat: name=%s error=%s", stored.name, str(error)[:_MAX_TEXT])
    return found


def read_heartbeats(storage: Storage) -> list[Heartbeat]:
    """Return the heartbeats of a stream's predictors, sorted by object name. Logs and skips malformed heartbeats.

    Raises:
        StorageError: if the store cannot be read.
    """
    return [seen.beat for seen in see_heartbeats(storage, StoreClock()) if seen is not None]


def _parse(path: str, data: bytes) -> Heartbeat:
    beat = convert(load_json(data), Heartbeat)
    if _path(beat.name) != path:
        raise MalformedError(path, f"it is the heartbeat of {beat.name}")
    return beat


def _path(name: str) -> str:
    return f"predictors/{name}.json"
