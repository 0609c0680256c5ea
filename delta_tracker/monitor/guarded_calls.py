"""Calls to sinks, event handlers and callbacks of stats, each with a deadline. Exceptions are caught.

A sink, handler or callback that fails is muted: it is not called for a while.
"""

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
    """Call to a sink, handler or callback, with its result.

    Args:
        action: function to call.
        is_done: set when ``action`` has returned or raised.
        error: exception raised by ``action``; None if it raised no exception.
    """

    action: Callable[[], None]
    is_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def make(self) -> None:
        """Call ``action`` and store the exception that it raises."""
        try:
            self.action()
        except BaseException as error:  # noqa: BLE001  user code must not end the worker thread
            self.error = error
        self.is_done.set()


@dataclass(slots=True)
class Guard:
    """State of one sink, handler or callback: its failures, its muting and its newest call.

    Args:
        name: name of the sink, handler or callback in log messages and metrics.
        num_errors: number of calls that raised or exceeded the deadline.
        num_muted: number of calls skipped because of the muting or because the previous call had not returned.
        muted_until_ns: end of the muting, in nanoseconds of the monotonic clock.
        call: the newest call, possibly unfinished. The next call is made only after it has finished.
    """

    name: str
    num_errors: int = 0
    num_muted: int = 0
    muted_until_ns: int = 0
    call: Call | None = None
    _num_in_a_row: int = 0

    @property
    def is_busy(self) -> bool:
        """True if the newest call is unfinished."""
        return self.call is not None and not self.call.is_done.is_set()

    def failed(self, reason: BaseException | str, now_ns: int) -> None:
        """Count a failure and mute the sink, handler or callback. Log the first failure.

        The muting lasts 10 s after a first failure. The duration doubles with each consecutive failure, up to 600 s.

        Args:
            reason: the exception, or a description of the failure.
            now_ns: current time of the monotonic clock.
        """
        self.num_errors += 1
        seconds = min(_FIRST_MUTE_SECONDS * 2**self._num_in_a_row, _LONGEST_MUTE_SECONDS)
        self._num_in_a_row = min(self._num_in_a_row + 1, 16)
        self.muted_until_ns = now_ns + seconds * _NS
        if self.num_errors == 1:
            error = reason if isinstance(reason, BaseException) else None
            _logger.error(
                "monitor: muted after a failure: outlet=%s seconds=%d error=%s",
                self.name,
                seconds,
                reason,
                exc_info=error,
            )

    def succeeded(self) -> None:
        """Reset the count of consecutive failures."""
        self._num_in_a_row = 0


class Runner:
    """Runner of calls in a worker thread. If a call exceeds the deadline, the next call is made in a new worker thread.

    Not thread-safe. The worker is a daemon thread, started by :meth:`start` or at the first call.

    Args:
        clock: clock that times the muting.
        deadline_seconds: time limit of a call.
    """

    def __init__(self, clock: Clock, deadline_seconds: float) -> None:
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._calls: queue.SimpleQueue[Call | None] | None = None

    def start(self) -> None:
        """Start the worker thread now instead of at the first call.

        Use this method if the first call may be made at interpreter shutdown, when no thread can be started.

        Raises:
            RuntimeError: if no thread can be started.
        """
        self._worker()

    def run(
        self, guard: Guard, action: Callable[[], None], *, even_if_muted: bool = False, here_if_refused: bool = False
    ) -> bool:
        """Call ``action`` in the worker thread, and return whether the call succeeded.

        The call is skipped if ``guard`` is muted, or if the previous call with ``guard`` has not returned.

        Args:
            guard: state of the sink, handler or callback that is called.
            action: function to call.
            even_if_muted: True to ignore the muting. The method then first waits for the previous call to return, but
                not longer than the deadline.
            here_if_refused: True to call ``action`` in the calling thread, without a deadline, if no worker thread can
                be started. Since Python 3.12, no thread can be started at interpreter shutdown.

        Returns:
            True if ``action`` was called and returned within the deadline without raising; False otherwise.
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
            error, call.error = call.error, None  # its traceback would keep the batch alive while muted
        else:
            self.stop()  # the worker ends when its call returns
            error = TimeoutError(f"no answer within {self._deadline_seconds} s")
        if error is None:
            guard.succeeded()
            return True
        guard.failed(error, now)
        return False

    def stop(self) -> None:
        """End the worker thread after its current call. The next :meth:`run` starts a new worker thread."""
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
