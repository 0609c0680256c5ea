"""Entries of a log from their bytes, which nobody vouches for: what ``FORMAT.md`` does not allow is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import numpy as np
import xxhash

from delta_tracker.errors import MalformedError
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import (
    DENSE_DTYPES,
    FORMAT,
    MAX_DIMS,
    Block,
    DenseSpec,
    IdForm,
    Kind,
    Link,
    Manifest,
    Part,
)
from delta_tracker.types import TableSpec

_T = TypeVar("_T")
_KINDS: tuple[Kind, ...] = get_args(Kind)
_ID_FORMS: tuple[IdForm, ...] = get_args(IdForm)
_END = 2**63  # of counts and row ids
_END_OF_TIME = 2**53  # in seconds
_TABLE_DTYPES = {name: DENSE_DTYPES[name] for name in ("F32", "F16", "BF16")}
# Edges of rows times edges of columns of one table's blocks: ten thousand ranks by a hundred column ranges fit.
_MAX_CELLS = 4_000_000
_MAX_REASON = 1000
_PART_NAME = re.compile(r"parts/[0-9a-z-]+\.safetensors")
_HEX = re.compile(r"[0-9a-f]{32}")


def parse_manifest(name: str, data: bytes) -> Manifest:
    """Read and check an entry.

    Args:
        name: the entry's name, for the error.
        data: its bytes.

    Raises:
        MalformedError: if anything in it does not follow the format.
    """
    try:
        return _manifest(load_json(data), xxhash.xxh3_128_hexdigest(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise MalformedError(name, reason_of(error)) from error


def load_json(data: bytes) -> Any:  # noqa: ANN401  untrusted JSON
    """Any JSON, in UTF-8, in which no object has one name twice: readers would differ in which of them counts.

    Raises:
        ValueError, RecursionError: if it is not that.
    """
    return json.loads(data.decode(), object_pairs_hook=_object)


def reason_of(error: Exception) -> str:
    """What a fault says, cut: it may quote whole files."""
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]


def parse_part(entry: Any) -> Part:  # noqa: ANN401  untrusted JSON
    """A part's record from JSON fields.

    Raises:
        ValueError, KeyError, TypeError: if a field is missing or out of its range.
    """
    return Part(
        name=_matching(_PART_NAME, entry["name"]),
        num_bytes=_count(entry["num_bytes"]),
        xxh3=_matching(_HEX, entry["xxh3"]),
        blocks=tuple(map(_block, _list(entry["blocks"]))),
        dense=tuple(map(_string, _list(entry["dense"]))),
    )


def _manifest(entry: Any, xxh3: str) -> Manifest:  # noqa: ANN401  untrusted JSON
    if type(entry["format"]) is not int or entry["format"] != FORMAT:
        raise ValueError(f"its format is {entry['format']!r}, this library reads format {FORMAT}")
    manifest = Manifest(
        stream=_matching(_HEX, entry["stream"]),
        generation=_count(entry["generation"]),
        writer=_matching(_HEX, entry["writer"]),
        version=_count(entry["version"]),
        kind=_one_of(_KINDS, entry["kind"]),
        parent=_optional(_link, entry["parent"]),
        snapshot=_optional(_count, entry["snapshot"]),
        batches=_range(entry["batches"]),
        cut=_time(entry["cut"]),
        created=_time(entry["created"]),
        pending_rows=_count(entry["pending_rows"]),
        tables={
            fqn: TableSpec(fqn, _count(table["num_rows"]), _count(table["dim"]), _TABLE_DTYPES[table["dtype"]])
            for fqn, table in entry["tables"].items()
        },
        dense={name: _dense(spec) for name, spec in entry["dense"].items()},
        parts=tuple(map(parse_part, _list(entry["parts"]))),
        merges=_optional(_link, entry["merges"]),
        xxh3=xxh3,
    )
    _check_place(manifest)
    _check_blocks(manifest)
    _check_dense(manifest)
    return manifest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("one name stands twice in an object")
    return found


def _block(entry: Any) -> Block:  # noqa: ANN401  untrusted JSON
    return Block(
        table=_string(entry["table"]),
        rows=_range(entry["rows"]),
        columns=_range(entry["columns"]),
        num_rows=_count(entry["num_rows"]),
        ids=_one_of(_ID_FORMS, entry["ids"]),
        encoding=Encoding(_string(entry["encoding"])),
    )


def _dense(entry: Any) -> DenseSpec:  # noqa: ANN401  untrusted JSON
    shape = tuple(map(_count, _list(entry["shape"])))
    if len(shape) > MAX_DIMS:
        raise _unexpected(entry["shape"])
    _count(math.prod(max(1, size) for size in shape) * 8)  # torch has strides for empty tensors too
    return DenseSpec(DENSE_DTYPES[entry["dtype"]], shape)


def _link(entry: Any) -> Link:  # noqa: ANN401  untrusted JSON
    return Link(_count(entry["version"]), _matching(_HEX, entry["xxh3"]))


def _check_place(manifest: Manifest) -> None:
    """An entry of the log follows the one before it; a merged one stands for several."""
    version, parent, snapshot = manifest.version, manifest.parent, manifest.snapshot
    if manifest.kind == "claim" and (manifest.parts or manifest.tables or manifest.dense or manifest.merges):
        raise ValueError("it is a claim with rows")
    before = -1 if parent is None else parent.version
    if before >= version or (manifest.merges is None and before != version - 1):
        raise ValueError(f"its parent is version {before}")
    if manifest.merges is not None and manifest.merges.version != version:
        raise ValueError(f"it stands for version {manifest.merges.version}")
    if manifest.kind == "snapshot" and snapshot != version:
        raise ValueError(f"it is a snapshot, but names {snapshot} as the newest one")
    if snapshot is not None and snapshot > version:
        raise ValueError(f"its newest snapshot is version {snapshot}")


def _check_blocks(manifest: Manifest) -> None:
    """Blocks lie inside their tables, those of a kind do not overlap, and a snapshot's cover the tables."""
    blocks: dict[str, list[Block]] = {fqn: [] for fqn in manifest.tables}
    for part in manifest.parts:
        for block in part.blocks:
            table = manifest.tables[block.table]
            span = block.rows[1] - block.rows[0]
            if block.rows[1] > table.num_rows or block.columns[1] > table.dim:
                raise ValueError(f"block {block} is outside its table, which is {table}")
            if block.num_rows > span or (block.ids == "all" and block.num_rows != span):
                raise ValueError(f"block {block} has {block.num_rows} rows in a range of {span}")
            block.encoding.width(block.num_columns)
            blocks[block.table].append(block)
    for fqn, table in manifest.tables.items():
        for is_whole in (True, False):
            alike = [block for block in blocks[fqn] if (block.ids == "all") == is_whole]
            must_cover = is_whole and manifest.kind == "snapshot"
            if len(alike) < 2 and not must_cover:  # noqa: PLR2004  one block overlaps with none
                continue
            cover = _cover(alike, table)
            if (cover > 1).any():
                raise ValueError(f"blocks of table {fqn!r} overlap")
            if must_cover and (cover < 1).any():
                raise ValueError(f"the snapshot does not hold all of table {fqn!r}, which is {table}")


