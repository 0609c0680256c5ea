"""Training steps of windows, for sinks that plot over steps."""

from __future__ import annotations

from collections import Counter

from delta_tracker.monitor.batch import WindowReport


class Steps:
    """Finds the step of each window of a series.

    It is the step set by :meth:`~delta_tracker.monitor.monitor.Monitor.step` when the window closed. If no step was
    set, it is the number of the window in its series.
    """

    def __init__(self) -> None:
        self._num_windows: Counter[str] = Counter()

    def of(self, series: str, report: WindowReport) -> int:
        """Return the step of the next window of a series."""
        self._num_windows[series] += 1
        return self._num_windows[series] if report.window.step is None else report.window.step
