"""The x axis of sinks that draw over the training step."""

from __future__ import annotations

from collections import Counter

from delta_tracker.monitor.batch import WindowReport


class Steps:
    """Finds the step of each window of a series.

    It is the last one that :meth:`~delta_tracker.monitor.monitor.Monitor.step` was called with before the window
    closed; without any such call, the number of the series' window.
    """

    def __init__(self) -> None:
        self._num_windows: Counter[str] = Counter()

    def of(self, series: str, report: WindowReport) -> int:
        """Return the step of the next window of a series."""
        self._num_windows[series] += 1
        return self._num_windows[series] if report.window.step is None else report.window.step
