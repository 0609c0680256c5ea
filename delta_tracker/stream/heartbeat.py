"""Heartbeats: objects that predictors and publishers write to the stream's store to show their state.

``predictors/{name}.json`` is a JSON object with the fields of :class:`Heartbeat`, replaced every few seconds. The
stream does not depend on heartbeats, which may be missing, old or forged. Retention deletes them after a day.
"""

import json
import logging
import re
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_args

from msgspec import Meta, convert

from delta_tracker.errors import InvalidArgumentError, StorageError
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.parse import load_json
from delta_tracker.stream.pin import Pin
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import StoredObject, Transfer
from delta_tracker.stream.store_clock import StoreClock

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_NAME = r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z"
GONE_SECONDS = 3600.0  # age of a heartbeat from which the predictor is not shown
BEAT_SECONDS = 5.0  # between two heartbeats of a process, unless a publisher sets another time
_MAX_BYTES = 16 << 10
_MAX_TEXT, _MAX_STEP = 1000, 400  # characters
_MAX_HOST = 253
_NUM_READERS = 32  # threads that read heartbeats from a remote store
_WINDOW = 10  # heartbeats in a window
_BEATS_PER_LOOK = 12  # heartbeats between two looks for another process of the same name
_MAX_PAUSE_SECONDS = 300.0
_PIN_SECONDS = 10.0  # predictors look for pins every 6.25 seconds or more often
_MIN_LOOKS = 3

_Fault = Literal["failing", "stuck", "silent", "elsewhere", "unpinned", "behind"]
State = Literal[_Fault, "waiting", "pinned", "applying", "current", "stopped"]
STATES: tuple[State, ...] = get_args(State)
"""All states of a predictor, the worst state first."""
Look = tuple[Time, Count | None, Count | None]
"""One heartbeat in a window: age in seconds (predictor's monotonic clock), version, and lag in versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of a predictor at a point in time. The predictor writes it to the stream's store as JSON."""

    # name of the predictor: a letter or digit, then up to 63 letters, digits, underscores and hyphens
    name: Annotated[str, Meta(pattern=_NAME)]
    # Unix time of the predictor's host, in seconds. The heartbeat's age is computed from its modification time in the
    # store instead.
    time: Time
    stream: Hex | None  # id of the stream, None before the first version
    version: Count | None  # last applied version, None before the first
    lag_versions: Count | None  # number of committed versions not yet applied, None if unknown
    lag_seconds: Time | None  # age of the oldest version not yet applied, None if unknown
    resyncs: Count  # number of resyncs since the predictor's start
    error: str | None  # error that currently delays the predictor, None if there is none
    # distance that a canary keeps from the newest version, in versions or in seconds; None if it keeps none
    canary_versions: Count | None = None
    canary_seconds: Time | None = None
    pin: Count = 0  # counter of the last pin that the predictor has followed, 0 if none
    # name of the predictor's host, cut to 253 characters; empty in heartbeats of standbys
    host: Annotated[str, Meta(max_length=_MAX_HOST)] = ""
    seconds: Time = BEAT_SECONDS  # time between two heartbeats; 0 if none follows, because the predictor was stopped
    # the last ten heartbeats, oldest first, this one included
    window: Annotated[tuple[Look, ...], Meta(max_length=16)] = ()
    # last decision of the predictor and its reason, see `Status`; empty in heartbeats of standbys
    why: Annotated[str, Meta(max_length=_MAX_TEXT)] = ""
    # what to do about the error; empty without one, for an error that is not of this library, and for standbys
    next_step: Annotated[str, Meta(max_length=_MAX_STEP)] = ""
    # what of the model differs from the stream, see `Status`; empty if nothing does
    differences: Annotated[str, Meta(max_length=_MAX_TEXT)] = ""


def check_predictor_name(name: object) -> None:
    """Raise InvalidArgumentError unless ``name`` is a valid name of a predictor."""
    if not isinstance(name, str) or re.search(_NAME, name) is None:
        raise InvalidArgumentError("name", name, "Use up to 64 letters, digits, underscores and hyphens")


