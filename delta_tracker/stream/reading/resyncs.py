"""Record of the faults that a reader has overcome: :class:`Resyncs`."""

from __future__ import annotations

import logging

from delta_tracker.errors import StreamError, kind_of

_logger = logging.getLogger(__name__)


class Resyncs:
    """Count and log of resyncs, and of faults, each of which is logged once until the next version is applied."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""  # description of the last resync
        self._logged: set[tuple[object, ...]] = set()

    def add(self, url: str, fault: StreamError, before: int | None, after: int) -> None:
        """Record a resync because of a fault, from version ``before`` to ``after``."""
        self.count += 1
        self.last = f"version {before} to {after}: {type(fault).__name__}: {fault}"
        # As text, because a log handler may keep its arguments, and with the error the rows of the version.
        _logger.warning("resync of %s from version %s to %s: %s", url, before, after, str(fault))

    def log_once(self, level: int, text: str, error: StreamError, *what: object) -> None:
        """Log a fault unless it was logged since the last applied version."""
        key = text, *what, *kind_of(error)
        if key not in self._logged:
            self._logged.add(key)
            _logger.log(level, text, *what, str(error))

    def applied(self) -> None:
        """Log faults again, because a version was applied."""
        self._logged.clear()
