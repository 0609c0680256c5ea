"""Frozen values that the tracker hands out; each checks itself when it is made.

Shapes: ``N`` rows in a delta, ``R`` rows of a shard, ``D`` columns of a table that this rank holds.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import ChangedRows


class TrackingMode(Enum):
    """What the tracker keeps of a changed row."""

    ID_ONLY = "id_only"
    """Only that it changed."""
    EMBEDDING = "embedding"
    """The row as the consumer last received it: states ``[N, D]``."""
    MOMENTUM_LAST = "momentum_last"
    """L2 norm of the optimizer's first state of the row, as it is at the read: states ``[N]``."""
    MOMENTUM_DIFF = "momentum_diff"
    """How far the optimizer's row-wise sum of squared gradients has grown since the consumer's read: states ``[N]``."""
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    """The same as MOMENTUM_DIFF, under the name that it had first."""


class EmbdUpdateMode(Enum):
    """Which of a row's recorded states a :class:`~delta_tracker.tracker.store.lookups.DeltaStore` keeps."""

    NONE = "none"
    """None: ids only."""
    FIRST = "first"
    """The earliest."""
    LAST = "last"
    """The latest."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexedLookup:
    """What one batch looked up in one table.

    Args:
        batch_idx: the batch.
        ids: ``[N]`` ids, in any order, duplicates allowed.
        states: ``[N, ...]`` recorded states, None for ids only.
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None


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
        is_replicated: every rank holds the same block (DATA_PARALLEL), so that one rank has to publish it.

    Example:
        >>> table = TableSpec("ec.embeddings.user", num_rows=10, dim=8, dtype=torch.float32)
        >>> ShardSpec(table, row_offset=5, num_rows=5, columns=((0, 8),)).num_columns
        8
    """

    table: TableSpec
    row_offset: int = 0
    num_rows: int = 0
    columns: tuple[tuple[int, int], ...] = ()
    is_replicated: bool = False

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

    def check_ids(self, ids: Tensor) -> None:
        """Refuse what are not local ids of this shard.

        Raises:
            InvalidArgumentError: unless ``ids`` is ``[N]`` integers, each from 0 to ``num_rows - 1``.
        """
        if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise InvalidArgumentError("ids", (tuple(ids.shape), ids.dtype), "Pass a [N] tensor of integers")
        outside = ids[(ids < 0) | (ids >= self.num_rows)]
        if len(outside):
            remedy = f"Pass local ids of {self.table.fqn!r} on this rank, 0 up to and without {self.num_rows}"
            raise InvalidArgumentError("ids", outside[:5].tolist(), remedy)

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
        known: ``[N]`` bool, whether the old state is known; its row in ``states`` is NaN otherwise. None in the modes
            that keep no old states.
        optimizer: the optimizer's states of the rows, if the read asked for them, in the optimizer's order: each
            ``[N, D]``, or ``[N, S]`` with one number for each of the shard's ``S`` column ranges.

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
    known: Tensor | None = field(default=None, kw_only=True)
    optimizer: tuple[Tensor, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.ids.dim() != 1:
            raise InvalidArgumentError("ids", (tuple(self.ids.shape), self.ids.dtype), "Pass a [N] int64 tensor")
        self._check_length("states", self.states)
        self._check_length("values", self.values)

    @property
    def global_ids(self) -> Tensor:
        """``[N]`` int64, counted within the whole table, ascending and unique."""
        return self.ids if self.shard is None else self.ids + self.shard.row_offset

    def __len__(self) -> int:
        return self.ids.shape[0]

    def _check_length(self, name: str, rows: Tensor | None) -> None:
        if rows is not None and rows.shape[0] != self.ids.shape[0]:
            raise InvalidArgumentError(name, tuple(rows.shape), f"Pass one row for each of {len(self.ids)} ids")


class Delta(Mapping[str, DeltaRows]):
    """Table FQN to :class:`DeltaRows` of one read; every tracked table is a key, also one without changes.

    Args:
        rows: the changed rows per table.
        consumer: who read it.
        start: log position that the read starts from, the consumer's cursor.
        stop: log position of the read's cut; committing moves the cursor here.
        batches: half-open range of ``step()`` counts that the read covers.
        left_out: changed rows that are not in it, per table with any; committing keeps them pending.
    """

    __slots__ = ("_left_out", "_rows", "batches", "consumer", "kept", "start", "stop")

    def __init__(
        self,
        rows: Mapping[str, DeltaRows],
        *,
        consumer: str,
        start: int,
        stop: int,
        batches: tuple[int, int],
        left_out: Mapping[str, ChangedRows] | None = None,
    ) -> None:
        self._rows = MappingProxyType(dict(rows))
        kept = {fqn: rows for fqn, rows in left_out.items() if len(rows)} if left_out else {}
        self.kept = MappingProxyType(kept)
        """What :attr:`left_out` says, in tensors of the tracker: do not write to them."""
        self._left_out: Mapping[str, ChangedRows] | None = None
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

    def items(self) -> ItemsView[str, DeltaRows]:
        """Its tables and their rows; what every mapping has, and faster."""
        return self._rows.items()

    @property
    def left_out(self) -> Mapping[str, ChangedRows]:
        """Changed rows that are not in it, per table with any. They are copied at the first access."""
        if self._left_out is None:
            self._left_out = MappingProxyType({fqn: rows.copy() for fqn, rows in self.kept.items()})
        return self._left_out

    @property
    def num_rows(self) -> int:
        """Changed rows over all tables on this rank."""
        return sum(len(rows) for rows in self._rows.values())

    @property
    def pending_rows(self) -> int:
        """Changed rows that it leaves out, over all tables on this rank; 0 unless top-k chose."""
        return sum(len(rows) for rows in self.kept.values())

    def __repr__(self) -> str:
        tables = {fqn: len(rows) for fqn, rows in self._rows.items()}
        return f"Delta(consumer={self.consumer!r}, batches={self.batches}, rows={tables})"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a tracker holds on this rank.

    Args:
        log_bytes: which rows changed, their old states in the modes that keep them, and the ids of open batches.
        copy_bytes: second copies of the shards whose optimizer is not fused.
        carried_bytes: rows that reads with top-k have left out.
    """

    log_bytes: int
    copy_bytes: int
    carried_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.log_bytes + self.copy_bytes + self.carried_bytes
