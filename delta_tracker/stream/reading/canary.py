"""Bound by which a predictor stays behind the newest version."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from delta_tracker.arguments import check_count, is_number
from delta_tracker.errors import InvalidArgumentError, MalformedError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Distance that a predictor keeps from the newest version. Pass exactly one argument.

    No version, snapshot or merged version above the bound is applied, even after a fault. The predictor waits if the
    stream has no snapshot at or below the bound.

    Args:
        versions: number of versions.
        seconds: number of seconds between the times at which a version and the newest entry of the log were created,
            both by the clocks of the publishers. A predictor without newer versions to compare with waits.

    Raises:
        InvalidArgumentError: if both or neither are given, or a value is not positive and finite.

    Example:
        >>> Canary(versions=3).text
        '3 versions'
    """

    versions: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.versions is None) == (self.seconds is None):
            raise InvalidArgumentError("Canary", (self.versions, self.seconds), "Pass either versions or seconds")
        if self.versions is not None:
            check_count("versions", self.versions)
        if self.seconds is not None and not (is_number(self.seconds) and self.seconds > 0):
            raise InvalidArgumentError("seconds", self.seconds, "Pass a positive number of seconds")

    @property
    def text(self) -> str:
        """Text of the distance, such as ``3 versions``."""
        return f"{self.versions} versions" if self.seconds is None else f"{self.seconds:g} seconds"


class CanaryBound:
    """Newest version of a log that a canary may apply."""

    def __init__(self, canary: Canary, log: StreamLog) -> None:
        self._canary = canary
        self._log = log
        self._origin: tuple[str, str] | None = None  # stream and publisher of the entries that were seen
        self._newest = -1  # newest version of the stream that was seen
        self._latest = float("-inf")  # creation time of the newest entry that was seen

    def allows(self, manifest: Manifest) -> bool:
        """Return True if an entry that was read is at or below the bound."""
        origin = manifest.stream, manifest.writer
        if origin != self._origin:  # a new publisher may have found an older copy of the log
            self._origin, self._newest, self._latest = origin, -1, float("-inf")
        # The newest entry may have been created earlier than one before it, by another clock.
        if self._canary.seconds is not None or not self._is_below(manifest):
            self._find_newest(manifest)
        return self._is_below(manifest)

    def _is_below(self, manifest: Manifest) -> bool:
        if self._canary.versions is not None:
            return manifest.version + self._canary.versions <= self._newest
        assert self._canary.seconds is not None, "one of both"
        return manifest.created + self._canary.seconds <= self._latest

    def _find_newest(self, manifest: Manifest) -> None:
        newest = self._log.newest_version(max(manifest.version, self._newest))
        if newest <= self._newest:
            return
        if self._canary.seconds is not None:
            try:
                head = self._log.read(newest)
            except MalformedError as error:
                _logger.info("cannot read the time of the newest version: %s", str(error))
                return
            if head is None:
                return
            self._latest = head.created
        self._newest = newest
