"""Results of the versions of a publisher, in its error, its log and its metrics: :class:`Reports`."""

from __future__ import annotations

import logging

from delta_tracker.errors import FencedError, LostEntryError, RankLostError, is_unknown, kind_of, unraised
from delta_tracker.publisher.gauges import PublisherGauges
from delta_tracker.stream.format.manifest import Manifest

_logger = logging.getLogger(__name__)


class Reports:
    """Result of the last version of a publisher.

    Attributes:
        error: error of the last version, without a traceback; None if it was published.
    """

    def __init__(self, gauges: PublisherGauges) -> None:
        self.error: Exception | None = None
        self._gauges = gauges
        self._failure: tuple[object, ...] | None = None  # kind of the last failure since the last version

    @property
    def is_over(self) -> bool:
        """True if this publisher can publish no more, because it is fenced or has lost a rank."""
        return isinstance(self.error, FencedError | RankLostError)

    def begin(self) -> None:
        """Forget the error of the last version, before another one that a caller waits for."""
        self.error = None

    def published(self, committed: Manifest) -> None:
        """Report that a version was published."""
        self._gauges.published(committed)
        if self.is_over:  # a version before the one that failed
            return
        if self._failure is not None:
            _logger.warning("publishing recovered at version %d", committed.version)
        self.error = self._failure = None

    def failed(self, error: Exception, version: int) -> None:
        """Report that ``version`` was not published. A failure of the same kind as the last one is not logged."""
        former, self._failure = self._failure, kind_of(error)
        self.error = unraised(error)
        if self._failure != former:
            level = logging.ERROR if isinstance(error, FencedError) else logging.WARNING  # it ends training
            _logger.log(level, "%s: %s", _outcome(error, version), error)
        self._gauges.failed(error)


def _outcome(error: Exception, version: int) -> str:
    """Return a text that says what became of a version."""
    if isinstance(error, LostEntryError):
        return f"the next version, {version}, must be a snapshot"
    return (
        f"whether version {version} was published is unknown"
        if is_unknown(error)
        else f"version {version} was not published"
    )
