"""Pins: objects ``control/pins/{counter}.json`` with which an operator returns all predictors to one version.

The counters are dense, and each object is created only if it does not exist. The pin with the highest counter applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.storage.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Order to all predictors that follow pins.

    Args:
        counter: number of the pin, 1 for the first.
        stream: id of the stream.
        kind: ``pin`` to return to a version and stay there, ``release`` to continue from a snapshot.
        version: the version to return to, or the version of the snapshot to continue from.
        xxh3: hash of the entry of ``version``.
        bad: newest version when the pin was written; a release has that of its pin.
        reason: text for people, at most 1,000 characters.
        time: Unix time of the host that wrote the pin, in seconds.
    """

    counter: Count
    stream: Hex
    kind: Literal["pin", "release"]
    version: Count
    xxh3: Hex
    bad: Count
    reason: str
    time: Time


class PinFollower:
    """Reader of the newest pin, for one predictor.

    Args:
        storage: function that returns the store of the stream.
        seconds: time between two looks, times a random factor of 0.75 to 1.25.
    """

    def __init__(self, storage: Callable[[], Storage], seconds: float = 5.0) -> None:
        self._storage = storage
        self._seconds = seconds

    def order(self) -> Pin | None:
        """Return the newest pin that is known; None before the first.

        Raises:
            StorageError: if the store cannot be read at the first look.
        """
        return None
