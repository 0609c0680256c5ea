"""Schedules: what happens in a world, generated from a seed before the run.

An operation is a kind and two numbers. The world maps the numbers to what exists when the operation runs, and an
operation that cannot apply does nothing. So a schedule stays valid if operations are removed from it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

# Weight of each kind of operation.
WEIGHTS = {
    "train": 4,
    "publish": 14,
    "burst": 2,
    "snapshot": 4,
    "restart_trainer": 3,
    "publish_former": 1,
    "spoil": 2,
    "heal": 1,
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
# Number of choices of each option of a predictor, which are the digits of the number of its join, the highest first.
_OPTIONS = {"gate": 5, "canary": 7, "kind": 6, "follows_pins": 2, "order": 9}
_URLS = 5  # number of choices of the next digit
LESSER = {
    "heartbeats": {"predictor with a `name`": "predictor"},
    "upkeep": {"publisher with `Upkeep(retention=, compact_every=)`": "publisher"},
    "operators": {"`rollback`, `release`": "predictor"},
    "compaction": {"`compact`": "predictor"},
    "mirrors": {
        "`mirror`, destination": "`mirror`, source",
        "`mirror --keep-versions`, destination": "`mirror`, source",
    },
}
"""Roles of the guide that an actor lacks, and the one that it has instead, by what it then cannot do."""
TABLE_CHOICES = 4
"""Number of choices of the tables that a predictor applies; they are the next digit, and 0 takes all."""
MODEL_CHOICES = 4
"""Number of choices of its model, the highest digit: bit 0 to apply what fits, bit 1 to have the trainer's model."""


class _Theme(NamedTuple):
    """Operations that meet in one schedule.

    Args:
        kinds: kinds of operations that are frequent.
        episodes: sequences that are rare among independent operations, of one predictor or one store.
        readers: options of the predictors, see ``_OPTIONS``; all options that are not named.
        settings: settings of the schedule.
    """

    kinds: tuple[str, ...]
    episodes: tuple[str, ...] = ()
    readers: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    settings: Mapping[str, bool] = MappingProxyType({})


