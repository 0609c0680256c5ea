"""Canary: the distance that a predictor keeps from the newest version."""

from dataclasses import dataclass

from delta_tracker.arguments import check_count, is_number, refuses_unknown
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Distance that a predictor keeps from the newest version. Pass exactly one argument.

    A version, snapshot or merged version that is closer to the newest version is not applied, even after a fault. The
    predictor waits if no snapshot is far enough away.

    Args:
        versions: minimum difference between the newest version and the applied version.
        seconds: minimum time in seconds from the creation of the applied version to the creation of the newest version,
            according to the publishers' clocks. The predictor waits while there is no newer version.

    Raises:
        InvalidArgumentError: if both arguments or none are given, or if a value is not positive and finite.

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
        """Distance as text, for example ``3 versions``."""
        return f"{self.versions} versions" if self.seconds is None else f"{self.seconds:g} seconds"


class CanaryBound:
    """Checker of the distance between an entry and the newest entry of a log, for a canary.

    Caches the newest entry while the log contains it. A check of an older entry sends more requests.
    """

    def __init__(self, canary: Canary, log: StreamLog) -> None:
        self._canary = canary
        self._log = log
        self._newest: Manifest | None = None  # of the last search

    def allows(self, entry: Manifest) -> bool:
        """Return True if the canary may apply ``entry``."""
        known = self._newest
        if known is not None:
            held = self._log.readable(known.version) if known.version >= entry.version else None
            if held is None or (held.stream, held.link) != (known.stream, known.link):  # an older copy of the log
                known = None
        # The newest entry may have been created earlier than one before it, by another clock.
        if known is None or self._canary.seconds is not None or not self._is_below(entry, known):
            version = self._log.newest_version(entry.version if known is None else known.version)
            if known is None or version != known.version:
                known = self._log.readable(version)
            if known is None and self._canary.versions is not None:
                return entry.version + self._canary.versions <= version
        self._newest = known
        return known is not None and self._is_below(entry, known)

    def _is_below(self, entry: Manifest, newest: Manifest) -> bool:
        if self._canary.versions is not None:
            return entry.version + self._canary.versions <= newest.version
        assert self._canary.seconds is not None, "one of both"
        return entry.created + self._canary.seconds <= newest.created
