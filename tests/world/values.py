"""Schedules: what happens in a world, generated from a seed before the run.

An operation is a kind and two numbers. The world maps the numbers to what exists when the operation runs, and an
operation that cannot apply does nothing. So a schedule stays valid if operations are removed from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

# Weight of each kind of operation.
WEIGHTS = {
    "train": 4,
    "publish": 14,
    "burst": 2,
    "snapshot": 4,
    "restart_trainer": 3,
    "publish_former": 1,
    "spoil": 2,
    "stand_by": 2,
    "take_over": 1,
    "fault": 6,
    "mirror": 7,
    "compact": 2,
    "retain": 3,
    "pin": 3,
    "release_pin": 2,
    "join": 4,
    "sync": 18,
    "restart": 5,
    "roll_back": 2,
    "release": 2,
    "accept": 1,
    "interrupt": 3,
    "damage": 4,
    "forge": 2,
    "fail": 2,
    "unmount": 1,
    "repair": 5,
    "advance": 7,
    "lose": 1,
    "promote": 3,
    "settle": 2,
}
# Sequences that are rare among independent operations, of one predictor or one store.
_EPISODES = (
    ("mirror", "publish", "sync", "sync", "lose", "promote", "snapshot", "publish"),
    ("publish", "mirror", "lose", "promote", "publish", "sync"),
    ("publish", "mirror", "publish", "publish", "sync", "sync", "restart", "restart", "sync", "sync"),
    ("snapshot", "advance", "publish", "retain", "mirror", "fail", "sync", "sync", "repair"),
    ("publish", "pin", "advance", "sync", "snapshot", "release_pin", "advance", "sync"),
    ("publish", "publish", "sync", "pin", "sync", "advance", "sync", "publish", "restart", "sync"),
    ("publish", "pin", "restart", "snapshot", "release_pin", "sync", "restart", "sync", "advance", "sync"),
    ("sync", "pin", "roll_back", "release", "settle"),
    ("sync", "pin", "advance", "roll_back", "settle", "release", "settle"),
    ("sync", "roll_back", "pin", "settle", "release", "settle"),
    ("publish", "pin", "settle", "publish", "restart", "settle"),
    ("pin", "publish", "publish", "pin", "snapshot", "release_pin", "settle"),
    ("pin", "settle", "fault", "sync", "restart", "settle", "snapshot", "release_pin", "settle"),
    ("snapshot", "publish", "pin", "snapshot", "advance", "retain", "join", "settle"),
    ("publish", "pin", "settle", "mirror", "lose", "promote", "snapshot", "settle"),
    ("fail", "sync", "sync", "publish", "repair", "sync"),
    ("publish", "sync", "publish", "forge", "sync", "advance", "sync", "publish", "sync"),
    ("publish", "publish", "compact", "join", "sync"),
    ("publish", "sync", "publish", "damage", "sync", "advance", "sync", "sync", "snapshot", "settle"),
    ("spoil", "publish", "sync", "accept", "restart_trainer", "snapshot"),
)
# Operations that meet in one schedule: two of these are frequent in each.
_THEMES = (
    ("pin", "release_pin", "advance", "restart", "snapshot", "settle"),
    ("pin", "release_pin", "roll_back", "release", "sync", "settle"),
    ("pin", "release_pin", "retain", "compact", "snapshot", "join", "settle"),
    ("pin", "mirror", "lose", "promote", "settle"),
    ("mirror", "lose", "promote", "restart", "sync"),
    ("fail", "unmount", "damage", "repair", "fault", "sync"),
    ("forge", "advance", "sync", "publish"),
    ("restart_trainer", "stand_by", "take_over", "publish_former", "fault"),
    ("spoil", "accept", "join", "sync", "settle"),
    ("interrupt", "sync", "restart", "publish", "snapshot"),
    ("compact", "retain", "burst", "join", "sync"),
)
_EMPHASIS = 5
_LEAST, _MOST = 12, 60


class Operation(NamedTuple):
    """One operation. ``who`` selects a store or a predictor, and ``choice`` the rest."""

    kind: str
    who: int
    choice: int


def operations(texts: Sequence[str]) -> tuple[Operation, ...]:
    """Return operations that are written as ``kind who choice``."""
    words = [each.split() for each in texts]
    return tuple(Operation(kind, int(who), int(choice)) for kind, who, choice in words)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Description of a run, which is a pure function of it.

    Args:
        seed: seed of the weights, the ids that are trained, and the jitter of the library.
        states: True to publish the states of the optimizer, so that trainers can be restored.
        encoding: name of the encoding of all tables, None for their own dtype.
        skips_unchanged: True to leave unchanged rows out of versions.
        operations: what happens.
        has_web: True for predictors that read through a caching web server.
        has_upkeep: True for publishers that compact and delete versions.
        has_raw_ids: True for a table with managed collisions instead of the model.
    """

    seed: int
    states: bool
    encoding: str | None
    skips_unchanged: bool
    operations: tuple[Operation, ...]
    has_web: bool = False
    has_upkeep: bool = False
    has_raw_ids: bool = False

    def with_operations(self, operations: Sequence[Operation]) -> Schedule:
        return replace(self, operations=tuple(operations))

    def to_json(self) -> str:
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({**settings, "operations": [" ".join(map(str, each)) for each in self.operations]})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        settings = json.loads(text)
        return cls(operations=operations(settings.pop("operations")), **settings)


def generate(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    chance = random.Random(seed)
    states = chance.random() < 0.5
    has_web = chance.random() < 0.25
    frequent = {kind for theme in chance.sample(_THEMES, 2) for kind in theme}
    weights = {kind: weight * (_EMPHASIS if kind in frequent else 1) for kind, weight in WEIGHTS.items()}
    kinds = chance.choice([["publish", "mirror", "join", "join"], ["join", "publish", "join"]])
    count = chance.randrange(_LEAST, _MOST)
    steps = [(kind, chance.randrange(5)) for kind in kinds]
    while len(steps) < count:
        kinds = chance.choices(list(weights), list(weights.values()))
        if chance.random() < 0.1:
            kinds = list(chance.choice(_EPISODES))
        if kinds[-1] == "lose" and chance.random() < 0.7:  # the trainer can do nothing else
            kinds.append("promote")
        who = chance.randrange(5)
        steps.extend((kind, who) for kind in kinds)
    return Schedule(
        seed=seed,
        states=states,
        encoding=None if states else chance.choice([None, None, "F16", "INT8"]),
        skips_unchanged=chance.random() < 0.2,
        operations=tuple(Operation(kind, who, chance.randrange(20000)) for kind, who in steps),
        has_web=has_web,
        has_upkeep=not has_web and chance.random() < 0.3,
        has_raw_ids=chance.random() < 0.2,
    )
