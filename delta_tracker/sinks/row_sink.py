"""Row stores that a predictor writes a stream to, for lookups in other processes.

Notation: ``N`` is the number of rows of a call, ``D`` the number of columns of the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self, runtime_checkable

import msgspec
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, MalformedSinkError
from delta_tracker.stream.format.field_types import Hex
from delta_tracker.stream.format.state_tree import TENSOR_DTYPES
from delta_tracker.stream.reading.position import Written
from delta_tracker.types import Identity, TableSpec, dtype_name

_FORMAT = 1
_DTYPES = {dtype_name(dtype) for dtype in TENSOR_DTYPES.values() if dtype.is_floating_point}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkState(Written):
    """State of one stream in a row store, with the fields of :class:`~delta_tracker.stream.reading.position.Written`.

    Args:
        is_settling: True if ``version`` is complete, but the logged owners are not in the stored map yet, and default
            rows of former buckets may be stored.
        tables: FQN to size and dtype of each table.
        identities: FQN to the buckets of raw ids as of ``version``, for each table with raw ids.
        default_slots: FQN to the global row ids whose default rows may be stored, for each table with default rows.
            Readers find the default rows by ``identities``.
        choice: names and patterns of the tables that are written; empty for all.

    Raises:
        InvalidArgumentError: if only one of a version and its hash is None, a table has a dtype other than a floating
            point type, or ``identities`` or ``default_slots`` do not fit ``tables``.

    Example:
        >>> import torch
        >>> table = TableSpec("user", 10, 4, torch.float32)
        >>> state = SinkState(stream="0" * 32, version=3, xxh3="1" * 32, tables={"user": table})
        >>> SinkState.from_json(state.to_json()) == state
        True
    """

    stream: Hex
    is_settling: bool = False
    tables: Mapping[str, TableSpec] = field(default_factory=dict)
    identities: Mapping[str, Identity] = field(default_factory=dict)
    default_slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.version is None) != (self.xxh3 is None):
            raise InvalidArgumentError("version", self.version, "Give a version and its hash, or neither")
        if (self.applying is None) != (self.applying_xxh3 is None):
            raise InvalidArgumentError("applying", self.applying, "Give a version and its hash, or neither")
        for fqn, table in self.tables.items():
            if table.dtype_name not in _DTYPES:
                raise InvalidArgumentError("dtype", table.dtype_name, f"Give table {fqn!r} one of {sorted(_DTYPES)}")
        for fqn, identity in self.identities.items():
            held = self.tables.get(fqn)
            if held is None or identity.num_rows != held.num_rows:
                raise InvalidArgumentError("identities", fqn, f"Give buckets of the tables: {sorted(self.tables)}")
        for fqn, slots in self.default_slots.items():
            held = self.tables.get(fqn)
            if held is None or any(not 0 <= slot < held.num_rows for slot in slots):
                raise InvalidArgumentError("default_slots", fqn, f"Give rows of the tables: {sorted(self.tables)}")

    def to_json(self) -> bytes:
        """Return the state as JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "choice" or self.choice}
        return msgspec.json.encode({"format": _FORMAT, **values})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the state that :meth:`to_json` encoded.

        Raises:
            MalformedSinkError: if ``data`` is invalid, or was written by a newer version of the library.
        """
        try:
            values = msgspec.json.decode(data, type=dict[str, Any])
            state = msgspec.convert(values, cls)
        except ValueError as error:
            raise MalformedSinkError("its state", str(error)) from error
        if values.get("format") != _FORMAT or values.keys() | {"choice"} != {
            "format",
            *(each.name for each in fields(cls)),
        }:
            raise MalformedSinkError("its state", "its format or a field is unknown")
        return state


@runtime_checkable
class RowSink(Protocol):
    """Interface to a row store, such as Redis, LMDB, a feature store or a cache of embeddings.

    Only one process writes to a store at a time, and it makes no overlapping calls. Readers in other processes read
    rows at any time. Each row is atomic and has the version that wrote it. A row may be newer than the stored version,
    but not older. No lookup reads the row of another id.

    The library calls the methods in this order:

    1. :meth:`open`, :meth:`states` and :meth:`current`, before the first version and after each error.
    2. For each version: :meth:`begin`; :meth:`log_owners` for tables with raw ids; :meth:`write` and
       :meth:`write_defaults`; :meth:`delete` for ids that own no row after the version; :meth:`finish`.
    3. After :meth:`finish`, if owners changed: :meth:`set_owners`, :meth:`delete_defaults` and :meth:`settle`.

    The effect of a call must not become durable before that of the calls before it: after a crash of the writer or of
    the store, the store has the effects of all calls up to some point. An interrupted call may have taken effect in
    part. :meth:`begin` and :meth:`finish` store the state as a whole. All calls may be repeated. A store with
    transactions may make the effects of :meth:`begin` and of all calls up to :meth:`finish` visible together.

    The key of a row is its global row id. In a table with raw ids it is the raw id of the row's owner. Its default
    rows, which unknown raw ids read, have keys of their own, by global row id. All keys contain the stream id.

    Every method raises :class:`~delta_tracker.errors.SinkError` if the store cannot be used, with ``writer`` if another
    process became the writer, and :class:`~delta_tracker.errors.MalformedSinkError` if stored data is invalid. In a
    forked process, every method raises an error: the process must build a sink of its own.

    Example:
        >>> from delta_tracker.sinks.lmdb import LmdbSink
        >>> predictor = Predictor(LmdbSink("/var/rows"), "s3://bucket/prefix")  # doctest: +SKIP
    """

    def open(self) -> None:
        """Connect, and become the only writer. No-op if this object is the writer and its connection works.

        May be called again after :meth:`close` or an error. Discards the uncommitted transaction, if there is one.

        Raises:
            SinkError: if another process is the writer.
        """

    def states(self) -> list[SinkState]:
        """Return the states of all streams that the store holds. There are several if a change was interrupted."""

    def current(self) -> str | None:
        """Return the id of the stream that readers read; None before the first :meth:`finish`."""

    def begin(self, state: SinkState) -> None:
        """Store the state before the first row of ``state.applying``. Readers keep their stream."""

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        """Write rows, each of which is atomic, in batches that the store bounds.

        Args:
            stream: id of the stream.
            table: FQN of the table.
            keys: ``[N]`` int64, unique, any value: global row ids or raw ids.
            values: ``[N, D]`` in the table's dtype, on the CPU. Read-only, and valid until the call returns.
            version: version to store with each row.
        """

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        """Write default rows, by global row id. Same arguments as :meth:`write`; ``slots`` are inside the table."""

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        """Delete rows by ``[N]`` int64 keys, unique; ignore keys that are not stored."""

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        """Delete default rows by ``[N]`` int64 global row ids; ignore rows that are not stored."""

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        """Return the raw ids of rows in the stored map.

        Args:
            stream: id of the stream.
            table: FQN of the table.
            slots: ``[N]`` int64 global row ids inside the table, ascending and unique, at most 65,536.

        Returns:
            ``[N]`` int64 raw ids, :data:`~delta_tracker.raw_ids.NO_OWNER` for a row without one.
        """

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        """Set the raw ids of rows in the stored map. Same arguments as :meth:`log_owners`."""

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        """Append changes of owners to the log of the version in progress.

        Args:
            stream: id of the stream.
            table: FQN of the table.
            slots: ``[N]`` int64 global row ids inside the table, ascending and unique, at most 65,536.
            owners: ``[N]`` int64 raw ids, :data:`~delta_tracker.raw_ids.NO_OWNER` for a row without one.
        """

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logged changes, each as the ``slots`` and ``owners`` of a call of :meth:`log_owners`, in order."""

    def finish(self, state: SinkState) -> None:
        """Store the state after all rows of a version, and atomically make its stream the one that readers read.

        When the call returns, the version is durable, subject to the store's own settings.
        """

    def settle(self, state: SinkState) -> None:
        """Clear the log of owners of all tables of the stream, and then store the state. Readers keep their stream."""

    def remove(self, stream: str) -> None:
        """Delete all keys of a stream that is not current, in bounded batches, and its state last.

        The keys are those of the stored state and maps, not a scan of the store: the row ids of tables without raw ids;
        the raw ids in the stored map and in the log, and ``default_slots``, of tables with them. No-op for an unknown
        stream. Readers of the stream may still run.

        Raises:
            InvalidArgumentError: if readers read the stream.
        """

    def close(self) -> None:
        """Discard the uncommitted transaction, release the store, and disconnect. No-op if closed."""
