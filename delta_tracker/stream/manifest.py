"""One entry of a stream's log: a JSON object that says what its version consists of.

Format 1, all fields required::

    {"format": 1, "stream": hex, "generation": int, "writer": hex, "version": int, "kind": "claim|snapshot|delta",
     "batches": [first, end], "created": unix seconds, "pending_rows": int,
     "tables": {fqn: {"num_rows": int, "dim": int, "dtype": "F32|F16|BF16"}},
     "parts": [{"name": str, "num_bytes": int, "xxh3": hex,
                "blocks": [{"table": fqn, "rows": [first, end], "columns": [first, end], "num_rows": int,
                            "whole": bool}]}]}

Version ``v`` is the ``v``-th entry of the log, from 0, and follows ``v - 1``. A claim is a version without rows. A
whole block carries every row of its range and no ids. The blocks of a version never overlap; those of a snapshot
cover every table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from delta_tracker.errors import MalformedError
from delta_tracker.types import TableSpec

FORMAT = 1
Kind = Literal["claim", "snapshot", "delta"]

DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Edges of rows times edges of columns of one table's blocks: ten thousand ranks by a hundred column ranges fit.
_MAX_CELLS = 4_000_000
_PART_NAME = re.compile(r"parts/[0-9a-z-]+\.safetensors")
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table in a part: ``num_rows`` of the rows in a half-open range, and a half-open column range.

    Args:
        table: fully qualified name.
        rows: range of global row ids that the rows lie in.
        columns: range of columns that the values cover.
        num_rows: how many rows the part holds.
        whole: the part holds every row of the range, in order, and no ids.
    """

    table: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    num_rows: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One object of rows, written by one rank.

    Args:
        name: the object's name in the store.
        num_bytes: its size.
        xxh3: 128-bit xxh3 of its bytes, in hex.
        blocks: what it holds.
    """

    name: str
    num_bytes: int
    xxh3: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed version.

    Args:
        stream: id of the stream, 32 hex digits.
        generation: which publisher's life wrote it.
        writer: id of that publisher, 32 hex digits.
        version: place in the log.
        kind: claim, snapshot or delta.
        batches: half-open range of the trainer's step counts that it covers; its cut is the end.
        created: unix time of the commit, in seconds.
        pending_rows: changed rows that it leaves for later versions.
        tables: FQN to table.
        parts: the objects that hold its rows.
    """

    stream: str
    generation: int
    writer: str
    version: int
    kind: Kind
    batches: tuple[int, int] = (0, 0)
    created: float
    pending_rows: int = 0
    tables: Mapping[str, TableSpec] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows in all its parts; a row in several column shards counts once for each."""
        return sum(block.num_rows for part in self.parts for block in part.blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.num_bytes for part in self.parts)

    def to_json(self) -> bytes:
        """The entry as it stands in the log."""
        tables = {
            fqn: {"num_rows": table.num_rows, "dim": table.dim, "dtype": DTYPE_NAMES[table.dtype]}
            for fqn, table in self.tables.items()
        }
        fields = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        entry = {"format": FORMAT, **fields, "tables": tables, "parts": [asdict(part) for part in self.parts]}
        return json.dumps(entry, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, name: str, data: bytes) -> Manifest:
        """Read and check an entry.

        Args:
            name: the entry's name, for the error.
            data: its bytes.

        Raises:
            MalformedError: if anything in it does not follow the format.
        """
        try:
            manifest = _parse(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise MalformedError(name, f"{type(error).__name__}: {error}") from error
        return manifest


_PLAIN_FIELDS = ("stream", "generation", "writer", "version", "kind", "batches", "created", "pending_rows")


def part_to_json(part: Part) -> dict[str, Any]:
    """A part's record as JSON fields."""
    return asdict(part)


def part_from_json(entry: Any) -> Part:  # noqa: ANN401  untrusted JSON
    """A part's record from JSON fields.

    Raises:
        ValueError, KeyError, TypeError: if a field is missing or out of its range.
    """
    blocks = tuple(
        Block(
            table=_string(block["table"]),
            rows=_range(block["rows"]),
            columns=_range(block["columns"]),
            num_rows=_count(block["num_rows"]),
            whole=_checked(block["whole"], lambda value: isinstance(value, bool)),
        )
        for block in _list(entry["blocks"])
    )
    return Part(
        name=_checked(entry["name"], lambda value: _matches(_PART_NAME, value)),
        num_bytes=_count(entry["num_bytes"]),
        xxh3=_checked(entry["xxh3"], lambda value: _matches(_HEX, value)),
        blocks=blocks,
    )


