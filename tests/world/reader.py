"""Predictors of a world, and the versions that each may serve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from delta_tracker import Canary, Gate, Predictor
from tests.predictor.memory_sink import MemorySink, Stored
from tests.world.stores import Store
from tests.world.trainer import NUM_BAGS, NUM_PLAIN, Model, empty_model
from tests.world.web import Web

_ORDERS = ((0,), (0, 1), (1, 0), (0, 1), (1, 0), (1,), (0, 1, 2), (2, 1), (1, 2))


@dataclass(frozen=True, slots=True)
class Settings:
    """How a predictor is built.

    Args:
        stores: the stores, in the order of their urls.
        canary: versions of the distance, None for no canary.
        has_gate: True for a gate.
        follows_pins: True to follow pins.
        has_row_store: True to write to a row store instead of a model.
        cache: directory of the host cache, None for none.
        web: server to read through, None for none.
    """

    stores: tuple[Store, ...]
    canary: int | None
    has_gate: bool
    follows_pins: bool
    has_row_store: bool
    cache: Path | None
    web: Web | None

    @classmethod
    def of(cls, who: int, choice: int, stores: list[Store], cache: Path, web: Web | None) -> Settings:
        order = _ORDERS[(choice + who) % len(_ORDERS)]
        kind = choice // len(_ORDERS) % 7  # 4 and 5 have nothing
        return cls(
            stores=tuple(stores[index] for index in order),
            canary=1 + choice % 2 if kind == 2 else None,
            has_gate=kind == 3,
            follows_pins=kind in (0, 1),
            has_row_store=kind == 6,
            cache=cache if choice % 7 == 0 else None,
            web=None if choice % 5 == 0 else web,
        )


@dataclass
class Reader:
    """A predictor, its model, and what it may do next.

    Attributes:
        floor: order of the stream and version below which it may not go; None before the first version.
        own: version of its own rollback, None without one.
        num_orders: number of pins and releases that were written before its own rollback.
        is_free: True if its own release may have ended a pin.
        may_serve_held: True if an accepted version or a rollback has led past the gate.
        is_restored: True from a restart with a saved position until the version changes.
    """

    name: str
    settings: Settings
    model: Model = field(default_factory=empty_model)
    rows: Stored = field(default_factory=Stored)
    floor: tuple[int, int] | None = None
    own: int | None = None
    num_orders: int = 0
    is_free: bool = False
    may_serve_held: bool = False
    is_restored: bool = False

    def __post_init__(self) -> None:
        settings = self.settings
        self.predictor = Predictor(
            MemorySink(self.rows) if settings.has_row_store else self.model,
            [store.url if settings.web is None else settings.web.url_of(store) for store in settings.stores],
            gate=Gate() if settings.has_gate else None,
            canary=None if settings.canary is None else Canary(versions=settings.canary),
            follows_pins=settings.follows_pins,
            cache=settings.cache,
        )

    def restarted(self, *, keeps: bool, turns: bool) -> Reader:
        """Return the reader after a restart of its process.

        Args:
            keeps: True to load the saved tables and position, False to start from nothing.
            turns: True to reverse the order of the urls.
        """
        stores = self.settings.stores[::-1] if turns else self.settings.stores
        settings = replace(self.settings, stores=stores)
        if self.settings.has_row_store:
            after = Reader(self.name, settings, rows=self.rows if keeps else Stored())
        else:
            after = Reader(self.name, settings)
            state, tables = self.predictor.state_dict(), self.model.copy()
            keeps = keeps and bool(state)
            if keeps:
                after.predictor.load_state_dict(state)
                after.model.assign(tables)
        if keeps:
            after.is_restored = True
            after.floor, after.may_serve_held = self.floor, self.may_serve_held
        return after

    def held(self) -> dict[str, Tensor]:
        """Return what lookups read."""
        if not self.settings.has_row_store:
            return self.model.copy()
        found = {}
        for table, name, count in (("bag", "bag.weight", NUM_BAGS), ("plain", "plain.weight", NUM_PLAIN)):
            keys = [(str(self.rows.current), table, row) for row in range(count)]
            found[name] = torch.stack([self.rows.rows[key][1] for key in keys])
        return found

    def describe(self) -> str:
        settings = self.settings
        words = [self.name, "[" + ", ".join(store.path.name for store in settings.stores) + "]"]
        words += ["over http"] if settings.web is not None else []
        words += [f"canary={settings.canary}"] if settings.canary else []
        words += [name for name in ("has_gate", "follows_pins", "has_row_store") if getattr(settings, name)]
        return " ".join(words)
