"""Consistent view of a log for one round of a reader: :class:`SeenLog`."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar, cast

from delta_tracker.errors import StreamError
from delta_tracker.stream.format.manifest import Manifest, Merged
from delta_tracker.stream.reading.orders import Order, Orders
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.source import Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class SeenLog:
    """Memoized view of a source's log for one round of a reader. Each object is read once, when it is first needed.

    Repeated calls of a method with the same arguments return the same answer or raise the same error, so that a
    decision can be reproduced. The methods are documented in :class:`Entries`, :class:`Source` and :class:`Orders`.

    Args:
        may_be_stale: True if a cache may be the cause of a fault, so that the reader must not act on the fault yet.
        answers: results of the lookups in this round, keyed by method and argument.
        lacks: keys of ``answers`` that are treated as missing entries.
    """

    source: Source
    orders: Orders
    may_be_stale: bool = False
    answers: dict[Hashable, object] = field(default_factory=dict)
    errors: list[StreamError] = field(default_factory=list)
    lacks: frozenset[Hashable] = frozenset()

    @property
    def number(self) -> int:
        return self.source.number

    @property
    def url(self) -> str:
        return self.source.storage.url

    def next(self, position: Position, *, looks_for_gap: bool) -> Manifest | None:
        return self._once(("next", looks_for_gap), self.source.next, position, looks_for_gap=looks_for_gap)

    def ahead(self, position: Position) -> Manifest | None:
        return self._once("ahead", self.source.catch_up.find, position)

    def allows(self, entry: Manifest) -> bool:
        return self._once(("allows", entry.stream, entry.link), self.source.allows, entry)

    def order(self) -> Order | None:
        return self._once("order", self.orders.newest, self.number)

    def named(self, order: Order) -> Manifest | None:
        return self._once(("named", order.counter), self.orders.named, order, self.source)

    def former_streams(self) -> tuple[str, ...]:
        """Return the ids of the former streams that the stream of the newest entry continues, newest first."""
        head = self.head()
        return () if head is None else self._once(("former_streams", head.stream), self.source.former_streams, head)

    def read(self, version: int) -> Manifest | None:
        return self._once(("read", version), self.source.log.read, version)

    def read_merged(self, merged: Merged) -> Manifest | None:
        return self._once(("read_merged", merged), self.source.log.read_merged, merged)

    def merged(self, *, after: int = -1) -> list[Merged]:
        return [each for each in self._once("merged", self.source.log.merged) if each.last > after]

    def versions(self, *, after: int = -1) -> list[int]:
        return self._once(("versions", after), self.source.log.versions, after=after)

    def head(self) -> Manifest | None:
        return self._once("head", self.source.log.head)

    def is_committed(self, entry: Manifest) -> bool:
        return self._once(("is_committed", entry.stream, entry.link), self.source.log.is_committed, entry)

    def without(self, entries: Iterable[Manifest]) -> Self:
        """Return a view of the log in which ``entries`` are missing."""
        keys = (("read", e.version) if e.merges is None else ("read_merged", Merged.of(e)) for e in entries)
        return replace(self, lacks=frozenset(keys))

    def _once(self, key: Hashable, look: Callable[..., T], *arguments: object, **named: object) -> T:
        if key not in self.answers:
            try:
                self.answers[key] = look(*arguments, **named)
            except StreamError as error:
                self.answers[key] = _Failed(error)
                self.errors.append(error)
        answer = None if key in self.lacks else self.answers[key]
        if isinstance(answer, _Failed):
            raise answer.error.with_traceback(None)
        return cast("T", answer)


@dataclass(frozen=True, slots=True)
class _Failed:
    error: StreamError
