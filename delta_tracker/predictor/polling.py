"""Schedules of the polls and gap checks of a follower. The poll interval depends on new versions, hints and errors."""

from delta_tracker.stream.reading.runtime import REAL, Runtime

# A poll requests only the next entry. If it is missing, a check at this interval shows whether it was deleted or is not
# committed yet. The interval doubles, up to twelve times its length, while checks list the log and find nothing.
GAP_CHECK_SECONDS = 5.0
_MAX_GAP_CHECKS = 12
_MAX_BACK_OFF_SECONDS = 5.0
_NO_STREAM_SECONDS = 0.5  # for a fixed interval
_MAX_NO_STREAM_SECONDS = 1.0  # otherwise
_LEAST_JITTERED_SECONDS = 0.1
_LEAST_IDLE_SECONDS = 1.0  # time without a version before the interval grows
_NUM_TRUSTED = 3  # right hints in a row after which polls are rare
_LEAST_PAUSE_SECONDS = 1e-3  # first pause above 0 of a schedule that begins at 0
# A cached pointer object may be this old: the interval at which it is written, its lifetime, and some more.
_HINT_SECONDS = 3.0
_HINTED_PAUSE_SECONDS = 0.25


class PollSchedule:
    """Schedule of polls. The wait before the next poll depends on the results of the last polls and hints.

    If ``is_fixed`` is True, the wait is always ``seconds``. Otherwise, the wait doubles up to ``longest`` while polls
    find no version, and a version resets the wait. If each of the last three hints was followed by a version, the wait
    is ``longest_hinted`` until a version arrives without a hint, a hint is wrong, or the notifier fails. ``is_delayed``
    is True if a cache in front of the store may hide a version for some seconds after its hint. Not thread-safe.

    Attributes:
        retry_seconds: seconds to wait after a failed poll, without jitter.

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
        runtime: Runtime = REAL,
    ) -> None:
        self.retry_seconds = seconds
        self._first_seconds = seconds
        self._is_fixed = is_fixed
        self._longest = seconds if is_fixed else max(seconds, longest)
        self._longest_hinted = seconds if is_fixed else max(seconds, longest_hinted)
        self._is_delayed = is_delayed and not is_fixed
        self._runtime = runtime
        self._moved = runtime.monotonic()  # time of the last version, or of the start
        self._between = 0.0  # seconds between the last two versions
        self._current = seconds
        self._num_right = 0  # right hints in a row
        self._hinted: float | None = None  # time of a hint whose version has not come yet
        self._is_moving = False  # True if the last poll found a version; the next one belongs to the same hint

    @property
    def seconds(self) -> float:
        """Seconds to wait before the next poll, without jitter."""
        if self._is_delayed_hint:
            return min(self._first_seconds, _HINTED_PAUSE_SECONDS)
        return self._longest_hinted if self._num_right >= _NUM_TRUSTED else self._current

    @property
    def _is_delayed_hint(self) -> bool:
        """True if a cache may still hide the version of the last hint."""
        hinted = self._hinted
        return self._is_delayed and hinted is not None and self._runtime.monotonic() - hinted < _HINT_SECONDS

    def version_applied(self) -> None:
        """Record that a poll found a version and applied it."""
        now = self._runtime.monotonic()
        if self._hinted is not None:
            self._num_right += 1
        elif not self._is_moving:
            self._num_right = 0
        if not self._is_moving:
            self._between = now - self._moved
        self._moved, self._is_moving = now, True
        self._hinted, self._current = None, self._first_seconds

    def hint_received(self) -> None:
        """Record that a hint ended the last wait."""
        self._hinted = self._runtime.monotonic()

    def hints_failed(self) -> None:
        """Record that the notifier failed and that hints may therefore be missing."""
        self._num_right, self._hinted = 0, None

    def pause(self) -> float:
        """Record that a poll found no version. Return the seconds to wait before the next poll."""
        self._is_moving = False
        if self._hinted is not None and not self._is_delayed_hint:
            self.hints_failed()  # the hint was wrong
        seconds = self.seconds
        if self._runtime.monotonic() - self._moved > max(_LEAST_IDLE_SECONDS, 2 * self._between):
            self._current = min(self._longest, max(2 * self._current, _LEAST_PAUSE_SECONDS))
        return jittered(seconds, self._runtime)

    def poll_succeeded(self) -> None:
        """Record that a poll succeeded. Resets :attr:`retry_seconds`."""
        self.retry_seconds = self._first_seconds

    def poll_failed(self, seconds: float | None = None) -> None:
        """Record that a poll failed. Doubles :attr:`retry_seconds` up to 5 s, or sets it to ``seconds``."""
        doubled = min(_MAX_BACK_OFF_SECONDS, max(2 * self.retry_seconds, _LEAST_PAUSE_SECONDS))
        self.retry_seconds = doubled if seconds is None else seconds

    def found_no_stream(self) -> None:
        """Record that the stream does not exist yet. Sets :attr:`retry_seconds` to at most 1 s."""
        self.retry_seconds = min(self._longest, _NO_STREAM_SECONDS if self._is_fixed else _MAX_NO_STREAM_SECONDS)


class GapChecks:
    """Schedule of gap checks. A gap check determines whether a missing version was deleted or is not committed yet."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seconds = GAP_CHECK_SECONDS
        self._due = runtime.monotonic() + jittered(self._seconds, runtime)

    @property
    def is_due(self) -> bool:
        """True if it is time for the next check."""
        return self._runtime.monotonic() >= self._due

    def done(self, *, found_none: bool) -> None:
        """Schedule the next check, after a longer interval if ``found_none`` (the last check found no gap) is True."""
        longer = min(2 * self._seconds, _MAX_GAP_CHECKS * GAP_CHECK_SECONDS)
        self._seconds = longer if found_none else GAP_CHECK_SECONDS
        self._due = self._runtime.monotonic() + jittered(self._seconds, self._runtime)


def jittered(seconds: float, runtime: Runtime) -> float:
    """Return ``seconds``, changed at random by up to 25 % to spread the requests of readers. No change below 0.1 s."""
    return seconds * runtime.uniform(0.75, 1.25) if seconds >= _LEAST_JITTERED_SECONDS else seconds
