"""Value types of the tracker's interface.

Notation: ``N`` is the number of rows of a read, and a shard has ``R`` rows and ``D`` columns.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from delta_tracker.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from delta_tracker.rows import ChangedRows

StateWidth = Literal["columns", "range"]
TABLE_DTYPES = ("float32", "float16", "bfloat16")
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Size in bytes of one value of each dtype. The keys are the names of the dtypes in torch."""


@cache
def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype without the prefix ``torch.``, for example ``float32``."""
    return str(dtype).removeprefix("torch.")


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``, such as ``float32``. The first call imports torch."""
    import torch  # noqa: PLC0415

    found: torch.dtype = getattr(torch, name)
    return found


class TrackingMode(Enum):
    """Kind of state that a read returns for each changed row in :attr:`DeltaRows.states`.

    Example:
        >>> TrackingMode.of("embedding")
        <TrackingMode.EMBEDDING: 'embedding'>
    """

    ID_ONLY = "id_only"
    """No state; :attr:`DeltaRows.states` is None."""
    EMBEDDING = "embedding"
    """Values of the row when the consumer last received it. The states are ``[N, D]``."""
    MOMENTUM_LAST = "momentum_last"
    """L2 norm of the row's first optimizer state, for example of its momentum, at the time of the read.

    The states are ``[N]``.
    """
    MOMENTUM_DIFF = "momentum_diff"
    """Increase of the optimizer's sum of squared gradients for the row since the consumer last received the row.

    The states are ``[N]``.
    """
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    """Older name for :attr:`MOMENTUM_DIFF`; both modes behave the same."""

    @classmethod
    def of(cls, mode: TrackingMode | str) -> TrackingMode:
        """Return the mode called ``mode``, ignoring case. Return a :class:`TrackingMode` unchanged.

        Raises:
            InvalidArgumentError: if no mode has this name.
        """
        found = cls.__members__.get(mode.upper()) if isinstance(mode, str) else mode
        if not isinstance(found, cls):
            raise InvalidArgumentError("mode", mode, f"Pass one of {list(cls.__members__)}")
        return found


class EmbdUpdateMode(Enum):
    """State that a :class:`~delta_tracker.tracker.store.lookups.DeltaStore` returns for each id.

    Example:
        >>> EmbdUpdateMode("first")
        <EmbdUpdateMode.FIRST: 'first'>
    """

    NONE = "none"
    """No state; only ids are returned."""
    FIRST = "first"
    """State of the id in the first lookup that the read covers."""
    LAST = "last"
    """State of the id in the last lookup that the read covers."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexedLookup:
    """Recorded lookup of one batch in one table, with the ids and their states.

    Args:
        batch_idx: index of the batch.
        ids: ``[N]`` ids, in any order, duplicates allowed.
        states: ``[N, ...]`` recorded states; None if only ids are recorded.

    Example:
        >>> import torch
        >>> IndexedLookup(3, torch.tensor([7, 42]), None).ids.tolist()
        [7, 42]
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None


@dataclass(frozen=True, slots=True, init=False)
class TableSpec:
    """Name, size and dtype of a whole embedding table. They are equal on all ranks.

    Args:
        fqn: fully qualified name of the table. In the model's ``state_dict``, the key of the table's weight is
            ``f"{fqn}.weight"``.
        num_rows: number of rows of the whole table.
        dim: number of columns of the whole table.
        dtype: dtype of the weight, or the name of this dtype, such as ``float32``.

    Raises:
        InvalidArgumentError: if ``num_rows`` is negative or ``dim`` is less than 1.

    Example:
        >>> import torch
        >>> str(TableSpec("ec.embeddings.user", 1000, 16, torch.float32))
        '1000 x 16 float32'
    """

    fqn: str
    num_rows: int
    dim: int
    dtype_name: str

    def __init__(
        self, fqn: str, num_rows: int, dim: int, dtype: torch.dtype | str = "", *, dtype_name: str = ""
    ) -> None:
        # dataclasses.replace passes dtype_name.
        name = str(dtype).removeprefix("torch.") or dtype_name
        if not name:
            raise InvalidArgumentError("dtype", dtype, "Give the dtype of the weight, such as torch.float32")
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "num_rows", num_rows)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "dtype_name", name)
        self.__post_init__()

    def __post_init__(self) -> None:  # which msgspec calls instead of __init__
        if self.num_rows < 0 or self.dim < 1:
            raise InvalidArgumentError("TableSpec", (self.num_rows, self.dim), "Give num_rows >= 0 and dim >= 1")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight, as a torch dtype."""
        return torch_dtype(self.dtype_name)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the weight."""
        return self.num_rows * self.dim * ITEM_BYTES[self.dtype_name]

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.dim} {self.dtype_name}"


