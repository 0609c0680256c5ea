"""Canary: the distance that a predictor keeps from the newest version."""

from __future__ import annotations

from dataclasses import dataclass

from delta_tracker.arguments import check_count, is_number
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog


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


def is_allowed(canary: Canary, entry: Manifest, log: StreamLog) -> bool:
    """Return True if a canary may apply an entry that was read.

    Looks for the newest entry each time, because the log may have been replaced by an older copy.
    """
    newest = log.newest_version(entry.version)
    if canary.versions is not None:
        return entry.version + canary.versions <= newest
    assert canary.seconds is not None, "one of both"
    head = log.readable(newest)
    return head is not None and entry.created + canary.seconds <= head.created
