"""The monitor of the program, which everything uses that is given no other."""

from __future__ import annotations

from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.monitor import Monitor

MONITOR = Monitor()

metrics: LibraryMetrics = MONITOR.metrics
"""The library's own metrics, as this monitor holds them."""


def program_monitor() -> Monitor:
    """Return :data:`MONITOR`. Code outside this package gets it here only, through a :class:`Recorder`."""
    return MONITOR
