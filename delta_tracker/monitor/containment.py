"""Runs code of others where it can do no harm: neither what it raises nor how long it takes is felt by anybody."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from delta_tracker.monitor.clock import Clock

_logger = logging.getLogger(__name__)

_NS = 1_000_000_000
_FIRST_MUTE_SECONDS, _LONGEST_MUTE_SECONDS = 10, 600


@dataclass(slots=True)
class Guard:
    """What is known of one piece of foreign code.

    Args:
        name: names it in logs and metrics.
        num_errors: how often it raised or took too long.
        num_muted: how many calls were left out because it was muted.
        muted_until_ns: no call before that, on the monotonic clock.
    """

    name: str
    num_errors: int = 0
    num_muted: int = 0
    muted_until_ns: int = 0
    _num_in_a_row: int = 0

    def failed(self, reason: BaseException | str, now_ns: int) -> None:
        """Mute it, twice as long each time in a row."""
        self.num_errors += 1
        seconds = min(_FIRST_MUTE_SECONDS * 2**self._num_in_a_row, _LONGEST_MUTE_SECONDS)
        self._num_in_a_row = min(self._num_in_a_row + 1, 16)
        self.muted_until_ns = now_ns + seconds * _NS
        if self.num_errors == 1:
            error = reason if isinstance(reason, BaseException) else None
            _logger.error("monitor: %s failed and is muted for %d s: %s", self.name, seconds, reason, exc_info=error)

    def succeeded(self) -> None:
        """The next failure is the first in a row."""
        self._num_in_a_row = 0


@dataclass(slots=True)
class _Call:
    action: Callable[[], None]
    done: queue.SimpleQueue[BaseException | None] = field(default_factory=queue.SimpleQueue)


class Runner:
    """Makes calls in a thread of its own, and gives the thread up when a call takes too long.

    For one calling thread. The threads are daemons and start at the first call.

    Args:
        clock: for muting.
        deadline_seconds: how long a call may take.
    """

    def __init__(self, clock: Clock, deadline_seconds: float) -> None:
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._calls: queue.SimpleQueue[_Call | None] | None = None

    def run(self, guard: Guard, action: Callable[[], None], *, even_if_muted: bool = False) -> bool:
        """Whether ``action`` was called and returned in time."""
        now = self._clock.monotonic_ns()
        if now < guard.muted_until_ns and not even_if_muted:
            guard.num_muted += 1
            return False
        call = _Call(action)
        try:
            self._worker().put(call)
            error = call.done.get(timeout=self._deadline_seconds)
        except queue.Empty:
            self.stop()  # that thread ends when its call does
            error = TimeoutError(f"no answer within {self._deadline_seconds} s")
        except RuntimeError as refused:  # no thread can be started: the interpreter is shutting down
            error = refused
        if error is None:
            guard.succeeded()
            return True
        guard.failed(error, now)
        return False

    def stop(self) -> None:
        """Let the thread end; the next call starts another."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _worker(self) -> queue.SimpleQueue[_Call | None]:
        if self._calls is None:
            calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(calls,), name="delta_tracker-sinks", daemon=True).start()
            self._calls = calls
        return self._calls


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.action()
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the code that was called
            call.done.put(error)
        else:
            call.done.put(None)
