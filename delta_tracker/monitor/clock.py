"""Clock and training progress, which provide the times, steps and epochs that windows report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of wall-clock and monotonic time.

    The module :mod:`time` implements this protocol. Tests pass their own clocks.
    """

    def time_ns(self) -> int:
        """Return the time in nanoseconds since the epoch. The time may decrease when the system clock is set."""

    def monotonic_ns(self) -> int:
        """Return the time in nanoseconds since an arbitrary start. The time never decreases."""


@dataclass(slots=True)
class Progress:
    """Mutable record of the clock, the current step and the last epoch, shared by all stats of a registry.

    Args:
        clock: source of timestamps.
        step: current training step; None until it is set.
        epoch: number of the last epoch that ended; None until it is set.
    """

    clock: Clock = time
    step: int | None = None
    epoch: int | None = None
