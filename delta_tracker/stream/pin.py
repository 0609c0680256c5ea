"""Pins: objects ``control/pins/{counter}.json`` with which an operator makes all predictors return to one version.

Counters are assigned without gaps, and objects are never overwritten. The pin with the highest counter applies.
"""

import json
import logging
import re
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from msgspec import convert

from delta_tracker.errors import MalformedError, StorageError
from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.parse import load_json
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)
PINS = "control/pins"
MAX_PIN_BYTES = 16 << 10
MAX_REASON = 1000
_MAX_PINS = 1 << 20
_RECHECK_SECONDS = 60.0  # between two looks for a pin whose entry was not read
_PIN_NAME = re.compile(PINS + r"/([0-9]{20})\.json")
_DELETIONS = "control/retention"
DELETIONS_NAME = re.compile(_DELETIONS + r"/[0-9a-f]{32}\.json")
# Age from which an announcement is that of an interrupted pass: a pass ends itself after half of this time.
DELETIONS_SECONDS = 3600.0
_reported: set[str] = set()  # malformed pins that were logged
_MAX_REPORTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Order to predictors that follow pins: return to a version and stay at it, or continue from a snapshot.

    FORMAT.md describes the fields. ``bad`` is the newest version when the pin was written. A release has the same
    ``bad`` as the pin that it ends.
    """

    counter: Count
    stream: Hex
    kind: Literal["pin", "release"]
    version: Count
    xxh3: Hex
    bad: Count
    reason: str
    time: Time

    def to_json(self) -> bytes:
        """Return the pin, encoded as JSON."""
        return json.dumps(asdict(self)).encode()


def pin_name(counter: int) -> str:
    """Return the name of the object that contains the pin with ``counter``."""
    return f"{PINS}/{counter:020d}.json"


def newest_counter(storage: Storage, *, after: int = 0) -> int:
    """Return the highest counter of a pin, or ``after`` if no pin has a higher counter. Does not list the store."""

    def is_there(counter: int) -> bool:
        if counter - after > _MAX_PINS:
            name = pin_name(after + _MAX_PINS)
            remedy = f"Request {storage.url.rstrip('/')}/{name}: a log-in page must become a 403 or 404"
            raise StorageError(storage.url, f"it has every object that is asked for, such as {name}", remedy)
        return storage.size(pin_name(counter)) is not None

    return last_present(is_there, after)


def last_present(is_there: Callable[[int], bool], after: int) -> int:
    """Return a number that is present and whose successor is missing, found by a search upwards from ``after``.

    Returns ``after`` if ``after + 1`` is missing. Calls ``is_there`` a logarithmic number of times.
    """
    present, step = after, 1
    while is_there(after + step):
        present, step = after + step, 2 * step
    return present + bisect_left(range(present + 1, after + step), True, key=lambda number: not is_there(number))


def free_counters(storage: Storage) -> list[int]:
    """Return the counters under which the next pin or release must be written, in ascending order.

    Write the order under each of them. The last one is the next counter. The others are gaps before forged pins: a
    reader at counter ``c`` probes ``c + 1``, ``c + 2``, ``c + 4`` and so on, and could stop at a gap.
    """
    names = map(_PIN_NAME.fullmatch, storage.names(PINS))
    taken = {int(match[1]) for match in names if match is not None}
    last = 0
    while found := [each for each in taken if last < each <= 2 * last + 2]:
        last = max(found)
    return [each for each in range(1, last + 2) if each not in taken]


def newest_pin(storage: Storage, *, after: int = 0) -> Pin | None:
    """Return the pin with the highest counter above ``after``; None if there is none. Does not list the store.

    Skips malformed pins, and logs each malformed pin once.
    """
    pins = (_read_pin(storage, counter) for counter in range(newest_counter(storage, after=after), after, -1))
    return next((pin for pin in pins if pin is not None), None)


def _read_pin(storage: Storage, counter: int) -> Pin | None:
    name = pin_name(counter)
    for each in dict.fromkeys((storage, storage.uncached)):  # the copy in a cache may be damaged
        try:
            data = each.read(name, max_bytes=MAX_PIN_BYTES)
            return None if data is None else _parsed(data.tobytes(), counter)
        except (ValueError, RecursionError, MalformedError) as error:
            text = f"url={storage.url} name={name} error={str(error)[:MAX_REASON]}"
    if text not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(text)
        _logger.warning("ignored malformed pin: %s", text)
    return None


def _parsed(data: bytes, counter: int) -> Pin:
    pin = convert(load_json(data), Pin)
    if pin.counter != counter:
        raise ValueError(f"its counter is {pin.counter}")
    if len(pin.reason) > MAX_REASON:
        raise ValueError(f"its reason has {len(pin.reason)} characters, more than {MAX_REASON}")
    if (pin.version <= pin.bad) != (pin.kind == "pin"):
        raise ValueError(f"a {pin.kind} of version {pin.version} contradicts its newest bad version {pin.bad}")
    return pin


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletions:
    """Announcement that a retention pass may delete versions below ``before``; see :func:`announce_deletions`."""

    stream: Hex
    before: Count
    time: Time  # of the host


def announce_deletions(storage: Storage, stream: str, before: int) -> str:
    """Write an announcement that versions of ``stream`` below ``before`` may be deleted. Return the object's name."""
    record = Deletions(stream=stream, before=before, time=time.time())
    name = f"{_DELETIONS}/{secrets.token_hex(16)}.json"
    storage.replace(name, json.dumps(asdict(record)).encode())
    return name


