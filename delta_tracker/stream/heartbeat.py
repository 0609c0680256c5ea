"""Heartbeats: what predictors leave beside a stream, so that people see who follows it and how far behind.

``predictors/{name}.json`` is a JSON object with the fields of :class:`Heartbeat`. It is replaced every few seconds,
says nothing that a stream depends on, and may be missing, old or forged.
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

_logger = logging.getLogger(__name__)

_NAME = r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z"
_MAX_BYTES = 16 << 10
_MAX_TEXT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How a predictor stood.

    Args:
        name: the predictor's, up to 64 letters, digits, underscores and hyphens.
        time: unix time by its host's clock, in seconds.
        stream: id of the stream, None before the first version.
        version: the last version that it had applied, None before the first.
        lag_versions: committed versions that it had not applied, None if it could not tell.
        lag_seconds: age of the oldest of them.
        resyncs: how often it went around a fault since its start.
        error: what held it up, None if nothing did.
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
    """Refuse what is no name for a heartbeat.

    Raises:
        InvalidArgumentError: if it is none.
    """
    if not isinstance(name, str) or re.search(_NAME, name) is None:
        raise InvalidArgumentError("name", name, "Use up to 64 letters, digits, underscores and hyphens")


def leave_heartbeat(storage: Storage, beat: Heartbeat) -> None:
    """Replace the heartbeat of ``beat.name``.

    Raises:
        StorageError: if it cannot be written.
    """
    fields = asdict(beat) | {"error": None if beat.error is None else beat.error[:_MAX_TEXT]}
    storage.replace(_path(beat.name), json.dumps(fields).encode())


class Pulse:
    """The heartbeat of one predictor. A store that cannot be written costs the heartbeat and one line of log.

    Args:
        storage: where the stream lies.
        name: the predictor's.
        seconds: time between two heartbeats.

    Raises:
        InvalidArgumentError: for what is no name.
    """

    def __init__(self, storage: Storage, name: str, seconds: float = 5.0) -> None:
        check_name(name)
        self._storage = storage
        self._name = name
        self._seconds = seconds
        self._next = 0.0
        self._fails = False

    def is_due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() >= self._next

    def leave(self, **fields: Any) -> None:  # noqa: ANN401  those of a Heartbeat
        """Leave a heartbeat with these fields."""
        self._next = time.monotonic() + self._seconds
        try:
            leave_heartbeat(self._storage, Heartbeat(name=self._name, time=time.time(), **fields))
        except StorageError as error:
            if fields["stream"] is None:
                return  # a predictor may start before the stream's directory is made
            if not self._fails:
                _logger.warning("the predictor cannot leave its heartbeat: %s", error)
            self._fails = True
        else:
            self._fails = False


def read_heartbeats(storage: Storage) -> list[Heartbeat]:
    """The heartbeats beside a stream, by name; what is none is passed over and logged.

    Raises:
        StorageError: if the store cannot be read.
    """
    found = []
    for path in storage.names("predictors"):
        try:
            data = storage.read(path, max_bytes=_MAX_BYTES)
            if data is not None:
                found.append(_parse(path, data.tobytes()))
        except (ValueError, RecursionError) as error:
            _logger.warning("%s is no heartbeat: %s", path, str(error)[:_MAX_TEXT])
    return found


def _parse(path: str, data: bytes) -> Heartbeat:
    beat = convert(load_json(data), Heartbeat)
    if _path(beat.name) != path:
        raise MalformedError(path, f"it is the heartbeat of {beat.name}")
    return beat


def _path(name: str) -> str:
    return f"predictors/{name}.json"
