"""The rules of a reader, written down a second time: slow, on words, without a search.

:func:`check` compares one decision with them, :func:`chances` returns what a reader at rest has missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from delta_tracker.errors import NoSnapshotError
from delta_tracker.stream.format.manifest import Manifest, Merged
from delta_tracker.stream.reading.decide import Apply, Decision, Fail, Stay
from delta_tracker.stream.reading.orders import Order
from tests.stream.reading.logs import Log, created, generation_of, lineage, rows_after, stream_of, word_of
from tests.stream.reading.readers import Reader, ViolationError, World, covers, leaves_rows


def check(world: World, before: Reader, decision: Decision, after: Reader, *, is_cut: bool = False) -> None:
    """Raise an error if a decision, or what was written by it, violates a rule."""
    if not isinstance(decision, Apply):
        if after.word != before.word or after.rows != before.rows:
            raise ViolationError("rows change without a decision")
        _check_wait(world, before, decision, order_of(after))
        return
    log, order = world.logs[decision.log.number], order_of(after)
    if not log.is_up:
        raise ViolationError("a url is read that cannot be read")
    last = decision.entries[-1]
    _check_entries(log, before, decision)
    if decision.order is None:
        if len(decision.entries) > 1:
            raise ViolationError("several entries without an order")
        _check_forward(world, log, before, last)
        _check_held(world, before, last)
    elif order is None or decision.order.counter != order.counter or decision.order.kind == "release":
        raise ViolationError("an order is followed that does not apply")
    elif last.stream != order.stream:
        raise ViolationError("an order of another stream is followed")
    _check_order(world, log, before, decision, order)
    if after.behind and (order is None or order.kind != "rollback") and last.version + after.behind > log.newest:
        raise ViolationError(f"a canary {after.behind} behind applies {last.version} of {log.newest}")
    if not is_cut:
        _check_rows(after)


def _check_wait(world: World, before: Reader, decision: Decision, order: Order | None) -> None:
    """Check that a reader reports an outage, also at a pin, and says that a canary waits for an order."""
    needs_log = order is None or order.kind != "rollback"
    if needs_log and isinstance(decision, Stay) and not world.logs[decision.log.number].is_up:
        raise ViolationError("an outage is not reported")
    is_empty = isinstance(decision, Fail) and isinstance(decision.error, NoSnapshotError)
    waits = before.word and order is not None and all(_waits_for(log, before, order) for log in world.logs)
    if is_empty and waits:
        raise ViolationError("a canary that waits for an order says that there is no snapshot")


def _waits_for(log: Log, reader: Reader, order: Order) -> bool:
    """Return True if a canary of a log does not allow what an order leads to."""
    if not log.word or stream_of(log.word) != order.stream or order.version not in log.entries:
        return False
    return _is_barred(log, reader, order)


def _check_entries(log: Log, before: Reader, decision: Apply) -> None:
    for entry in decision.entries:
        if entry not in log.merged_entries and log.entries.get(entry.version) != entry:
            raise ViolationError(f"{word_of(entry)} is not at this url")
        if entry == log.late and entry.version < log.newest:
            raise ViolationError("a late claim is applied")
    first = decision.entries[0]
    if first.kind != "snapshot" and (before.word is None or before.is_mixed):
        raise ViolationError("rows of a delta on those of unrelated versions")


def _check_rows(after: Reader) -> None:
    assert after.word is not None
    right = rows_after(after.word)
    if after.rows == right:
        return
    if not (after.ahead or after.is_loaded):
        raise ViolationError(f"rows {after.rows} at {after.word}")
    # After a restart, nothing shows which rows are ahead.
    if (
        not after.is_loaded
        and not after.ahead.startswith(after.word)
        and any(
            row != good and row.startswith(after.ahead[:1]) and not after.word.startswith(row)
            for row, good in zip(after.rows, right, strict=True)
        )
    ):
        raise ViolationError(f"rows of two histories: {after.rows} at {after.word}, {after.ahead} was begun")


def _check_forward(world: World, log: Log, before: Reader, entry: Manifest) -> None:
    if before.word is None:
        return
    if before.is_mixed:
        if stream_of(before.word) not in lineage(word_of(entry)) and not _is_replaced(world, log, before.word):
            raise ViolationError(f"{word_of(entry)} is of another stream than {before.word}")
        return
    if not may_follow(world, log, before, entry):
        raise ViolationError(f"{word_of(entry)} does not follow {before.word}")


def may_follow(world: World, log: Log, reader: Reader, entry: Manifest) -> bool:  # noqa: PLR0911  one for each rule
    """Return True if an entry is newer than the position, or its stream proves that it continues the position's."""
    position, word = reader.word, word_of(entry)
    assert position is not None
    if word.startswith(position) and len(word) > len(position):
        if entry.kind == "snapshot":
            return True
        first = entry.version if entry.merges is None else Merged.of(entry).first
        return first <= len(position) and stream_of(word) == stream_of(position)
    if entry.kind != "snapshot":
        return False
    if stream_of(word) == stream_of(position):
        newer = generation_of(word) - generation_of(position)
        if len(word) > len(position) and len(position) - 1 not in log.entries and newer >= 0:
            return True  # nothing shows that it is another history
        is_restored = created(word) > created(position) + 60 and generation_of(word) == generation_of(log.word)
        return not _has(world, position) and (newer > 0 or is_restored)
    if stream_of(position) in lineage(word):
        return True
    return _is_replaced(world, log, position)


