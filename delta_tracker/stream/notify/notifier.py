"""Hints that a version is committed, so that predictors need not poll often. Polling goes on beneath them.

A hint carries nothing but a stream's id and a version. It may be lost, repeated, late, or forged: whoever gets one
looks into the store, which alone says what exists. Losing every hint costs latency and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from delta_tracker.forking import Forkable, protect

_logger = logging.getLogger(__name__)

# How long a wait takes to see that it is to stop.
_SLICE_SECONDS = 0.1
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class Notifier(Protocol):
    """What carries hints. Three methods, because a broker can do no more than that for all of us alike.

    1. The publisher calls :meth:`announce` after each version that it committed, from the thread that publishes. It
       returns within two seconds, also when the broker hangs.
    2. A predictor calls :meth:`wait` again and again, from the thread that follows.
    3. :meth:`close` comes last, and may come twice.

    All of them may be called from several threads. An implementation raises whatever its broker raises: it is
    :class:`Hints` that publishers and predictors talk to, and it lets nothing through. Versions of one stream ascend
    over all generations, so only the newest hint of a stream has to be kept.
    """

    def announce(self, stream: str, version: int) -> None:
        """Tell that ``version`` of the stream with this id is committed. An old or repeated version is no error."""

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        """Wait until a version above ``after`` has been announced, also before this call, and say whether one has.

        It gives up after ``timeout_seconds`` at the latest, and may do so sooner.
        """

    def close(self) -> None:
        """Let go of connections."""


class LocalNotifier(Forkable):
    """Hints between threads of one process. Also the smallest complete :class:`Notifier`.

    Example:
        >>> notifier = LocalNotifier()
        >>> notifier.announce("s", 7)
        >>> notifier.wait("s", 6, timeout_seconds=1.0)
        True
        >>> notifier.wait("s", 7, timeout_seconds=0.0)
        False
    """

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._changed = threading.Condition()
        protect(self)

    def announce(self, stream: str, version: int) -> None:
        """Tell that ``version`` of the stream is committed."""
        with self._changed:
            self._newest[stream] = max(version, self._newest.get(stream, version))
            self._changed.notify_all()

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        """Wait until a version above ``after`` has been announced, and say whether one has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest.get(stream, after) > after, timeout_seconds)

    def close(self) -> None:
        """Nothing to let go of."""

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._changed = threading.Condition()


class Hints:
    """A publisher's or predictor's side of a :class:`Notifier`: no error of the broker gets through.

    While the broker fails, hints are neither sent nor waited for, and it is tried again after pauses that grow from one
    second to thirty. The first failure is logged, and so is the recovery.

    Args:
        notifier: what carries the hints; None for polling alone.
        stop: ends every wait once it is set.

    Attributes:
        num_lost: hints that were not sent because the broker failed.
        num_failures: calls of the notifier that failed.
    """

    def __init__(self, notifier: Notifier | None, stop: threading.Event | None = None) -> None:
        self.num_lost = 0
        self.num_failures = 0
        self._notifier = notifier
        self._stop = threading.Event() if stop is None else stop
        self._pause_seconds = 0.0  # 0 while all is well
        self._try_again = 0.0
        self._believed: tuple[str, int] | None = None

    def announce(self, stream: str, version: int) -> None:
        """Tell that ``version`` of the stream with this id is committed. Never raises."""
        if self._notifier is None:
            return
        if not self._is_due():
            self.num_lost += 1
            return
        try:
            self._notifier.announce(stream, version)
        except Exception as error:  # noqa: BLE001  a version is committed whatever becomes of its hint
            self.num_lost += 1
            self._failed(error)
        else:
            self._worked()

    def wait(self, stream: str | None, after: int, timeout_seconds: float) -> None:
        """Wait for a hint of a version above ``after``, for ``timeout_seconds``, or until told to stop. Never raises.

        A hint is believed once: if the caller comes back with the same version, there was nothing behind it, and the
        next wait takes its full time. So a forged hint makes nobody spin.

        Args:
            stream: id of the stream that is followed, None while it is not known.
            after: the version that the caller has.
            timeout_seconds: the time after which the caller looks into the store anyway.
        """
        deadline = time.monotonic() + timeout_seconds
        while stream is not None and (stream, after) != self._believed and not self._stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if not self._is_due():
                break
            if self._heard(stream, after, min(left, _SLICE_SECONDS)):
                self._believed = (stream, after)
                return
        self._stop.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Let go of the notifier's connections. Never raises."""
        if self._notifier is not None:
            try:
                self._notifier.close()
            except Exception as error:  # noqa: BLE001  nobody can do anything about it
                self._failed(error)

    def _heard(self, stream: str, after: int, timeout_seconds: float) -> bool:
        assert self._notifier is not None
        try:
            heard = self._notifier.wait(stream, after, timeout_seconds)
        except Exception as error:  # noqa: BLE001  polling goes on
            self._failed(error)
            return False
        self._worked()
        return heard

    def _is_due(self) -> bool:
        """Whether the notifier is to be tried now."""
        return self._notifier is not None and time.monotonic() >= self._try_again

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self._pause_seconds == 0:
            reason = f"{type(error).__name__}: {error}"
            _logger.warning("hints of new versions fail, polling goes on alone: %s", reason)
        doubled = max(_FIRST_PAUSE_SECONDS, 2 * self._pause_seconds)
        self._pause_seconds = min(doubled, _LONGEST_PAUSE_SECONDS)
        self._try_again = time.monotonic() + self._pause_seconds

    def _worked(self) -> None:
        if self._pause_seconds:
            _logger.warning("hints of new versions work again")
        self._pause_seconds = 0.0