_PRIMARY_FIRST = (0, 1, 3)  # orders of the urls, so that no mirror delays the predictor
_THEMES = (
    _Theme(
        ("pin", "release_pin", "advance", "restart", "snapshot", "settle"),
        (
            "publish pin advance sync snapshot release_pin advance sync",
            "publish publish sync pin sync advance sync publish restart sync",
            "publish pin restart snapshot release_pin sync restart sync advance sync",
            "publish pin settle publish restart settle",
            "pin publish publish pin snapshot release_pin settle",
            "pin settle fault sync restart settle snapshot release_pin settle",
        ),
        {"follows_pins": (1,)},
    ),
    _Theme(
        ("pin", "release_pin", "roll_back", "release", "sync", "settle"),
        (
            "sync pin roll_back release settle",
            "sync pin advance roll_back settle release settle",
            "sync roll_back pin settle release settle",
        ),
        {"follows_pins": (1,)},
    ),
    _Theme(
        ("pin", "retain", "compact", "burst", "snapshot", "advance", "join"),
        (
            "snapshot publish pin snapshot advance retain join settle",
            "publish publish compact publish retain pin snapshot advance retain settle",
            "publish publish compact advance retain pin join sync",
            "publish publish compact join sync",
            "burst compact pin snapshot advance retain join sync",
            "snapshot advance publish retain mirror fail sync sync repair",
        ),
    ),
    _Theme(
        ("mirror", "lose", "promote", "restart", "pin", "sync"),
        (
            "mirror publish sync sync lose promote snapshot publish",
            "publish mirror lose promote publish sync",
            "publish mirror publish publish sync sync restart restart sync sync",
            "publish pin settle mirror lose promote snapshot settle",
            "mirror sync lose promote snapshot advance retain publish mirror restart sync settle",
        ),
    ),
    _Theme(
        ("spoil", "heal", "accept", "compact", "sync", "snapshot", "settle"),
        (
            "spoil publish sync accept restart_trainer snapshot",
            "publish sync spoil publish sync heal publish publish compact sync sync",
            "snapshot sync publish sync spoil publish sync heal publish compact compact sync sync",
            "snapshot publish sync spoil publish sync sync heal snapshot sync accept sync",
            "spoil publish heal publish pin sync settle release_pin sync",
        ),
        {"gate": (3, 4), "canary": (0,), "order": _PRIMARY_FIRST},
    ),
    _Theme(
        ("pin", "release_pin", "snapshot", "compact", "roll_back", "sync", "advance"),
        (
            "snapshot advance sync burst compact damage sync sync sync",
            "publish publish publish sync roll_back sync release sync",
            "publish publish pin sync advance sync publish sync publish sync",
            "snapshot publish publish sync damage sync publish sync compact sync",
            "publish pin sync publish snapshot release_pin sync advance sync settle",
            "snapshot publish publish sync burst compact sync publish sync",
        ),
        {"canary": (4, 5, 6), "gate": (0,), "order": _PRIMARY_FIRST},
    ),
    _Theme(
        ("interrupt", "sync", "restart", "roll_back", "pin", "publish", "snapshot"),
        (
            "publish sync publish interrupt restart sync",
            "publish publish sync pin advance interrupt restart sync sync",
            "publish publish sync roll_back interrupt publish sync release sync",
        ),
        {"kind": (2, 4), "gate": (0,), "canary": (0,), "order": _PRIMARY_FIRST},
    ),
    _Theme(
        ("interrupt", "train", "publish", "compact", "roll_back", "sync"),
        (
            "train publish train publish compact join sync",
            "publish sync train train publish interrupt roll_back sync",
            "publish sync publish sync train publish roll_back sync release sync",
        ),
        {"kind": (0, 2, 4, 4), "gate": (0,), "canary": (0,), "order": _PRIMARY_FIRST},
        {"has_raw_ids": True},
    ),
    _Theme(("forge", "advance", "sync", "publish"), ("publish sync publish forge sync advance sync publish sync",)),
    _Theme(
        ("fail", "unmount", "damage", "repair", "fault", "sync"),
        (
            "fail sync sync publish repair sync",
            "publish sync publish damage sync advance sync sync snapshot settle",
        ),
    ),
    _Theme(
        ("restart_trainer", "stand_by", "take_over", "publish_former", "fault"),
        ("publish stand_by publish take_over publish_former publish sync",),
        settings={"states": True},
    ),
)
# Sequences that :func:`_widened` inserts, each into some schedules.
_SEQUENCES = (
    "publish mirror publish publish sync promote_lagging restart sync snapshot settle",
    "publish mirror publish sync promote_lagging sync restart snapshot publish sync restart settle",
    "mirror sync publish promote_lagging publish sync rebuild sync repair restart settle",
    "publish mirror publish promote_lagging restart repair snapshot publish rebuild publish sync restart settle",
    "publish publish back_up publish publish sync return_backup sync publish settle",
    "back_up publish restart_trainer publish publish sync return_backup publish sync",
    "publish mirror back_up publish sync mirror return_backup publish mirror settle",
    "publish train save_checkpoint publish publish sync load_checkpoint publish sync publish settle",
    "publish save_checkpoint publish load_checkpoint train publish sync load_checkpoint publish sync",
    "train save_checkpoint mirror publish promote_lagging load_checkpoint publish sync settle",
)
# Sequences of worlds that restore tables of raw ids, from the states in the stream.
_RAW_ID_RESTORES = (
    "publish train publish restart_trainer publish sync train publish settle",
    "publish snapshot train restart_trainer train publish restart_trainer publish sync",
    "publish stand_by train publish stand_by take_over publish sync restart_trainer publish settle",
    "publish train mirror publish promote_lagging publish restart_trainer publish sync",
)
_RAW_ID_SHARE = 0.08


class _Opening(NamedTuple):
    """First operations of a schedule, which are about its first predictor.

    Args:
        steps: kinds of operations, each with its ``who`` after an ``@``, by default 0, and its ``choice`` after a
            colon, by default a random one.
        readers: options of that predictor, see ``_OPTIONS``; all options that are not named.
        settings: settings of the schedule.
    """

    steps: str
    readers: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})


