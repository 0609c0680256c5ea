"""Default monitor of the program, which is used if no other monitor is passed."""

from __future__ import annotations

from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.monitor import Monitor

MONITOR = Monitor()

metrics: LibraryMetrics = MONITOR.metrics
"""Built-in metrics of the default monitor."""


def program_monitor() -> Monitor:
    """Return :data:`MONITOR`.

    Code outside the package ``monitor`` must get the default monitor from this function or from a ``Recorder``.
    """
    return MONITOR
