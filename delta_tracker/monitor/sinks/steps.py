"""Training steps of windows, for sinks that plot values over steps."""

from __future__ import annotations

from collections import Counter

from delta_tracker.monitor.batch import WindowReport


class Steps:
    """Mapping from windows to training steps.

    The step of a window is the training step, set by :meth:`~delta_tracker.monitor.monitor.Monitor.step`, at which the
    window closed. If no training step was set, the windows of each series are numbered from 1.
    """

    def __init__(self) -> None:
        self._num_windows: Counter[str] = Counter()

    def of(self, series: str, report: WindowReport) -> int:
        """Return the step of ``report``, which must be the next window of the series named ``series``."""
        self._num_windows[series] += 1
        return self._num_windows[series] if report.window.step is None else report.window.step
