"""Orders that a reader follows: pins and releases of a stream, and rollbacks of a process; see :class:`Orders`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.pin import Pin
from delta_tracker.stream.reading.position import Position, Rows, Written
from delta_tracker.stream.reading.source import Source


@dataclass(frozen=True, slots=True)
class Order:
    """Order to a reader: a pin, a release, or a rollback.

    Args:
        counter: counter of the pin or release; for a rollback, counter of the newest pin at the time of the rollback.
        kind: ``pin`` to apply the version and stay at it; ``release`` to continue from the version or a later snapshot;
            ``rollback`` to pin this process only, even if a canary does not allow the version.
        link: link of the entry; None for a rollback.
        newest: newest version at the time of the order.
        is_new: True if another order, or none, was the newest in the previous round.
    """

    counter: int
    kind: str
    stream: str
    version: int
    link: Link | None
    newest: int
    is_new: bool = False
    pin: Pin | None = None

    @classmethod
    def of(cls, pin: Pin) -> "Order":
        """Return the order for ``pin``, the record of a pin or a release."""
        link = Link(pin.version, pin.xxh3)
        return cls(pin.counter, pin.kind, pin.stream, pin.version, link, pin.bad, pin=pin)

    def is_followed_by(self, position: Position | None) -> bool:
        """Return True if a reader at ``position`` has carried out the order."""
        if position is None or position.stream != self.stream or position.rows is Rows.MIXED:
            return False
        if self.kind == "release":
            return position.version >= self.version
        is_there = position.version == self.version if self.link is None else position.link == self.link
        return is_there and position.rows is Rows.WHOLE


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """Choice of the orders (pins, releases and rollbacks) that the reader of one process follows.

    Args:
        own: rollback of this process; None if there is none.
        released: newest pin or release to ignore. Earlier orders of the same stream are ignored too.
    """

    follows_pins: bool = False
    own: Order | None = None
    released: Order | None = None
    is_canary: bool = False

    def has_released(self, order: Order) -> bool:
        """Return True if this process ignores ``order`` because of :attr:`released`."""
        released = self.released
        return released is not None and order.stream == released.stream and order.counter <= released.counter


class Orders:
    """Record of the orders to one reader, including the last order that the reader has followed.

    The newest order at all urls applies. A followed order remains in effect if it is no longer found at any url,
    because a mirror may lag. Orders of the current stream take precedence over orders of its former streams.

    Not thread-safe, except :meth:`release` and :attr:`followed`.

    Attributes:
        policy: choice of the orders to follow. Calls of :meth:`release` change it at the next :meth:`begin`.
        followed: last pin or release that was carried out; None if there was none.
    """

    def __init__(self, policy: OrderPolicy, sources: Sequence[Source]) -> None:
        self.policy = policy
        self._sources = sources  # by number
        self._releases: deque[Order | None] = deque()  # calls of release(), with the order that was followed then
        self.followed: Order | None = None
        self._begun: Order | None = None  # pin on the way to which versions may be written
        self._shown: dict[int, Order | None] = {}  # number of a url to its newest order
        self._newest: Order | None = None  # newest order of this round
        self._known: Order | None = None  # newest order when a round ended
        self._overruled: tuple[Order, ...] = ()  # orders of its stream that were known at an own rollback
        self._stream = ""  # of the position when the last round ended

    def begin(self) -> OrderPolicy:
        """Begin a round: apply the calls of :meth:`release` since the previous round, and return the policy."""
        while self._releases:
            last = self._releases.popleft()
            if self.policy.own is not None:
                self.policy = replace(self.policy, own=None)
            elif last is not None and not self.policy.has_released(last):
                self.policy = replace(self.policy, released=last)
        self._newest = None
        return self.policy

    def newest(self, number: int, *, at_once: bool = False) -> Order | None:
        """Poll the url with index ``number`` for pins, and return the newest order found at all urls.

        See :meth:`PinReader.order`. If a forged pin is dropped, the reader no longer counts as following this pin.
        """
        if not self.policy.follows_pins:
            return None
        source = self._sources[number]
        pin = source.pins.order(source.storage, stream=self._stream, at_once=at_once)
        if (drop := source.pins.pop_dropped()) is not None:
            self._drop(*drop)
        self._shown[number] = None if pin is None else Order.of(pin)
        found = [each for each in (*self._shown.values(), self.followed) if each is not None]
        newest = max(self._present(found, source), key=lambda each: each.counter, default=None)
        if newest is None:
            return None
        self._newest = replace(newest, is_new=newest != self._known)
        return self._newest

    def _present(self, found: Sequence[Order], source: Source) -> Sequence[Order]:
        if len({each.stream for each in found}) <= 1:
            return found
        former = source.known_former_streams()
        return [each for each in found if each.stream not in former] or found

    def named(self, order: Order, source: Source) -> Manifest | None:
        """Return the entry that a pin or release ``order`` names; None if the log of ``source`` does not contain it."""
        entry = source.log.read(order.version)
        is_there = entry is not None and (entry.stream, entry.link) == (order.stream, order.link)
        if is_there:
            self._confirm(order)
        elif order.pin is not None:
            source.pins.recheck(order.pin)
        return entry if is_there else None

    def _confirm(self, order: Order) -> None:
        if order.pin is not None:
            for each in self._sources:
                each.pins.confirm(order.pin)

    def start(self, order: Order) -> None:
        """Record that the reader starts to apply ``order``, if it is a pin."""
        if order.kind == "pin":
            self._begun = replace(order, is_new=False)

    def record(self, position: Position | None) -> Order | None:
        """End a round and record its newest order. Return the order if a reader at ``position`` has carried it out."""
        order, self._stream = self._newest, "" if position is None else position.stream
        self._known = None if order is None else replace(order, is_new=False)
        if order is None or not order.is_followed_by(position):
            return None
        if order.kind == "pin":
            self._confirm(order)  # its entry is that of the position
        self.followed, self._begun = self._known, None
        return order

    def load(self, written: Written) -> None:
        """Restore the last followed order and its stream from ``written``, the saved state of a reader."""
        position, counter = written.position, written.pin or written.release
        self.followed = self._begun = None
        self._stream = "" if position is None else position.stream
        if counter and position is not None:
            kind, link = "pin" if written.pin else "release", position.link
            self.followed = Order(counter, kind, position.stream, link.version, link, link.version)

    def roll_back(self, entry: Manifest) -> None:
        """Make this process apply ``entry`` and stay at it until :meth:`release`. Ignores all orders known so far."""
        former = () if self.begin().own is None else self._overruled
        known = {*former, *self._shown.values(), self.followed}
        self._overruled = tuple(each for each in known if each is not None and each.stream == entry.stream)
        self._roll_back(Order(0, "rollback", entry.stream, entry.version, None, entry.version))

    def _roll_back(self, own: Order, least: int = 0) -> None:
        counter = max([least, *(each.counter for each in self._overruled)])
        self.policy = replace(self.policy, own=replace(own, counter=counter))

    def release(self) -> None:
        """End the rollback of this process. Without a rollback, release this process from the pin that it follows.

        Takes effect in the next round. Thread-safe.
        """
        self._releases.append(self._begun or self.followed)

    def _drop(self, pin: Pin, counter: int) -> None:
        """Drop a forged pin. ``counter`` is the highest valid counter at its url."""
        order = Order.of(pin)
        if self._begun == order:
            self._begun = None
        if self.followed == order:
            self.followed = None
        if self.policy.released == order:
            self.policy = replace(self.policy, released=replace(order, counter=counter))
        if self.policy.own is not None and order in self._overruled:
            self._overruled = tuple(each for each in self._overruled if each != order)
            self._roll_back(self.policy.own, counter)