def write_heartbeat(storage: Storage, beat: Heartbeat) -> None:
    """Write a heartbeat, replacing an earlier one of the same name. Truncates long texts."""
    error = None if beat.error is None else beat.error[:_MAX_TEXT]
    fields = asdict(beat) | {"error": error, "why": beat.why[:_MAX_TEXT], "next_step": beat.next_step[:_MAX_STEP]}
    fields["differences"] = beat.differences[:_MAX_TEXT]
    storage.replace(heartbeat_path(beat.name), json.dumps(fields).encode())  # texts may have surrogates


@dataclass(slots=True)
class _Target:
    storage: Storage
    due: float = 0.0
    pause: float = 0.0  # seconds from the last failure to the next heartbeat, 0 after a success
    last: float = 0.0  # time of the last heartbeat that was written
    num_written: int = 0


class HeartbeatWriter:
    """Writer of one predictor's heartbeats. Call :meth:`write` whenever :meth:`is_due` returns True.

    A heartbeat is due every five seconds. Each failure doubles this interval, up to five minutes. Errors of the store
    are not raised. The first of several failures and the recovery are logged, except before the first version.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        check_predictor_name(name)
        self._target = _Target(storage)
        self._name = name
        self._looks: deque[tuple[float, int | None, int | None]] = deque(maxlen=_WINDOW)  # with monotonic times
        self._is_alone = True  # False once another process with the name was logged

    def is_due(self) -> bool:
        """Return True if it is time for the next heartbeat."""
        return time.monotonic() >= self._target.due

    def move_to(self, storage: Storage) -> None:
        """Write later heartbeats to ``storage``. The next heartbeat is due immediately, even after failures."""
        self._target = _Target(storage)  # a heartbeat that another thread is writing delays only its own target

    def write(self, **fields: Any) -> None:  # noqa: ANN401  fields of a Heartbeat
        """Write a heartbeat. No-op if the store is a local directory without a log.

        ``fields`` are the fields of :class:`Heartbeat`, except ``name``, ``time``, ``host`` and ``window``.
        """
        target, now = self._target, time.monotonic()
        target.due = now + BEAT_SECONDS
        self._looks.append((now, fields["version"], fields["lag_versions"]))
        window = tuple((now - then, version, lag) for then, version, lag in self._looks)
        try:
            if not target.storage.has_directory("log"):
                return
            target.storage = target.storage.reopened()
            self._check_alone(target)
            own: dict[str, Any] = {"host": socket.gethostname()[:_MAX_HOST], "window": window}
            beat = Heartbeat(name=self._name, time=time.time(), **(own | fields))
            write_heartbeat(target.storage, beat)
            target.last, target.num_written = beat.time, target.num_written + 1
        except StorageError as error:
            if fields["stream"] is None:
                return  # a predictor may start before the stream's directory exists
            if not target.pause:
                _logger.warning("could not write the predictor's heartbeat: %s", error)
            target.pause = min(2 * (target.pause or BEAT_SECONDS), _MAX_PAUSE_SECONDS)
            target.due = time.monotonic() + target.pause
        else:
            if target.pause:
                _logger.warning("the predictor's heartbeat is written again: name=%s", self._name)
            target.pause = 0.0

    def _check_alone(self, target: _Target) -> None:
        """Log once if another process writes heartbeats with the same name. Checks before every twelfth heartbeat."""
        if not self._is_alone or target.num_written % _BEATS_PER_LOOK != 1:
            return
        found = read_record(target.storage, heartbeat_path(self._name), "heartbeat", Heartbeat)
        if found is not None and found.time != target.last:
            self._is_alone = False
            text = "another process, on host %s, writes heartbeats of the name %s: give each predictor its own name"
            _logger.warning(text, found.host, self._name)


@dataclass(frozen=True, slots=True)
class SeenHeartbeat:
    """Heartbeat read from a store, with the Unix time at which it was written according to the store's clock."""

    beat: Heartbeat
    modified: float

    @property
    def skew(self) -> float:
        """Predictor's clock minus the store's clock when the heartbeat was written, in seconds."""
        return self.beat.time - self.modified


