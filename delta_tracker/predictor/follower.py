"""Background thread of a predictor: it polls for versions, applies them, and retries after errors."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Protocol

from delta_tracker.errors import (
    FollowEndedError,
    ForkedError,
    HeldVersionError,
    InvalidArgumentError,
    NoSnapshotError,
    PanicError,
    StreamError,
    is_panic,
)
from delta_tracker.predictor.gauges import PredictorGauges
from delta_tracker.stream.cursor import StreamCursor
from delta_tracker.stream.interruption import Interrupted, check, interruptible
from delta_tracker.stream.notify.notifier import Hints, Notifier

_logger = logging.getLogger(__name__)

# A poll costs one request for the next entry. To distinguish a gap from the head costs a listing, done less often.
_GAP_CHECK_SECONDS = 5.0
_MAX_BACK_OFF_SECONDS = 5.0
_NO_STREAM_SECONDS = 0.5
_START_SECONDS = 2.0  # maximum wait of start() for a store that does not answer
_LOCK_SECONDS = 0.1  # interval at which a wait for the lock checks the stop flag


class Advance(Protocol):
    """Function that applies the next version, if there is one."""

    def __call__(self, *, looks_for_gap: bool) -> bool:
        """Return True if there was a version."""
        ...


class Beat(Protocol):
    """Function that writes a heartbeat if one is due."""

    def __call__(self, *, is_last: bool = False) -> None:
        """Write a heartbeat if it is due, or if it is the last one."""
        ...


class Follower:
    """Thread that calls ``advance`` repeatedly.

    Every error of ``advance`` is retried with increasing pauses. Versions hold absolute rows, so an interrupted version
    can be applied again. Only other exceptions than ``Exception``, such as ``SystemExit``, end the thread.

    Args:
        advance: applies the next version, if there is one.
        cursor: stream position, for the lag.
        lock: held while ``advance`` runs.
        notifier: delivers hints of new versions.
        beat: called after each poll.
        gauges: counts the errors.
    """

    def __init__(
        self,
        advance: Advance,
        cursor: StreamCursor,
        lock: threading.Lock,
        notifier: Notifier | None,
        beat: Beat,
        gauges: PredictorGauges,
    ) -> None:
        self._advance = advance
        self._cursor = cursor
        self._lock = lock
        self._beat = beat
        self._gauges = gauges
        self._stop = threading.Event()
        # Held while the thread is started or stopped. Reentrant: a signal handler may call stop() in that time.
        self._control = threading.RLock()
        self._notifier = notifier
        self._hints = Hints(notifier, self._stop)
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # set at the end of the thread
        self._pause = self._gap_check = 0.0
        self.error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """True if the thread runs."""
        return self._thread is not None and not self._over.is_set()

    def check(self, poll_seconds: float) -> None:
        """Validate the arguments of :meth:`start`.

        Raises:
            InvalidArgumentError: if the thread runs already, or for a time that is negative or not finite.
        """
        if not 0 <= poll_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("poll_seconds", poll_seconds, "Pass seconds, 0 or more")
        if self.is_running:
            raise InvalidArgumentError("follow()", "already following", "Call stop() first")

    def start(self, poll_seconds: float, refuse: Callable[[], None]) -> None:
        """Start the thread, which calls ``refuse`` first.

        The caller waits at most two seconds for ``refuse``, for example if the store does not answer. A later error of
        ``refuse`` is ignored: the thread gets the same error when it applies the version, and retries.

        Args:
            poll_seconds: seconds between two polls.
            refuse: raises if the stream cannot be followed.

        Raises:
            InvalidArgumentError: as :meth:`check`.
            Exception: the error of ``refuse``; the thread has then ended.
        """
        with self._control:
            self.check(poll_seconds)
            self._stop.clear()
            self.error = None
            begun: Future[None] = Future()
            over = threading.Event()
            arguments = poll_seconds, refuse, begun, over
            thread = threading.Thread(target=self._run, args=arguments, name="predictor", daemon=True)
            self._thread, self._over = thread, over  # set before it runs, because it may call stop()
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
        """End the thread at its next chunk or request.

        Args:
            raises: True to raise the current error of the thread.

        Raises:
            InvalidArgumentError: if called in the thread itself.
            Exception: the error that ended or delays the thread, if ``raises``.
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
            raise self.error
        if self.error is not None:
            _logger.warning("predictor stopped with an error: %s", self.error)

    def after_fork_in_child(self, lock: threading.Lock) -> None:
        """Drop the thread, which does not exist in the child, and the locks that it may have held.

        Args:
            lock: new lock to hold while ``advance`` runs.
        """
        if self._thread is threading.current_thread():
            return  # a RowTarget forked in this thread, which continues in the child
        self._lock, self._control, self._stop = lock, threading.RLock(), threading.Event()
        self._hints = Hints(self._notifier, self._stop)
        if self._thread is not None and not isinstance(self.error, FollowEndedError):
            self.error = ForkedError("no thread applies versions here", "Call follow() or sync() in this process")
        self._thread = None

    def forget_error(self) -> None:
        """Clear the error of an ended thread, after the tables were updated without it."""
        if not self.is_running:
            self.error = None

    def lag(self) -> tuple[int, float] | None:
        """Return the number of committed versions that are not applied, and the age in seconds of the oldest.

        Returns:
            None if the store cannot be read.
        """
        try:
            count, created = self._cursor.lag()
        except StreamError:
            return None
        return count, max(0.0, time.time() - created) if count else 0.0

    def _join(self, thread: threading.Thread) -> None:
        """Wait for the end of the thread. After an interrupt the thread is still known."""
        self._over.wait()  # not join(): Python 3.11 considers the thread ended if join() is interrupted
        thread.join()
        self._thread = None

    def _run(self, poll_seconds: float, refuse: Callable[[], None], begun: Future[None], over: threading.Event) -> None:
        try:
            self._follow(poll_seconds, refuse, begun)
        finally:
            over.set()

    def _follow(self, poll_seconds: float, refuse: Callable[[], None], begun: Future[None]) -> None:
        """Run until stopped. The next advance reads an interrupted version again."""
        self._pause, self._gap_check = poll_seconds, time.monotonic() + _GAP_CHECK_SECONDS
        with interruptible(self._stop), suppress(Interrupted):
            if not self._begins(refuse, begun):
                return
            try:
                while not self._stop.is_set():
                    self._turn(poll_seconds)
            except Interrupted:
                raise
            except BaseException as error:  # noqa: BLE001  there is no caller
                self.error = ended = FollowEndedError(error)
                url = self._cursor.log.storage.url
                _logger.error("predictor stopped following %s: %s", url, _described(error))  # noqa: TRY400  see _described
                _drop_frames(error)
                self._survives(lambda: self._beat(is_last=True))
                self.error = ended

    @staticmethod
    def _begins(refuse: Callable[[], None], begun: Future[None]) -> bool:
        """Call ``refuse`` and pass its result to :meth:`start`. Return True to follow."""
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

    def _turn(self, poll_seconds: float) -> None:
        """Poll once, then wait unless there was a version."""
        has_moved = self._survives(lambda: self._look(poll_seconds))
        self._survives(self._beat)
        if has_moved:
            return
        place = self._cursor.place
        if self.error is not None or place is None:
            self._stop.wait(self._pause)
        else:
            self._hints.wait(place.stream, place.link.version, self._pause)

    def _look(self, poll_seconds: float) -> bool:
        """Apply the next version. Return True if there was one."""
        # An error that a listing found remains until another listing clears it.
        looks_for_gap = self.error is not None or time.monotonic() >= self._gap_check
        has_moved = False
        try:
            with self._held_lock():
                has_moved = self._advance(looks_for_gap=looks_for_gap)
        except NoSnapshotError:
            # There are no hints for a stream whose id is unknown.
            self.error, self._pause = None, min(poll_seconds, _NO_STREAM_SECONDS)
        else:
            if self.error is not None:
                _logger.warning("predictor recovered at version %s", self._cursor.version)
            self.error, self._pause = None, poll_seconds
        finally:
            if looks_for_gap and not has_moved:
                self._gap_check = time.monotonic() + _GAP_CHECK_SECONDS
        return has_moved

    def _survives(self, call: Callable[[], object]) -> bool:
        """Return the result of ``call`` as a bool; if it raises, record the error and return False."""
        try:
            return bool(call())
        except Exception as error:  # noqa: BLE001  every error is retried: memory, the store, a user's target
            self._failed(error)
        except BaseException as error:
            if not is_panic(error):
                raise
            self._failed(PanicError(error))
        return False

    def _failed(self, error: Exception) -> None:
        self._pause = min(_MAX_BACK_OFF_SECONDS, max(2 * self._pause, 0.001))
        is_new = (type(error), str(error)) != (type(self.error), str(self.error))
        if is_new and not isinstance(error, HeldVersionError):
            _logger.warning("predictor failed and retries: %s", _described(error))
        self._gauges.failed_to_follow(error)
        _drop_frames(error)
        self.error = error


def _described(error: BaseException) -> str:
    """Return the message of an error; for errors from outside the library with its type and line.

    The traceback is left out: Python 3.11 parses source files to print one, which is not thread-safe.
    """
    if isinstance(error, StreamError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {error}{where}"


def _drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that is kept: their frames refer to a version of up to 320 MiB."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
