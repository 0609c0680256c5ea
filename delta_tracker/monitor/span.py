"""Spans: named ranges of time. A span can be nested in a parent span."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from contextvars import Token
from types import TracebackType
from typing import Self

from delta_tracker.monitor.clock import Clock
from delta_tracker.monitor.event import CURRENT_SPAN, Event, Phase, Severity, Value, new_id, new_trace

_NS = 1e-9
_NO_RUN_IDS = frozenset({"", "none"})  # "none" is torchrun's default

_logger = logging.getLogger(__name__)


def trace_of(run_id: str, number: int) -> int:
    """Return the 128-bit id, never 0, of the trace with a given number in a training run.

    The ids are equal on all ranks of a run, and differ between runs.

    Args:
        run_id: identifier of the training run.
        number: any integer, such as the step.
    """
    digest = hashlib.blake2b(f"{run_id}\0{number}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") or 1


def launched_run_id() -> str:
    """Return the id that the launcher gave to the run, from ``TORCHELASTIC_RUN_ID`` or ``SLURM_JOB_ID``.

    If there is none, return a random id. Then log a warning if there are several ranks.
    """
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        found = os.environ.get(name, "")
        if found not in _NO_RUN_IDS:
            return found
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _logger.warning("monitor: spans do not share traces between ranks. Pass run_id to monitor.start()")
    return f"{new_trace():032x}"


class Span:
    """Named range of time that emits one event when it starts and another when it stops.

    Each event emitted inside the span stores the span's id as :attr:`Event.span`. The parent is the enclosing span of
    the same thread or task. If the body of the ``with`` statement raises, the end event has severity ERROR and the
    exception's type as ``data["error"]``. Use :meth:`start` and :meth:`stop` where a ``with`` statement does not fit.

    Args:
        emit: called with the events.
        clock: source of timestamps.
        name: name of both events.
        data: data of both events.
        severity: severity of both events, unless the body raises.
        trace: 128-bit id of a group of related spans, see :func:`trace_of`. None to use the trace of the parent, or a
            new random trace if there is no parent.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        clock: Clock,
        name: str,
        data: Mapping[str, Value],
        severity: Severity,
        trace: int | None,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._name = name
        self._data = data
        self._severity = severity
        self._trace = trace
        self._token: Token[tuple[int, int]] | None = None
        self.id = 0

    def start(self) -> Self:
        """Emit the begin event, make this span the current one, and return the span."""
        self.id = new_id()
        self._parent, trace = CURRENT_SPAN.get()
        if self._trace is None:
            self._trace = trace or new_trace()
        self._token = CURRENT_SPAN.set((self.id, self._trace))
        self._begin_ns = self._clock.monotonic_ns()
        self._emit(self._event(Phase.BEGIN, self._severity, self._begin_ns, self._data))
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Emit the end event and make the parent, if any, the current span. A second call is a no-op.

        Must be called in the thread or task that called :meth:`start`.

        Args:
            error: exception that ended the body, if any.
        """
        if self._token is None:
            return
        CURRENT_SPAN.reset(self._token)
        self._token = None
        now = self._clock.monotonic_ns()
        data: dict[str, Value] = {**self._data, "seconds": (now - self._begin_ns) * _NS}
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(error)
