"""Events and spans. A span emits an event when a section of the program starts and another when it ends."""

import contextvars
import hashlib
import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cache
from types import MappingProxyType
from typing import Self

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.clock import NS, Clock
from delta_tracker.monitor.names import check_stat_name, encodable

_logger = logging.getLogger(__name__)
Value = str | int | float | bool
"""Type of the values in an event's data. Nested values are not supported, because some sinks cannot export them."""

_RANK_BITS, _COUNT_BITS = 16, 48
_TRACE_BITS = 128
_IDS, _TRACES = 2**64, 2**_TRACE_BITS
_NO_RUN_IDS = frozenset({"", "none"})  # "none" is torchrun's default


class Severity(IntEnum):
    """Severity of an event. The values equal the levels of :mod:`logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


class Phase(StrEnum):
    """Role of an event: the start of a span, the end of a span, or neither. A span is a timed program section."""

    INSTANT = "instant"
    """Event that neither starts nor ends a span."""
    BEGIN = "begin"
    """Start of a span. If a rank hangs in a span, the span has no end event."""
    END = "end"
    """End of a span; ``data["seconds"]`` is its duration."""


@cache  # not at import, because RANK may be set later
def _ids() -> Iterator[int]:
    """Return an iterator over nonzero 64-bit ids. Threads may share the iterator.

    The high 16 bits are the rank from the environment variable ``RANK``, or a random number if the variable is not
    set. The low 48 bits are a counter with a random start. Ids of different ranks below 65536 never collide. The
    probability that two processes of the same rank use a common id is about (number of ids) / 2**48.
    """
    rank = os.environ.get("RANK", "")
    high = int(rank) % 2**_RANK_BITS if rank.isdecimal() else secrets.randbits(_RANK_BITS)
    counts = itertools.count(secrets.randbits(_COUNT_BITS))
    # Two threads cannot run one generator.
    return filter(None, map(lambda count: high << _COUNT_BITS | count % 2**_COUNT_BITS, counts))  # noqa: C417


def new_id() -> int:
    """Return a new 64-bit id for an event or span, unique across ranks."""
    return next(_ids())


def new_trace() -> int:
    """Return a random nonzero 128-bit id for a trace."""
    return secrets.randbits(_TRACE_BITS) or new_trace()


def renew_ids() -> None:
    """Restart the counter of event and span ids at a new random number. Called in a forked child."""
    _ids.cache_clear()


CURRENT_SPAN: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("CURRENT_SPAN", default=(0, 0))
"""Id of the current span and id of the trace that contains it. Both are 0 outside a span."""


@dataclass(frozen=True, slots=True)
class Event:
    """Named event with a message, data, a severity and a time.

    Surrogate characters in the message and in the data are replaced by escape sequences.

    Args:
        name: type of the event; dots separate namespaces, as in ``training.epoch.end``.
        message: human-readable description.
        data: values by name, each a str, int, float or bool.
        severity: severity of the event.
        time_ns: wall-clock time, nanoseconds since the epoch.
        monotonic_ns: time of the host's monotonic clock in nanoseconds. Use it to compute durations.
        id: 64-bit id, unique across ranks.
        span: id of the span that the event starts, ends or belongs to; 0 outside a span.
        parent: id of the parent span; 0 if there is none.
        trace: 128-bit id of the trace, which is a group of related spans; 0 outside a span.
        phase: role of the event: the start of ``span``, the end of ``span``, or neither.

    Raises:
        InvalidArgumentError: if ``name``, ``severity``, ``data`` or an id is invalid, or if ``span`` or ``trace`` is 0
            for an event that starts or ends a span.
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
        check_stat_name("name", self.name)
        low = 0 if self.phase is Phase.INSTANT else 1
        for name, number, end, least in (
            ("id", self.id, _IDS, 0),
            ("span", self.span, _IDS, low),
            ("parent", self.parent, _IDS, 0),
            ("trace", self.trace, _TRACES, low),
        ):
            if type(number) is not int or not least <= number < end:
                raise InvalidArgumentError(name, number, f"Pass an int from {least} to {end - 1}")
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


