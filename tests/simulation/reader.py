"""Predictors of a world, and the versions that each may serve."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from delta_tracker import Canary, Gate, ModelTarget, Predictor, Rollout, Storage
from delta_tracker.errors import DeltaTrackerError
from delta_tracker.monitor import Monitor
from tests.simulation.history import Order, Place
from tests.simulation.roles import NAMED, PREDICTOR
from tests.simulation.served import Choice, Served, ServedRows, served
from tests.simulation.stores import Store
from tests.simulation.threads import SCHEDULER, Clock, Process
from tests.simulation.trainer import TABLES, Copy, in_stream, num_common
from tests.simulation.values import Schedule, options_of
from tests.simulation.web import Web

_ORDERS = ((0,), (0, 1), (1, 0), (0, 2), (2, 0), (1,), (0, 1, 2), (2, 1), (1, 2))
_CANARIES = (None, None, None, None, Canary(versions=1), Canary(versions=2), Canary(seconds=10.0))
_GATES = (None, None, None, Gate(), Gate(max_drift=99.0, min_rows=1))
_POLL_SECONDS = 2.0
_KINDS = ("", "", "tables", "follows", "row store", "cache")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a predictor is built.

    Args:
        stores: the stores, in the order of their urls.
        canary: the distance, None for no canary.
        gate: the bounds, None for no gate.
        follows_pins: True to follow pins.
        kind: ``row store`` to write to one instead of a model, ``tables`` to write to tables that may fail, ``cache``
            for a host cache, ``follows`` to reach the end by the thread of :meth:`Predictor.follow`, or an empty text.
        cache: directory of the host cache.
        web: server to read through, None for none.
        has_raw_ids: True for a table of raw ids.
        is_sharded: True for tables that several ranks train.
        choice: the tables that it applies.
        has_changed_model: True if its model lacks the other tables, and it applies what fits.
        continues: True if it applies what fits.
        number: number of its model.
        monitor: monitor of the predictor.
        has_roles: True if it has only the permissions of its role. Every other predictor then has a name.
    """

    stores: tuple[Store, ...]
    canary: Canary | None
    gate: Gate | None
    follows_pins: bool
    kind: str
    cache: Path
    web: Web | None
    has_raw_ids: bool
    is_sharded: bool
    choice: Choice
    has_changed_model: bool
    continues: bool
    number: int
    monitor: Monitor
    has_roles: bool

    @classmethod
    def of(
        cls,
        choice: int,
        stores: list[Store],
        cache: Path,
        web: Web | None,
        schedule: Schedule,
        monitor: Monitor,
        number: int,
    ) -> Settings:
        """Return the settings of a number: one below 9 has none, and one url or several.

        ``number`` is that of the trainer's model.
        """
        options, is_sharded = options_of(choice), schedule.ranks > 1 and not schedule.has_raw_ids
        kind, tables = _KINDS[options["kind"]], 0 if schedule.has_raw_ids else options["tables"]
        has_changed_model = kind == "tables" and tables > 0 and schedule.seed % 4 > 1 and not schedule.mirrored
        return cls(
            stores=tuple(stores[index] for index in _ORDERS[options["order"]]),
            canary=_CANARIES[options["canary"]],
            gate=_GATES[options["gate"]],
            follows_pins=bool(options["follows_pins"]),
            kind=kind,
            cache=cache,
            web=None if options["url"] == 4 else web,
            has_raw_ids=schedule.has_raw_ids,
            is_sharded=is_sharded,
            choice=Choice(tables, is_sharded=is_sharded),
            has_changed_model=has_changed_model,
            continues=has_changed_model or options["model"] % 2 == 1,
            number=number if options["model"] > 1 else 0,
            monitor=monitor,
            has_roles=schedule.has_roles,
        )

    @property
    def is_bounded(self) -> bool:
        """True if a newest version may be beyond what the predictor may apply."""
        return self.canary is not None or self.gate is not None