@dataclass(frozen=True, slots=True, init=False)
class StateSpec:
    """Name, dtype and width of one state that an optimizer keeps for each row of a table.

    Args:
        name: name of the state, unique in its table.
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``, or the name of one of them.
        width: ``columns`` for one number per column; ``range`` for one number per range in ``TableStates.columns``.
    """

    name: str
    dtype_name: str
    width: StateWidth

    def __init__(self, name: str, dtype: torch.dtype | str, width: StateWidth) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype_name", dtype_name(dtype))
        object.__setattr__(self, "width", width)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the state, as a torch dtype."""
        return torch_dtype(self.dtype_name)


@dataclass(frozen=True, slots=True)
class TableStates:
    """Specs of the states that a fused optimizer keeps for each row of a table. They are equal on all ranks.

    Args:
        optimizer: FBGEMM's name of the optimizer, such as ``EXACT_ROWWISE_ADAGRAD``.
        columns: half-open column ranges of the table's shards, ascending. They cover all columns without gaps.
        states: specs in the order of the optimizer's states; empty if the optimizer keeps no states.
    """

    optimizer: str
    columns: tuple[tuple[int, int], ...]
    states: tuple[StateSpec, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of a table that the raw ids of one bucket can own, and the default row of the bucket.

    Args:
        rows: half-open range of the bucket's global row ids, not empty.
        default: global id of the row that lookups of unknown raw ids read; None if the bucket has no default row. No
            raw id owns the default row.
    """

    rows: tuple[int, int]
    default: int | None


