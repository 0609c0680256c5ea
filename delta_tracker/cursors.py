"""Consumers: independent readers of one log, each with a cursor and at most one uncommitted read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delta_tracker.errors import InvalidArgumentError, StaleDeltaError, UnknownConsumerError
from delta_tracker.types import Delta


@dataclass(slots=True)
class _Consumer:
    position: int
    batch: int
    sealed: Delta | None = None


class Cursors:
    """Where each consumer stands in the log, in cuts and in batches.

    A read seals a range of positions; :meth:`commit` moves the cursor to the range's end, :meth:`abort` forgets the
    range. Sealing again replaces the former read, whose commit is then a :class:`StaleDeltaError`.

    Args:
        names: the consumers' names, at least one, all different.

    Raises:
        InvalidArgumentError: for an empty list or a name twice.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not names or len(set(names)) != len(names):
            raise InvalidArgumentError("consumers", names, "Pass a list of one or more different names")
        self._consumers = {name: _Consumer(position=0, batch=0) for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        """All consumers, in the order of their making."""
        return tuple(self._consumers)

    @property
    def pinned(self) -> set[int]:
        """Positions that a cursor or an uncommitted read still needs apart from their neighbours."""
        positions = {consumer.position for consumer in self._consumers.values()}
        return positions | {each.sealed.stop for each in self._consumers.values() if each.sealed is not None}

    @property
    def oldest(self) -> int:
        """The smallest cursor: nothing before it will be read."""
        return min(consumer.position for consumer in self._consumers.values())

    def resolve(self, name: str | None) -> str:
        """The name of a consumer; None means the only one.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
        """
        if name is None and len(self._consumers) == 1:
            return next(iter(self._consumers))
        if name is None or name not in self._consumers:
            raise UnknownConsumerError(name, self._consumers)
        return name

    def start(self, name: str) -> tuple[int, int]:
        """The cursor of consumer ``name``: its position and its batch count."""
        consumer = self._consumers[name]
        return consumer.position, consumer.batch

    def seal(self, delta: Delta) -> None:
        """Make ``delta`` its consumer's one uncommitted read."""
        self._consumers[delta.consumer].sealed = delta

    def commit(self, delta: Delta) -> None:
        """Move the cursor to the end of the consumer's uncommitted read.

        Raises:
            StaleDeltaError: if ``delta`` is not that read any more.
        """
        consumer = self._sealed_by(delta)
        consumer.position, consumer.batch, consumer.sealed = delta.stop, delta.batches[1], None

    def abort(self, delta: Delta) -> None:
        """Forget the consumer's uncommitted read; its rows stay pending.

        Raises:
            StaleDeltaError: if ``delta`` is not that read any more.
        """
        self._sealed_by(delta).sealed = None

    def rewind(self, name: str) -> None:
        """Put the cursor of ``name`` back to the start of the log, without an uncommitted read."""
        self._consumers[name] = _Consumer(position=0, batch=0)

    def _sealed_by(self, delta: Delta) -> _Consumer:
        consumer = self._consumers[self.resolve(delta.consumer)]
        if consumer.sealed is not delta:
            raise StaleDeltaError(delta.consumer)
        return consumer