def see_heartbeats(
    storage: Storage, clock: StoreClock, *, max_age: float = float("inf"), limit: int | None = None
) -> tuple[list[SeenHeartbeat], int]:
    """Return the heartbeats of a stream's predictors, sorted by object name, and the number of omitted heartbeats.

    Omits heartbeats that are older than ``max_age`` seconds, measured with the store's clock, and all but the ``limit``
    newest. Updates ``clock`` with the modification times of all heartbeats. Logs and skips malformed heartbeats.
    """
    began = clock.reader_time()
    listed = storage.objects("predictors")
    clock.observe("predictors", (stored.modified for stored in listed), began=began)
    now = clock.now()
    young = sorted((each for each in listed if now - each.modified <= max_age), key=lambda each: -each.modified)
    wanted = sorted(young[:limit], key=lambda each: each.name)
    if storage.is_remote and len(wanted) > 1:
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            found = list(pool.map(lambda each: _seen(storage, each), wanted))
    else:
        found = [_seen(storage, each) for each in wanted]
    return [seen for seen in found if seen is not None], len(listed) - len(wanted)


def _seen(storage: Storage, stored: StoredObject) -> SeenHeartbeat | None:
    beat = read_record(storage, stored.name, "heartbeat", Heartbeat)
    if beat is not None and heartbeat_path(beat.name) != stored.name:
        _logger.warning("ignored malformed heartbeat: name=%s error=it is that of %s", stored.name, beat.name)
        return None
    return None if beat is None else SeenHeartbeat(beat, stored.modified)


def read_record(storage: Storage, name: str, what: str, kind: type[_T], response: Transfer | None = None) -> _T | None:
    """Return the small JSON object ``name``, converted to ``kind``; None if it is missing or malformed.

    Logs a warning about a malformed object, which calls it ``what``. Sets the modification time in ``response``.
    """
    try:
        data = storage.read(name, max_bytes=_MAX_BYTES, transfer=response)
        return None if data is None else convert(load_json(data.tobytes()), kind)
    except (ValueError, RecursionError) as error:
        _logger.warning("ignored malformed %s: name=%s error=%s", what, name, str(error)[:_MAX_TEXT])
        return None


def heartbeat_path(name: str) -> str:
    """Return the name of the object that contains a predictor's heartbeat."""
    return f"predictors/{name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherHeartbeat:
    """State of a publisher built with ``recovery``, stored as the JSON object ``publishers/{generation}.json``.

    Rank 0 of the publisher's job replaces the object every few seconds.
    """

    stream: Hex  # id of the stream
    generation: Count  # generation of the claim
    writer: Hex  # id of the claim
    version: Count  # newest entry of the publisher
    seconds: Time  # time between two heartbeats; 0 if none follows until a publisher is built
    time: Time  # Unix time of the publisher's host, in seconds, see `Heartbeat`


def see_publisher(storage: Storage, head: Manifest) -> tuple[PublisherHeartbeat, float | None] | None:
    """Return the last heartbeat of the publisher of ``head`` and its modification time; None without a heartbeat.

    The modification time is in Unix seconds according to the store's clock, or None if the store does not report it.
    """
    name, response = _publisher_path(head.generation), Transfer()
    beat = read_record(storage, name, "heartbeat", PublisherHeartbeat, response)
    if beat is None or (beat.stream, beat.generation, beat.writer) != (head.stream, head.generation, head.writer):
        return None
    return beat, response.modified


