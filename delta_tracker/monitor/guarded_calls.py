"""Call sinks, handlers and callbacks so that neither their errors nor the time that they take affect the caller."""

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
class Call:
    """A call of foreign code.

    Args:
        action: what is called.
        is_done: set when it has returned or raised.
        error: what it raised.
    """

    action: Callable[[], None]
    is_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def make(self) -> None:
        """Call it; what it raises is kept."""
        try:
            self.action()
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the code that was called
            self.error = error
        self.is_done.set()


@dataclass(slots=True)
class Guard:
    """What is known of one piece of foreign code.

    Args:
        name: names it in logs and metrics.
        num_errors: how often it raised or took too long.
        num_muted: how many calls were left out because it was muted.
        muted_until_ns: no call before that, on the monotonic clock.
        call: the newest call, which may not have returned; no other one is made until it has.
    """

    name: str
    num_errors: int = 0
    num_muted: int = 0
    muted_until_ns: int = 0
    call: Call | None = None
    _num_in_a_row: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned."""
        return self.call is not None and not self.call.is_done.is_set()

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


class Runner:
    """Makes calls in a thread of its own, and gives the thread up when a call takes too long.

    For one calling thread. The threads are daemons and start at the first call, or at :meth:`start`.

    Args:
        clock: for muting.
        deadline_seconds: how long a call may take.
    """

    def __init__(self, clock: Clock, deadline_seconds: float) -> None:
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def start(self) -> None:
        """Start the thread, for a time when none can be started any more.

        Raises:
            RuntimeError: if none can be started.
        """
        self._worker()

    def run(
        self, guard: Guard, action: Callable[[], None], *, even_if_muted: bool = False, here_if_refused: bool = False
    ) -> bool:
        """Whether ``action`` was called and returned in time.

        It is not called while the guard's last call has not returned.

        Args:
            guard: of what is called.
            action: what is called.
            even_if_muted: call it even if it is muted, and wait up to the deadline for its last call to return.
            here_if_refused: call it in this thread, without a deadline, if no other one can be started: since
                Python 3.12 none can be at the end of a program.
        """
        now = self._clock.monotonic_ns()
        if even_if_muted and guard.call is not None:
            guard.call.is_done.wait(self._deadline_seconds)
        if guard.is_busy or (now < guard.muted_until_ns and not even_if_muted):
            guard.num_muted += 1
            return False
        call = guard.call = Call(action)
        error: BaseException | None = None
        try:
            self._worker().put(call)
        except RuntimeError as refused:  # no thread can be started
            if here_if_refused:
                call.make()
            else:
                call.error = refused
                call.is_done.set()
        if call.is_done.wait(self._deadline_seconds):
            error = call.error
        else:
            self.stop()  # that thread ends when its call does
            error = TimeoutError(f"no answer within {self._deadline_seconds} s")
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

    def _worker(self) -> queue.SimpleQueue[Call | None]:
        if self._calls is None:
            calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(calls,), name="delta_tracker-sinks", daemon=True).start()
            self._calls = calls
        return self._calls


def _work(calls: queue.SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.make()