def _parse(entry: Any) -> Manifest:  # noqa: ANN401  untrusted JSON
    if type(entry["format"]) is not int or entry["format"] != FORMAT:
        raise ValueError(f"its format is {entry['format']!r}, this library reads format {FORMAT}")
    tables = {
        fqn: TableSpec(fqn, _count(table["num_rows"]), _count(table["dim"]), _DTYPES[table["dtype"]])
        for fqn, table in entry["tables"].items()
    }
    manifest = Manifest(
        stream=_checked(entry["stream"], lambda value: _matches(_HEX, value)),
        generation=_count(entry["generation"]),
        writer=_checked(entry["writer"], lambda value: _matches(_HEX, value)),
        version=_count(entry["version"]),
        kind=_checked(entry["kind"], lambda value: value in get_args(Kind)),
        batches=_range(entry["batches"]),
        created=_checked(entry["created"], lambda value: type(value) in (int, float) and 0 <= value < 2**53),
        pending_rows=_count(entry["pending_rows"]),
        tables=tables,
        parts=tuple(part_from_json(part) for part in _list(entry["parts"])),
    )
    if manifest.kind == "claim" and (manifest.parts or manifest.tables):
        raise ValueError("it is a claim with rows")
    _check_blocks(manifest)
    return manifest


def _check_blocks(manifest: Manifest) -> None:
    """Blocks lie inside their tables, do not overlap, and cover the tables in a snapshot."""
    blocks: dict[str, list[Block]] = {fqn: [] for fqn in manifest.tables}
    for part in manifest.parts:
        for block in part.blocks:
            table = manifest.tables[block.table]
            span = block.rows[1] - block.rows[0]
            if block.rows[1] > table.num_rows or block.columns[1] > table.dim:
                raise ValueError(f"block {block} is outside its table, which is {table}")
            if block.num_rows > span or (block.whole and block.num_rows != span):
                raise ValueError(f"block {block} has {block.num_rows} rows in a range of {span}")
            blocks[block.table].append(block)
    for fqn, table in manifest.tables.items():
        cover = _cover(blocks[fqn], table)
        if (cover > 1).any():
            raise ValueError(f"blocks of table {fqn!r} overlap")
        if manifest.kind == "snapshot" and ((cover < 1).any() or not all(block.whole for block in blocks[fqn])):
            raise ValueError(f"the snapshot does not hold all of table {fqn!r}, which is {table}")


def _cover(blocks: list[Block], table: TableSpec) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many blocks cover each cell of the grid that the blocks' edges cut the table into."""
    rows = np.unique([0, table.num_rows, *(edge for block in blocks for edge in block.rows)])
    columns = np.unique([0, table.dim, *(edge for block in blocks for edge in block.columns)])
    if len(rows) * len(columns) > _MAX_CELLS:
        raise ValueError(f"its {len(blocks)} blocks of table {table.fqn!r} are too many")
    cover = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int64)
    for block in blocks:
        top, bottom = np.searchsorted(rows, block.rows)
        left, right = np.searchsorted(columns, block.columns)
        cover[top:bottom, left:right] += 1
    return cover


def _checked(value: Any, is_good: Callable[[Any], bool]) -> Any:  # noqa: ANN401  untrusted JSON
    if not is_good(value):
        raise ValueError(f"unexpected value {value!r}")
    return value


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _list(value: object) -> list[Any]:
    return list(_checked(value, lambda found: isinstance(found, list)))


def _string(value: object) -> str:
    return str(_checked(value, lambda found: isinstance(found, str)))


def _count(value: object) -> int:
    return int(_checked(value, lambda found: type(found) is int and 0 <= found < 2**63))


def _range(value: Any) -> tuple[int, int]:  # noqa: ANN401  untrusted JSON
    first, end = value
    return _count(first), _checked(_count(end), lambda found: found >= first)
