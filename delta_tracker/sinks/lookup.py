"""Lookup of rows by readers of a row store.

Notation: ``N`` is the number of ids of a call, ``D`` the number of columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, MalformedSinkError
from delta_tracker.raw_ids import defaults_of
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.sinks.stored_values import decode_rows
from delta_tracker.types import TableSpec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LookedUp:
    """Rows of one lookup.

    Each row has its value as of :attr:`version`, or as of a later version. If :attr:`is_mixed` is True, a rollback or a
    change to another branch is in progress or was interrupted, and rows may be of any version that was applied before.

    Args:
        values: ``[N, D]`` in the table's dtype; 0 for an id without a row.
        versions: ``[N]`` int64 version that wrote each row; -1 for an id without a row.
        is_own: ``[N]`` bool; False for a raw id that owns no row. Its values are those of the default row of its
            bucket, or 0 in a table without default rows.
        stream: id of the stream.
        version: version that no row is older than.
        is_mixed: True if rows may be of unrelated versions.
    """

    values: Tensor
    versions: Tensor
    is_own: Tensor
    stream: str
    version: int
    is_mixed: bool


@lru_cache(maxsize=4)
def _parsed(data: bytes) -> SinkState:
    return SinkState.from_json(data)


def current_state(data: bytes | None) -> SinkState:
    """Return the state of the stream that readers read from its JSON, which is parsed only if it changes.

    Raises:
        MalformedSinkError: if it is invalid or missing.
    """
    if data is None:
        raise MalformedSinkError("its current stream", "it has no state")
    return _parsed(data)


class Lookup:
    """Lookup of ids in one table as of one state: says which keys to read, and decodes what was read.

    Args:
        state: state of the stream that readers read.
        table: FQN of the table.
        ids: ``[N]`` int64 on the CPU: global row ids, or raw ids for a table with raw ids.

    Raises:
        InvalidArgumentError: if the table is unknown, ``ids`` has another shape or dtype, or a global row id is outside
            the table.
        MalformedSinkError: if the state has no version.

    Attributes:
        defaults: global row ids of the default rows that ``ids`` may need.
    """

    def __init__(self, state: SinkState, table: str, ids: Tensor) -> None:
        spec = state.tables.get(table)
        if spec is None:
            raise InvalidArgumentError("table", table, f"Pass one of the tables: {sorted(state.tables)}")
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
        """Return the rows.

        Args:
            rows: stored row of each id, None if there is none.
            defaults: stored default row of each of :attr:`defaults`, None if there is none.

        Raises:
            MalformedSinkError: if a row is missing or invalid.
        """
        is_own = torch.tensor([row is not None for row in rows], dtype=torch.bool)
        found = [row for row in rows if row is not None]
        if self._identity is None and len(found) < len(rows):
            missing = int(self._ids[~is_own][0])
            raise MalformedSinkError(f"row {missing} of table {self._spec.fqn!r}", "it is missing")
        values = torch.zeros(len(rows), self._spec.dim, dtype=self._spec.dtype)
        versions = torch.full((len(rows),), -1, dtype=torch.int64)
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
    """Return the rows of several lookups of one stream and table as those of one lookup."""
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
