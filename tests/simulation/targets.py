"""Where a predictor must end when all faults are over, by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from delta_tracker import Canary
from tests.simulation.history import History, Order, Place
from tests.simulation.reader import Reader
from tests.simulation.stores import Entry, Store

LOOK_SECONDS = 6.5  # more than the time between two looks for a pin


def targets(reader: Reader, history: History) -> set[Place] | None:
    """Return the places at which a predictor may end, None if nothing leads it anywhere."""
    stores = [store for store in reader.settings.stores if not store.is_lost]
    entries = [entry for store in stores for entry in store.entries(reader.needed)]
    numbers = [history.streams.index(each.stream) for each in entries if each.kind == "snapshot"]
    floor = reader.floor
    if not numbers or (floor is not None and floor[0] > max(numbers)):
        return None
    number = max(numbers)
    # A stream that a promotion has started waits for its first snapshot.
    is_waiting = any(history.streams.index(each.stream) > number for each in entries)
    stream = history.streams[number]
    entries = [each for each in entries if each.stream == stream]
    head = _newest(reader, stores, entries, stream)
    is_older = reader.saved is not None and reader.saved > (number, head.version)  # all that is there is older
    if is_waiting or (floor is None and (is_older or not _may_begin(reader, history, entries, head))):
        return None
    start = floor[1] if floor is not None and floor[0] == number else None
    is_stuck = _is_stuck(reader, history, entries, start)
    entries = [each for each in entries if fits(reader, history, each)]
    allowed = [each for each in entries if is_allowed(each, head, reader.settings.canary)]
    ends = reached(allowed, start)
    newest = {history.without_claims((number, max(ends)))} if ends else set()
    newest |= {history.without_claims((number, start))} if start is not None and is_stuck else set()
    if reader.settings.kind == "cache" and ends:  # it may have a lost part, because another part has the same bytes
        listed = [each for store in stores for each in store.listed() if each.stream == stream]
        cached = reached([each for each in listed if is_allowed(each, head, reader.settings.canary)], start)
        newest |= {history.without_claims((number, version)) for version in cached if version > max(ends)}
    found = newest | _while_held(entries, allowed, start, number, ends, history)
    if reader.own is not None:
        own = history.without_claims(reader.own)
        found = {own} | (found | _before_end(reader, own, history) if own[0] != number else set())
    if not reader.settings.follows_pins:
        return found or None
    # The newest one that one of the stores shows. If a mirror cannot copy the newest one, it shows an older one.
    shown = max((each["counter"] for store in stores for each in store.orders() if each["stream"] == stream), default=0)
    newest_one = max((counter for name, counter in history.ordered if name == stream), default=0)
    for order in {history.ordered[stream, counter] for counter in (shown, newest_one) if counter}:
        is_known = newest_one == shown
        is_there = order.version in ends
        pinned = (number, order.version)
        # An earlier pin may still apply.
        applies = floor is None or (is_known and is_there)
        found |= set() if applies else set(product([number], _pins(history, stream, 0, order.counter) & ends))
        if order.kind == "pin":
            found = _pinned(reader, order, found, pinned, is_certain=is_known and is_there, is_known=is_known)
        else:
            found |= newest if reader.own is not None else set()
        if not is_there and floor is None:
            return None  # a canary waits for the version of the order
        if not is_there and floor is not None:
            found |= _while_waiting(floor, number, history)
            # A pin that a canary does not allow yet ends an own rollback, and leads up to what the canary allows.
            found |= {each for each in newest if each[1] < order.version}
            # A release that it does not allow yet keeps a predictor where it was when it saw the order.
            least = floor[1] if floor[0] == number else 0  # it may have come from a former stream before
            seen_at = {each for each in ends if least <= each < order.version}
            found |= {history.without_claims((number, each)) for each in seen_at if order.kind == "release"}
    return found or None


def _newest(reader: Reader, stores: Sequence[Store], entries: Sequence[Entry], stream: str) -> Entry:
    """Return the entry up to which a canary counts: the newest one, also if its parts are lost.

    Over http, that is the entry of the pointer, which is not written for a claim.
    """
    shown = [store.newest() for store in stores if reader.can_read(store)]
    heads = [each for each in shown if each is not None and each.stream == stream]
    pointed = max((store.pointed() or 0 for store in stores), default=0) if reader.settings.web is not None else None
    counted = [each for each in (*entries, *heads) if pointed is None or each.version <= pointed] or entries
    return max(counted, key=lambda each: (not each.is_merged, each.version))


def fits(reader: Reader, history: History, entry: Entry) -> bool:
    """Return True if the version of an entry fits the model of a predictor."""
    copy = history.copies.get((entry.stream, entry.version))
    return copy is None or entry.kind == "claim" or reader.fits(copy, entry.stream)


def _is_stuck(reader: Reader, history: History, entries: Sequence[Entry], start: int | None) -> bool:
    """Return True if the next version is lost, and the newest snapshot does not fit: an older one is not looked for."""
    snapshots = [each for each in entries if each.kind == "snapshot"]
    newest = max(snapshots, key=lambda each: each.version, default=None)
    if start is None or newest is None or newest.version <= start:
        return False
    leads_on = any(each.first <= start + 1 <= each.version for each in entries if each.kind != "snapshot")
    return not leads_on and not fits(reader, history, newest)


def _may_begin(reader: Reader, history: History, entries: Sequence[Entry], head: Entry) -> bool:
    """Return True unless a predictor without a version is refused: the newest snapshot does not fit its model."""
    snapshots = sorted((each for each in entries if each.kind == "snapshot"), key=lambda each: each.version)
    allowed = [each for each in snapshots if is_allowed(each, head, reader.settings.canary)]
    return all(fits(reader, history, each) for each in (*snapshots[-1:], *allowed[-1:]))


def _while_held(
    entries: Sequence[Entry], allowed: Sequence[Entry], start: int | None, number: int, ends: set[int], history: History
) -> set[Place]:
    """Return where a canary may wait below what it allows: a clock that was set back makes later entries older."""
    held = {each.version for each in entries if not each.is_merged and each not in allowed}
    first = min((version for version in held if start is None or version > start), default=None)
    if first is None or not ends or first > max(ends):
        return set()
    return {history.without_claims((number, each)) for each in {first - 1} & ends}


def _pins(history: History, stream: str, after: int, before: float) -> set[int]:
    """Return the versions of the pins of a stream with counters between two others."""
    orders = [each for (name, _), each in history.ordered.items() if name == stream and each.kind == "pin"]
    return {each.version for each in orders if after < each.counter < before}


def _before_end(reader: Reader, own: Place, history: History) -> set[Place]:
    """Return where a predictor may be that a later pin has led from its own rollback before the stream ended."""
    stream = history.streams[own[0]]
    last = max(_pins(history, stream, reader.known, float("inf")), default=0)
    versions = {version for name, version in history.copies if name == stream and version <= last}
    return {history.without_claims((own[0], each)) for each in versions}


def _while_waiting(floor: Place, number: int, history: History) -> set[Place]:
    """Return where a predictor may be that cannot follow an order of a stream: it may reach the end of a former one."""
    former = {(floor[0], version) for stream, version in history.copies if stream == history.streams[floor[0]]}
    return {history.without_claims(floor)} | (former if floor[0] < number else set())


def _pinned(
    reader: Reader, pin: Order, found: set[Place], pinned: Place, *, is_certain: bool, is_known: bool
) -> set[Place]:
    """Return the places at which a predictor may end that may see a pin.

    Args:
        reader: the predictor.
        pin: the pin.
        found: where it may end without the pin.
        pinned: where it ends with the pin.
        is_certain: True if all its stores show the pin, and lead to it.
        is_known: True if they show it.
    """
    if is_certain and _must_follow(reader, pin):
        return {pinned}
    if not found or (is_known and _has_overruled(reader, pin)):
        return found
    return found | {pinned}


def _must_follow(reader: Reader, order: Order) -> bool:
    """Return True if no call of the predictor itself may have ended a pin."""
    return order.counter > reader.excused and (reader.own is None or order.counter > reader.known)


def _has_overruled(reader: Reader, order: Order) -> bool:
    """Return True if the predictor's own rollback has ended a pin that it knew."""
    return reader.own is not None and reader.knew_all and order.time + LOOK_SECONDS < reader.own_time


def is_allowed(entry: Entry, head: Entry, canary: Canary | None) -> bool:
    """Return True if a canary allows an entry of a stream with this newest one."""
    if canary is None:
        return True
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
