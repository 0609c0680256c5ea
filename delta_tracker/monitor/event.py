"""One event: something that happened once, with a name, a message, flat data and a severity."""

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
from delta_tracker.monitor.names import check_name

Value = str | int | float | bool
"""What an event's data may hold; nothing nested, so that every sink can carry it."""

_RANK_BITS, _COUNT_BITS = 16, 48


class Severity(IntEnum):
    """How bad it is; the numbers are those of :mod:`logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


class Phase(StrEnum):
    """What part of a span an event is."""

    INSTANT = "instant"
    """None: it has no duration."""
    BEGIN = "begin"
    """The span begins. One that never ends is where a rank hangs."""
    END = "end"
    """The span ended; ``data["seconds"]`` says how long it took."""


class _Ids:
    """Numbers of 64 bits: 16 of the rank, which are random where there is none, and 48 that count from a random start.

    So two ranks never share one, and two lives of a rank do with a chance of events / 2**48.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new life, as a forked process does."""
        rank = os.environ.get("RANK", "")
        self._high = int(rank) % 2**_RANK_BITS if rank.isdecimal() else secrets.randbits(_RANK_BITS)
        self._counts = itertools.count(secrets.randbits(_COUNT_BITS))

    def next(self) -> int:
        """A new one, never 0."""
        low = next(self._counts) % 2**_COUNT_BITS
        return (self._high << _COUNT_BITS | low) or self.next()


_ids: list[_Ids] = []


def new_id() -> int:
    """A 64-bit number that no other event or span of any rank has."""
    if not _ids:
        _ids.append(_Ids())  # here, not at import: the rank may be set after that
    return _ids[0].next()


def renew_ids() -> None:
    """Draw a new start, for a process that was forked."""
    _ids.clear()


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Where an event stands: the span it is in, and the trace that the span belongs to."""

    span: int
    trace: int


CURRENT_SPAN: contextvars.ContextVar[SpanContext | None] = contextvars.ContextVar("CURRENT_SPAN", default=None)


def _current(part: str) -> int:
    context = CURRENT_SPAN.get()
    return 0 if context is None else int(getattr(context, part))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. Everything but the name is filled in, and everything can be set.

    Args:
        name: what kind of thing, with dots for namespaces, such as ``training.epoch.end``.
        message: a sentence for people.
        data: name to str, int, float or bool.
        severity: how bad it is.
        time_ns: when, nanoseconds since the epoch.
        monotonic_ns: when, on this machine's monotonic clock, for differences.
        id: 64 bits, unique over ranks.
        span: the id of the span it happened in or is a part of, 0 for none.
        parent: the id of the span around that, 0 for none.
        trace: the id that belongs to all spans of one cause, 0 for none.
        phase: which part of a span it is.

    Raises:
        InvalidArgumentError: for a malformed name, an unknown severity, or data that is not flat.
    """

    name: str
    message: str = ""
    data: Mapping[str, Value] = field(default_factory=dict)
    severity: Severity = Severity.INFO
    time_ns: int = field(default_factory=lambda: time.time_ns())  # noqa: PLW0108  looked up when it is called
    monotonic_ns: int = field(default_factory=lambda: time.monotonic_ns())  # noqa: PLW0108
    id: int = field(default_factory=new_id)
    span: int = field(default_factory=lambda: _current("span"))
    parent: int = 0
    trace: int = field(default_factory=lambda: _current("trace"))
    phase: Phase = Phase.INSTANT

    def __post_init__(self) -> None:
        check_name("name", self.name)
        for key, value in self.data.items():
            if type(key) is not str or type(value) not in (str, int, float, bool):
                raise InvalidArgumentError("data", {key: value}, "Keys are str; values are str, int, float or bool")
        object.__setattr__(self, "data", MappingProxyType(dict(self.data)))
        try:
            object.__setattr__(self, "severity", Severity(self.severity))
        except ValueError:
            known = [each.name for each in Severity]
            raise InvalidArgumentError("severity", self.severity, f"Pass one of {known}") from None


def json_value(value: Value) -> Value:
    """``value`` as JSON can hold it: a float that is not finite becomes text.

    Example:
        >>> json_value(float("nan")), json_value(1.5)
        ('nan', 1.5)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