@dataclass(frozen=True, slots=True)
class Identity:
    """Buckets of a table with managed collisions, and the hash size that determines the bucket of each raw id.

    :func:`~delta_tracker.raw_ids.bucket_of` returns the bucket of a raw id.

    Args:
        hash_size: size of the range of raw ids that is divided evenly among the buckets, from 0 to 2**63 - 1.
        buckets: buckets in ascending order. Their row ranges cover the table without gaps. Either all buckets have a
            default row, or no bucket has one.

    Raises:
        InvalidArgumentError: if ``hash_size`` or ``buckets`` is invalid.
    """

    hash_size: int
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.hash_size < 1 << 63:
            raise InvalidArgumentError("hash_size", self.hash_size, "Give 0 or more, and less than 2**63")
        end = 0
        for bucket in self.buckets:
            first, stop = bucket.rows
            if first != end or stop <= first or not (bucket.default is None or first <= bucket.default < stop):
                remedy = "Give ascending row ranges from 0 without gaps, and default rows inside them"
                raise InvalidArgumentError("bucket", bucket, remedy)
            end = stop
        if len({bucket.default is None for bucket in self.buckets}) != 1:
            raise InvalidArgumentError("buckets", self.buckets, "Give a default row for each bucket, or for none")

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return self.buckets[-1].rows[1]

    @property
    def defaults(self) -> tuple[int, ...]:
        """Global ids of the buckets' default rows; empty if the buckets have no default rows."""
        return tuple(bucket.default for bucket in self.buckets if bucket.default is not None)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Block of a table that one rank holds, with one range of rows and one or more ranges of columns.

    If the rank holds no block of the table, ``num_rows`` is 0 and ``columns`` is empty.

    Args:
        table: spec of the whole table.
        row_offset: global id of the block's first row.
        num_rows: number of rows of the block, ``R``.
        columns: half-open column ranges of the block, ascending and disjoint.
        is_replicated: True if every rank holds the same block (DATA_PARALLEL). Only rank 0 publishes it.
        replica: index of this rank's replica of the block in 2D parallelism (``DMPCollection``), otherwise 0. Only the
            rank with replica 0 publishes the block.

    Raises:
        InvalidArgumentError: if the block lies outside the table, or ``replica`` is negative.

    Example:
        >>> import torch
        >>> table = TableSpec("ec.embeddings.user", num_rows=10, dim=8, dtype=torch.float32)
        >>> ShardSpec(table, row_offset=5, num_rows=5, columns=((0, 8),)).num_columns
        8
    """

    table: TableSpec
    row_offset: int = 0
    num_rows: int = 0
    columns: tuple[tuple[int, int], ...] = ()
    is_replicated: bool = False
    replica: int = 0

    def __post_init__(self) -> None:
        if self.replica < 0:
            raise InvalidArgumentError("replica", self.replica, "Pass 0 or more")
        edges = [edge for column_range in self.columns for edge in column_range]
        rows_fit = self.row_offset >= 0 and 0 <= self.num_rows <= self.table.num_rows - self.row_offset
        columns_fit = edges == sorted(edges) and all(0 <= edge <= self.table.dim for edge in edges)
        if not (rows_fit and columns_fit):
            remedy = f"Keep the shard of {self.table.fqn!r} inside the table's {self.table}"
            raise InvalidArgumentError("ShardSpec", (self.row_offset, self.num_rows, self.columns), remedy)

    def check_ids(self, ids: Tensor) -> None:
        """Raise InvalidArgumentError unless ``ids`` is a ``[N]`` tensor of integers from 0 to ``num_rows - 1``."""
        import torch  # noqa: PLC0415  the other types are used without it

        if not isinstance(ids, torch.Tensor):
            raise InvalidArgumentError("ids", ids, "Pass a [N] tensor of integers, for example torch.tensor([7, 42])")
        if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise InvalidArgumentError("ids", (tuple(ids.shape), ids.dtype), "Pass a [N] tensor of integers")
        outside = ids[(ids < 0) | (ids >= self.num_rows)]
        if len(outside):
            remedy = f"Pass local ids of {self.table.fqn!r} on this rank: at least 0 and less than {self.num_rows}"
            raise InvalidArgumentError("ids", outside[:5].tolist(), remedy)

    @property
    def num_columns(self) -> int:
        """Number of columns of the shard, ``D``."""
        return sum(stop - start for start, stop in self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRows:
    """Changed rows of one table on this rank.

    Args:
        ids: ``[N]`` int64, local to the shard, ascending and unique.
        states: ``[N, ...]`` states of the rows, see :class:`TrackingMode`; None if the mode has no states or the read
            used ``with_states=False``.
        values: ``[N, D]`` values of the rows at the time of the read, in the table's dtype, columns in the order of
            ``shard.columns``; None unless the read used ``with_values=True``.
        shard: block of the table that contains the rows; None if ``ids`` are not local to a shard.
        known: ``[N]`` bool, True where the old state is known; elsewhere the row in ``states`` is NaN. None if the
            mode keeps no old states or the read used ``with_states=False``.
        optimizer: states of the fused optimizer for the rows, in the optimizer's order; empty unless the read used
            ``with_optimizer=True``. Each state is ``[N, D]``, or ``[N, S]`` with one value for each of the shard's
            ``S`` column ranges.
        raw_ids: ``[N]`` int64 raw id that owned each row at the time of the read, 2**63 - 1 if no raw id owned it. None
            for a table without managed collisions.
        admitted: ``[N]`` int64 new owner of each row: the raw id that owned the row at the time of the read, but not
            when the consumer last received it; otherwise 2**63 - 1. None for a table without managed collisions.
        evicted: ``[N]`` int64 previous owner of each row: the raw id that owned the row when the consumer last received
            it, but not at the time of the read; otherwise 2**63 - 1. None for a table without managed collisions. After
            a restore or a reshard, the previous owner may be unknown. The row is then treated as previously unowned.

    Raises:
        InvalidArgumentError: if ``ids`` are not ``[N]`` int64, or ``states``, ``values``, ``raw_ids``, ``admitted`` or
            ``evicted`` have a different number of rows.

    Example:
        >>> import torch
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
    raw_ids: Tensor | None = field(default=None, kw_only=True)
    admitted: Tensor | None = field(default=None, kw_only=True)
    evicted: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if dtype_name(self.ids.dtype) != "int64" or self.ids.dim() != 1:
            raise InvalidArgumentError("ids", (tuple(self.ids.shape), self.ids.dtype), "Pass a [N] int64 tensor")
        for name in ("states", "values", "raw_ids", "admitted", "evicted"):
            rows = getattr(self, name)
            if rows is not None and rows.shape[0] != self.ids.shape[0]:
                raise InvalidArgumentError(name, tuple(rows.shape), f"Pass one row for each of {len(self.ids)} ids")

    @property
    def global_ids(self) -> Tensor:
        """``[N]`` int64 global ids, ascending and unique; equal to ``ids`` if ``shard`` is None."""
        return self.ids if self.shard is None else self.ids + self.shard.row_offset

    def __len__(self) -> int:
        return self.ids.shape[0]


