"""The background thread of a predictor: it looks for versions, waits, and gets over faults."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from delta_tracker.errors import (
    DenseMismatchError,
    HeldVersionError,
    InvalidArgumentError,
    NoSnapshotError,
    StreamError,
    TableMismatchError,
)
from delta_tracker.stream.cursor import StreamCursor
from delta_tracker.stream.interruption import Interrupted, check, interruptible
from delta_tracker.stream.notify import Hints, Notifier

_logger = logging.getLogger(__name__)

# A poll costs one probe of the next name; telling a gap from the head costs a listing, so that is done less often.
_GAP_CHECK_SECONDS = 5.0
_MAX_BACK_OFF_SECONDS = 5.0
_NO_STREAM_SECONDS = 0.5
_LOCK_SECONDS = 0.1  # how long waiting for the lock takes to see that it is to stop
# No later version changes what the model is.
_FINAL = (TableMismatchError, DenseMismatchError)


class Advance(Protocol):
    """Applies one version, if there is one."""

    def __call__(self, *, looks_for_gap: bool) -> bool:
        """Whether there was one."""
        ...


class Follower:
    """Calls ``advance`` again and again in a thread of its own.

    Args:
        advance: applies one version, if there is one.
        cursor: the reader's place, for its lag.
        lock: held while ``advance`` runs.
        notifier: carries hints of new versions.
        beat: called after each look at the stream; it does not raise.
    """

    def __init__(
        self,
        advance: Advance,
        cursor: StreamCursor,
        lock: threading.Lock,
        notifier: Notifier | None,
        beat: Callable[[], None],
    ) -> None:
        self._advance = advance
        self._cursor = cursor
        self._lock = lock
        self._beat = beat
        self._stop = threading.Event()
        self._control = threading.Lock()  # held while the thread is started or stopped
        self._hints = Hints(notifier, self._stop)
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self, poll_seconds: float) -> None:
        """Start the thread.

        Raises:
            InvalidArgumentError: if it runs already, or for a time that is negative or not finite.
        """
        if not 0 <= poll_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("poll_seconds", poll_seconds, "Pass seconds, 0 or more")
        with self._control:
            if self._thread is not None and self._thread.is_alive():
                raise InvalidArgumentError("follow()", "already following", "Call stop() first")
            self._stop.clear()
            self.error = None
            self._thread = threading.Thread(target=self._follow, args=(poll_seconds,), name="predictor", daemon=True)
            self._thread.start()

    def stop(self, *, raises: bool = True) -> None:
        """End the thread at its next piece or request; raises what ended it before, or holds it up."""
        with self._control:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._stop.set()
            thread.join()
        if self.error is not None and raises:
            raise self.error
        if self.error is not None:
            _logger.warning("the predictor was held up when it was stopped: %s", self.error)

    def forget_error(self) -> None:
        """The tables are up to date by other means: what ended the thread is over."""
        if self._thread is None:
            self.error = None

    def lag(self) -> tuple[int, float] | None:
        """Versions that are committed and not applied, and the age of the oldest in seconds; None if nobody knows."""
        try:
            count, created = self._cursor.lag()
        except StreamError:
            return None
        return count, max(0.0, time.time() - created) if count else 0.0

    def _follow(self, poll_seconds: float) -> None:
        """Run until stopped. A version that is cut short is read again by the next advance, as after a fault."""
        with interruptible(self._stop), suppress(Interrupted):
            self._run(poll_seconds)

    def _run(self, poll_seconds: float) -> None:
        gap_check = time.monotonic() + _GAP_CHECK_SECONDS
        pause = poll_seconds
        while not self._stop.is_set():
            # What a listing found stays found until another listing says otherwise.
            looks_for_gap = self.error is not None or time.monotonic() >= gap_check
            try:
                with self._held_lock():
                    has_moved = self._advance(looks_for_gap=looks_for_gap)
            except NoSnapshotError:
                # No hint can come of a stream whose id is not known.
                self.error, pause = None, min(poll_seconds, _NO_STREAM_SECONDS)
            except Exception as error:
                if self._is_final(error):
                    _logger.exception("the predictor stopped following %s", self._cursor.log.storage.url)
                    self.error = error
                    return
                self._note(error)
                pause = min(_MAX_BACK_OFF_SECONDS, max(2 * pause, 0.001))
            else:
                if self.error is not None:
                    _logger.warning("the predictor follows again, at version %s", self._cursor.version)
                self.error, pause = None, poll_seconds
                if has_moved:
                    self._beat()
                    continue
            if looks_for_gap:
                gap_check = time.monotonic() + _GAP_CHECK_SECONDS
            self._beat()
            place = self._cursor.place
            if self.error is not None or place is None:
                self._stop.wait(pause)
            else:
                self._hints.wait(place.stream, place.link.version, pause)

    @contextmanager
    def _held_lock(self) -> Iterator[None]:
        while not self._lock.acquire(timeout=_LOCK_SECONDS):
            check()
        try:
            yield
        finally:
            self._lock.release()

    def _note(self, error: Exception) -> None:
        if str(error) != str(self.error) and not isinstance(error, HeldVersionError):
            _logger.warning("the predictor cannot go on and keeps trying: %s", error)
        self.error = error

    @staticmethod
    def _is_final(error: Exception) -> bool:
        return isinstance(error, _FINAL) or not isinstance(error, StreamError)