_FREE = {"gate": (0,), "canary": (0,)}
_BOTH = {"order": (1, 2, 6)}  # the first store and its mirror
_CANARY = {"gate": (0,), "canary": (4, 5, 6)}
_OPENINGS = (
    _Opening(  # a canary, whose stream ends before a pin that it does not allow yet
        "publish join publish advance:2 publish mirror sync:0 lose promote snapshot pin:0 sync:0 sync:0 settle",
        {**_CANARY, **_BOTH, "follows_pins": (1,)},
    ),
    _Opening(  # a pin of a stream that has ended, seen by a predictor of mixed rows of the next one
        "publish join publish pin:1 mirror sync:0 promote:7 snapshot sync:0 advance:4 sync:0 advance:4 sync:0 burst "
        "snapshot retain:0 interrupt:20 fail@1 sync:0 sync:0 sync:0 advance:4 sync:0 repair@1 settle",
        {**_FREE, "order": (1,), "kind": (2, 4), "follows_pins": (1,)},
        {"has_web": False},
    ),
    _Opening(  # an older copy, with the generation of lost versions
        "publish join publish back_up restart_trainer:0 publish publish publish sync:0 return_backup:0 sync settle",
        {**_FREE, "order": (0, 1, 3)},
    ),
    _Opening(  # an older copy, whose entries are newer by a clock that was set back
        "set_clock:1 publish join publish back_up set_clock:0 publish publish sync:0 return_backup:1 sync settle",
        {**_FREE, "order": (0, 1, 3)},
    ),
    _Opening(  # an older copy, whose next snapshot has the number of a lost version, before predictors restart
        "publish join publish back_up publish train publish sync:0 return_backup:3 sync settle",
        {**_FREE, "order": (0, 1, 3)},
        {"states": True, "encoding": None},
    ),
    _Opening(  # a predictor of a stream reads a former one, which has more versions
        "publish join publish mirror burst snapshot promote_lagging:2 snapshot sync:0 advance:4 sync:0 advance:4 "
        "sync:0 restart:4 sync:2 sync:2 sync:0 restart:4 sync:2 sync:2 settle",
        {**_FREE, "order": (1, 2)},
    ),
    _Opening(  # a canary, which allows a bad snapshot but not yet that of the release
        "publish join publish advance:2 publish snapshot publish advance:2 pin:3 sync:0 snapshot release_pin sync:0 "
        "sync:0 publish sync:0 settle",
        {**_CANARY, "follows_pins": (1,), "order": (0, 1, 3)},
    ),
    _Opening(  # damaged copies in a cache, of the pointer, an entry and a part, without a later snapshot
        "publish join publish sync:0 publish spoil_copy spoil_copy spoil_copy sync:0 sync:0 settle publish spoil_copy "
        "spoil_copy spoil_copy sync:0 advance:4 sync:0 settle",
        {**_FREE, "order": (0,)},
        {"has_web": True, "has_upkeep": False},
    ),
    _Opening(  # a mirror that lags reads damaged entries
        "publish mirror join burst damage_entry mirror damage_entry mirror sync repair:1 mirror sync settle",
    ),
)
_OPENING_SHARE = 0.9
_RESTORES = 4, 1  # modulus and rest of the choices by which restart_trainer restores the newest version
_SEQUENCE_SHARE = 0.3
INSERTED = {
    *(
        "advised",
        "average",
        "begin_previous",
        "change_model",
        "change_served",
        "choose",
        "damage_entry",
        "follow",
        "misuse_mirror",
        "read_previous",
        "read_rows",
        "set_clock",
        "slow",
        "spoil_copy",
    ),
    *(kind for each in _SEQUENCES for kind in each.split() if kind not in WEIGHTS),
}
"""Kinds of operations that plain schedules lack."""
_EMPHASIS = 5
_FOLLOW_SHARE = 0.1
_COPY_SHARE = 0.15
_CLOCK_SHARE = 0.06
_SLOW_SHARE = 0.06
_ADVISED_SHARE = 0.25
_TABLES_SHARE = 0.3  # of the schedules
_CHOOSE_SHARE = 0.06
_CHANGES_SHARE = 0.1  # of the schedules
_CHANGE_SHARE, _SERVED_SHARE = 0.08, 0.05
_ROLES_SHARE, _LESSER_SHARE = 0.4, 0.4  # of the schedules with object stores, and of those with roles
_PREVIOUS_SHARE, _READ_SHARE, _BEGIN_SHARE = 0.1, 0.15, 0.5  # of the schedules, and of the operations of these
_READS_SHARE, _READ_ROWS_SHARE = 0.15, 0.2
_MIRRORS_SHARE, _MIRROR_SHARE, _MISUSE_SHARE = 0.15, 0.06, 0.04
_MIRRORED = (0, 1, 2, 2, 2, 3)  # choices of tables; that of 2 is only in parts of the last rank
_MIRROR_FIRST = (2, 4, 5, 5, 7, 8)  # orders of the urls
_REPLICAS_SHARE, _AVERAGE_SHARE = 0.5, 0.15  # of the schedules with four ranks and no states, and of their operations
_EPISODE_SHARE = 0.4
_LEAST, _MOST = 12, 60


