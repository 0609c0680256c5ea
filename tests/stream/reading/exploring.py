"""Exploration of families of states: each run goes on until the reader is at rest after all faults have ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from delta_tracker.stream.reading.decisions import Apply, Decision
from tests.stream.reading.families import FAMILIES, State
from tests.stream.reading.readers import Reader, ViolationError, World, advance
from tests.stream.reading.rules import chances, check

_FAULTY_ROUNDS = 4
_IDLE_ROUNDS = 4  # without a step, after which a reader is at rest
_MAX_SETTLED = 1 << 20

Round = tuple[Reader, bool, bool, bool]


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
            for is_cut, catches_up in ((False, False), (False, True), (True, False)):
                trace: list[tuple[Reader, Decision]] = []
                try:
                    self._run(world, reader, trace, is_cut=is_cut, catches_up=catches_up)
                except ViolationError as error:
                    shown = [*map(str, world.logs), f"bad={set(world.bad)} {is_cut=} {catches_up=}", f"{reader}"]
                    raise ViolationError("\n".join([str(error), *shown, *map(_text, trace)])) from None
        return self

    def _run(
        self, world: World, reader: Reader, trace: list[tuple[Reader, Decision]], *, is_cut: bool, catches_up: bool
    ) -> None:
        if world is not self._world:
            self._world = world
            self._known.clear()
        for number in range(_FAULTY_ROUNDS):
            key = reader, number > 0, catches_up, is_cut
            if key not in self._known:
                self._known[key] = self._round(world, *key)
            before, (reader, decision) = reader, self._known[key]
            trace.append((reader, decision))
            if before == reader and number > 1:
                break
            is_cut = is_cut and not isinstance(decision, Apply)
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
            reader, decision = self._round(world, reader, idle > 0, catches_up, False)
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
        self, world: World, reader: Reader, surveys: bool, catches_up: bool, is_cut: bool
    ) -> tuple[Reader, Decision]:
        after, decision = advance(world, reader, surveys=surveys, catches_up=catches_up, is_cut=is_cut)
        self.rounds += 1
        self.steps += isinstance(decision, Apply)
        check(world, reader, decision, after, is_cut=is_cut)
        return after, decision


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
    return f"{decision.rule.name} {names} of url {decision.number}: {decision.cause} -> {reader}"


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
