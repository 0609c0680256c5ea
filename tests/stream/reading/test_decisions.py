"""The rules of a reader, and the diagram of its states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, product

from delta_tracker.stream.reading.decide import Apply, Decision, Rule, Stay
from delta_tracker.stream.reading.orders import Order
from tests import reader_rules
from tests.reader_rules import Step
from tests.stream.reading.families import FAMILIES, State
from tests.stream.reading.readers import Reader, World, advance

_EVERY = {"one url": 3, "gates": 9, "orders": 1, "promoted orders": 5}  # of which each this many-th state is run


def _states() -> Iterator[State]:
    for family, every in _EVERY.items():
        short, _ = FAMILIES[family]
        yield from islice(short(), 0, None, every)


def _state_after(reader: Reader, decision: Decision, before: str) -> str:
    match decision:
        case Apply():
            return "Following" if decision.order is None else "Pinned"
        case Stay() if not reader.is_mixed:
            return "Following" if decision.pinned is None else "Pinned"
    return _state_of(reader, before)


def _state_of(reader: Reader, before: str = "Following") -> str:
    return "Empty" if reader.word is None else "Mixed" if reader.is_mixed else before


def _ordered(world: World, reader: Reader, kind: str) -> State:
    """End the rollback of a reader, and order it to another version: to the newest snapshot, or the newest entry."""
    logs = []
    for log in world.logs:
        former = max(log.orders, key=lambda each: each.counter, default=None)
        entries = [each for each in log.entries.values() if former is not None and each.stream == former.stream]
        allowed = [each for each in entries if kind == "pin" or each.kind == "snapshot"]
        entry = max(allowed, key=lambda each: each.version, default=None)
        if former is not None and entry is not None and (kind == "pin" or entry.version > former.version):
            order = Order(former.counter + 1, kind, former.stream, entry.version, entry.link, former.newest)
            logs.append(replace(log, orders=(*log.orders, order)))
        else:
            logs.append(log)
    return replace(world, logs=tuple(logs)), replace(reader, policy=replace(reader.policy, own=None))


def _steps(world: World, reader: Reader, kind: str, *, catches_up: bool) -> Iterator[Step]:
    state, is_own = _state_of(reader), reader.policy.own is not None
    for number in range(7):
        if number == 2:
            world = world.healed()
        elif number == 4:
            world, reader = _ordered(world, reader, kind)
            state = _state_of(reader) if is_own else state
        reader, decision = advance(world, reader, surveys=number > 0, catches_up=catches_up)
        before, state = state, _state_after(reader, decision, state)
        if isinstance(decision, Apply) or (isinstance(decision, Stay) and before != state):
            yield before, state, decision.rule


def test_the_table_has_the_rules() -> None:
    assert reader_rules.table() == [(rule.name, rule.value) for rule in Rule]


def test_the_table_has_the_steps_of_a_reader() -> None:
    """Interrupted writes, which mix rows, have no rule."""
    found: set[Step] = set()
    variants = cycle(product(("pin", "release"), (False, True)))
    for (world, reader), (kind, catches_up) in zip(_states(), variants, strict=False):
        found.update(_steps(world, reader, kind, catches_up=catches_up))
    shown = reader_rules.steps()
    assert (found - shown, shown - found) == (set(), set())