def has_deletions(storage: Storage) -> bool:
    """Return True if the store contains the announcement of a retention pass, which may be running or interrupted."""
    return bool(storage.names(_DELETIONS))


def running_deletions(storage: Storage, *, now: float) -> list[Deletions]:
    """Return the announcements of retention passes from the last hour. ``now`` is the store's Unix time in seconds."""
    found = []
    for stored in storage.objects(_DELETIONS):
        if DELETIONS_NAME.fullmatch(stored.name) is None or now - stored.modified > DELETIONS_SECONDS:
            continue
        data = storage.read(stored.name, max_bytes=MAX_PIN_BYTES)
        if data is None:
            continue  # the pass has ended since the listing
        try:
            found.append(convert(load_json(data.tobytes()), Deletions))
        except (ValueError, RecursionError) as error:
            remedy = "Delete it when no retention pass runs: no pass has written it"
            raise MalformedError(stored.name, str(error)[:MAX_REASON]).with_remedy(remedy) from error
    return found


class PinReader:
    """Reader that polls one url for the newest pin every ``seconds``, with a random jitter of 25 %.

    A pin is confirmed once its entry has been read. The counter of a stream's confirmed pin never decreases, even if
    the store is replaced by a store with fewer pins. An unconfirmed pin may be forged. The reader drops it if a read
    that bypasses caches does not find it, or if the store fails for a minute.
    """

    def __init__(self, seconds: float = 5.0, runtime: Runtime = REAL) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._newest: Pin | None = None
        self._confirmed: Pin | None = None  # the last one whose entry was read
        self._source: Storage | None = None  # store that had the newest pin
        self._recheck_at = 0.0  # monotonic time at which the newest pin is looked for again, unless it is confirmed
        self._drop: tuple[Pin, int] | None = None  # until pop_dropped()
        self._next: float | None = None  # monotonic time of the next look; None before the first one succeeded
        self._failing_since: float | None = None  # monotonic time of the first failed look; None after a success

    def order(self, storage: Storage, *, stream: str = "", at_once: bool = False) -> Pin | None:
        """Poll ``storage`` if a poll is due. Return the newest known pin; None before the first pin.

        ``stream`` is the stream of the reader's rows. If this stream's log has replaced the log of another stream, the
        counters may restart at 1. With ``at_once``, polls immediately and bypasses caches.
        """
        now = self._runtime.monotonic()
        if self._next is not None and now < self._next and not at_once:
            return self._newest
        try:
            self._read(storage, stream, now, past_caches=at_once)
        except StorageError as error:
            if self._next is None:
                raise
            self._fail(error, now)
        else:
            if self._failing_since is not None:
                _logger.warning("pins can be read again: url=%s", storage.url)
            self._failing_since = None
        self._next = now + self._seconds * self._runtime.uniform(0.75, 1.25)
        return self._newest

    def confirm(self, pin: Pin) -> None:
        """Confirm ``pin``. Call this method once the entry that the pin names was read and has the expected hash."""
        if pin == self._newest:
            self._confirmed = pin

    def recheck(self, pin: Pin) -> None:
        """Make the next poll read ``pin`` again. Call this method if the pin's entry is missing or has another hash."""
        if pin == self._newest:
            self._recheck_at = 0.0

    def pop_dropped(self) -> tuple[Pin, int] | None:
        """Return the pin dropped since the last call and the highest valid counter; None if no pin was dropped."""
        drop, self._drop = self._drop, None
        return drop

    def _read(self, storage: Storage, stream: str, now: float, *, past_caches: bool) -> None:
        newest = self._newest
        found = newest_pin(storage.uncached if past_caches else storage, after=0 if newest is None else newest.counter)
        if found is None and newest is not None and stream not in ("", newest.stream):
            # The store may contain another log, without the pin ``newest``, and with a pin of ``stream``.
            other = newest_pin(storage, after=newest.counter - 1) or newest_pin(storage.uncached)
            if other is not None and other.stream == stream:
                found, self._confirmed = other, None
        is_due_again = newest != self._confirmed and storage is self._source and now >= self._recheck_at
        if found is not None:
            self._newest, self._source = found, storage
        elif newest is not None and is_due_again:
            after = 0 if self._confirmed is None else self._confirmed.counter
            self._replace(newest, newest_pin(storage.uncached, after=after) or self._confirmed)
        else:
            return
        self._recheck_at = now + _RECHECK_SECONDS

    def _fail(self, error: StorageError, now: float) -> None:
        if self._failing_since is None:
            self._failing_since = now
            _logger.warning("pins cannot be read, and the last one that was read applies: error=%s", error)
        newest = self._newest
        if newest is not None and newest != self._confirmed and now - self._failing_since >= _RECHECK_SECONDS:
            text = "ignored an unconfirmed pin of a store that fails: counter=%d version=%d"
            _logger.warning(text, newest.counter, newest.version)
            self._replace(newest, self._confirmed)

    def _replace(self, former: Pin, newest: Pin | None) -> None:
        self._newest, counter = newest, 0 if newest is None else newest.counter
        if newest != former and counter <= former.counter:
            self._drop = former, min(counter, former.counter - 1)