def json_value(value: Value) -> Value:
    """Convert ``value`` to a value that JSON can represent. NaN and infinity become strings.

    Example:
        >>> json_value(float("nan")), json_value(1.5)
        ('nan', 1.5)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def trace_of(run_id: str, number: int) -> int:
    """Return a nonzero 128-bit id for a trace, computed from the id of a training run and a number.

    All ranks that pass the same arguments get the same id.

    Args:
        run_id: id of the training run.
        number: any integer, such as the step.
    """
    digest = hashlib.blake2b(f"{run_id}\0{number}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") or 1


def launched_run_id() -> str:
    """Return the id of the training run from ``TORCHELASTIC_RUN_ID`` or ``SLURM_JOB_ID``.

    If neither environment variable is set, return a random id, and warn if there are several ranks.
    """
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        found = os.environ.get(name, "")
        if found not in _NO_RUN_IDS:
            return found
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _logger.warning("monitor: spans do not share traces between ranks. Pass run_id to monitor.start()")
    return f"{new_trace():032x}"


@dataclass(slots=True, eq=False, repr=False)
class Span:
    """Timed section of the program that emits an event when it starts and another when it ends.

    Created by :meth:`~delta_tracker.monitor.monitor.Monitor.span`. Use the span in a ``with`` statement, or call
    :meth:`start` and :meth:`stop`. Events emitted inside the span store its id in :attr:`Event.span`. The parent is the
    enclosing span of the same thread or task. If the body of the ``with`` statement raises an exception, the end event
    has severity ERROR, and ``data["error"]`` is the name of the exception's type.

    Args:
        severity: severity of both events.
        trace: 128-bit id of the trace, see :func:`trace_of`. None to use the trace of the parent, or a new random trace
            if there is no parent.
    """

    _emit: Callable[[Event], None]
    _clock: Clock
    _name: str
    _data: Mapping[str, Value]
    _severity: Severity
    _trace: int | None
    _token: contextvars.Token[tuple[int, int]] | None = field(default=None, init=False)
    _parent: int = field(default=0, init=False)
    _begin_ns: int = field(default=0, init=False)
    id: int = field(default=0, init=False)

    def start(self) -> Self:
        """Emit the begin event, make this span the current span, and return this span."""
        self.id = new_id()
        self._parent, trace = CURRENT_SPAN.get()
        if self._trace is None:
            self._trace = trace or new_trace()
        self._token = CURRENT_SPAN.set((self.id, self._trace))
        self._begin_ns = self._clock.monotonic_ns()
        self._emit(self._event(Phase.BEGIN, self._severity, self._begin_ns, self._data))
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Emit the end event, and make the span that was current before :meth:`start` the current span again.

        Call it in the thread or task that called :meth:`start`. No-op if the span is already stopped. ``error`` is the
        exception that ended the span; None if the span ended normally.
        """
        if self._token is None:
            return
        CURRENT_SPAN.reset(self._token)
        self._token = None
        now = self._clock.monotonic_ns()
        data: dict[str, Value] = {**self._data, "seconds": (now - self._begin_ns) * NS}
        severity = self._severity
        if error is not None:
            data["error"] = type(error).__name__
            severity = Severity.ERROR
        self._emit(self._event(Phase.END, severity, now, data))

    def _event(self, phase: Phase, severity: Severity, now_ns: int, data: Mapping[str, Value]) -> Event:
        assert self._trace is not None, "set by start()"
        return Event(
            self._name,
            data=data,
            severity=severity,
            time_ns=self._clock.time_ns(),
            monotonic_ns=now_ns,
            span=self.id,
            parent=self._parent,
            trace=self._trace,
            phase=phase,
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop(error)
