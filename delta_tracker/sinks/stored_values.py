"""Bytes of rows and of owners in row stores.

Notation: ``N`` is the number of rows of a call, ``D`` the number of columns of the table.

A stored row is the version that wrote it, 8 bytes, and its values in the table's dtype. All numbers are little-endian.
A stored owner is 8 bytes, its exclusive or with :data:`~delta_tracker.raw_ids.NO_OWNER`: a row without an owner is 8
zero bytes, with which Redis extends a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import MalformedSinkError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.types import TableSpec

OWNER_BYTES = 8
_VERSION_BYTES = 8


def num_value_bytes(table: TableSpec) -> int:
    """Return the size of a stored row."""
    return _VERSION_BYTES + table.dim * table.dtype.itemsize


def encode_rows(values: Tensor, version: int) -> list[bytes]:
    r"""Return the stored form of each row.

    Args:
        values: ``[N, D]`` on the CPU.
        version: version that writes the rows.

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
    """Return the values ``[N, D]`` of stored rows, and the versions ``[N]`` int64 that wrote them.

    Raises:
        MalformedSinkError: if the size or the version of a row is invalid.
    """
    width = num_value_bytes(table)
    if not data:
        return torch.empty(0, table.dim, dtype=table.dtype), torch.empty(0, dtype=torch.int64)
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
    """Return the stored form of owners, ``[N]`` int64."""
    return (owners ^ NO_OWNER).numpy().astype("<i8").tobytes()


def decode_owners(data: bytes, num_owners: int) -> Tensor:
    """Return ``[num_owners]`` int64 owners; those behind the end of ``data`` are NO_OWNER.

    Raises:
        MalformedSinkError: if ``data`` has parts of an owner, or more than ``num_owners``.
    """
    if len(data) % OWNER_BYTES or len(data) > num_owners * OWNER_BYTES:
        raise MalformedSinkError("its map of raw ids", f"{len(data)} bytes are stored for {num_owners} rows")
    held = torch.zeros(num_owners, dtype=torch.int64)
    held[: len(data) // OWNER_BYTES] = torch.from_numpy(np.frombuffer(data, "<i8").astype(np.int64))
    return held ^ NO_OWNER


def encode_log(slots: Tensor, owners: Tensor) -> bytes:
    """Return an entry of the log of owners: ``[N]`` int64 global row ids, and their ``[N]`` int64 owners."""
    return slots.numpy().astype("<i8").tobytes() + encode_owners(owners)


def decode_log(data: bytes, table: str) -> tuple[Tensor, Tensor]:
    """Return the global row ids and the owners of an entry of the log, each ``[N]`` int64.

    Raises:
        MalformedSinkError: if the size of the entry is invalid.
    """
    half = len(data) // 2
    if not data or half % OWNER_BYTES or len(data) % 2:
        raise MalformedSinkError(f"the log of owners of table {table!r}", f"an entry has {len(data)} bytes")
    slots = torch.from_numpy(np.frombuffer(data[:half], "<i8").astype(np.int64))
    return slots, decode_owners(data[half:], half // OWNER_BYTES)
