"""Stores from which a predictor may read one stream: its own and mirrors of it."""

from __future__ import annotations

from collections.abc import Sequence

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.cursor import Place
from delta_tracker.stream.storage.storage import Storage, open_storage


class Sources:
    """Stores of one stream, of which one is current.

    Args:
        url: url or store, or a sequence of them, in the order of preference.

    Attributes:
        current: the store that the predictor reads.

    Raises:
        InvalidArgumentError: if there is none, or one is given twice.
    """

    def __init__(self, url: str | Storage | Sequence[str | Storage]) -> None:
        urls = [url] if isinstance(url, str | Storage) else list(url)
        if not urls:
            raise InvalidArgumentError("url", urls, "Pass at least one url")
        self._all = [open_storage(each) for each in urls]
        self.current = self._all[0]

    def fail_over(self, place: Place | None) -> Storage | None:  # noqa: ARG002  skeleton
        """Make another source current and return it; None if none qualifies."""
        return None

    def writable(self) -> Storage | None:
        """Return the first store that can be written to; None if there is none."""
        return next((storage for storage in self._all if not storage.is_read_only), None)
