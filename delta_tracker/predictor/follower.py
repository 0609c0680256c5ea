"""The background thread of a predictor: it looks for versions, waits, and gets over faults."""

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

# A poll costs one probe of the next name; telling a gap from the head costs a listing, so that is done less often.
_GAP_CHECK_SECONDS = 5.0
_MAX_BACK_OFF_SECONDS = 5.0
_NO_STREAM_SECONDS = 0.5
_START_SECONDS = 2.0  # how long start() waits for a store that does not answer
_LOCK_SECONDS = 0.1  # how long waiting for the lock takes to see that it is to stop


class Advance(Protocol):
    """Applies one version, if there is one."""

    def __call__(self, *, looks_for_gap: bool) -> bool:
        """Whether there was one."""
        ...


class Beat(Protocol):
    """Writes a heartbeat, if one is due."""

    def __call__(self, *, is_last: bool = False) -> None:
        """Write it now if it is the last one."""
        ...


class Follower:
    """Calls ``advance`` again and again in a thread of its own.

    Any error of ``advance`` is retried with growing pauses: versions hold absolute rows, so that one that was cut short
    can be applied again. Only what is no ``Exception``, such as ``SystemExit``, ends the thread.

    Args:
        advance: applies one version, if there is one.
        cursor: the reader's place, for its lag.
        lock: held while ``advance`` runs.
        notifier: carries hints of new versions.
        beat: called after each look at the stream.
        gauges: count the errors.
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
        # Held while the thread is started or stopped. A signal handler may call stop() meanwhile.
        self._control = threading.RLock()
        self._notifier = notifier
        self._hints = Hints(notifier, self._stop)
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # the thread has ended
        self._pause = self._gap_check = 0.0
        self.error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and not self._over.is_set()

    def check(self, poll_seconds: float) -> None:
        """Refuse a start.

        Raises:
            InvalidArgumentError: if it runs already, or for a time that is negative or not finite.
        """
        if not 0 <= poll_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("poll_seconds", poll_seconds, "Pass seconds, 0 or more")
        if self.is_running:
            raise InvalidArgumentError("follow()", "already following", "Call stop() first")

    def start(self, poll_seconds: float, refuse: Callable[[], None]) -> None:
        """Start the thread, which calls ``refuse`` first.

        A ``refuse`` that takes over two seconds, because the store does not answer, no longer holds up the caller.
        What it raises then is ignored: the thread meets the same fault when it takes the version, and retries.

        Args:
            poll_seconds: seconds between two looks at the stream.
            refuse: raises if the stream cannot be followed.

        Raises:
            InvalidArgumentError: as :meth:`check`.
            Exception: what ``refuse`` raises; the thread has ended then.
        """
        with self._control:
            self.check(poll_seconds)
            self._stop.clear()
            self.error = None
            begun: Future[None] = Future()
            over = threading.Event()
            arguments = poll_seconds, refuse, begun, over
            thread = threading.Thread(target=self._run, args=arguments, name="predictor", daemon=True)
            self._thread, self._over = thread, over  # before it runs: it may call stop(), which must know it
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
        """End the thread at its next piece or request; raises what ended it before, or holds it up.

        Raises:
            InvalidArgumentError: in the thread itself, which cannot wait for its own end.
            Exception: what ended the thread, or holds it up, if ``raises``.
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
            _logger.warning("the predictor was held up when it was stopped: %s", self.error)

    def after_fork_in_child(self, lock: threading.Lock) -> None:
        """Forget the thread, which does not exist in the child, and the locks that it may have held.

        Args:
            lock: what is to be held from now on while ``advance`` runs.
        """
        if self._thread is threading.current_thread():
            return  # it forked, in a RowTarget: the child is what it continues as
        self._lock, self._control, self._stop = lock, threading.RLock(), threading.Event()
        self._hints = Hints(self._notifier, self._stop)
        if self._thread is not None and not isinstance(self.error, FollowEndedError):
            self.error = ForkedError("no thread applies versions here", "Call follow() or sync() in this process")
        self._thread = None

    def forget_error(self) -> None:
        """The tables are up to date by other means: what ended the thread is over."""
        if not self.is_running:
            self.error = None

    def lag(self) -> tuple[int, float] | None:
        """Versions that are committed and not applied, and the age of the oldest in seconds; None if nobody knows."""
        try:
            count, created = self._cursor.lag()
        except StreamError:
            return None
        return count, max(0.0, time.time() - created) if count else 0.0

    def _join(self, thread: threading.Thread) -> None:
        """Wait for the end of the thread. Until it has come the thread is not forgotten, also after an interrupt."""
        self._over.wait()  # not join(): if that is interrupted, Python 3.11 takes the thread for ended
        thread.join()
        self._thread = None

    def _run(self, poll_seconds: float, refuse: Callable[[], None], begun: Future[None], over: threading.Event) -> None:
        try:
            self._follow(poll_seconds, refuse, begun)
        finally:
            over.set()

    def _follow(self, poll_seconds: float, refuse: Callable[[], None], begun: Future[None]) -> None:
        """Run until stopped. A version that is cut short is read again by the next advance, as after a fault."""
        self._pause, self._gap_check = poll_seconds, time.monotonic() + _GAP_CHECK_SECONDS
        with interruptible(self._stop), suppress(Interrupted):
            if not self._begins(refuse, begun):
                return
            try:
                while not self._stop.is_set():
                    self._turn(poll_seconds)
            except Interrupted:
                raise
            except BaseException as error:  # noqa: BLE001  no caller sees what is raised here
                self.error = ended = FollowEndedError(error)
                url = self._cursor.log.storage.url
                _logger.error("the predictor stopped following %s: %s", url, _described(error))  # noqa: TRY400  see _described
                _drop_frames(error)
                self._survives(lambda: self._beat(is_last=True))
                self.error = ended

    @staticmethod
    def _begins(refuse: Callable[[], None], begun: Future[None]) -> bool:
        """Call ``refuse`` and let :meth:`start` return or raise; return whether to follow."""
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
        """Look for a version, then wait unless there was one."""
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
        """Take one version; return whether there was one."""
        # What a listing found stays found until another listing says otherwise.
        looks_for_gap = self.error is not None or time.monotonic() >= self._gap_check
        has_moved = False
        try:
            with self._held_lock():
                has_moved = self._advance(looks_for_gap=looks_for_gap)
        except NoSnapshotError:
            # No hint can come of a stream whose id is not known.
            self.error, self._pause = None, min(poll_seconds, _NO_STREAM_SECONDS)
        else:
            if self.error is not None:
                _logger.warning("the predictor follows again, at version %s", self._cursor.version)
            self.error, self._pause = None, poll_seconds
        finally:
            if looks_for_gap and not has_moved:
                self._gap_check = time.monotonic() + _GAP_CHECK_SECONDS
        return has_moved

    def _survives(self, call: Callable[[], object]) -> bool:
        """Return what ``call`` returns, as a bool; False where it raises, which is shown and retried."""
        try:
            return bool(call())
        except Exception as error:  # noqa: BLE001  whatever it is may pass: memory, the store, a user's target
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
            _logger.warning("the predictor cannot go on and keeps trying: %s", _described(error))
        self._gauges.failed_to_follow(error)
        _drop_frames(error)
        self.error = error


def _described(error: BaseException) -> str:
    """Return the message, with the type and the line for what is no error of the library.

    Not the whole traceback: Python 3.11 parses source text to print one, which fails in other threads that do the same.
    """
    if isinstance(error, StreamError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {error}{where}"


def _drop_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: an error is kept to be shown, and a version may take 320 MiB."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