def _is_replaced(world: World, log: Log, word: str) -> bool:
    """Return True if all urls can be read, none has the stream of an entry, and the log ends after it."""
    is_older = created(log.word) <= created(word)
    return (
        not is_older
        and all(each.is_up for each in world.logs)
        and not any(stream_of(word) in lineage(each.word) for each in world.logs if each.word)
    )


def _has(world: World, word: str) -> bool:
    """Return True if a url shows an entry."""
    return any(each.is_up and getattr(each.entries.get(len(word) - 1), "xxh3", None) == word for each in world.logs)


def _check_held(world: World, before: Reader, entry: Manifest) -> None:
    if entry.merges is None:
        if word_of(entry) in world.bad:
            raise ViolationError("a held version is applied")
    elif any(covers(entry, bad) for bad in before.held):
        raise ViolationError("a merged entry with rows of a held version is applied")


def order_of(reader: Reader) -> Order | None:
    """Return the order that applies to a reader."""
    newest, own = reader.known if reader.policy.follows_pins else None, reader.policy.own
    if own is not None and (newest is None or newest.counter <= own.counter):
        return own
    return None if newest is None or _is_released(newest, reader) else newest


def _is_released(order: Order, reader: Reader) -> bool:
    released = reader.policy.released
    return released is not None and (order.stream, order.counter <= released.counter) == (released.stream, True)


def _check_order(world: World, log: Log, before: Reader, decision: Apply, order: Order | None) -> None:
    last = decision.entries[-1]
    if order is None or order.stream != last.stream:
        _check_left(before, last)
        return
    if order.kind != "release":
        if decision.order is not None:
            is_exact = last.link == order.link if order.link is not None else last.version == order.version
            if not is_exact:
                raise ViolationError(f"version {last.version} instead of the pinned {order.version}")
        elif not _is_barred(log, before, order) or last.version > order.version:
            raise ViolationError(f"version {last.version} is applied although {order.version} is pinned")
        return
    is_above = before.word is not None and stream_of(before.word) == order.stream and not before.is_mixed
    is_above = is_above and len(before.word or "") > order.version
    if not is_above and (last.kind != "snapshot" or last.version < order.version):
        raise ViolationError(f"version {last.version} is applied below the released {order.version}")


def _check_left(before: Reader, last: Manifest) -> None:
    """Check that a reader at a pin does not go on in its stream because of an order of another stream."""
    pin = _pin_of(before)
    if pin is not None and last.stream == pin.stream and last.version <= pin.newest:
        raise ViolationError(f"version {last.version}, which the pin to {pin.version} calls bad, is applied")


def _pin_of(reader: Reader) -> Order | None:
    """Return the pin at which a reader is; None if it is at none."""
    pin = reader.followed
    if pin is None or pin.kind != "pin" or reader.policy.own is not None or reader.policy.released is not None:
        return None
    return pin if pin.is_followed_by(reader.position) else None


def _is_barred(log: Log, reader: Reader, order: Order) -> bool:
    """Return True if the canary does not allow a pinned version yet."""
    return reader.behind > 0 and order.kind != "rollback" and order.version + reader.behind > log.newest


def chances(world: World, reader: Reader) -> Iterator[str]:
    """Yield what a reader at rest could do by the rules, if all its urls can be read and no entry has a fault."""
    shown = [each for log in world.logs if log.is_up for each in log.orders]
    known = max(shown if reader.known is None else [reader.known, *shown], key=lambda each: each.counter, default=None)
    order = order_of(replace(reader, known=known))
    for number, log in enumerate(world.logs):
        if not log.word or log.is_lost:
            continue
        head = log.entries[log.newest]
        if order is not None and (order.stream == head.stream or order.kind == "rollback"):
            chance = _ordered(world, log, reader, order)
        elif order is not None and reader.word is not None and stream_of(reader.word) == order.stream:
            chance = _succeeding(world, log, reader, order)
        elif order is not None and (pin := _pin_of(reader)) is not None and head.stream == pin.stream:
            continue  # until the order can be followed
        else:
            chance = _newer(world, log, reader)
        if chance:
            yield f"url {number}: {chance}"


