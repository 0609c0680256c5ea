"""Hints that a version was committed, so that predictors can poll less often.

A hint consists of a stream's id and a version. It may be lost, repeated, late, or forged: the receiver reads the store
to find out which versions exist.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.reading.runtime import REAL, Runtime

_logger = logging.getLogger(__name__)
_SLICE_SECONDS = 0.1  # between two checks of the stop flag
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class Notifier(Protocol):
    """Protocol for objects that send and receive hints, usually through a message broker.

    1. The publisher calls :meth:`announce` after each committed version, from the thread that publishes.
    2. A predictor calls :meth:`wait` in a loop, from the thread that follows the stream.
    3. :meth:`close` is called last, possibly twice.

    All methods must be thread-safe. They may raise any error of the broker, which :class:`Hints` catches. Versions of
    one stream ascend over all generations, so an implementation needs to keep only the newest hint of a stream.
    """

    def announce(self, stream: str, version: int) -> None:
        """Announce that ``version`` of the stream with id ``stream`` is committed. Ignore old and repeated versions.

        Must return within two seconds, even if the broker hangs.
        """

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        """Wait until a version above ``after`` has been announced, and return True. Return False at the timeout."""

    def close(self) -> None:
        """Close the connections."""


class Hints:
    """Wrapper of a :class:`Notifier` that catches all errors of the broker, for publishers and predictors.

    After a failure, the notifier is not called for one second. This time doubles with each further failure, up to
    thirty seconds. The first of several failures and the recovery are logged. If ``notifier`` is None, hints are
    disabled. Setting ``stop`` ends every wait.

    Attributes:
        num_lost: number of hints that were not sent because the broker failed.
        num_failures: number of failed calls of the notifier.
    """

    def __init__(self, notifier: Notifier | None, stop: threading.Event | None = None, runtime: Runtime = REAL) -> None:
        if notifier is not None and (isinstance(notifier, type) or not callable(getattr(notifier, "announce", None))):
            raise InvalidArgumentError("notifier", notifier, "Pass a Notifier, for example RedisNotifier(url)")
        self.num_lost = 0
        self.num_failures = 0
        self._notifier = notifier
        self._runtime = runtime
        self._stop = threading.Event() if stop is None else stop
        self._pause_seconds = 0.0  # 0 unless the last call failed
        self._try_again = 0.0
        self._believed: tuple[str, int] | None = None

    def announce(self, stream: str, version: int) -> None:
        """Announce that ``version`` of the stream with the id ``stream`` is committed. Never raises."""
        if self._notifier is None:
            return
        if self._is_due():
            with self._caught():
                self._notifier.announce(stream, version)
                self._worked()
                return
        self.num_lost += 1

    def wait(self, stream: str | None, after: int, timeout_seconds: float) -> bool:
        """Wait for a hint of a version above ``after``, and return True. Return False at the timeout or once stopped.

        Never raises. A hint ends only one wait with the same ``after``. If the caller repeats the call with this value,
        the hint was wrong, and the call waits for the full timeout. Forged hints therefore cannot cause a busy loop.
        """
        deadline = self._runtime.monotonic() + timeout_seconds
        while stream is not None and (stream, after) != self._believed and not self._stop.is_set():
            left = deadline - self._runtime.monotonic()
            if left <= 0:
                return False
            if self._notifier is None or not self._is_due():
                break
            with self._caught():
                is_heard = self._notifier.wait(stream, after, min(left, _SLICE_SECONDS))
                self._worked()
                if is_heard:
                    self._believed = (stream, after)
                    return True
        self._runtime.wait(self._stop, max(0.0, deadline - self._runtime.monotonic()))
        return False

    def close(self) -> None:
        """Close the notifier. Never raises."""
        if self._notifier is not None:
            with self._caught():
                self._notifier.close()

    def _is_due(self) -> bool:
        return self._runtime.monotonic() >= self._try_again

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a lost hint must not fail a committed version; polling continues
            self.num_failures += 1
            if self._pause_seconds == 0:
                reason = f"{type(error).__name__}: {error}"
                _logger.warning("hints of new versions failed, polling continues: error=%s", reason)
            doubled = max(_FIRST_PAUSE_SECONDS, 2 * self._pause_seconds)
            self._pause_seconds = min(doubled, _LONGEST_PAUSE_SECONDS)
            self._try_again = self._runtime.monotonic() + self._pause_seconds

    def _worked(self) -> None:
        if self._pause_seconds:
            _logger.warning("hints of new versions recovered")
        self._pause_seconds = 0.0
