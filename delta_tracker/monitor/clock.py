"""Time, and how far training is: what windows and events are stamped with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Two clocks. The module :mod:`time` is one; a test passes its own."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch; may be set back."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment; never goes back."""


@dataclass(slots=True)
class Progress:
    """What is the same for all cells of a registry, and changes.

    Args:
        clock: where times come from.
        step: the training step that the next record belongs to; None before it was said.
        epoch: the same for the epoch.
    """

    clock: Clock = time
    step: int | None = None
    epoch: int | None = None