def _is_usable(world: World, log: Log, reader: Reader, entry: Manifest) -> bool:
    if (entry.version + reader.behind > log.newest and reader.behind) or log.fault(entry):
        return False
    if entry.merges is None:
        return word_of(entry) not in world.bad
    return not any(covers(entry, bad) for bad in world.bad)


def _starts(world: World, log: Log, reader: Reader, stream: str) -> list[Manifest]:
    newest = max((e.version for e in log.entries.values() if e.kind == "snapshot" and e.stream == stream), default=-1)
    found = [*log.entries.values(), *(each for each in log.merged_entries if each.version > newest)]
    return [e for e in found if e.kind == "snapshot" and e.stream == stream and _is_usable(world, log, reader, e)]


def _newer(world: World, log: Log, reader: Reader) -> str:
    stream = stream_of(log.word)
    starts = _starts(world, log, reader, stream)
    if reader.word is None or reader.is_mixed:
        is_other = reader.word is not None and stream_of(reader.word) not in lineage(log.word)
        if is_other and not _is_replaced(world, log, reader.word or ""):
            return ""
        return f"start from {word_of(starts[0])}" if starts else ""
    if chance := _next_step(world, log, reader, reader.word):
        return chance
    for each in starts:
        if each.merges is not None and world.bad:
            continue
        if may_follow(world, log, reader, each):
            return f"{word_of(each)} is newer"
    return ""


def _next_step(world: World, log: Log, reader: Reader, word: str) -> str:
    """Return the entry of the log or the merged delta that follows a word in its history."""
    if not log.word.startswith(word) or len(log.word) == len(word):
        return ""
    following = log.entries.get(len(word))
    if following == log.late or (following is not None and _leads_nowhere(log, following)):
        following = None
    found = [following] if following is not None and not leaves_rows(reader, following) else []
    if following is None:
        deltas = [each for each in log.merged_entries if each.kind == "delta"]
        found = [each for each in deltas if Merged.of(each).first <= len(word) <= each.version]
    usable = (each for each in found if each.stream == stream_of(word) and _is_usable(world, log, reader, each))
    return next((f"{each.xxh3} leads on" for each in usable), "")


def _leads_nowhere(log: Log, entry: Manifest) -> bool:
    return entry.kind == "claim" and entry.version < log.newest and entry.version + 1 not in log.entries


def _succeeding(world: World, log: Log, reader: Reader, order: Order) -> str:
    assert reader.word is not None
    if order.stream not in lineage(log.word)[1:] or order.kind == "rollback":
        return ""
    starts = _starts(world, log, reader, stream_of(log.word))
    return f"{word_of(starts[0])} continues the pinned stream" if starts else ""


def _ordered(world: World, log: Log, reader: Reader, order: Order) -> str:  # noqa: PLR0911  one for each rule
    named = log.entries.get(order.version)
    if named is None or (order.link is not None and named.link != order.link) or named.stream != order.stream:
        return ""
    word = reader.word or ""
    if word and stream_of(word) not in lineage(log.word):
        return ""
    if word and stream_of(word) != order.stream and not reader.is_mixed:
        return ""  # it is obeyed at the next fault, or once it is new
    is_there = bool(word) and not reader.is_mixed
    if order.kind != "release":
        if _is_barred(log, reader, order) or (
            is_there and word == named.xxh3 and not reader.ahead and not reader.is_loaded
        ):
            return ""
        return f"{named.xxh3} is pinned" if _has_path(log, named) else ""
    if is_there and len(word) > order.version:
        return _newer(world, log, reader)
    starts = [each for each in _starts(world, log, reader, order.stream) if each.version >= order.version]
    return f"{word_of(starts[0])} is released" if starts else ""


def _has_path(log: Log, named: Manifest) -> bool:
    """Return True if all entries from a snapshot up to one are there."""
    word = word_of(named)
    for version in range(named.version, len(stream_of(word)) - 1, -1):
        entry = log.entries.get(version)
        if entry is None or entry.xxh3 != word[: version + 1] or log.fault(entry):
            return False
        if entry.kind == "snapshot":
            return True
    return False