class PublisherHeartbeatWriter:
    """Writer of a publisher's heartbeats. Unlike :class:`HeartbeatWriter`, it does not back off after failures."""

    def __init__(self, storage: Storage, seconds: float = BEAT_SECONDS) -> None:
        self._storage = storage
        self._seconds = seconds
        self._next = time.monotonic() + seconds  # the claim is a sign of life
        self._fails = False

    def is_due(self) -> bool:
        """Return True if it is time for the next heartbeat."""
        return time.monotonic() >= self._next

    def write(self, head: Manifest) -> None:
        """Write a heartbeat. ``head`` is the newest entry of the publisher."""
        self._next = time.monotonic() + self._seconds
        beat = PublisherHeartbeat(
            stream=head.stream,
            generation=head.generation,
            writer=head.writer,
            version=head.version,
            seconds=self._seconds,
            time=time.time(),
        )
        try:
            self._storage.replace(_publisher_path(beat.generation), json.dumps(asdict(beat)).encode())
        except StorageError as error:
            if not self._fails:
                _logger.warning("could not write the publisher's heartbeat: %s", error)
            self._fails = True
        else:
            if self._fails:
                _logger.warning("the publisher's heartbeat is written again: generation=%d", head.generation)
            self._fails = False


def _publisher_path(generation: int) -> str:
    return f"publishers/{generation:020d}.json"


def predictor_state(beat: Heartbeat, seconds_since: float, head: Manifest, *, order: Pin | None = None) -> State:
    """Return the state of a predictor. ``guide/fleet.md`` defines the states.

    ``beat`` is the predictor's last heartbeat, and ``seconds_since`` is its age in seconds according to the store's
    clock. ``head`` is the newest entry of the stream. ``order`` is the newest pin or release, or None.
    """
    span = max((age for age, _, _ in beat.window), default=0.0)
    if not beat.seconds or seconds_since > max(3 * beat.seconds, span):
        return "silent" if beat.seconds else "stopped"
    if beat.stream is not None and beat.stream != head.stream:
        return "elsewhere"
    if order is not None and order.stream == head.stream:
        if order.kind == "pin" and beat.pin == order.counter:
            return "pinned"
        if order.kind == "pin" and _is_above(order, beat):
            return "unpinned"
        if order.kind == "release" and _waits_after(order, beat, head):
            return "waiting"
    return "applying" if len(beat.window) < _MIN_LOOKS else _progress(beat, head)


def _is_above(pin: Pin, beat: Heartbeat) -> bool:
    """Return True if a predictor has been above ``pin.bad`` for longer than a reader needs to find the pin."""
    return any(age >= _PIN_SECONDS and version is not None and version > pin.bad for age, version, _ in beat.window)


def _waits_after(release: Pin, beat: Heartbeat, head: Manifest) -> bool:
    """Return True if a canary waits at its version because it may not apply the snapshot of ``release`` yet."""
    if not _is_canary(beat) or beat.error is not None or beat.version is None or beat.pin >= release.counter:
        return False
    if beat.version >= release.version or len({version for _, version, _ in beat.window}) > 1:
        return False  # it moves: it is above the release, or does not follow pins
    if beat.canary_seconds is not None:
        return head.created < release.time + beat.canary_seconds  # the snapshot is older than its release
    return head.version < release.version + (beat.canary_versions or 0)


def _progress(beat: Heartbeat, head: Manifest) -> State:
    if beat.version == head.version:
        return "current"  # an error, such as that of one poll, delays nothing
    has_moved = len({version for _, version, _ in beat.window}) > 1
    lags = [lag for _, _, lag in beat.window]
    known = [lag for lag in lags if lag is not None]
    if beat.error is not None and not has_moved:
        return "failing"
    if 0 in lags or (has_moved and known and min(known) <= (beat.canary_versions or 0)):
        return "current"
    if _is_canary(beat) and not has_moved and known and known[-1] <= known[0]:
        return "current"  # no version came, so the canary had none to apply
    if len(known) == len(lags) and not has_moved:
        return "stuck"
    falls = len(known) < len(lags) or any(later < earlier for earlier, later in pairwise(known))
    return "applying" if falls else "behind"


def _is_canary(beat: Heartbeat) -> bool:
    return beat.canary_versions is not None or beat.canary_seconds is not None
