"""Clock and training progress, the source of the timestamps, steps and epochs of windows and events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of wall-clock and monotonic time. The module :mod:`time` implements it; tests pass their own clocks."""

    def time_ns(self) -> int:
        """Return nanoseconds since the epoch; may jump backwards."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary start; never decreases."""


@dataclass(slots=True)
class Progress:
    """Clock, current step and epoch, shared by all cells of a registry. Mutable.

    Args:
        clock: source of timestamps.
        step: current training step; None until it is set.
        epoch: number of the last epoch that ended; None until it is set.
    """

    clock: Clock = time
    step: int | None = None
    epoch: int | None = None
