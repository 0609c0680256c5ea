"""Interval between the polls of a follower: longer while a stream is at rest or hints arrive, with jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_LEAST_JITTERED_SECONDS = 0.1
_LEAST_IDLE_SECONDS = 1.0  # time without a version before the interval grows
_NUM_TRUSTED = 3  # right hints in a row after which polls are rare
_LEAST_PAUSE_SECONDS = 1e-3  # first pause above 0 of a schedule that begins at 0
# A cached pointer object may be this old: the interval at which it is written, its lifetime, and some more.
_HINT_SECONDS = 3.0
_HINTED_PAUSE_SECONDS = 0.25


class PollSchedule:
    """Wait before the next poll, computed from what the last polls and hints brought.

    A fixed schedule always waits ``seconds``. Otherwise the wait doubles while no version comes, and a version resets
    it. After three hints in a row that announced a version, the wait is ``longest_hinted``. A version that no hint
    announced, or a failure of the notifier, ends that. Waits of 0.1 s and more are multiplied by a random factor
    between 0.75 and 1.25, so that many readers do not poll at the same time. Not thread-safe.

    Args:
        seconds: first wait between two polls.
        is_fixed: True to always wait this long.
        longest: longest wait while no version comes, in seconds.
        longest_hinted: wait while hints can be trusted, in seconds.
        is_delayed: True if a version becomes visible some seconds after its hint, because a cache is in between.
        clock: returns a monotonic time in seconds.
        uniform: returns a random number between two bounds.

    Attributes:
        first_seconds: first wait between two polls.
        is_fixed: True if all waits are equal.
        longest: longest wait without hints, in seconds.

    Example:
        >>> schedule = PollSchedule(0.01, is_fixed=False, longest=0.1, longest_hinted=1.0)
        >>> schedule.pause()
        0.01
    """

    def __init__(
        self,
        seconds: float,
        *,
        is_fixed: bool,
        longest: float,
        longest_hinted: float,
        is_delayed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,  # no secret
    ) -> None:
        self.first_seconds = seconds
        self.is_fixed = is_fixed
        self.longest = max(seconds, longest)
        self._longest_hinted = max(seconds, longest_hinted)
        self._is_delayed = is_delayed
        self._clock = clock
        self._uniform = uniform
        self._moved = clock()  # time of the last version, or of the start
        self._between = 0.0  # seconds between the last two versions
        self._current = seconds
        self._num_right = 0  # right hints in a row
        self._hinted: float | None = None  # time of a hint whose version has not come yet
        self._is_moving = False  # True if the last poll found a version; the next one belongs to the same hint

    @property
    def seconds(self) -> float:
        """Wait before the next poll, without jitter."""
        if self.is_fixed:
            return self.first_seconds
        if self._is_delayed and self._hinted is not None and self._clock() - self._hinted < _HINT_SECONDS:
            return min(self.first_seconds, _HINTED_PAUSE_SECONDS)
        return self._longest_hinted if self._num_right >= _NUM_TRUSTED else self._current

    def moved(self) -> None:
        """Record that a poll found a version and applied it."""
        now = self._clock()
        if self._hinted is not None:
            self._num_right += 1
        elif not self._is_moving:
            self._num_right = 0
        if not self._is_moving:
            self._between = now - self._moved
        self._moved, self._is_moving = now, True
        self._hinted, self._current = None, self.first_seconds

    def hinted(self) -> None:
        """Record that a hint ended the last wait."""
        self._hinted = self._clock()

    def distrust(self) -> None:
        """Record that the notifier failed, so that hints may be missing."""
        self._num_right, self._hinted = 0, None

    def pause(self) -> float:
        """Return the seconds to wait before the next poll, after one that found nothing."""
        self._is_moving = False
        if not self.is_fixed:
            self._forget_wrong_hint()
            is_idle = self._clock() - self._moved > max(_LEAST_IDLE_SECONDS, 2 * self._between)
            seconds = self.seconds
            if is_idle:
                self._current = min(self.longest, max(2 * self._current, _LEAST_PAUSE_SECONDS))
        else:
            seconds = self.first_seconds
        return jittered(seconds, self._uniform)

    def _forget_wrong_hint(self) -> None:
        """Count a hint as wrong if the poll after it found nothing, or over http, the polls of some seconds."""
        if self._hinted is not None and (not self._is_delayed or self._clock() - self._hinted >= _HINT_SECONDS):
            self._num_right, self._hinted = 0, None


def jittered(seconds: float, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Return ``seconds``, from 0.1 s on times a random factor, so that many readers do not send requests at once.

    Args:
        seconds: time to wait.
        uniform: function that returns a random number between two others.
    """
    return seconds * uniform(0.75, 1.25) if seconds >= _LEAST_JITTERED_SECONDS else seconds