class Delta(Mapping[str, DeltaRows]):
    """Result of a read: a mapping from the FQN of each tracked table to the table's :class:`DeltaRows`.

    Args:
        rows: mapping from table FQN to the changed rows.
        consumer: name of the consumer.
        start: position in the change log at which the read starts; equal to the consumer's cursor.
        stop: position in the change log at which the read ends. A commit moves the cursor to this position.
        batches: half-open range of the batches that the read covers, counted in calls of ``step()``.
        left_out: mapping from table FQN to the changed rows that top-k left out. These rows stay pending.

    Example:
        >>> import torch
        >>> from delta_tracker import ModelDeltaTracker
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True))
        >>> tracker = ModelDeltaTracker(model)
        >>> model(torch.tensor([[7, 42, 7]])).sum().backward()
        >>> torch.optim.SGD(model.parameters(), lr=0.1).step()
        >>> delta = tracker.get_delta()
        >>> delta["0"].ids.tolist(), delta.num_rows
        ([7, 42], 2)
    """

    __slots__ = ("_left_out", "_rows", "batches", "consumer", "held_back", "start", "stop")

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
        held_back = {fqn: rows for fqn, rows in left_out.items() if len(rows)} if left_out else {}
        self.held_back = MappingProxyType(held_back)
        """Same rows as :attr:`left_out`, but not copied. Do not modify the tensors: the tracker shares them."""
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
        """Return a view of the pairs of table FQN and rows. It is faster than the view that ``Mapping`` provides."""
        return self._rows.items()

    @property
    def left_out(self) -> Mapping[str, ChangedRows]:
        """Mapping from table FQN to the changed rows that top-k left out. The first access copies the rows."""
        if self._left_out is None:
            self._left_out = MappingProxyType({fqn: rows.copy() for fqn, rows in self.held_back.items()})
        return self._left_out

    @property
    def num_rows(self) -> int:
        """Number of changed rows in all tables on this rank."""
        return sum(map(len, self._rows.values()))

    @property
    def pending_rows(self) -> int:
        """Number of changed rows that top-k left out, in all tables on this rank."""
        return sum(map(len, self.held_back.values()))

    def __repr__(self) -> str:
        tables = {fqn: len(rows) for fqn, rows in self._rows.items()}
        return f"Delta(consumer={self.consumer!r}, batches={self.batches}, rows={tables})"


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory usage of a tracker on this rank, in bytes.

    The sizes include neither memory for 2D parallelism nor up to 1 GiB of buffers that all trackers in a process share.

    Args:
        log_bytes: size of the change log: sets of changed rows, old states on the device and in pinned host memory, and
            ids of updates in progress.
        copy_bytes: size of the copies that reads compare with the model. The tracker copies the shards without a fused
            optimizer, and the raw id of each row (8 bytes) in tables with managed collisions.
        carried_bytes: size of the pending rows outside the log: rows that top-k left out, rows from a loaded state, and
            rows that are pending for a single consumer only.

    Example:
        >>> Memory(log_bytes=125, copy_bytes=0, carried_bytes=16)  # what tracker.memory() returns
        Memory(log_bytes=125, copy_bytes=0, carried_bytes=16)
    """

    log_bytes: int
    copy_bytes: int
    carried_bytes: int

    @property
    def total_bytes(self) -> int:
        """Total memory usage in bytes."""
        return self.log_bytes + self.copy_bytes + self.carried_bytes
