"""Encoding of rows and owners in row stores, and decoding for lookups.

Notation: ``N`` is the number of rows or ids in a call, ``D`` the number of columns of the table.

A stored row consists of the version that wrote the row, in 8 bytes, and the values in the table's dtype. All numbers
are little-endian. A stored owner is the 8-byte raw id XOR :data:`~delta_tracker.raw_ids.NO_OWNER`. "No owner" is
therefore 8 zero bytes, which are also the padding that Redis adds when it extends a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, MalformedSinkError
from delta_tracker.raw_ids import NO_OWNER, defaults_of
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.types import TableSpec

OWNER_BYTES = 8
_VERSION_BYTES = 8


def num_value_bytes(table: TableSpec) -> int:
    """Return the size in bytes of a stored row of the table, including its version."""
    return _VERSION_BYTES + table.dim * table.dtype.itemsize


def encode_rows(values: Tensor, version: int) -> list[bytes]:
    r"""Return the encoded bytes of each row.

    Args:
        values: ``[N, D]`` on the CPU.
        version: version to store with each row.

    Example:
        >>> encode_rows(torch.ones(1, 1, dtype=torch.float16), 3)
        [b'\x03\x00\x00\x00\x00\x00\x00\x00\x00<']
    """
    rows = values.detach().contiguous().view(torch.uint8).numpy()
    width = _VERSION_BYTES + rows.shape[1]
    joined = np.empty((len(rows), width), np.uint8)
    joined[:, :_VERSION_BYTES] = np.frombuffer(version.to_bytes(_VERSION_BYTES, "little"), np.uint8)
    joined[:, _VERSION_BYTES:] = rows
    data = joined.tobytes()
    return [data[begin : begin + width] for begin in range(0, len(data), width)]


def decode_rows(table: TableSpec, data: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return the values ``[N, D]`` of encoded rows, and the version that wrote each row, ``[N]`` int64.

    Raises MalformedSinkError if the size or the version of a row is invalid.
    """
    width = num_value_bytes(table)
    if not data:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return none.new_empty(0, table.dim, dtype=table.dtype), none
    if any(len(each) != width for each in data):
        found = sorted({len(each) for each in data} - {width})
        raise MalformedSinkError(f"a row of table {table.fqn!r}", f"it has {found[0]} bytes instead of {width}")
    joined = np.frombuffer(b"".join(data), np.uint8).reshape(len(data), width)
    versions = torch.from_numpy(joined[:, :_VERSION_BYTES].copy()).view(torch.int64).reshape(len(data))
    if bool((versions < 0).any()):
        raise MalformedSinkError(f"a row of table {table.fqn!r}", "its version is above 2**63 - 1")
    values = torch.from_numpy(joined[:, _VERSION_BYTES:].copy()).view(table.dtype)
    return values.reshape(len(data), table.dim), versions


def encode_owners(owners: Tensor) -> bytes:
    """Return the encoded bytes of ``[N]`` int64 owners."""
    return (owners ^ NO_OWNER).numpy().astype("<i8").tobytes()


