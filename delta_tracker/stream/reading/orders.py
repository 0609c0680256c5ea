"""Orders that a reader follows: pins and releases of the stream, and rollbacks of its process; see :class:`Orders`."""

from __future__ import annotations

from dataclasses import replace

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import PinFollower
from delta_tracker.stream.reading.decisions import Order, Policy
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage


class Orders:
    """Orders to one reader, and which of them it has followed.

    Args:
        policy: what the process wants at the start.

    Attributes:
        policy: what the process wants. Any thread may replace it by :meth:`release`.
        pins: reader of pins; None to ignore them.
        followed: counter of the last pin or release that was followed; 0 before the first.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.pins = PinFollower() if policy.follows_pins else None
        self.followed = 0
        self._known = 0  # counter of the newest order when a round ended

    def newest(self, storage: Storage) -> Order | None:
        """Return the newest pin or release that is known. If a forged one was dropped, forget what was done for it.

        Raises:
            StorageError: if the store cannot be read at the first look.
        """
        if self.pins is None:
            return None
        pin = self.pins.order(storage)
        if (last := self.pins.take_drop()) is not None:
            self.followed = min(self.followed, last)
            own = (
                None
                if self.policy.own is None
                else replace(self.policy.own, counter=min(self.policy.own.counter, last))
            )
            self.policy = replace(self.policy, own=own, released=min(self.policy.released, last))
        return None if pin is None else replace(Order.of(pin), is_new=pin.counter != self._known)

    def named(self, order: Order, log: StreamLog) -> Manifest | None:
        """Return the entry that a pin or a release names; None if the log does not have it.

        Raises:
            StreamError: if the entry cannot be read.
        """
        entry = log.read(order.version)
        is_there = entry is not None and (entry.stream, entry.link) == (order.stream, order.link)
        if self.pins is not None and order.pin is not None:
            (self.pins.confirm if is_there else self.pins.doubt)(order.pin)
        return entry if is_there else None

    def seen(self, order: Order | None, position: Position | None) -> None:
        """Record the newest order at the end of a round, and whether a reader at a position has followed it."""
        self._known = 0 if order is None else order.counter
        if order is not None and order.is_followed_by(position):
            self.followed = max(self.followed, order.counter)

    def roll_back(self, entry: Manifest, newest: Order | None) -> None:
        """Order this process to go to an entry and stay there. Pins up to ``newest`` no longer apply meanwhile."""
        former = 0 if self.policy.own is None else self.policy.own.counter
        counter = max(former, 0 if newest is None else newest.counter)
        own = Order(counter, "pin", entry.stream, entry.version, None, entry.version, is_own=True)
        self.policy = replace(self.policy, own=own)

    def release(self) -> None:
        """End a rollback of this process. Without one, end the pin that is followed, for this process."""
        if self.policy.own is not None:
            self.policy = replace(self.policy, own=None)
        else:
            self.policy = replace(self.policy, released=max(self.policy.released, self.followed))
