"""What a predictor writes to, and what lookups read there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from delta_tracker import RawIdIndex
from tests.predictor.memory_sink import MemorySink, Stored
from tests.world.trainer import NUM_BAGS, NUM_PLAIN, Model


class Served(Protocol):
    """Protocol of a destination.

    Attributes:
        target: first argument of the predictor.
        raw_ids: its argument of this name.
    """

    target: Any
    raw_ids: Mapping[str, RawIdIndex] | None

    def copy(self) -> dict[str, Tensor]:
        """Return what lookups read."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return what a restart needs besides the position."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the content by a saved one."""
        ...


class _ServedModel:
    """A model, of zeros before the first version."""

    raw_ids = None

    def __init__(self) -> None:
        self.target = Model()
        self.load({name: torch.zeros_like(each) for name, each in self.copy().items()})

    def copy(self) -> dict[str, Tensor]:
        return self.target.copy()

    state = copy

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.target.load_state_dict(state)


class ServedRows:
    """A row store, which keeps its rows and its position when the process ends."""

    raw_ids = None

    def __init__(self, stored: Stored, keys: Mapping[str, tuple[str, list[int]]]) -> None:
        self._stored = stored
        self._keys = keys
        self.target = MemorySink(stored)

    def restarted(self) -> ServedRows:
        return ServedRows(self._stored, self._keys)

    def copy(self) -> dict[str, Tensor]:
        return {name: self._rows(table, ids) for name, (table, ids) in self._keys.items()}

    def _rows(self, table: str, ids: list[int]) -> Tensor:
        """Return the row of each id. An id without a row reads the default row, of which a table here has one."""
        stream = str(self._stored.current)
        defaults = [row for (of, name, _), row in self._stored.defaults.items() if (of, name) == (stream, table)]
        found = [self._stored.rows.get((stream, table, each)) or defaults[0] for each in ids]
        return torch.stack([row for _, row in found])

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        pass


def served(kind: str, *, has_raw_ids: bool) -> Served:
    """Return the destination of a kind of predictor, see :class:`~tests.world.reader.Settings`."""
    if not has_raw_ids:
        keys = {"bag.weight": ("bag", [*range(NUM_BAGS)]), "plain.weight": ("plain", [*range(NUM_PLAIN)])}
        return ServedRows(Stored(), keys) if kind == "row store" else _ServedModel()
    from tests.world.raw_ids import RAW_IDS, TABLE, IndexedItems, ServedItems  # noqa: PLC0415  torchrec takes seconds

    if kind == "row store":
        return ServedRows(Stored(), {"item": (TABLE, RAW_IDS.tolist())})
    return ServedItems() if kind else IndexedItems()
