"""Pins that a reader does not follow: :class:`IgnoredPins`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from delta_tracker.errors import StreamError
from delta_tracker.stream.pin import newest_pin
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 60.0  # between two looks


class IgnoredPins:
    """Rare look for a pin of the stream, for a reader that follows no pins.

    Attributes:
        notice: which pin is not followed; empty if none applies.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.notice = ""
        self._monotonic = monotonic
        self._looked_at = float("-inf")

    def look(self, storage: Storage, position: Position | None) -> None:
        """Look for the newest pin, and log once that it is not followed. No-op in the minute after a look."""
        if position is None or self._monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = self._monotonic()
        with suppress(StreamError):
            pin, notice = newest_pin(storage), ""
            if pin is not None and pin.kind == "pin" and pin.stream == position.stream:
                notice = f"the pin of version {pin.version} is not followed"
            if notice and notice != self.notice:
                _logger.warning("%s, because follows_pins is False: url=%s", notice, storage.url)
            self.notice = notice