@dataclass(frozen=True, slots=True)
class Saved:
    """Position and tables of a predictor at one time."""

    state: dict[str, str | int]
    tables: dict[str, Tensor]


@dataclass
class Reader:
    """A predictor, what it writes to, and what it may do next.

    Attributes:
        served: what it writes to.
        floor: place below which it may not go; None before the first version.
        saved: place of the position that it loaded without its tables, None without one.
        own: place of its own rollback, None without one.
        own_time: time of its own rollback.
        seen: highest counter of an order when it was called last.
        known: number of orders that existed at its own rollback, without those that a promotion removed.
        num_known: number of all orders then.
        knew_all: True if its stores had all of them.
        blind_at: time of its last call without a version while a store lacked an order.
        empty_at: time of its last call without a version, or of its start.
        excused: counter of the newest order that its own release may have ended.
        pinned: pin that it has followed, None without one.
        may_serve_held: True if an accepted version or a rollback has led past the gate.
        held: place of the version that its gate holds, None without one.
        baselines: kind of version and tensor of which its gate has a baseline without large values.
        is_continued: True if it has continued from a saved position or a row store.
        start: place at its first check, without claims; None before.
        has_applied: True if it has applied rows for sure.
        failed_at: time of its last call that failed.
        is_interrupted: True from an error of what it writes to until a call succeeds.
        is_following: True while a thread of its own follows.
        clock: wall clock of its host.
        before: what lookups read at its last check.
        applying: highest version of which rows may have been written at its last check; None for none.
    """

    name: str
    settings: Settings
    served: Served
    floor: Place | None = None
    saved: Place | None = None
    own: Place | None = None
    own_time: float = 0.0
    seen: int = 0
    known: int = 0
    num_known: int = 0
    knew_all: bool = True
    blind_at: float = 0.0
    empty_at: float = field(default_factory=lambda: SCHEDULER.now)
    excused: int = 0
    pinned: Order | None = None
    may_serve_held: bool = False
    held: Place | None = None
    baselines: set[tuple[str, str]] = field(default_factory=set)
    is_continued: bool = False
    start: Place | None = None
    has_applied: bool = False
    failed_at: float = -math.inf
    is_interrupted: bool = False
    is_following: bool = False
    applying: int | None = None
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        settings = self.settings
        self._process = Process(self.name)
        self.predictor = Predictor(
            self.served.target
            if self.has_row_store
            else ModelTarget(
                self.served.target,
                raw_ids=self.served.raw_ids or {},
                on_model_change="continue" if settings.continues else "stop",
            ),
            [self._opened(store) for store in settings.stores],
            rollout=Rollout(gate=settings.gate, canary=settings.canary, follows_pins=settings.follows_pins),
            cache=settings.cache if settings.kind == "cache" else None,
            name=self.name if self._has_name else None,
            monitor=settings.monitor,
            tables=None if settings.has_changed_model else settings.choice.patterns,
        )
        self._keep()

    @classmethod
    def new(cls, name: str, settings: Settings) -> Reader:
        """Return a predictor that has no version."""
        to = served(
            settings.kind,
            has_raw_ids=settings.has_raw_ids,
            is_sharded=settings.is_sharded,
            choice=settings.choice,
            number=settings.number,
        )
        return cls(name, settings, to)

    def _keep(self) -> None:
        """Keep the values of the tables that are not applied."""
        copy = {} if self.has_row_store else self.served.copy()
        self._others = {name: each for name, each in copy.items() if not self.settings.choice.takes(name)}
        self.before = self.served.copy() if copy else {}

    def load(self, tables: dict[str, Tensor]) -> None:
        """Replace the tables by saved ones."""
        self.served.load(tables)
        self._keep()

    def copy(self) -> dict[str, Tensor]:
        """Return what lookups read, of the tables that are applied."""
        return {name: each for name, each in self.served.copy().items() if self.settings.choice.takes(name)}

    def fits(self, copy: Copy, stream: str) -> bool:
        """Return True if a version fits its model, its row store and its choice of tables."""
        settings = self.settings
        if settings.has_raw_ids:
            return True
        shapes = {name: each for name, each in copy.shapes.items() if settings.choice.takes(name)}
        if not settings.has_changed_model and not settings.choice.is_in(shapes):
            return False
        if isinstance(self.served, ServedRows):
            stated = self.served.stated
            is_begun = stated is not None and (stated.stream, stated.version) != (stream, None)
            held = self.served.shapes(stream) if is_begun else {}
            return not held or held == {name: each for name, each in shapes.items() if name in TABLES}
        if settings.continues:
            return any(num_common(name, copy.tensors, self.before) != 0 for name in shapes if name in TABLES)
        return all(num_common(name, copy.tensors, self.before) is None for name in shapes)

    @property
    def needed(self) -> Choice:
        """The tables whose parts it needs."""
        return Choice() if self.settings.has_changed_model else self.settings.choice

    def can_read(self, store: Store) -> bool:
        """Return True if a store is that of a mirror of all the tables that it needs, or not a mirror."""
        return store.choice.covers(self.needed)

    def left_out(self, copy: Copy) -> tuple[str, ...]:
        """Names of the tables and dense tensors of a version that it does not apply, sorted."""
        held = copy.tensors if self.has_row_store else self.before
        others = {name for name in copy.tensors if num_common(name, copy.tensors, held) == 0}
        return tuple(sorted({*map(in_stream, others), *self.not_chosen(copy)}))

    def not_chosen(self, copy: Copy) -> tuple[str, ...]:
        """Names of those of which its choice takes none, sorted."""
        return tuple(sorted(in_stream(name) for name in copy.tensors if not self.settings.choice.takes(name)))

    @property
    def written(self) -> set[str]:
        """Names of the tables that are not applied but have been written."""
        served, choice = self.served, self.settings.choice
        if isinstance(served, ServedRows):
            return {name for name in served.tables if not choice.takes(name)}
        copy = served.copy()
        bits = torch.int32  # NaN is not equal to itself
        return {name for name, each in self._others.items() if not each.view(bits).equal(copy[name].view(bits))}

    def follow(self) -> None:
        """Start the thread that follows."""
        with SCHEDULER.inside(self._process), SCHEDULER.by(self.clock):
            self.predictor.follow(_POLL_SECONDS)
        self.is_following = True

    def stop(self) -> None:
        """End that thread, if there is one. Its last calls may have failed."""
        self.failed_at = SCHEDULER.now if self.is_following else self.failed_at
        self.is_following = False
        if not self._process.is_killed:
            with suppress(DeltaTrackerError):  # the error of its last attempt
                self.predictor.stop()

    @property
    def is_killed(self) -> bool:
        return self._process.is_killed

    def kill(self) -> None:
        """End its process."""
        self.is_following = False
        SCHEDULER.kill(self._process)

    @property
    def _has_name(self) -> bool:
        """True if it writes heartbeats, which it cannot do over http."""
        return self.settings.has_roles and self.settings.web is None and int(self.name[1:]) % 2 == 0

    def _opened(self, store: Store) -> str | Storage:
        if self.settings.web is not None:
            return self.settings.web.store_of(store)
        return store.opened_by_predictor(NAMED if self._has_name else PREDICTOR)

    def url_of(self, store: Store) -> str:
        """Return the url at which it reads a store."""
        opened = self._opened(store)
        return opened if isinstance(opened, str) else opened.url

    @property
    def has_row_store(self) -> bool:
        return isinstance(self.served, ServedRows)

    def look(self) -> bool:
        """Set :attr:`applying` to what lookups are told. Return True if the tables have no complete version.

        A second look may wait, while a thread that follows goes on.
        """
        if isinstance(self.served, ServedRows):
            self.applying = None if self.served.stated is None else self.served.stated.applying
            return self.applying is not None
        with self.predictor.reading() as held:
            self.applying = held.applying
            return held.applying is not None or (held.version is None and self.predictor.version is not None)

    @property
    def is_late(self) -> bool:
        """True while a row store states a version that a thread that follows has written and does not state yet."""
        stated = self.served.stated if isinstance(self.served, ServedRows) else None
        return self.is_following and stated is not None and stated.version != self.predictor.version

    def save(self) -> Saved:
        """Return what a restart needs. A row store keeps its own position."""
        return Saved({} if self.has_row_store else self.predictor.state_dict(), self.served.state())

    def restarted(self, saved: Saved | None, *, turns: bool) -> Reader:
        """Return the reader after a restart of its process.

        Args:
            saved: position and tables to continue with, None to start from nothing.
            turns: True to reverse the order of the urls.
        """
        stores = self.settings.stores[::-1] if turns else self.settings.stores
        settings = replace(self.settings, stores=stores)
        if saved is None or not (self.has_row_store or "version" in saved.state):
            new = Reader.new(self.name, settings)
            new.clock = self.clock
            return new
        if isinstance(self.served, ServedRows):
            after = Reader(self.name, settings, self.served.restarted(settings.choice))
        else:
            after = Reader.new(self.name, settings)
            after.load(saved.tables)
            after.predictor.load_state_dict(saved.state)
        after.is_continued = True
        after.floor, after.may_serve_held, after.pinned = self.floor, self.may_serve_held, self.pinned
        after.is_interrupted, after.seen, after.clock = self.is_interrupted, self.seen, self.clock
        return after

    def choosing(self, number: int, saved: Saved) -> Reader:
        """Return the reader after a restart of its process with a choice of tables and no position.

        Args:
            number: number of the choice.
            saved: tables to continue with. Tables that may fail are new ones.
        """
        choice = Choice(number, is_sharded=self.settings.is_sharded)
        settings = replace(self.settings, choice=choice)
        if isinstance(self.served, ServedRows):
            after = Reader(self.name, settings, self.served.restarted(choice))
        else:
            after = Reader.new(self.name, settings)
            if saved.tables.keys() == after.served.copy().keys():
                after.load(saved.tables)
        after.clock = self.clock
        return after

    def changed(self, number: int, saved: Saved | None) -> Reader:
        """Return the reader after a restart of its process with another model, or with another row store.

        Args:
            number: number of the model.
            saved: position and tables to continue with. Tables of another size are new ones. None for no position.
        """
        after = Reader.new(self.name, replace(self.settings, number=number))
        after.clock = self.clock
        if saved is None or self.has_row_store or "version" not in saved.state:
            return after
        copy = after.served.copy()
        fitting = {name: each for name, each in saved.tables.items() if num_common(name, saved.tables, copy) is None}
        after.load({**copy, **fitting})
        after.predictor.load_state_dict(saved.state)
        after.is_continued, after.may_serve_held, after.is_interrupted = True, self.may_serve_held, self.is_interrupted
        if fitting.keys() == copy.keys():
            after.floor, after.pinned, after.seen = self.floor, self.pinned, self.seen
        else:
            after.is_interrupted, after.saved = True, self.floor  # until it has read a snapshot
        return after

    def released(self) -> None:
        """End its own rollback, or else the pins that it may have followed."""
        self.predictor.release()
        if self.own is None:
            self.excused = self.seen
        self.own, self.pinned = None, None

    def describe(self) -> str:
        settings = self.settings
        words = [self.name, "[" + ", ".join(store.path.name for store in settings.stores) + "]"]
        words += ["over http"] if settings.web is not None else []
        words += [f"canary of {settings.canary.text}"] if settings.canary is not None else []
        words += [repr(settings.gate)] if settings.gate is not None else []
        words += [f"of {', '.join(settings.choice.patterns)}"] if settings.choice.patterns else []
        words += ["in a changed model"] if settings.has_changed_model else []
        words += [f"in model {settings.number}"] if settings.number else []
        words += ["applies what fits"] if settings.continues else []
        words += ["with pins"] if settings.follows_pins else []
        return " ".join([*words, settings.kind]).strip()
