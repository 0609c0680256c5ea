"""Where a predictor must end when all faults are over, by brute force."""

from __future__ import annotations

from collections.abc import Sequence

from delta_tracker import Canary
from tests.world.history import History, Order, Place
from tests.world.reader import Reader
from tests.world.stores import Entry

LOOK_SECONDS = 6.5  # more than the time between two looks for a pin


def targets(reader: Reader, history: History) -> set[Place] | None:
    """Return the places at which a predictor may end, None if nothing leads it anywhere."""
    stores = [store for store in reader.settings.stores if not store.is_lost]
    entries = [entry for store in stores for entry in store.entries()]
    numbers = [history.streams.index(each.stream) for each in entries if each.kind == "snapshot"]
    floor = reader.floor
    if not numbers or (floor is not None and floor[0] > max(numbers)):
        return None
    number = max(numbers)
    stream = history.streams[number]
    entries = [each for each in entries if each.stream == stream]
    allowed = [each for each in entries if is_allowed(each, entries, reader.settings.canary)]
    start = floor[1] if floor is not None and floor[0] == number else None
    ends = reached(allowed, start)
    newest = {history.without_claims((number, max(ends)))} if ends else set()
    found = set(newest)
    if reader.own is not None:
        own = history.without_claims(reader.own)
        found = {own} | (found if own[0] != number else set())
    if reader.settings.follows_pins:
        # The one that the stores show. A mirror that cannot copy the newest one shows an older one.
        shown = max((each["counter"] for store in stores for each in store.orders()), default=0)
        for order in {*history.orders[-1:], *history.orders[max(0, shown - 1) : shown]}:
            pinned = (number, order.version)
            is_there = any(each.version == order.version for each in allowed)
            if (order.kind, order.stream) == ("release", stream):
                found |= newest if reader.own is not None else set()
                if floor is not None and floor < pinned and not is_there:
                    found.add(history.without_claims(floor))  # a canary waits for the snapshot of the release
            elif order.stream == stream and pinned not in found:
                is_newest = order.counter == len(history.orders) == shown
                if is_newest and is_there and _must_follow(reader, order):
                    found = {pinned}
                elif is_newest and _has_overruled(reader, order):
                    continue
                else:
                    found.add(pinned)
    return found or None


def _must_follow(reader: Reader, order: Order) -> bool:
    """Return True if no call of the predictor itself may have ended a pin."""
    return order.counter > reader.excused and (reader.own is None or order.counter > reader.known)


def _has_overruled(reader: Reader, order: Order) -> bool:
    """Return True if the predictor's own rollback has ended a pin that it knew."""
    return reader.own is not None and order.time + LOOK_SECONDS < reader.own_time


def is_allowed(entry: Entry, entries: Sequence[Entry], canary: Canary | None) -> bool:
    """Return True if a canary allows an entry of a stream."""
    if canary is None:
        return True
    head = max((each for each in entries if not each.is_merged), key=lambda each: each.version, default=entry)
    if canary.versions is not None:
        return entry.version + canary.versions <= head.version
    assert canary.seconds is not None, "one of both"
    return entry.created + canary.seconds <= head.created


def reached(entries: Sequence[Entry], start: int | None) -> set[int]:
    """Return all versions to which entries lead from a version, or from a snapshot."""
    found = {each.version for each in entries if each.kind == "snapshot"}
    found |= set() if start is None else {start}
    size = -1
    while size < len(found):
        size = len(found)
        for each in entries:
            if any(each.first - 1 <= before < each.version for before in found):
                found.add(each.version)
    return found
