"""Background thread of a predictor: it polls for versions, applies them, and retries after errors."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from delta_tracker.arguments import is_number
from delta_tracker.errors import (
    FollowEndedError,
    ForkedError,
    HeldVersionError,
    InvalidArgumentError,
    NoSnapshotError,
    PanicError,
    StaleCacheError,
    StreamError,
    is_panic,
    kind_of,
    unraised,
)
from delta_tracker.predictor.gauges import PredictorGauges
from delta_tracker.predictor.polling import PollSchedule, jittered
from delta_tracker.stream.interruption import Interrupted, check, interruptible
from delta_tracker.stream.notify.notifier import Hints, Notifier
from delta_tracker.stream.reading.reader import Reader
from delta_tracker.stream.storage.url import default_poll_seconds

_logger = logging.getLogger(__name__)

# A poll requests only the next entry. If it is missing, a check at this interval shows whether it was deleted or is not
# committed yet. The interval doubles, up to twelve times its length, while checks list the log and find nothing.
GAP_CHECK_SECONDS = 5.0
_MAX_GAP_CHECKS = 12
_MAX_BACK_OFF_SECONDS = 5.0
_NO_STREAM_SECONDS = 0.5  # for a fixed interval
_MAX_NO_STREAM_SECONDS = 1.0  # otherwise
_STALE_SECONDS = 1.0  # between two reads of an object that is stale in a cache
# Longest intervals between two polls, while no version comes and while hints arrive.
_LONGEST_SECONDS = {"directory": (0.1, 1.0), "remote": (5.0, 30.0)}
_BEAT_SECONDS = 2.0  # interval at which a long wait writes a heartbeat if one is due
_START_SECONDS = 2.0  # maximum time that start() waits for the thread's first check
_LOCK_SECONDS = 0.1  # interval at which a wait for the lock checks the stop flag


class Beat(Protocol):
    """Protocol of a function that writes a heartbeat if one is due."""

    def __call__(self, *, is_last: bool = False) -> None:
        """Write a heartbeat if one is due or ``is_last`` is True."""
        ...


class Follower:
    """Thread that calls :meth:`Reader.advance` repeatedly.

    If the call raises an ``Exception`` or if Rust code in it panics, the thread retries after a pause, which
    increases with each failure. Versions contain the rows' values, not differences, so an interrupted version can be
    applied again. The thread ends only if :meth:`stop` is called or any other exception is raised, such as
    ``SystemExit``.

    Args:
        reader: reader of the stream.
        lock: lock that is held while the reader advances.
        notifier: delivers hints of new versions; None to poll only.
        beat: function that writes heartbeats, called after each poll.
        gauges: metrics that count the errors.
        max_pause_seconds: maximum time between two polls, if the reader has other work to do.

    Attributes:
        error: error that ended the thread, or error of the last attempt, which the thread will retry; None if there is
            none. It has no traceback.
    """

    def __init__(
        self,
        reader: Reader,
        lock: threading.Lock,
        notifier: Notifier | None,
        beat: Beat,
        gauges: PredictorGauges,
        *,
        max_pause_seconds: float = float("inf"),
    ) -> None:
        self._reader = reader
        self._runtime = reader.runtime
        self._lock = lock
        self._beat = beat
        self._gauges = gauges
        self._max_pause_seconds = max_pause_seconds
        self._stop = threading.Event()
        # Held while the thread is started or stopped. Reentrant, because a signal handler may then call stop().
        self._control = threading.RLock()
        self._notifier = notifier
        self._hints = Hints(notifier, self._stop)
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # set when the thread ends
        # One queue for each call of wait(), which gets an item when a version was applied, and when the thread ends. No
        # lock, because a signal handler that calls stop() waits for the thread while the main thread is in wait().
        self._waiters: list[SimpleQueue[None]] = []
        self._schedule: PollSchedule | None = None
        self._num_hint_failures = 0
        self._waits_for_snapshot = False  # True once this was logged
        self._pause = self._gap_check = 0.0
        self._gap_seconds = GAP_CHECK_SECONDS
        self.error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """True if the thread is running."""
        return self._thread is not None and not self._over.is_set()

    @property
    def poll_seconds(self) -> float | None:
        """Current interval between two polls in seconds; None if the thread is not running."""
        schedule = self._schedule
        return schedule.seconds if schedule is not None and self.is_running else None

    def check(self, poll_seconds: float | None) -> None:
        """Check that :meth:`start` can be called with ``poll_seconds``.

        Raises:
            InvalidArgumentError: if the thread is already running, or ``poll_seconds`` is not positive and finite.
        """
        if poll_seconds is not None and not (is_number(poll_seconds) and 0 < poll_seconds < threading.TIMEOUT_MAX):
            raise InvalidArgumentError("poll_seconds", poll_seconds, "Pass seconds, more than 0, or None")
        if self.is_running:
            raise InvalidArgumentError("follow()", "already following", "Call stop() first")

    def start(self, poll_seconds: float | None, refuse: Callable[[], None]) -> None:
        """Start the thread, which calls ``refuse`` before it polls.

        This method waits at most two seconds for ``refuse`` to return, because the store may not answer. If ``refuse``
        raises later, the error is ignored. A version that does not fit the model then causes an error when the thread
        applies it, and the thread retries.

        Args:
            poll_seconds: number of seconds between two polls; None for an interval that suits the store.
            refuse: function that raises if the stream cannot be followed.

        Raises:
            InvalidArgumentError: as :meth:`check`.
            Exception: the error of ``refuse``, after the thread has ended.
        """
        with self._control:
            self.check(poll_seconds)
            self._stop.clear()
            self.error = None
            begun: Future[None] = Future()
            over = threading.Event()
            arguments = poll_seconds, refuse, begun, over
            thread = self._runtime.thread(target=self._run, args=arguments, name="predictor", daemon=True)
            self._thread, self._over = thread, over  # set before the thread runs: code in it may call stop()
            try:
                thread.start()
            except BaseException:
                self._stop.set()
                self._thread = None
                raise
            try:
                wait([begun], _START_SECONDS)
                if not begun.cancel():
                    begun.result()
            except BaseException:
                self._stop.set()
                self._join(thread)
                raise

    def stop(self, *, raises: bool = True) -> None:
        """Stop the thread at its next chunk or request, and wait until it has ended. No-op if there is no thread.

        Args:
            raises: True to raise a copy of :attr:`error`; False to log it.

        Raises:
            InvalidArgumentError: if called in the thread itself.
            Exception: a copy of :attr:`error`, if it is not None and ``raises`` is True.
        """
        if self._thread is threading.current_thread():
            raise InvalidArgumentError("stop()", "called in the thread of follow()", "Call it in another thread")
        with self._control:
            thread = self._thread
            if thread is None:
                return
            self._stop.set()
            self._join(thread)
        if self.error is not None and raises:
            raise unraised(self.error)
        if self.error is not None:
            _logger.warning("predictor stopped with an error: %s", self.error)

    def wait(self, is_there: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until ``is_there`` returns True, which is called after each version. Return False after a time-out.

        Args:
            is_there: function that returns True if the wait is over.
            seconds: maximum time to wait; None for no limit.

        Raises:
            InvalidArgumentError: if the thread is not running, or if called in the thread itself.
            FollowEndedError: if the thread ended by an error.
            ForkedError: if the process was forked while the thread ran in its parent.
        """
        if self._thread is threading.current_thread():
            raise InvalidArgumentError("wait()", "called in the thread of follow()", "Call it in another thread")
        waiter, end = SimpleQueue[None](), None if seconds is None else self._runtime.monotonic() + seconds
        try:
            self._waiters.append(waiter)
            while not is_there() and self.is_running:
                waiter.get(timeout=None if end is None else max(0.0, end - self._runtime.monotonic()))
        except Empty:
            pass
        finally:
            with suppress(ValueError):  # interrupted before it was added
                self._waiters.remove(waiter)
        if is_there():
            return True
        error = self.error
        if isinstance(error, FollowEndedError | ForkedError):
            raise unraised(error)
        if not self.is_running:
            raise InvalidArgumentError("wait()", "not following", "Call follow() first, or sync() instead")
        return False

    def moved(self) -> None:
        """Wake the threads in :meth:`wait`."""
        for waiter in tuple(self._waiters):
            waiter.put(None)

    def after_fork_in_child(self, lock: threading.Lock) -> None:
        """Drop the thread, which does not exist in the child process, and replace the locks that it may have held.

        No-op if the fork was made by the thread itself, which then continues in the child process.

        Args:
            lock: new lock to hold while the reader advances.
        """
        if self._thread is threading.current_thread():
            return  # this thread forked, in a method of a RowTarget, and continues in the child
        self._lock, self._control, self._stop = lock, threading.RLock(), threading.Event()
        self._waiters = []
        self._hints = Hints(self._notifier, self._stop)
        if self._thread is not None and not isinstance(self.error, FollowEndedError):
            self.error = ForkedError("no thread applies versions here", "Call follow() or sync() in this process")
        self._thread = None

    def forget_error(self) -> None:
        """Clear :attr:`error` if the thread has ended. Call it after the tables were updated in another thread."""
        if not self.is_running:
            self.error = None

    def lag(self) -> tuple[int, float] | None:
        """Return the number of committed versions that are not applied, and the age in seconds of the oldest of them.

        See :class:`~delta_tracker.stream.reading.lag.Lag` for the clocks.

        Returns:
            The number and the age, which is 0 if there is no such version; None if the store cannot be read, or if its
            log ends before the last applied version.
        """
        try:
            return self._reader.lag.of(self._reader.source.log, self._reader.version)
        except StreamError:
            return None

    def _join(self, thread: threading.Thread) -> None:
        """Wait until the thread has ended, then drop it. If the wait is interrupted, the thread is kept."""
        self._over.wait()  # join() alone is not enough: Python 3.11 considers the thread ended if join() is interrupted
        thread.join()
        self._thread = None

    def lag_at_rest(self) -> tuple[int, float] | None:
        """Return :meth:`lag` without a request, if the last poll found no version; otherwise send the requests.

        For heartbeats. The result is as old as the last poll.
        """
        rested, seconds, position = self._reader.lag.rested, self.poll_seconds, self._reader.position
        if (
            self.error is not None
            or seconds is None
            or rested is None
            or position is None
            or rested[0] != position.version
        ):
            return self.lag()
        return (0, 0.0) if self._runtime.monotonic() - rested[1] <= 2 * seconds + 1.0 else self.lag()

    def _run(
        self, poll_seconds: float | None, refuse: Callable[[], None], begun: Future[None], over: threading.Event
    ) -> None:
        try:
            self._follow(poll_seconds, refuse, begun)
        except BaseException as error:  # noqa: BLE001  raised before the first poll, for example for lack of memory
            self.error = ended = unraised(FollowEndedError(error))
            _logger.error("predictor could not follow: %s", str(ended))  # noqa: TRY400  start() raises it
            with suppress(InvalidStateError):  # start() has returned
                begun.set_exception(ended)
        finally:
            over.set()
            self.moved()

    def _new_schedule(self, poll_seconds: float | None) -> PollSchedule:
        storage = self._reader.storage
        seconds = default_poll_seconds(storage.url) if poll_seconds is None else poll_seconds
        longest, longest_hinted = _LONGEST_SECONDS["remote" if storage.is_remote else "directory"]
        return PollSchedule(
            seconds,
            is_fixed=poll_seconds is not None,
            longest=longest,
            longest_hinted=longest_hinted,
            is_delayed=not storage.lists,
            clock=self._runtime.monotonic,
            uniform=self._runtime.uniform,
        )

    def _follow(self, poll_seconds: float | None, refuse: Callable[[], None], begun: Future[None]) -> None:
        """Poll until the stop flag is set or an exception ends the thread.

        If a version is interrupted, it is applied again after the next :meth:`start`.
        """
        self._schedule = schedule = self._new_schedule(poll_seconds)
        self._gap_seconds = GAP_CHECK_SECONDS
        self._pause, self._gap_check = (
            schedule.first_seconds,
            self._runtime.monotonic() + jittered(self._gap_seconds, self._runtime.uniform),
        )
        with interruptible(self._stop), suppress(Interrupted):
            if not self._begins(refuse, begun):
                return
            try:
                storage = self._reader.storage
                while not self._stop.is_set():
                    self._turn(schedule)
                    if self._reader.storage is not storage:  # another source, perhaps of another kind
                        storage = self._reader.storage
                        self._schedule = schedule = self._new_schedule(poll_seconds)
            except Interrupted:
                raise
            except BaseException as error:  # noqa: BLE001  a thread has no caller that could handle it
                what = _described(error)  # first, because unraised() removes the traceback of an error it cannot copy
                self.error = ended = unraised(FollowEndedError(error))
                url = self._reader.storage.url
                _logger.error("predictor stopped following %s: %s", url, what)  # noqa: TRY400  see _described
                self._survives(lambda: self._beat(is_last=True))
                self.error = ended

    @staticmethod
    def _begins(refuse: Callable[[], None], begun: Future[None]) -> bool:
        """Call ``refuse`` and report to :meth:`start` whether it raised. Return False if :meth:`start` will raise."""
        refusal: BaseException | None = None
        try:
            refuse()
        except Interrupted:
            raise
        except BaseException as error:  # noqa: BLE001  start() raises it
            refusal = error
        if not begun.set_running_or_notify_cancel():
            return True  # start() has returned
        if refusal is None:
            begun.set_result(None)
        else:
            begun.set_exception(refusal)
        return refusal is None

    @contextmanager
    def _held_lock(self) -> Iterator[None]:
        while not self._lock.acquire(timeout=_LOCK_SECONDS):
            check()
        try:
            yield
        finally:
            self._lock.release()

    def _turn(self, schedule: PollSchedule) -> None:
        """Poll once, and write a heartbeat if one is due. If no version was applied, wait for the next poll or hint."""
        has_moved = self._survives(lambda: self._look(schedule))
        self._survives(self._beat)
        if has_moved:
            schedule.moved()
            self.moved()
            return
        position = self._reader.position
        if self.error is not None or position is None:
            self._runtime.wait(self._stop, jittered(self._pause, self._runtime.uniform))
            return
        if self._hints.num_failures != self._num_hint_failures:
            self._num_hint_failures = self._hints.num_failures
            schedule.distrust()
        end = self._runtime.monotonic() + min(schedule.pause(), self._max_pause_seconds)
        while (left := end - self._runtime.monotonic()) > 0 and not self._stop.is_set():
            if self._hints.wait(position.stream, position.version, min(left, _BEAT_SECONDS)):
                schedule.hinted()
                return
            if left > _BEAT_SECONDS:
                self._survives(self._beat)

    def _look(self, schedule: PollSchedule) -> bool:
        """Apply the next version and return True. Return False if there is none."""
        # An error may have been found by a gap check. Only another one can show that it no longer exists.
        looks_for_gap = self.error is not None or self._runtime.monotonic() >= self._gap_check
        has_moved = False
        try:
            with self._held_lock():
                has_moved = self._reader.advance(looks_for_gap=looks_for_gap)
        except NoSnapshotError as error:
            if not self._waits_for_snapshot:
                self._waits_for_snapshot = True
                _logger.warning("predictor waits for the first snapshot: %s", error.problem)
            # The id of the stream is unknown, so that there are no hints: poll often.
            pause = min(schedule.first_seconds, _NO_STREAM_SECONDS)
            self.error, self._pause = (
                None,
                pause if schedule.is_fixed else min(schedule.longest, _MAX_NO_STREAM_SECONDS),
            )
        else:
            if self.error is not None:
                _logger.warning("predictor recovered at version %s", self._reader.version)
            self.error, self._pause = None, schedule.first_seconds
        finally:
            if looks_for_gap and not has_moved:
                is_well = self.error is None and self._reader.source.has_listed
                longer = min(2 * self._gap_seconds, _MAX_GAP_CHECKS * GAP_CHECK_SECONDS)
                self._gap_seconds = longer if is_well else GAP_CHECK_SECONDS
                self._gap_check = self._runtime.monotonic() + jittered(self._gap_seconds, self._runtime.uniform)
        return has_moved

    def _survives(self, call: Callable[[], object]) -> bool:
        """Return the result of ``call`` as a bool. Record an error or a Rust panic of ``call``, and return False."""
        try:
            return bool(call())
        except Exception as error:  # noqa: BLE001  every error is retried, for example of memory, the store or a user's target
            self._failed(error)
        except BaseException as error:
            if not is_panic(error):
                raise
            self._failed(PanicError(error))
        return False

    def _failed(self, error: Exception) -> None:
        if isinstance(error, StaleCacheError):
            self._pause = _STALE_SECONDS
        else:
            self._pause = min(_MAX_BACK_OFF_SECONDS, max(2 * self._pause, 0.001))
        is_new = self.error is None or kind_of(error) != kind_of(self.error)
        if is_new and not isinstance(error, HeldVersionError):
            _logger.warning("predictor failed and retries: %s", _described(error))
        self._gauges.failed_to_follow(error)
        self.error = unraised(error)


def _described(error: BaseException) -> str:
    """Return the message of a :class:`StreamError`, or the type, message, file and line of another error.

    The traceback is omitted, because Python 3.11 parses source files to print it, which is not thread-safe.
    """
    if isinstance(error, StreamError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {error}{where}"
