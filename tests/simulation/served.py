"""What a predictor writes to, and what lookups read there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from delta_tracker import RawIdIndex, RowTarget
from tests.predictor.memory_sink import MemorySink, Stored
from tests.simulation.trainer import SHAPES, SHARDED, Model

# Patterns of the tables that predictors choose, with the tensor that each takes.
_CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"*bag": "bag.weight"},
    {"*pl*n": "plain.weight", "over.w*": "over.weight"},
    {"*bag": "bag.weight", "*plain": "plain.weight"},
)


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

    def __init__(self, number: int = 0) -> None:
        self.target = Model(number)
        self.load({name: torch.zeros_like(each) for name, each in self.copy().items()})

    def copy(self) -> dict[str, Tensor]:
        return self.target.copy()

    state = copy

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.target.load_state_dict(state)


class Choice:
    """Tables and dense tensors that a predictor applies.

    Args:
        number: number of the choice, 0 for all.
        is_sharded: True for tables that several ranks train, which have no dense tensors.

    Attributes:
        patterns: argument of the predictor.
    """

    def __init__(self, number: int = 0, *, is_sharded: bool = False) -> None:
        self.number = number
        self._taken = {
            pattern: name for pattern, name in _CHOICES[number].items() if not is_sharded or not name.startswith("over")
        }
        self.patterns = [*self._taken] or None

    def takes(self, name: str) -> bool:
        """Return True for a tensor that is applied, by its name in a copy."""
        return self.patterns is None or any(name.endswith(each) for each in self._taken.values())

    def takes_part(self, part: Mapping[str, Any]) -> bool:
        """Return True for the record of a part with a tensor that is applied."""
        tables = (f"{block['table']}.weight" for block in part["blocks"])
        return self.patterns is None or any(map(self.takes, (*tables, *part["dense"])))

    def covers(self, other: Choice) -> bool:
        """Return True if each tensor is applied that another choice applies."""
        return self.patterns is None or (other.patterns is not None and other._taken.items() <= self._taken.items())

    def is_in(self, names: Collection[str]) -> bool:
        """Return True if each pattern fits a tensor of these."""
        return all(any(name.endswith(each) for name in names) for each in self._taken.values())


class InterruptionError(Exception):
    """Raised by a table in the middle of a version."""


class _Table(RowTarget):
    """Table that fails after a number of writes.

    Attributes:
        left: number of writes of all tables before the next one fails, one number in a list; empty for none.
    """

    def __init__(self, num_rows: int, width: int, left: list[int]) -> None:
        self.tensor, self._left = torch.zeros(num_rows, width), left
        self.num_rows, self.dim, self.dtype = num_rows, width, torch.float32
        self.rows, self.columns = (0, num_rows), ((0, width),)

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        if self._left:
            self._left[0] -= 1
            if self._left[0] < 0:
                self._left.clear()
                raise InterruptionError
        self.tensor[ids, columns[0] : columns[1]] = values


class ServedTables:
    """Tables of the model, of which one may fail in the middle of a version, and dense tensors."""

    raw_ids = None

    def __init__(self, tables: Mapping[str, tuple[int, int]], dense: Mapping[str, Tensor]) -> None:
        self._left: list[int] = []
        self._tables = {name: _Table(num_rows, width, self._left) for name, (num_rows, width) in tables.items()}
        self.target = {**self._tables, **dense}
        self._tensors = {f"{name}.weight": each.tensor for name, each in self._tables.items()} | dense

    def fail_after(self, number: int | None) -> None:
        """Let a write fail, None for none."""
        self._left[:] = [] if number is None else [number % 4]

    def copy(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self._tensors.items()}

    state = copy

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, each in self._tensors.items():
            each.copy_(state[name])


class ServedRows:
    """A row store, which keeps its rows and its position when the process ends."""

    raw_ids = None

    def __init__(self, stored: Stored, keys: Mapping[str, tuple[str, list[int]]] | None, choice: Choice) -> None:
        self._stored, self._keys, self._choice = stored, keys, choice
        self.target = MemorySink(stored)

    def fail_after(self, number: int | None) -> None:
        """Let an operation fail, None for none."""
        self.target.fails_after = number

    def restarted(self, choice: Choice) -> ServedRows:
        return ServedRows(self._stored, self._keys, choice)

    def copy(self) -> dict[str, Tensor]:
        keys = self._keys or {
            f"{name}.weight": (name, ids) for name, ids in self._ids(str(self._stored.current)).items()
        }
        return {name: self._rows(*each) for name, each in keys.items() if self._choice.takes(name)}

    def _ids(self, stream: str) -> dict[str, list[int]]:
        """Return the ids of each table of a stream."""
        found: dict[str, list[int]] = {}
        for of, table, each in sorted(self._stored.rows):
            if of == stream:
                found.setdefault(table, []).append(each)
        return found

    def shapes(self, stream: str) -> dict[str, tuple[int, ...]]:
        """Return the size of each table of a stream; nothing if it has none."""
        rows = self._stored.rows
        return {
            f"{table}.weight": (len(ids), *rows[stream, table, ids[0]][1].shape)
            for table, ids in self._ids(stream).items()
        }

    def _rows(self, table: str, ids: list[int]) -> Tensor:
        """Return the row of each id. An id without a row reads the default row of the rank that it is trained on."""
        stream = str(self._stored.current)
        of_ranks = [
            row for (of, name, _), row in sorted(self._stored.defaults.items()) if (of, name) == (stream, table)
        ]
        found = [self._stored.rows.get((stream, table, each)) or of_ranks[each % len(of_ranks)] for each in ids]
        return torch.stack([row for _, row in found])

    @property
    def tables(self) -> set[str]:
        """Names of the tables that have rows."""
        return {f"{table}.weight" for _, table, _ in (*self._stored.rows, *self._stored.defaults)}

    @property
    def stated(self) -> Any:
        """What the row store states about its rows; None without any version."""
        return self._stored.state()

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        pass


def served(kind: str, *, has_raw_ids: bool, is_sharded: bool, choice: Choice, number: int = 0) -> Served:
    """Return the destination of a kind of predictor, see :class:`~tests.simulation.reader.Settings`.

    ``number`` is that of its model, see :data:`~tests.simulation.trainer.SHAPES`. A row store has what was written.

    A model has all tables and dense tensors, other destinations have those of the choice only.
    """
    if not has_raw_ids:
        tables = SHAPES[number]
        if is_sharded:
            tables = {name.removesuffix(".weight"): size for name, size in zip(SHARDED, tables.values(), strict=True)}
        if kind == "row store":
            return ServedRows(Stored(), None, choice)
        if kind == "tables":
            dense = {} if is_sharded else _ServedModel(number).copy()
            return ServedTables(
                {name: size for name, size in tables.items() if choice.takes(f"{name}.weight")},
                {name: each for name, each in dense.items() if name.startswith("over") and choice.takes(name)},
            )
        if not is_sharded:
            return _ServedModel(number)
        from tests.simulation.shards import ServedShards  # noqa: PLC0415  torchrec takes seconds

        return ServedShards()
    from tests.simulation.raw_ids import RAW_IDS, TABLE, IndexedItems, ServedItems  # noqa: PLC0415  torchrec takes seconds

    if kind == "row store":
        return ServedRows(Stored(), {"item": (TABLE, RAW_IDS.tolist())}, choice)
    return ServedItems() if kind in ("follows", "cache") else IndexedItems()
