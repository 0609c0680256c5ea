"""Orders that a reader follows: pins and releases of the stream, and rollbacks of its process; see :class:`Orders`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from delta_tracker.errors import MalformedError, StorageError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.decisions import Order, Policy
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.source import Source


@dataclass(frozen=True, slots=True)
class Followed:
    """Last ``pin`` or ``release`` that a reader has followed, as it is saved with the position."""

    kind: str
    counter: int


class Orders:
    """Orders to one reader, and which of them it has followed.

    The newest one of all urls counts. One that was followed still counts if no url shows it any more: a mirror may lag.
    At a promoted mirror, orders of the former streams give way to one of its own: the counters of its own ones may be
    lower, because the mirror lacked the last of the former ones.

    Attributes:
        policy: what the process wants. Any thread may replace it by :meth:`release`.
        followed: counter of the last pin or release that was followed; 0 before the first.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.followed = 0
        self._last: Order | None = None  # that was followed
        self._begun = 0  # counter of the last pin whose path was begun
        self._shown: dict[int, Order | None] = {}  # number of a url to its newest order
        self._known = 0  # counter of the newest order when a round ended
        # Number of a url and streams of orders to the former streams of its log.
        self._former: dict[tuple[int, frozenset[str]], tuple[str, ...]] = {}

    def newest(self, source: Source, *, at_once: bool = False) -> Order | None:
        """Return the newest pin or release of a source, or another one that is newer. See :meth:`PinFollower.order`.

        If a forged one was dropped, what was done for it is forgotten.
        """
        if not self.policy.follows_pins:
            return None
        pin = source.pins.order(source.storage, at_once=at_once)
        if (last := source.pins.take_drop()) is not None:
            self._drop(last)
        self._shown[source.number] = None if pin is None else Order.of(pin)
        found = [each for each in (*self._shown.values(), self._last) if each is not None]
        newest = max(self._present(found, source), key=lambda each: each.counter, default=None)
        return None if newest is None else replace(newest, is_new=newest.counter != self._known)

    def _present(self, found: Sequence[Order], source: Source) -> Sequence[Order]:
        """Return the orders without those of the former streams of a source, unless there are no others."""
        key = source.number, frozenset(each.stream for each in found)
        if len(key[1]) <= 1:
            return found
        if key not in self._former:
            with suppress(MalformedError, StorageError):
                head = source.log.head()
                self._former[key] = () if head is None else source.former_streams(head)
        return [each for each in found if each.stream not in self._former.get(key, ())] or found

    def named(self, order: Order, source: Source) -> Manifest | None:
        """Return the entry that a pin or a release names; None if the log does not have it."""
        entry = source.log.read(order.version)
        is_there = entry is not None and (entry.stream, entry.link) == (order.stream, order.link)
        if order.pin is not None:
            (source.pins.confirm if is_there else source.pins.doubt)(order.pin)
        return entry if is_there else None

    def begin(self, order: Order) -> None:
        """Record that versions on the path to a pin are about to be written."""
        if order.kind == "pin":
            self._begun = order.counter

    def record(self, order: Order | None, position: Position | None) -> Followed | None:
        """Record the newest order at the end of a round. Return it if a reader at a position has followed it."""
        self._known = 0 if order is None else order.counter
        if order is None or not order.is_followed_by(position):
            return None
        self.followed, self._last = order.counter, order
        return Followed(order.kind, order.counter)

    def load(self, followed: Followed | None, position: Position | None) -> None:
        """Begin with a saved position, and what was followed there."""
        self.followed, self._last = 0, None
        if followed is not None and position is not None:
            self.followed = followed.counter
            link = position.link
            self._last = Order(followed.counter, followed.kind, position.stream, link.version, link, link.version)

    def roll_back(self, entry: Manifest, newest: Order | None) -> None:
        """Order this process to go to an entry and stay there. Pins up to ``newest`` no longer apply meanwhile."""
        known = [each for each in (self.policy.own, newest) if each is not None and each.stream == entry.stream]
        counter = max((each.counter for each in known), default=0)
        own = Order(counter, "rollback", entry.stream, entry.version, None, entry.version)
        self.policy = replace(self.policy, own=own)

    def release(self) -> None:
        """End a rollback of this process. Without one, end the pin that is followed or begun, for this process."""
        if self.policy.own is not None:
            self.policy = replace(self.policy, own=None)
        else:
            self.policy = replace(self.policy, released=max(self.policy.released, self.followed, self._begun))

    def _drop(self, counter: int) -> None:
        """Forget orders above a counter."""
        own = self.policy.own
        own = None if own is None else replace(own, counter=min(own.counter, counter))
        self.policy = replace(self.policy, own=own, released=min(self.policy.released, counter))
        self.followed, self._begun = min(self.followed, counter), min(self._begun, counter)
        if self._last is not None and self._last.counter > counter:
            self._last = None
