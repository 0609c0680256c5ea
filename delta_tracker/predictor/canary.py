"""Bound by which a predictor stays behind the newest version."""

from __future__ import annotations

from dataclasses import dataclass

from delta_tracker.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Distance that a predictor keeps from the newest version. Exactly one argument is given.

    Args:
        versions: number of versions.
        seconds: number of seconds, by the times at which the versions were created.

    Raises:
        InvalidArgumentError: if both or neither are given, or a value is not positive and finite.
    """

    versions: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.versions is None) == (self.seconds is None):
            raise InvalidArgumentError("Canary", (self.versions, self.seconds), "Pass either versions or seconds")
        if self.versions is not None and (type(self.versions) is not int or self.versions < 1):
            raise InvalidArgumentError("versions", self.versions, "Pass a count of 1 or more")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise InvalidArgumentError("seconds", self.seconds, "Pass a positive number of seconds")