# Settings that a schedule without them does not name, so that its text stays as it was before there were these.
_OMITTED = {"has_roles", "lesser", "has_previous", "has_replicas", "mirrored", "read_mode"}


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
        operations: what happens.
        has_web: True for predictors that read through a caching web server.
        has_upkeep: True for publishers that compact and delete versions.
        has_raw_ids: True for a table with managed collisions instead of the model.
        has_buckets: True if trainers and predictors access the stores as object stores.
        ranks: number of ranks of each trainer. Several have sharded tables instead of the model, or one of raw ids.
        has_roles: True if each actor has only the permissions of its role, in a world with object stores.
        lesser: name in ``LESSER`` of the actor with a lesser role, None for none.
        has_previous: True if the previous release reads the stores, and perhaps publishes the first versions.
        has_replicas: True if the ranks train two replicas of their tables.
        mirrored: choice of the tables of each mirror, 0 for all: that of the second store, plus ``TABLE_CHOICES`` times
            that of the third one. Several ranks train, so that the tables are in several parts.
        read_mode: mode of the tracker if a consumer of each rank reads changed rows as with TorchRec; empty if none.
    """

    seed: int
    states: bool
    encoding: str | None
    operations: tuple[Operation, ...]
    has_web: bool = False
    has_upkeep: bool = False
    has_raw_ids: bool = False
    has_buckets: bool = False
    ranks: int = 1
    has_roles: bool = False
    lesser: str | None = None
    has_previous: bool = False
    has_replicas: bool = False
    mirrored: int = 0
    read_mode: str = ""

    def with_operations(self, operations: Sequence[Operation]) -> Schedule:
        return replace(self, operations=tuple(operations))

    def to_json(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        settings = {name: value for name, value in values.items() if value or name not in _OMITTED}
        return json.dumps({**settings, "operations": [" ".join(map(str, each)) for each in self.operations]})

    @property
    def has_changes(self) -> bool:
        """True if the trainer's model changes."""
        return any(each.kind == "change_model" for each in self.operations)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        settings = json.loads(text)
        return cls(operations=operations(settings.pop("operations")), **settings)


def options_of(number: int) -> dict[str, int]:
    """Return the options of a predictor by the number of its join. Plain schedules have no choice of tables."""
    found = {}
    digits = ("url", _URLS), ("tables", TABLE_CHOICES), ("model", MODEL_CHOICES)
    for name, count in (*reversed(_OPTIONS.items()), *digits):
        number, found[name] = divmod(number, count)
    return found


