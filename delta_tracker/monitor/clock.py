"""Timers, clocks, and the progress of training."""

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, Self, TypeVar, cast

_P = ParamSpec("_P")
_T = TypeVar("_T")

NS = 1e-9
"""Seconds per nanosecond."""


class Clock(Protocol):
    """Source of wall-clock and monotonic time.

    The module :mod:`time` implements this protocol. Tests pass their own clocks.
    """

    def time_ns(self) -> int:
        """Return the wall-clock time in nanoseconds since the epoch. Clock adjustments may decrease the time."""

    def monotonic_ns(self) -> int:
        """Return the time in nanoseconds since an arbitrary start. The time never decreases."""


@dataclass(slots=True)
class Progress:
    """Clock, current step and last epoch of a monitor. All stats of a registry share one ``Progress``.

    Args:
        step: current training step; None until the step is set.
        epoch: number of the last epoch that ended; None if no epoch has ended.
    """

    clock: Clock = time
    step: int | None = None
    epoch: int | None = None


@dataclass(slots=True, eq=False, repr=False)
class Timer:
    """Context manager and decorator that records the duration of a block or call, even if an exception is raised.

    A timer is not reentrant as a context manager. As a decorator, it times each call separately.

    Args:
        record: function that is called with the duration in seconds.
        clock: source of monotonic time.

    Example:
        >>> import time
        >>> seconds = []
        >>> with Timer(seconds.append, time):
        ...     pass
        >>> seconds[0] >= 0
        True
    """

    record: Callable[[float], None]
    clock: Clock
    _begin_ns: int = field(default=0, init=False)

    def __enter__(self) -> Self:
        self._begin_ns = self.clock.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.record((self.clock.monotonic_ns() - self._begin_ns) * NS)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return a wrapper of ``function`` that records the duration of each call. Supports coroutine functions."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_coroutine(*args: _P.args, **kwargs: _P.kwargs) -> object:
                with Timer(self.record, self.clock):
                    return await function(*args, **kwargs)

            return cast("Callable[_P, _T]", timed_coroutine)

        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with Timer(self.record, self.clock):
                return function(*args, **kwargs)

        return timed
