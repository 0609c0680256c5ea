"""Stores from which a reader may read one stream: its own and mirrors of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.reading.source import Source
from delta_tracker.stream.storage.storage import Location, Storage, open_storage

_FIRST_PAUSE_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 300.0


class Sources:
    """Stores of one stream, of which one is current.

    A source that failed is not asked again for 30 s; each further failure doubles this time, up to 300 s. Several urls
    or stores are given in the order of preference. Raises InvalidArgumentError if there is none, or one is given twice.
    """

    def __init__(
        self, url: Location | Sequence[Location], canary: Canary | None = None, *, runtime: Runtime = REAL
    ) -> None:
        given = list(url) if isinstance(url, Sequence) and not isinstance(url, str) else [url]
        if not given:
            raise InvalidArgumentError("url", given, "Pass at least one url")
        stores = [open_storage(each) for each in given]
        names = [id(each) if each.url == "memory://" else each.url.rstrip("/") for each in stores]
        if len(set(names)) < len(names):
            raise InvalidArgumentError("url", [each.url for each in stores], "Pass each store once")
        self._all = [Source(number, each, canary, runtime=runtime) for number, each in enumerate(stores)]
        self._pauses = [_FIRST_PAUSE_SECONDS] * len(stores)  # of each source, after its next failure
        self._due_at = [float("-inf")] * len(stores)  # monotonic time from which a source may be asked
        self._monotonic = runtime.monotonic
        self._since = runtime.monotonic()  # time at which the current source became it
        self.current = self._all[0]

    def __iter__(self) -> Iterator[Source]:
        return iter(self._all)

    def __getitem__(self, number: int) -> Source:
        return self._all[number]

    def __len__(self) -> int:
        return len(self._all)

    def due(self) -> list[Source]:
        """Return the current source, and then the others that may be asked, in the order of preference."""
        now = self._monotonic()
        others = [each for each in self._all if each is not self.current and now >= self._due_at[each.number]]
        return [self.current, *others]

    def use(self, source: Source) -> None:
        """Make a source current."""
        self.current, self._since = source, self._monotonic()

    def failed(self, source: Source) -> None:
        """Record that a source failed, once for each pause."""
        now, number = self._monotonic(), source.number
        if source is self.current and now - self._since > _MAX_PAUSE_SECONDS:
            self._pauses[number] = _FIRST_PAUSE_SECONDS  # it worked for a while
        if now >= self._due_at[number]:
            self._due_at[number] = now + self._pauses[number]
            self._pauses[number] = min(2 * self._pauses[number], _MAX_PAUSE_SECONDS)

    def writable(self) -> Storage | None:
        """Return the first store that can be written to; None if there is none."""
        return next((each.storage for each in self._all if not each.storage.is_read_only), None)