def _join(chance: random.Random, options: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of a join whose predictor has one of these options."""
    number = chance.randrange(_URLS)
    for name, count in _OPTIONS.items():
        number = number * count + chance.choice(options.get(name, range(count)))
    return number


def generate(seed: int, *, is_plain: bool = False) -> Schedule:
    """Return the schedule of a seed; a plain one has local directories, one rank and operations of ``WEIGHTS``."""
    chance = random.Random(seed)
    theme, other = chance.sample(_THEMES, 2)
    frequent = {*theme.kinds, *other.kinds}
    weights = {kind: weight * (_EMPHASIS if kind in frequent else 1) for kind, weight in WEIGHTS.items()}
    episodes = (*theme.episodes, *theme.episodes, *other.episodes)
    kinds = chance.choice([["publish", "mirror", "join", "join"], ["join", "publish", "join"]])
    count = chance.randrange(_LEAST, _MOST)
    steps = [(kind, chance.randrange(5)) for kind in kinds]
    while len(steps) < count:
        kinds = chance.choices(list(weights), list(weights.values()))
        if episodes and chance.random() < _EPISODE_SHARE:
            kinds = chance.choice(episodes).split()
        if kinds[-1] == "lose" and chance.random() < 0.7:  # the trainer can do nothing else
            kinds.append("promote")
        who = chance.randrange(5)
        steps.extend((kind, who) for kind in kinds)
    if seed % 3 == 0:  # also in the middle of a theme's sequences
        faults = {number for number in range(len(steps)) if chance.random() < 0.2}
        steps = [
            each
            for number, step in enumerate(steps)
            for each in ([("fault", chance.randrange(5)), step] if number in faults else [step])
        ]
    choices = [_join(chance, theme.readers) if kind == "join" else chance.randrange(20000) for kind, _ in steps]
    states = theme.settings.get("states", chance.random() < 0.5)
    has_web = chance.random() < 0.25
    schedule = Schedule(
        seed=seed,
        states=states,
        encoding=None if states else chance.choice([None, None, "F16", "INT8"]),
        operations=tuple(Operation(kind, who, choice) for (kind, who), choice in zip(steps, choices, strict=True)),
        has_web=has_web,
        has_upkeep=not has_web and chance.random() < 0.3,
        has_raw_ids=theme.settings.get("has_raw_ids", chance.random() < 0.15),
    )
    return schedule if is_plain else _widened(schedule, random.Random(f"{seed} widened"))


def _widened(schedule: Schedule, chance: random.Random) -> Schedule:
    """Return a schedule with the stores, ranks and operations that plain schedules lack."""
    sequences, share = _SEQUENCES, _SEQUENCE_SHARE
    if chance.random() < _RAW_ID_SHARE:
        schedule, sequences = replace(schedule, has_raw_ids=True, states=True, encoding=None), _RAW_ID_RESTORES
        share = _EPISODE_SHARE
    steps = _inserted(schedule.operations, "follow", _FOLLOW_SHARE, chance)
    steps = _inserted(steps, "advised", _ADVISED_SHARE, chance)
    has_buckets = chance.random() < 0.5
    if schedule.has_web:
        steps = _inserted(steps, "spoil_copy", _COPY_SHARE, chance)
    if chance.random() < 0.5:
        steps = _inserted(steps, "set_clock", _CLOCK_SHARE, chance)
    if schedule.has_web or has_buckets:
        steps = _inserted(steps, "slow", _SLOW_SHARE, chance)
    while chance.random() < share:
        place, who = chance.randrange(3, len(steps) + 1), chance.randrange(5)
        steps[place:place] = [_in_sequence(kind, who, chance) for kind in chance.choice(sequences).split()]
    if not schedule.has_raw_ids:  # a world with raw ids has one table
        steps = _with_tables(steps, random.Random(f"{schedule.seed} tables"))
    if (opened := random.Random(f"{schedule.seed} opening")).random() < _OPENING_SHARE:
        opening = opened.choice(_OPENINGS)
        steps = [*_first(opening, opened), *steps]
        schedule = replace(schedule, **opening.settings)
    ranks = chance.choice([1, 2, 3, 4])
    if schedule.has_raw_ids:
        ranks = random.Random(f"{schedule.seed} raw id ranks").choice([1, 1, 2, 4])
    changes = random.Random(f"{schedule.seed} changes")
    if not schedule.has_raw_ids and changes.random() < _CHANGES_SHARE:
        steps, ranks = _with_changes(steps, changes), 1
    schedule = replace(schedule, operations=tuple(steps), has_buckets=has_buckets, ranks=ranks)
    return _with_reads(_with_mirrors(_with_replicas(_with_previous(_with_roles(schedule)))))


def _with_roles(schedule: Schedule) -> Schedule:
    """Return a schedule whose actors have only their roles, in some schedules with object stores."""
    chance = random.Random(f"{schedule.seed} roles")
    if not schedule.has_buckets or chance.random() >= _ROLES_SHARE:
        return schedule
    lesser = chance.choice(list(LESSER)) if chance.random() < _LESSER_SHARE else None
    return replace(schedule, has_roles=True, lesser=lesser)


def _with_previous(schedule: Schedule) -> Schedule:
    """Return a schedule that the previous release reads, and perhaps begins, in some schedules."""
    chance = random.Random(f"{schedule.seed} previous")
    if schedule.has_raw_ids or chance.random() >= _PREVIOUS_SHARE:
        return schedule
    steps = _inserted(schedule.operations, "read_previous", _READ_SHARE, chance)
    if chance.random() < _BEGIN_SHARE:  # with one rank and tables that are not encoded
        steps.insert(0, Operation("begin_previous", 0, chance.randrange(20000)))
        schedule = replace(schedule, encoding=None, ranks=1)
    return replace(schedule, operations=tuple(steps), has_previous=True)


def _with_mirrors(schedule: Schedule) -> Schedule:
    """Return a schedule with mirrors of some tables, in some schedules with several ranks."""
    chance = random.Random(f"{schedule.seed} mirrors")
    if schedule.ranks == 1 or schedule.has_raw_ids or chance.random() >= _MIRRORS_SHARE:
        return schedule
    steps = _inserted(schedule.operations, "mirror", _MIRROR_SHARE, chance)
    steps = _inserted(steps, "misuse_mirror", _MISUSE_SHARE, chance)
    opening = _Opening("join publish mirror@0 mirror@1 sync", {"order": _MIRROR_FIRST})
    steps = [*_first(opening, chance), *steps]
    one, other = chance.choices(_MIRRORED, k=2)
    return replace(schedule, operations=tuple(steps), mirrored=one + TABLE_CHOICES * other)


def _with_reads(schedule: Schedule) -> Schedule:
    """Return a schedule with a consumer that reads the trainer's changed rows, in some schedules."""
    chance = random.Random(f"{schedule.seed} reads")
    if schedule.has_raw_ids or chance.random() >= _READS_SHARE:
        return schedule
    steps = _inserted(schedule.operations, "read_rows", _READ_ROWS_SHARE, chance)
    return replace(schedule, operations=tuple(steps), read_mode=chance.choice(["ID_ONLY", "EMBEDDING"]))


def _with_replicas(schedule: Schedule) -> Schedule:
    """Return a schedule whose ranks train replicas, which are averaged now and then, in some schedules."""
    chance = random.Random(f"{schedule.seed} replicas")
    can_have = schedule.ranks == 4 and not schedule.has_raw_ids and not schedule.states
    if not can_have or chance.random() >= _REPLICAS_SHARE:
        return schedule
    steps = _inserted(schedule.operations, "average", _AVERAGE_SHARE, chance)
    return replace(schedule, operations=tuple(steps), has_replicas=True)


def _inserted(steps: Sequence[Operation], kind: str, share: float, chance: random.Random) -> list[Operation]:
    """Return operations with others of a kind before some of them."""
    found: list[Operation] = []
    for step in steps:
        if chance.random() < share:
            found.append(Operation(kind, chance.randrange(5), chance.randrange(20000)))
        found.append(step)
    return found


def _with_tables(steps: list[Operation], chance: random.Random) -> list[Operation]:
    """Return operations whose predictors apply some tables only, in some schedules."""
    if chance.random() >= _TABLES_SHARE:
        return steps
    all_options = _URLS * math.prod(_OPTIONS.values())
    steps = [
        Operation(step.kind, step.who, step.choice + all_options * chance.randrange(TABLE_CHOICES))
        if step.kind == "join"
        else step
        for step in steps
    ]
    return _inserted(steps, "choose", _CHOOSE_SHARE, chance)


def _first(opening: _Opening, chance: random.Random) -> Iterator[Operation]:
    """Yield the first operations of a schedule."""
    for step in opening.steps.split():
        words, _, choice = step.partition(":")
        kind, _, who = words.partition("@")
        number = _join(chance, opening.readers) if kind == "join" else chance.randrange(20000)
        yield Operation(kind, int(who or 0), int(choice or number))


def _with_changes(steps: list[Operation], chance: random.Random) -> list[Operation]:
    """Return operations with changes of the trainer's model, and with predictors of other models."""
    all_options = _URLS * math.prod(_OPTIONS.values()) * TABLE_CHOICES
    steps = [
        Operation(step.kind, step.who, step.choice + all_options * chance.randrange(MODEL_CHOICES))
        if step.kind == "join"
        else step
        for step in steps
    ]
    steps = _inserted(steps, "change_served", _SERVED_SHARE, chance)
    return _inserted(steps, "change_model", _CHANGE_SHARE, chance)


def _in_sequence(kind: str, who: int, chance: random.Random) -> Operation:
    """Return an operation of a sequence, in which trainers are mostly restored."""
    choice = chance.randrange(20000)
    modulus, rest = _RESTORES
    if kind == "restart_trainer" and chance.random() < 0.8:
        choice += rest - choice % modulus
    return Operation(kind, who, choice)
