"""Frozen values that the tracker hands out; each checks itself when it is made.

Shapes: ``N`` rows in a delta, ``R`` rows of a shard, ``D`` columns of a table that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError


class TrackingMode(Enum):
    """What the tracker keeps of a changed row."""

    ID_ONLY = "id_only"
    """Only that it changed."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One whole embedding table, the same on every rank.

    Args:
        fqn: fully qualified name, the key of its weight in the model's ``state_dict`` without ``.weight``.
        num_rows: rows of the whole table.
        dim: columns of the whole table.
        dtype: dtype of its weight.
    """

    fqn: str
    num_rows: int
    dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.num_rows < 0 or self.dim < 1:
            raise InvalidArgumentError("TableSpec", (self.num_rows, self.dim), "Give num_rows >= 0 and dim >= 1")

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.dim} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The block of a table that one rank holds: one range of rows and one or more ranges of columns.

    A rank without a shard of the table has ``num_rows == 0`` and no columns.

    Args:
        table: the whole table.
        row_offset: global id of local row 0.
        num_rows: rows held here, ``R``.
        columns: half-open column ranges held here, ascending and disjoint.

    Example:
        >>> table = TableSpec("ec.embeddings.user", num_rows=10, dim=8, dtype=torch.float32)
        >>> ShardSpec(table, row_offset=5, num_rows=5, columns=((0, 8),)).num_columns
        8
    """

    table: TableSpec
    row_offset: int = 0
    num_rows: int = 0
    columns: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        edges = [edge for column_range in self.columns for edge in column_range]
        rows_fit = self.row_offset >= 0 and 0 <= self.num_rows <= self.table.num_rows - self.row_offset
        columns_fit = edges == sorted(edges) and all(0 <= edge <= self.table.dim for edge in edges)
        if not (rows_fit and columns_fit):
            raise InvalidArgumentError(
                "ShardSpec",
                (self.row_offset, self.num_rows, self.columns),
                f"Keep the shard of {self.table.fqn!r} inside the table's {self.table}",
            )

    @property
    def num_columns(self) -> int:
        """Columns held here, ``D``."""
        return sum(stop - start for start, stop in self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRows:
    """The changed rows of one table on this rank.

    Args:
        ids: ``[N]`` int64, local to the shard, ascending and unique.
        states: ``[N, ...]`` old states, in the modes that keep them; otherwise None.
        values: ``[N, D]`` rows as they were at the read, in the table's dtype, columns in the order of
            ``shard.columns``; None unless the read asked for them.
        shard: the block that ``ids`` count in.

    Example:
        >>> table = TableSpec("ec.embeddings.user", num_rows=10, dim=8, dtype=torch.float32)
        >>> rows = DeltaRows(torch.tensor([0, 3]), shard=ShardSpec(table, 5, 5, ((0, 8),)))
        >>> rows.global_ids
        tensor([5, 8])
    """

    ids: Tensor
    states: Tensor | None = None
    values: Tensor | None = None
    shard: ShardSpec | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.dtype != torch.int64:
            raise InvalidArgumentError("ids", (tuple(self.ids.shape), self.ids.dtype), "Pass a [N] int64 tensor")
        for name, rows in (("states", self.states), ("values", self.values)):
            if rows is not None and rows.shape[0] != self.ids.shape[0]:
                raise InvalidArgumentError(name, tuple(rows.shape), f"Pass one row for each of {len(self.ids)} ids")

    @property
    def global_ids(self) -> Tensor:
        """``[N]`` int64, counted within the whole table, ascending and unique."""
        return self.ids if self.shard is None else self.ids + self.shard.row_offset

    def __len__(self) -> int:
        return self.ids.shape[0]


class Delta(Mapping[str, DeltaRows]):
    """Table FQN to :class:`DeltaRows` of one read; every tracked table is a key, also one without changes.

    Args:
        rows: the changed rows per table.
        consumer: who read it.
        start: log position that the read starts from, the consumer's cursor.
        stop: log position of the read's cut; committing moves the cursor here.
        batches: half-open range of ``step()`` counts that the read covers.
    """

    __slots__ = ("_rows", "batches", "consumer", "start", "stop")

    def __init__(
        self, rows: Mapping[str, DeltaRows], *, consumer: str, start: int, stop: int, batches: tuple[int, int]
    ) -> None:
        self._rows = MappingProxyType(dict(rows))
        self.consumer = consumer
        self.start = start
        self.stop = stop
        self.batches = batches

    def __getitem__(self, fqn: str) -> DeltaRows:
        return self._rows[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int:
        """Changed rows over all tables on this rank."""
        return sum(len(rows) for rows in self._rows.values())

    def __repr__(self) -> str:
        tables = {fqn: len(rows) for fqn, rows in self._rows.items()}
        return f"Delta(consumer={self.consumer!r}, batches={self.batches}, rows={tables})"
