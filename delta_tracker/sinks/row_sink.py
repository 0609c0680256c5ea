"""Interface to a row store that a predictor writes a stream to, for lookups in other processes.

Notation: ``N`` is the number of rows in a call, ``D`` the number of columns of the table.
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
    """State of one stream in a row store. The predictor stores it with the rows, and readers need it to look up rows.

    See :class:`~delta_tracker.stream.reading.position.Written` for the inherited fields.

    Args:
        is_settling: True if ``version`` is complete, but :meth:`RowSink.clear_owner_log` still has to be called. Some
            owners may then be only in the log, and default rows of previous buckets may still be stored.
        tables: size and dtype of each table by FQN.
        identities: buckets of raw ids as of ``version``, by FQN of each table with raw ids.
        default_slots: global ids of the default rows that may be stored, by FQN of each table with default rows.
        choice: names and patterns of the tables that the predictor applies; empty for all tables.

    Raises:
        InvalidArgumentError: if a version is given without its hash or a hash without its version, if the dtype of a
            table is not a floating point type, or if ``identities`` or ``default_slots`` do not match ``tables``.

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
        """Return the state encoded as JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "choice" or self.choice}
        return msgspec.json.encode({"format": _FORMAT, **values, "created": self.saved_created})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse the output of :meth:`to_json`.

        Raises:
            MalformedSinkError: if ``data`` is invalid, or was written by a newer version of the library.
        """
        try:
            values = msgspec.json.decode(data, type=dict[str, Any])
            for fqn, table in values["tables"].items():
                if "dtype" in table:  # of a release before 0.1.0
                    table |= {"fqn": fqn, "dtype_name": dtype_name(TENSOR_DTYPES[table.pop("dtype")])}
            state = msgspec.convert(values, cls)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedSinkError("its state", str(error)) from error
        known = {"format", *(each.name for each in fields(cls))}
        if values.get("format") != _FORMAT or values.keys() | {"choice"} != known:
            raise MalformedSinkError("its state", "its format or a field is unknown")
        return state


@runtime_checkable
class RowSink(Protocol):
    """Interface for writing rows to a store such as Redis, LMDB, a feature store or an embedding cache.

    Only one process writes to a store at a time, and its calls do not overlap. Other processes may read rows at any
    time. Each row is stored atomically, together with the number of the version that contains it. A stored row may be
    newer than the version in the stored state, but not older. A lookup never returns the row of a different id.

    The library calls the methods in this order:

    1. :meth:`open`, :meth:`states` and :meth:`current`, before the first version and after each error.
    2. For each version: :meth:`begin`; :meth:`log_owners` for tables with raw ids; :meth:`write` and
       :meth:`write_defaults`; :meth:`delete` for raw ids that own no row after the version; :meth:`finish`.
    3. After :meth:`finish`, if owners or default rows changed: :meth:`set_owners`, :meth:`delete_defaults` and
       :meth:`clear_owner_log`.

    Calls must become durable in the order in which they are made: after a crash of the writer or the store, the store
    must contain the effects of all calls before some point, and of none after it. Only the last call may be partly
    effective, except that :meth:`begin` and :meth:`finish` store the state atomically. All calls may be repeated. A
    store with transactions may commit all calls from :meth:`begin` to :meth:`finish` together.

    The key of a row contains its global row id or, for a table with raw ids, its raw id. A lookup of an unknown raw id
    returns a default row. Default rows are stored under separate keys, which contain global row ids. All keys contain
    the stream id.

    Every method raises :class:`~delta_tracker.errors.SinkError` if the store cannot be used, and
    :class:`~delta_tracker.errors.MalformedSinkError` if stored data is invalid. ``SinkError.writer`` is not None if
    another process became the writer. In a forked process, all methods except :meth:`close` raise an error.

    Example:
        >>> from delta_tracker.sinks.lmdb import LmdbSink
        >>> predictor = Predictor(LmdbSink("/var/rows"), "s3://bucket/prefix")  # doctest: +SKIP
    """

    def open(self) -> None:
        """Connect and become the only writer. No-op if this object is the writer and its connection works.

        Discards any uncommitted transaction. May be called again after :meth:`close` or an error.

        Raises:
            SinkError: if another process is the writer.
        """

    def states(self) -> list[SinkState]:
        """Return the state of each stored stream. During a change to another stream, several streams are stored."""

    def current(self) -> str | None:
        """Return the id of the current stream, from which readers read rows; None before the first :meth:`finish`."""

    def begin(self, state: SinkState) -> None:
        """Store the state. Called before version ``state.applying`` is written. Does not change the current stream."""

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        """Write rows. Implementations may split the rows into batches, but must write each row atomically.

        Args:
            stream: id of the stream.
            table: FQN of the table.
            keys: ``[N]`` int64, unique: global row ids, or raw ids for a table with raw ids.
            values: ``[N, D]`` in the table's dtype, on the CPU. Read-only, and valid until the call returns.
            version: version to store with each row.
        """

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        """Write default rows. ``slots`` are ``[N]`` int64 global row ids. See :meth:`write` for the other arguments."""

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        """Delete the rows with the given keys (``[N]`` int64, unique). Ignore keys that are not stored."""

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        """Delete the default rows with the given global row ids (``[N]`` int64). Ignore rows that are not stored."""

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        """Return the owner of each row, from the stored map of owners, which maps global row ids to raw ids.

        Args:
            stream: id of the stream.
            table: FQN of the table.
            slots: ``[N]`` int64 global row ids, ascending and unique. ``N`` is at most 65,536.

        Returns:
            ``[N]`` int64 raw ids; :data:`~delta_tracker.raw_ids.NO_OWNER` for a row without an owner.
        """

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        """Set the owner of each row in the stored map. The arguments are the same as in :meth:`log_owners`."""

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        """Append new owners of rows to the table's log of owners. Does not change the stored map.

        Args:
            stream: id of the stream.
            table: FQN of the table.
            slots: ``[N]`` int64 global row ids, ascending and unique. ``N`` is at most 65,536.
            owners: ``[N]`` int64 raw ids; :data:`~delta_tracker.raw_ids.NO_OWNER` for a row without an owner.
        """

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the ``slots`` and ``owners`` of each entry in the table's log of owners, oldest entry first."""

    def finish(self, state: SinkState) -> None:
        """Atomically store ``state`` and make ``state.stream`` current. Called after all rows of a version are written.

        When the call returns, the version must be as durable as the settings of the store permit.
        """

    def clear_owner_log(self, state: SinkState) -> None:
        """Clear the owner log of each table of the stream, then store ``state``. Does not change the current stream."""

    def remove(self, stream: str) -> None:
        """Delete all keys of a stream that is not current, in batches of limited size. Delete the state's key last.

        Implementations must not scan the keys of other streams: the state, the stored maps and the logs determine the
        keys to delete. Lookups that started earlier may still read the stream. No-op for an unknown stream.

        Raises:
            InvalidArgumentError: if the stream is the current stream.
        """

    def close(self) -> None:
        """Discard any uncommitted transaction, release the writer role, and disconnect. No-op if already closed."""
