"""Orders that a reader follows: pins and releases of the stream, and rollbacks of its process; see :class:`Orders`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.pin import Pin, PinFollower
from delta_tracker.stream.reading.decisions import Policy
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.seen import Order
from delta_tracker.stream.reading.source import Source


@dataclass(frozen=True, slots=True)
class Followed:
    """Last ``pin`` or ``release`` that a reader has followed, as it is saved with the position."""

    kind: str
    counter: int


class Orders:
    """Orders to one reader, and which of them it has followed.

    The newest one of all urls counts, also one that was followed and that no url shows any more: a mirror may lag. At a
    promoted mirror, its own orders come before those of the former streams, although their counters may be lower.

    Only one thread at a time may use it, except :meth:`release` and :attr:`followed`.

    Attributes:
        policy: what the process wants, without the calls of :meth:`release` since :meth:`begin`.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._releases: deque[Order | None] = deque()  # calls of release(), with the order that was followed then
        self._last: Order | None = None  # that was followed
        self._begun: Order | None = None  # pin on the way to which versions may be written
        self._pins: dict[int, PinFollower] = {}  # number of a url to the reader of its pins
        self._shown: dict[int, Order | None] = {}  # number of a url to its newest order
        self._known: Order | None = None  # newest order when a round ended
        self._overruled: tuple[Order, ...] = ()  # orders of its stream that were known at an own rollback

    @property
    def followed(self) -> int:
        """Counter of the last pin or release that was followed; 0 before the first."""
        return 0 if self._last is None else self._last.counter

    def begin(self) -> Policy:
        """Begin a round: take the calls of :meth:`release` into account, and return the policy."""
        while self._releases:
            last = self._releases.popleft()
            if self.policy.own is not None:
                self.policy = replace(self.policy, own=None)
            elif last is not None and not self.policy.has_released(last):
                self.policy = replace(self.policy, released=last)
        return self.policy

    def newest(self, source: Source, *, at_once: bool = False) -> Order | None:
        """Return the newest pin or release of a source, or another one that is newer. See :meth:`PinFollower.order`.

        If a forged one was dropped, what was done for it is forgotten.
        """
        if not self.policy.follows_pins:
            return None
        self._pins[source.number] = source.pins
        pin = source.pins.order(source.storage, at_once=at_once)
        if (drop := source.pins.take_drop()) is not None:
            self._drop(*drop)
        self._shown[source.number] = None if pin is None else Order.of(pin)
        found = [each for each in (*self._shown.values(), self._last) if each is not None]
        newest = max(self._present(found, source), key=lambda each: each.counter, default=None)
        return None if newest is None else replace(newest, is_new=newest != self._known)

    def _present(self, found: Sequence[Order], source: Source) -> Sequence[Order]:
        """Return the orders without those of the former streams of a source, unless there are no others."""
        if len({each.stream for each in found}) <= 1:
            return found
        former = source.known_former_streams()
        return [each for each in found if each.stream not in former] or found

    def named(self, order: Order, source: Source) -> Manifest | None:
        """Return the entry that a pin or a release names; None if the log does not have it."""
        entry = source.log.read(order.version)
        is_there = entry is not None and (entry.stream, entry.link) == (order.stream, order.link)
        if is_there:
            self._confirm(order)
        elif order.pin is not None:
            source.pins.doubt(order.pin)
        return entry if is_there else None

    def _confirm(self, order: Order) -> None:
        """Keep an order at all urls that show it, because its entry was read at one of them."""
        if order.pin is not None:
            for each in self._pins.values():
                each.confirm(order.pin)

    def start(self, order: Order) -> None:
        """Record that versions on the path to a pin are about to be written."""
        if order.kind == "pin":
            self._begun = replace(order, is_new=False)

    def record(self, order: Order | None, position: Position | None) -> Followed | None:
        """Record the newest order at the end of a round. Return it if a reader at a position has followed it."""
        self._known = None if order is None else replace(order, is_new=False)
        if order is None or not order.is_followed_by(position):
            return None
        if order.kind == "pin":
            self._confirm(order)  # its entry is that of the position
        self._last, self._begun = self._known, None
        return Followed(order.kind, order.counter)

    def load(self, followed: Followed | None, position: Position | None) -> None:
        """Begin with a saved position, and what was followed there."""
        self._last = self._begun = None
        if followed is not None and position is not None:
            link = position.link
            self._last = Order(followed.counter, followed.kind, position.stream, link.version, link, link.version)

    def roll_back(self, entry: Manifest) -> None:
        """Order this process to go to an entry and stay there. The orders that are known do not apply meanwhile."""
        former = () if self.begin().own is None else self._overruled
        known = {*former, *self._shown.values(), self._last}
        self._overruled = tuple(each for each in known if each is not None and each.stream == entry.stream)
        self._roll_back(Order(0, "rollback", entry.stream, entry.version, None, entry.version))

    def _roll_back(self, own: Order, least: int = 0) -> None:
        counter = max([least, *(each.counter for each in self._overruled)])
        self.policy = replace(self.policy, own=replace(own, counter=counter))

    def release(self) -> None:
        """End a rollback of this process. Without one, end the pin that is followed or begun, for this process.

        Any thread may call it at any time. It has an effect from the next round on.
        """
        self._releases.append(self._begun or self._last)

    def _drop(self, pin: Pin, counter: int) -> None:
        """Forget a pin that was forged. At its url, only those up to a counter still count."""
        order = Order.of(pin)
        if self._begun == order:
            self._begun = None
        if self._last == order:
            self._last = None
        if self.policy.released == order:
            self.policy = replace(self.policy, released=replace(order, counter=counter))
        if self.policy.own is not None and order in self._overruled:
            self._overruled = tuple(each for each in self._overruled if each != order)
            self._roll_back(self.policy.own, counter)
