"""The monitor of the program: what the library records to, and what users do unless they build their own."""

from __future__ import annotations

from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.monitor import Monitor

MONITOR = Monitor()

metrics: LibraryMetrics = MONITOR.metrics
"""The library's own metrics: ``metrics.published_rows.cell(table=fqn).add(n)``."""
