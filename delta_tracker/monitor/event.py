"""Events with a name, a message, flat data and a severity."""

from __future__ import annotations

import contextvars
import itertools
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.names import check_name, encodable

Value = str | int | float | bool
"""Value in an event's data. Nested values are not supported, so that every sink can export the data."""

_RANK_BITS, _COUNT_BITS = 16, 48
_TRACE_BITS = 128
_IDS, _TRACES = 2**64, 2**_TRACE_BITS


class Severity(IntEnum):
    """Severity of an event. The values equal the levels of :mod:`logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


class Phase(StrEnum):
    """Relation of an event to a span. A span is a timed section of the program."""

    INSTANT = "instant"
    """Event without a duration."""
    BEGIN = "begin"
    """Start of a span. If a rank hangs in a span, the span has no end event."""
    END = "end"
    """End of a span; ``data["seconds"]`` is its duration."""


class _Ids:
    """Generator of 64-bit ids.

    The high 16 bits are the rank from the environment variable ``RANK``, or a random number if the variable is not
    set. The low 48 bits are a counter with a random start. Ids of different ranks below 65536 never collide. Ids of two
    processes of the same rank collide with a probability of about (number of ids) / 2**48.
    """

    def __init__(self) -> None:
        rank = os.environ.get("RANK", "")
        self._high = int(rank) % 2**_RANK_BITS if rank.isdecimal() else secrets.randbits(_RANK_BITS)
        self._counts = itertools.count(secrets.randbits(_COUNT_BITS))

    def next(self) -> int:
        """Return a new id, never 0."""
        low = next(self._counts) % 2**_COUNT_BITS
        return (self._high << _COUNT_BITS | low) or self.next()


_ids: list[_Ids] = []


def new_id() -> int:
    """Return a new 64-bit id for an event or span, unique across ranks."""
    if not _ids:
        _ids.append(_Ids())  # not at import, because RANK may be set later
    return _ids[0].next()


def new_trace() -> int:
    """Return a random 128-bit id for a trace, never 0."""
    return secrets.randbits(_TRACE_BITS) or new_trace()


def renew_ids() -> None:
    """Make later ids continue from a new random number. Called in a forked child."""
    _ids.clear()


CURRENT_SPAN: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("CURRENT_SPAN", default=(0, 0))
"""Ids of the current span and of its trace, which is a group of related spans; 0 outside of spans."""


@dataclass(frozen=True, slots=True)
class Event:
    """Named occurrence with a message, data and a time. Surrogates in texts are replaced by escape sequences.

    Args:
        name: type of the event; dots separate namespaces, as in ``training.epoch.end``.
        message: description for humans.
        data: str, int, float or bool values by name.
        severity: severity of the event.
        time_ns: wall-clock time, nanoseconds since the epoch.
        monotonic_ns: time on this machine's monotonic clock in nanoseconds, to compute durations.
        id: 64-bit id, unique across ranks.
        span: id of the span that contains the event, or that the event begins or ends; 0 outside of spans.
        parent: id of the parent span; 0 if there is none.
        trace: 128-bit id shared by all related spans and their events; 0 outside of spans.
        phase: relation of the event to ``span``.

    Raises:
        InvalidArgumentError: for an invalid name, an unknown severity, data that is not flat, an id that has too many
            bits, or a beginning or ending span whose ``span`` or ``trace`` is 0.
    """

    name: str
    message: str = ""
    data: Mapping[str, Value] = field(default_factory=dict)
    severity: Severity = Severity.INFO
    time_ns: int = field(default_factory=lambda: time.time_ns())  # noqa: PLW0108  the function is looked up at each call
    monotonic_ns: int = field(default_factory=lambda: time.monotonic_ns())  # noqa: PLW0108
    id: int = field(default_factory=new_id)
    span: int = field(default_factory=lambda: CURRENT_SPAN.get()[0])
    parent: int = 0
    trace: int = field(default_factory=lambda: CURRENT_SPAN.get()[1])
    phase: Phase = Phase.INSTANT

    def __post_init__(self) -> None:
        check_name("name", self.name)
        self._check_ids()
        for key, value in self.data.items():
            if type(key) is not str or type(value) not in (str, int, float, bool):
                raise InvalidArgumentError("data", {key: value}, "Use str keys and str, int, float or bool values")
        data = {encodable(key): encodable(each) if isinstance(each, str) else each for key, each in self.data.items()}
        object.__setattr__(self, "data", MappingProxyType(data))
        object.__setattr__(self, "message", encodable(str(self.message)))
        try:
            object.__setattr__(self, "severity", Severity(self.severity))
        except ValueError:
            known = [each.name for each in Severity]
            raise InvalidArgumentError("severity", self.severity, f"Pass one of {known}") from None

    def _check_ids(self) -> None:
        low = 0 if self.phase is Phase.INSTANT else 1
        for name, number, end, least in (
            ("id", self.id, _IDS, 0),
            ("span", self.span, _IDS, low),
            ("parent", self.parent, _IDS, 0),
            ("trace", self.trace, _TRACES, low),
        ):
            if type(number) is not int or not least <= number < end:
                raise InvalidArgumentError(name, number, f"Pass an int from {least} to {end - 1}")


def json_value(value: Value) -> Value:
    """Return ``value`` as a JSON value. A float that is not finite is returned as a string.

    Example:
        >>> json_value(float("nan")), json_value(1.5)
        ('nan', 1.5)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
