"""Exploration of families of states: each run goes on until the reader is at rest after all faults have ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from delta_tracker.stream.reading.decide import Apply, Decision
from delta_tracker.stream.reading.orders import Order, OrderPolicy
from tests.stream.reading.families import FAMILIES, State
from tests.stream.reading.readers import Reader, ViolationError, World, advance
from tests.stream.reading.rules import chances, check

_FAULTY_ROUNDS = 4
_IDLE_ROUNDS = 4  # without a step, after which a reader is at rest
_MAX_SETTLED = 1 << 20

_LAST = 1 << 10  # interrupts the last entry of a path

Round = tuple[Reader, bool, bool, int | None]


@dataclass
class Exploration:
    """Exploration of states, and their numbers. What was explored from one state is not explored from another again.

    Attributes:
        states: number of states from which a reader was run.
        rounds: number of different rounds.
        steps: number of rounds that applied a version.
    """

    states: int = 0
    rounds: int = 0
    steps: int = 0
    _world: World | None = None
    _known: dict[Round, tuple[Reader, Decision]] = field(default_factory=dict)  # rounds in this world
    _settled: set[Hashable] = field(default_factory=set)  # worlds without faults, and readers that come to rest there

    def __str__(self) -> str:
        return f"{self.states:,} states, {self.rounds:,} rounds, {self.steps:,} steps"

    def run(self, states: Iterable[State]) -> Exploration:
        """Run a reader from each state.

        Raises:
            ViolationError: for the first state from which a rule is violated.
        """
        for world, reader in states:
            self.states += 1
            for cut, catches_up in ((None, False), (None, True), (_LAST, False), (1, False)):
                if cut == 1 and reader.policy == OrderPolicy():
                    continue  # only orders have paths
                trace: list[tuple[Reader, Decision]] = []
                try:
                    self._run(world, reader, trace, cut=cut, catches_up=catches_up)
                except ViolationError as error:
                    shown = [*map(str, world.logs), f"bad={set(world.bad)} {cut=} {catches_up=}", f"{reader}"]
                    raise ViolationError("\n".join([str(error), *shown, *map(_text, trace)])) from None
        return self

    def _run(
        self, world: World, reader: Reader, trace: list[tuple[Reader, Decision]], *, cut: int | None, catches_up: bool
    ) -> None:
        if world is not self._world:
            self._world = world
            self._known.clear()
        for number in range(_FAULTY_ROUNDS):
            key = reader, number > 0, catches_up, cut
            if key not in self._known:
                self._known[key] = self._round(world, *key)
            before, (reader, decision) = reader, self._known[key]
            trace.append((reader, decision))
            if before == reader and number > 1:
                break
            if cut is not None and isinstance(decision, Apply):
                reader, cut = reader if cut == _LAST else _released(reader, decision.order), None
        world, reader = world.healed(), _without_forged(reader)
        settled = world.key, reader, catches_up
        if settled not in self._settled:
            self._settle(world, reader, trace, catches_up=catches_up)
            if len(self._settled) > _MAX_SETTLED:
                self._settled.clear()
            self._settled.add(settled)

    def _settle(self, world: World, reader: Reader, trace: list[tuple[Reader, Decision]], *, catches_up: bool) -> None:
        """Run a reader until it rests. It must then have done all that it could."""
        idle, num_left = 0, 2 * sum(len(each.word) for each in world.logs) + 4
        while idle < _IDLE_ROUNDS:
            before = reader
            reader, decision = self._round(world, reader, idle > 0, catches_up, None)
            trace.append((reader, decision))
            if isinstance(decision, Apply):
                idle, num_left = 0, num_left - 1
            else:
                idle = _IDLE_ROUNDS if reader == before and idle > 0 else idle + 1
            if num_left < 0:
                raise ViolationError("the reader does not come to rest")
        missed = next(chances(world, reader), None)
        if missed is not None:
            raise ViolationError(f"at rest at {reader.word}, but {missed}")

    def _round(
        self, world: World, reader: Reader, surveys: bool, catches_up: bool, cut: int | None
    ) -> tuple[Reader, Decision]:
        after, decision = advance(world, reader, surveys=surveys, catches_up=catches_up, cut=cut)
        self.rounds += 1
        self.steps += isinstance(decision, Apply)
        check(world, reader, decision, after, is_cut=cut is not None)
        return after, decision


def _released(reader: Reader, order: Order | None) -> Reader:
    """Return a reader whose process ends what it follows, on the path to it."""
    policy = reader.policy
    if policy.own is not None:
        return replace(reader, policy=replace(policy, own=None))
    return reader if order is None else replace(reader, policy=replace(policy, released=order))


def _without_forged(reader: Reader) -> Reader:
    """Return a reader after a forged pin was removed."""
    known = reader.known
    is_forged = known is not None and known.link is not None and known.link.xxh3 == "forged"
    return replace(reader, known=reader.confirmed) if is_forged else reader


def _text(each: tuple[Reader, Decision]) -> str:
    reader, decision = each
    if not isinstance(decision, Apply):
        return f"{decision} at {reader.word}"
    names = [entry.xxh3 for entry in decision.entries]
    return f"{decision.rule.name} {names} of url {decision.log.number}: {decision.cause} -> {reader}"


def main(names: list[str]) -> None:
    """Explore the whole of the named families, or of all, and print the counts."""
    for name, (short, whole) in FAMILIES.items():
        if name in names or not set(names) & set(FAMILIES):
            began = time.monotonic()
            try:
                found: object = Exploration().run((short if "short" in names else whole)())
            except ViolationError as error:
                found = error
            print(f"{name}: {found}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
