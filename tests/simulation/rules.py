"""Rules that hold after each call of a predictor.

- Each served row is the trainer's at the version that the predictor states. While a row store or :meth:`reading` states
  that a newer version may be written in part, it is that of one of the versions up to there.
- A predictor never goes back, in (stream, version), without an order: a pin, its own rollback or a promotion.
- It serves nothing that its gate rejects, that is closer than its canary, or that a pin has called bad. Only a snapshot
  of the log leads past a version that its gate holds.
- It stays at its own rollback.
- Tables that it leaves out have their former rows, and it names them.
- The version fits its model, or a part of it does and it applies what fits. What the version lacks has its former rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tests.simulation.history import History, Key, Order, Place, RuleError
from tests.simulation.reader import Reader
from tests.simulation.served import ServedRows
from tests.simulation.targets import LOOK_SECONDS
from tests.simulation.threads import SCHEDULER
from tests.simulation.trainer import TABLES, Copy


def check(reader: Reader, history: History, encoding: str | None, *, is_complete: bool) -> None:
    """Check a predictor after a call. Raise RuleError if a rule does not hold.

    Args:
        reader: the predictor, whose ``floor`` is changed.
        history: what was committed.
        encoding: encoding of the versions.
        is_complete: True if the call applied whatever it found.
    """
    reader.seen = max((counter for _, counter in history.ordered), default=0)
    version, stream, held = _stated(reader)
    if version is None or stream is None:
        if reader.floor is not None:
            raise RuleError("backwards", f"{reader.describe()} from {reader.floor} to no version")
        if not history.is_shown_by(reader.settings.stores):
            reader.blind_at = SCHEDULER.now
        reader.empty_at = SCHEDULER.now
        return
    key = stream, version
    if key not in history.copies:
        raise RuleError("rows", f"{reader.describe()} states version {version}, which was not committed")
    difference = history.copies[key].difference(held, encoding)
    if difference is not None:
        raise RuleError("rows", f"{reader.describe()} at version {version}: {difference}")
    _check_model(reader, history, key, encoding)
    place = history.place(*key)
    if reader.floor is not None and place < reader.floor:
        reader.baselines.clear()
        reader.held = None
    is_pinned = reader.settings.follows_pins and any(
        (each.kind, each.stream, each.version) == ("pin", *key) for each in history.ordered.values()
    )
    # Rows that may be ahead of a saved version are replaced from a snapshot on. An interrupted call shows the way.
    is_on_the_way = (
        not is_complete
        and reader.settings.follows_pins
        and any(
            (each.kind, each.stream) == ("pin", stream) and each.version > version for each in history.ordered.values()
        )
    )
    reader.may_serve_held |= is_pinned  # an order bypasses the gate
    is_led = is_pinned or (reader.is_following and is_on_the_way)
    _check_gate(reader, Copy(held, {}), version, is_led=is_led)
    _check_held(reader, place, history, is_led=is_led)
    _check_floor(reader, place, is_ordered=is_pinned or is_on_the_way)
    _check_canary(reader, place, history, key)
    _check_orders(reader, place, history, key, is_on_the_way=is_on_the_way)
    if Copy(held, {}).is_healthy:
        reader.baselines |= history.written(*key)
    _check_choice(reader, place, history)
    reader.floor = place
    newest = history.pin
    if newest is not None and is_complete and reader.own is None and key == (newest.stream, newest.version):
        # It may be there by chance, before it has looked for the pin.
        reader.pinned = newest if reader.predictor.status().pinned == newest.version else reader.pinned


def _check_floor(reader: Reader, place: Place, *, is_ordered: bool) -> None:
    """Check that a predictor goes back only by an order of its stream."""
    floor = reader.floor
    if floor is None or place >= floor:
        return
    if not is_ordered:
        raise RuleError("backwards", f"{reader.describe()} from {floor} to {place} without an order")
    if place[0] < floor[0]:
        raise RuleError("former pin", f"{reader.describe()} from {floor} to {place} by a pin of a former stream")


def _stated(reader: Reader) -> tuple[int | None, str | None, Mapping[str, Tensor]]:
    """Return the version that a predictor states, its stream and its rows, all of the same time.

    A predictor without a version has no rows: tables of raw ids may lack them.
    """
    while True:
        status = reader.predictor.status()  # may wait, while a thread that follows applies versions
        held = reader.copy() if status.version is not None else {}
        if reader.predictor.version == status.version:
            return status.version, status.stream, held


def _check_model(reader: Reader, history: History, key: Key, encoding: str | None) -> None:
    """Check that a version fits the model of a predictor, and that it has kept what the version lacks."""
    if not reader.fits(history.copies[key], key[0]):
        raise RuleError("fit", f"{reader.describe()} serves version {key[1]}, which does not fit")
    if kept := history.kept(key, reader.copy(), reader.before, encoding):
        raise RuleError("kept", f"{reader.describe()} at version {key[1]} has written {kept}, which it lacks")
    reader.before = reader.served.copy()
    former = None if reader.floor is None else history.copies.get((history.streams[reader.floor[0]], reader.floor[1]))
    if former is not None and former.shapes != history.copies[key].shapes:
        reader.baselines.clear()  # a changed table has a new baseline


def check_partial(reader: Reader, history: History, encoding: str | None) -> None:
    """Check the rows of a row store that states that a newer version may be written in part."""
    stored = reader.served
    state = stored.stated if isinstance(stored, ServedRows) else None
    if state is None or state.version is None or state.is_mixed or reader.settings.has_raw_ids:
        return  # a raw id reads the default row while its row changes owners
    versions = range(state.version, (state.version if state.applying is None else state.applying) + 1)
    if not history.has_rows(state.stream, versions, stored.copy(), encoding):
        raise RuleError("rows", f"{reader.describe()} has rows of no version of {versions}")


def _check_choice(reader: Reader, place: Place, history: History) -> None:
    """Check that a predictor has not written the tables that it leaves out, and names them once it has applied rows."""
    if written := reader.written:
        raise RuleError("left out", f"{reader.describe()} has written {sorted(written)}")
    left_out, whole = reader.predictor.status().left_out, history.without_claims(place)
    reader.start = reader.start or whole
    reader.has_applied |= not reader.is_continued or whole != reader.start
    copy = history.copies[history.streams[whole[0]], whole[1]]
    # Until a version is applied after a restart, it is not compared with the model.
    known = [reader.left_out(copy)] if reader.has_applied else [(), reader.left_out(copy), reader.not_chosen(copy)]
    # It names those of a version before it writes the first row, and its thread before it states what it applies.
    ahead = {reader.applying} if reader.applying is not None else set()
    ahead |= {version for _, version in history.copies if reader.is_following and version > place[1]}
    known += [reader.left_out(each) for (_, version), each in history.copies.items() if version in ahead]
    if left_out not in known:
        raise RuleError("left out", f"{reader.describe()} names {left_out}")


def _check_gate(reader: Reader, held: Copy, version: int, *, is_led: bool) -> None:
    gate = reader.settings.gate
    if gate is None or reader.may_serve_held or is_led:
        return
    if not held.is_finite:
        raise RuleError("gate", f"{reader.describe()} serves the NaN of version {version}")
    known = {name for name in held.large & {*TABLES} if {("snapshot", name), ("delta", name)} <= reader.baselines}
    if gate.max_drift is not None and known:
        raise RuleError("gate", f"{reader.describe()} serves the large values of version {version}")


def _check_held(reader: Reader, place: Place, history: History, *, is_led: bool) -> None:
    """Check that only a snapshot of the log, or an order, leads past the version that a gate holds."""
    held = reader.held
    if held is None or place < held:
        return
    reader.held = None
    places = {history.place(*key) for key, kind in history.kinds.items() if kind == "snapshot"}
    if not is_led and not any(held < each <= place for each in places):
        raise RuleError("gate", f"{reader.describe()} went past {held}, which its gate holds, to {place}")


def _check_canary(reader: Reader, place: Place, history: History, key: Key) -> None:
    canary = reader.settings.canary
    if canary is None:
        return
    if canary.versions is not None:
        is_too_close = place[1] + canary.versions > history.newest(place)
    else:
        assert canary.seconds is not None, "one of both"
        seconds = canary.seconds - history.clock_seconds
        is_too_close = history.created[key] + seconds > max(history.created.values())
    if is_too_close:
        raise RuleError("canary", f"{reader.describe()} at {place} of {history.head}")


def _check_orders(reader: Reader, place: Place, history: History, key: Key, *, is_on_the_way: bool) -> None:
    own = reader.own
    is_free = own is None or place[0] != own[0] or place == own
    if not is_free and reader.knew_all and len(history.ordered) == reader.num_known:
        raise RuleError("rollback", f"{reader.describe()} left {own} for {place}")
    if own is not None:
        return
    if reader.floor is None and history.is_shown_by(reader.settings.stores):
        _check_start(reader, key, history.pin)
    pin = reader.pinned
    if pin is None:
        return
    if _is_after(key, pin) and key[1] <= pin.bad and reader.floor != place:
        later = [each for each in history.ordered.values() if each.stream == pin.stream and each.counter > pin.counter]
        if all(key[1] > each.version if each.kind == "pin" else key[1] != each.version for each in later):
            raise RuleError("bad version", f"{reader.describe()} has left {pin} for {place}")
    if pin == history.pin and key != (pin.stream, pin.version) and not is_on_the_way:
        raise RuleError("pin", f"{reader.describe()} has left {pin}, which applies, for {place}")


def _check_start(reader: Reader, key: Key, pin: Order | None) -> None:
    """Check that the first version of a predictor is not one after a pin."""
    if not reader.settings.follows_pins or reader.settings.canary is not None or pin is None:
        return
    slow_at = max(store.pace.slow_at for store in reader.settings.stores)
    since = max(pin.time, reader.blind_at, slow_at)
    begun_at = reader.empty_at if reader.is_following else SCHEDULER.now  # a thread may have begun then
    if pin.counter > reader.excused and since + LOOK_SECONDS < begun_at and _is_after(key, pin):
        raise RuleError("bad version", f"{reader.describe()} begins with {key[1]} in spite of {pin}")


def _is_after(key: Key, pin: Order) -> bool:
    return key[0] == pin.stream and key[1] > pin.version