def _check_dense(manifest: Manifest) -> None:
    """Every dense tensor stands in one part."""
    held = [name for part in manifest.parts for name in part.dense]
    if sorted(held) != sorted(manifest.dense):
        raise ValueError(f"its parts hold the dense tensors {sorted(held)} instead of {sorted(manifest.dense)}")


def _cover(blocks: Sequence[Block], table: TableSpec) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many blocks cover each cell of the grid that the blocks' edges cut the table into."""
    rows = np.unique([0, table.num_rows, *(edge for block in blocks for edge in block.rows)])
    columns = np.unique([0, table.dim, *(edge for block in blocks for edge in block.columns)])
    if len(rows) * len(columns) > _MAX_CELLS:
        raise ValueError(f"its {len(blocks)} blocks of table {table.fqn!r} are too many")
    # Each block counts at its corners alone, and the sums spread it: else many large blocks would take hours.
    cover = np.zeros((len(rows), len(columns)), dtype=np.int64)
    corners = np.array([(*block.rows, *block.columns) for block in blocks], dtype=np.int64).reshape(-1, 4)
    top, bottom = np.searchsorted(rows, corners[:, 0]), np.searchsorted(rows, corners[:, 1])
    left, right = np.searchsorted(columns, corners[:, 2]), np.searchsorted(columns, corners[:, 3])
    for row, column, sign in ((top, left, 1), (bottom, right, 1), (top, right, -1), (bottom, left, -1)):
        np.add.at(cover, (row, column), sign)
    cover.cumsum(0, out=cover).cumsum(1, out=cover)
    return cover[:-1, :-1]


def _unexpected(value: object) -> ValueError:
    return ValueError(f"unexpected value {value!r}")


def _optional(read: Callable[[Any], _T], value: Any) -> _T | None:  # noqa: ANN401  untrusted JSON
    return None if value is None else read(value)


def _one_of(values: Sequence[_T], value: Any) -> _T:  # noqa: ANN401  untrusted JSON
    if value not in values:
        raise _unexpected(value)
    found: _T = value
    return found


def _matching(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise _unexpected(value)
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _unexpected(value)
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise _unexpected(value)
    return value


def _count(value: Any) -> int:  # noqa: ANN401  untrusted JSON
    if type(value) is not int or not 0 <= value < _END:
        raise _unexpected(value)
    return value


def _time(value: Any) -> float:  # noqa: ANN401  untrusted JSON
    if type(value) not in (int, float) or not 0 <= value < _END_OF_TIME:
        raise _unexpected(value)
    return float(value)


def _range(value: Any) -> tuple[int, int]:  # noqa: ANN401  untrusted JSON
    first, end = value
    if type(first) is not int or type(end) is not int or not 0 <= first <= end < _END:
        raise _unexpected(value)
    return first, end
