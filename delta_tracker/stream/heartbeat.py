"""Heartbeats: what predictors leave beside a stream, so that people see who follows it and how far behind.

``predictors/{name}.json`` is a JSON object with the fields of :class:`Heartbeat`. It is replaced every few seconds,
says nothing that a stream depends on, and may be missing, old or forged.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
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

    name: str
    time: float
    stream: str | None
    version: int | None
    lag_versions: int | None
    lag_seconds: float | None
    resyncs: int
    error: str | None


def check_name(name: object) -> None:
    """Refuse what is no name for a heartbeat.

    Raises:
        InvalidArgumentError: if it is none.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
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
                found.append(_parse(path, json.loads(data.tobytes())))
        except StorageError:
            raise
        except (MalformedError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _logger.warning("%s is no heartbeat: %s", path, str(error)[:_MAX_TEXT])
    return found


def _parse(path: str, entry: Any) -> Heartbeat:  # noqa: ANN401  untrusted JSON
    beat = Heartbeat(
        name=_checked(entry["name"], lambda value: isinstance(value, str) and path == _path(value)),
        time=_checked(entry["time"], _is_time),
        stream=_checked(entry["stream"], lambda value: value is None or (isinstance(value, str) and len(value) == 32)),  # noqa: PLR2004  hex digits
        version=_checked(entry["version"], lambda value: value is None or _is_count(value)),
        lag_versions=_checked(entry["lag_versions"], lambda value: value is None or _is_count(value)),
        lag_seconds=_checked(entry["lag_seconds"], lambda value: value is None or _is_time(value)),
        resyncs=_checked(entry["resyncs"], _is_count),
        error=_checked(entry["error"], lambda value: value is None or isinstance(value, str)),
    )
    check_name(beat.name)
    return beat


def _path(name: str) -> str:
    return f"predictors/{name}.json"


def _checked(value: Any, is_good: Callable[[Any], bool]) -> Any:  # noqa: ANN401  untrusted JSON
    if not is_good(value):
        raise ValueError(f"unexpected value {str(value)[:_MAX_TEXT]!r}")
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**53  # type: ignore[operator]