def decode_owners(data: bytes, num_owners: int) -> Tensor:
    """Return ``[num_owners]`` int64 owners. If ``data`` is shorter, the remaining owners are NO_OWNER.

    Raises MalformedSinkError if the size of ``data`` is not a multiple of 8 bytes, or exceeds ``num_owners`` owners.
    """
    if len(data) % OWNER_BYTES or len(data) > num_owners * OWNER_BYTES:
        raise MalformedSinkError("its map of raw ids", f"{len(data)} bytes are stored for {num_owners} rows")
    held = torch.zeros(num_owners, dtype=torch.int64, device="cpu")
    held[: len(data) // OWNER_BYTES] = torch.from_numpy(np.frombuffer(data, "<i8").astype(np.int64))
    return held ^ NO_OWNER


def encode_log(slots: Tensor, owners: Tensor) -> bytes:
    """Return the encoded bytes of one log entry: ``[N]`` int64 global row ids and their ``[N]`` int64 owners."""
    return slots.numpy().astype("<i8").tobytes() + encode_owners(owners)


def decode_log(data: bytes, table: str) -> tuple[Tensor, Tensor]:
    """Return the global row ids and the owners of one encoded log entry, each ``[N]`` int64.

    Raises MalformedSinkError if the size of the entry is invalid.
    """
    half = len(data) // 2
    if not data or half % OWNER_BYTES or len(data) % 2:
        raise MalformedSinkError(f"the log of owners of table {table!r}", f"an entry has {len(data)} bytes")
    slots = torch.from_numpy(np.frombuffer(data[:half], "<i8").astype(np.int64))
    return slots, decode_owners(data[half:], half // OWNER_BYTES)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LookedUp:
    """Result of a lookup.

    Each row has its value as of :attr:`version` or a later version. If :attr:`is_mixed` is True, a rollback or a change
    to another history is in progress or was interrupted, and a row may have its value as of any applied version.

    Args:
        values: ``[N, D]`` in the table's dtype. A raw id that owns no row gets the values of its default row, or zeros
            in a table without default rows.
        versions: ``[N]`` int64, version that wrote each row; -1 for an id that has neither a row nor a default row.
        is_own: ``[N]`` bool, False for raw ids that own no row.
        stream: id of the stream.
        version: last complete version during the lookup; the lowest one if the lookup found several.
        is_mixed: True if rows may have values of unrelated versions.
    """

    values: Tensor
    versions: Tensor
    is_own: Tensor
    stream: str
    version: int
    is_mixed: bool


@lru_cache(maxsize=4)
def current_state(data: bytes | None) -> SinkState:
    """Parse the state of the current stream from ``data``. The results for the four most recent values are cached.

    Raises MalformedSinkError if ``data`` is None or invalid.
    """
    if data is None:
        raise MalformedSinkError("its current stream", "it has no state")
    return SinkState.from_json(data)


class Lookup:
    """One lookup of ids in a table, for use by readers of row stores.

    The reader reads the stored bytes of the rows ``ids`` and of the default rows :attr:`defaults`, and passes the bytes
    to :meth:`decode`.

    Args:
        state: state of the current stream.
        table: FQN of the table.
        ids: ``[N]`` int64 on the CPU: global row ids, or raw ids for a table with raw ids.

    Raises:
        InvalidArgumentError: if the table is unknown, ``ids`` is not ``[N]`` int64 on the CPU, or a global row id is
            outside the table.
        MalformedSinkError: if the state does not contain a complete version.

    Attributes:
        defaults: global row ids of the default rows to read, for those of ``ids`` that may own no row.
    """

    def __init__(self, state: SinkState, table: str, ids: Tensor) -> None:
        spec = state.tables.get(table)
        if spec is None:
            raise InvalidArgumentError("table", table, f"Pass one of the tables: {sorted(state.tables)}")
        if not isinstance(ids, Tensor):
            raise InvalidArgumentError("ids", ids, "Pass [N] int64 on the CPU, for example torch.tensor([7, 42])")
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device.type != "cpu":
            raise InvalidArgumentError("ids", f"{list(ids.shape)} {ids.dtype}", "Pass [N] int64 on the CPU")
        if state.version is None:
            raise MalformedSinkError("its state", "the stream that readers read has no complete version")
        self.version: int = state.version
        self._state = state
        self._spec: TableSpec = spec
        self._ids = ids
        self._identity = state.identities.get(table)
        self._default_of = torch.full_like(ids, -1)
        if self._identity is not None:
            self._default_of = defaults_of(self._identity, ids)
        elif bool(((ids < 0) | (ids >= spec.num_rows)).any()):
            wrong = ids[(ids < 0) | (ids >= spec.num_rows)]
            raise InvalidArgumentError("ids", int(wrong[0]), f"Pass rows of table {table!r}, 0 to {spec.num_rows - 1}")
        found: list[int] = self._default_of.unique().tolist()  # type: ignore[no-untyped-call]
        self.defaults: list[int] = [slot for slot in found if slot >= 0]

    def decode(self, rows: Sequence[bytes | None], defaults: Sequence[bytes | None]) -> LookedUp:
        """Return the result of the lookup. Raise MalformedSinkError if a required row is missing or invalid.

        ``rows`` and ``defaults`` are the stored bytes of the rows ``ids`` and :attr:`defaults`; None for a missing row.
        """
        is_own = torch.tensor([row is not None for row in rows], dtype=torch.bool, device="cpu")
        found = [row for row in rows if row is not None]
        if self._identity is None and len(found) < len(rows):
            missing = int(self._ids[~is_own][0])
            raise MalformedSinkError(f"row {missing} of table {self._spec.fqn!r}", "it is missing")
        values = torch.zeros(len(rows), self._spec.dim, dtype=self._spec.dtype, device="cpu")
        versions = torch.full((len(rows),), -1, dtype=torch.int64, device="cpu")
        values[is_own], versions[is_own] = decode_rows(self._spec, found)
        needed = set(self._default_of[~is_own].tolist())
        for slot, data in zip(self.defaults, defaults, strict=True):
            if slot not in needed:
                continue
            if data is None:
                raise MalformedSinkError(f"default row {slot} of table {self._spec.fqn!r}", "it is missing")
            is_filled = ~is_own & (self._default_of == slot)
            values[is_filled], versions[is_filled] = decode_rows(self._spec, [data])
        return LookedUp(
            values=values,
            versions=versions,
            is_own=is_own,
            stream=self._state.stream,
            version=self.version,
            is_mixed=self._state.is_mixed,
        )


def joined(parts: Sequence[LookedUp]) -> LookedUp:
    """Concatenate ``parts``, the results of one or more lookups in the same table of the same stream."""
    if len(parts) == 1:
        return parts[0]
    return LookedUp(
        values=torch.cat([part.values for part in parts]),
        versions=torch.cat([part.versions for part in parts]),
        is_own=torch.cat([part.is_own for part in parts]),
        stream=parts[0].stream,
        version=min(part.version for part in parts),
        is_mixed=any(part.is_mixed for part in parts),
    )
