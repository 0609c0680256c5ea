"""Parser of manifests, which are untrusted input. It rejects manifests that violate ``stream/FORMAT.md``.

The decoders of msgspec check types and limits, and end at the first invalid element, so that a malformed manifest takes
no more memory than a valid one of its size. The functions below check conditions on several fields.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import xxhash
from msgspec import Meta, Raw, Struct, ValidationError, structs
from msgspec.json import Decoder

from delta_tracker.errors import MalformedError, NewerFormatError
from delta_tracker.stream.format.digests import total_bytes
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.field_types import MAX_COUNT, Count, Hex, Range, Time
from delta_tracker.stream.format.manifest import (
    DENSE_DTYPES,
    FORMAT,
    MAX_DIMS,
    STATES_FORMAT,
    Block,
    DenseSpec,
    Fork,
    Kind,
    Link,
    Manifest,
    Part,
    PartName,
    Stored,
)
from delta_tracker.types import Bucket, Identity, StateSpec, StateWidth, TableSpec, TableStates

_TABLE_DTYPES = {name: DENSE_DTYPES[name] for name in ("F32", "F16", "BF16")}
# Maximum of row edges times column edges of one table's blocks; allows 10,000 ranks by 100 column ranges.
_MAX_CELLS = 4_000_000
_MAX_REASON = 1000
_KNOWN = f"formats {FORMAT} and {STATES_FORMAT}"
_POSITIVE = re.compile(rb"[1-9][0-9]*+")
_T = TypeVar("_T")


class _Format(Struct):
    format: Raw


class _Table(Struct):
    num_rows: Count
    dim: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    dtype: str


class _State(Struct):
    name: Annotated[str, Meta(pattern=r"\A[a-z0-9_]{1,64}\Z")]
    dtype: str
    width: StateWidth


class _Identity(Struct):
    dtype: Literal["I64"]
    hash_size: Count
    buckets: Annotated[tuple[Bucket, ...], Meta(max_length=65_536)]


class _StatesTable(_Table):
    columns: Annotated[tuple[Range, ...], Meta(max_length=65_536)]
    optimizer: Annotated[str, Meta(pattern=r"\A[A-Z0-9_]{1,64}\Z")] | None
    states: Annotated[tuple[_State, ...], Meta(max_length=16)]
    identity: _Identity | None


class _Owners(Struct):
    admitted: Count
    evicted: Count


class _Dense(Struct):
    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]


class _Part(Struct):
    name: PartName
    num_bytes: Count
    xxh3: Hex
    blocks: Raw
    dense: Raw
    tensors: tuple[Hex, ...] = ()


class _StatesPart(_Part, kw_only=True):
    body: Count
    states: Stored | None


class _Commit(Struct):
    """Fields that identify the writer of an entry and the entry's position in the log."""

    stream: Hex
    generation: Count
    writer: Hex
    version: Count
    created: Time
    parent: Link | None
    merges: Link | None


class _Entry(_Commit):
    """Fields of an entry except ``format``. Unknown fields are ignored."""

    kind: Kind
    snapshot: Count | None
    batches: Range
    cut: Time
    pending_rows: Count
    tables: Mapping[str, _Table]
    dense: Mapping[str, _Dense]
    parts: tuple[_Part, ...]


class _StatesEntry(_Entry):
    tables: Mapping[str, _StatesTable]
    parts: tuple[_StatesPart, ...]
    event_time: Time | None
    training: tuple[Stored, ...]
    owners: Mapping[str, _Owners]


class _Claim(Struct):
    forked_from: Fork | None = None


_FORMATS, _CLAIMS = Decoder(_Format), Decoder(_Claim)
_BLOCKS, _NAMES = Decoder(tuple[Block, ...]), Decoder(tuple[str, ...])
_ENTRIES: dict[int, Decoder[_Entry]] = {FORMAT: Decoder(_Entry), STATES_FORMAT: Decoder(_StatesEntry)}
_NUMBERS = {str(number).encode(): number for number in _ENTRIES}

# A block as this library writes it, which has no name twice.
_BLOCK = (
    r'\{"table":"[^"\\]*+","rows":\[[0-9]++,[0-9]++\],"columns":\[[0-9]++,[0-9]++\],"num_rows":[0-9]++,'
    r'"ids":"[a-z]*+","encoding":"[A-Z0-9]*+"\},?+'
)
_STRING = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
# Group 1 is a name, and group 2 a brace. The last two alternatives match a limited number of tokens without names: a
# search does not release the interpreter lock.
_TOKEN = re.compile(
    rf'{_STRING}\s*+:|(?:{_BLOCK}){{1,99}}+|(?:[^{{}}"]{{1,999}}+|\{{\}}|"[^"\\]*+(?:\\.[^"\\]*+)*+"(?!\s*+:)){{1,999}}+|([{{}}])'
)


def parse_manifest(name: str, data: bytes) -> Manifest:
    """Parse and check an entry. Raises NewerFormatError for a newer format, MalformedError for an invalid entry."""
    try:
        return _manifest(name, data)
    except NewerFormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise MalformedError(name, reason_of(error)) from error


def load_json(data: bytes) -> Any:  # noqa: ANN401  untrusted JSON
    """Parse JSON in UTF-8. Raises ValueError for invalid JSON or duplicate keys, RecursionError for deep nesting."""
    return json.loads(data.decode(), object_pairs_hook=_object)


def reason_of(error: Exception) -> str:
    """Return the type and text of an error, truncated to 1,000 characters because the text may quote a whole file."""
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]


def check_columns(table: TableSpec, columns: tuple[Range, ...]) -> None:
    """Raise ValueError unless the ascending ranges ``columns`` cover the table's columns without gaps or overlaps."""
    ends = [0, *(end for _, end in columns)]
    is_right = ends[-1] == table.dim and all(first < end for first, end in columns)
    if not is_right or columns != tuple(pairwise(ends)):
        raise ValueError(f"the column ranges of table {table.fqn!r} do not divide its {table.dim} columns")


def _manifest(name: str, data: bytes) -> Manifest:
    text = data.decode()  # the decoders do not check the UTF-8 of unknown fields
    number = _format_of(name, data)
    entry = _ENTRIES[number].decode(data)
    tables, states, identities = _tables(entry)
    dense = {name: _dense(spec) for name, spec in entry.dense.items()}
    columns_of = {fqn: frozenset(each.columns) for fqn, each in states.items() if each.states}
    parts = _parts(entry, tables, columns_of)
    fields = structs.asdict(entry) | {"tables": tables, "dense": dense, "parts": parts, "states": states}
    if entry.kind == "claim":
        fields["forked_from"] = _CLAIMS.decode(data).forked_from
    if isinstance(entry, _StatesEntry):
        for i, stored in enumerate(entry.training):
            _check_size(stored, f"$.training[{i}]")
        owners = fields.pop("owners")
        if unknown := owners.keys() - identities:
            raise ValueError(f"table {min(unknown)!r} has changes of raw ids, but no raw ids - at `$.owners`")
        fields["identities"] = identities
        fields["owner_changes"] = {fqn: (each.admitted, each.evicted) for fqn, each in owners.items()}
    _check_names(text)
    manifest = Manifest(**fields, format=number, xxh3=xxhash.xxh3_128_hexdigest(data))
    _check_place(manifest)
    _check_overlaps(manifest)
    if identities:
        _check_identities(manifest)
    return manifest


def _tables(entry: _Entry) -> tuple[dict[str, TableSpec], dict[str, TableStates], dict[str, Identity]]:
    tables: dict[str, TableSpec] = {}
    states: dict[str, TableStates] = {}
    identities: dict[str, Identity] = {}
    for fqn, table in entry.tables.items():
        tables[fqn] = spec = TableSpec(fqn, table.num_rows, table.dim, _TABLE_DTYPES[table.dtype])
        if isinstance(table, _StatesTable):
            found = _states(spec, table)
            if table.optimizer is not None:
                states[fqn] = TableStates(table.optimizer, table.columns, found)
            elif found or len(table.columns) > 1:
                raise ValueError(f"table {fqn!r} has states or several column ranges, but no optimizer")
            if table.identity is not None:
                identities[fqn] = identity = Identity(table.identity.hash_size, table.identity.buckets)
                if identity.num_rows != table.num_rows or len(table.columns) > 1:
                    raise ValueError(f"table {fqn!r} has raw ids and several column ranges, or buckets of other rows")
    return tables, states, identities


def _format_of(name: str, data: bytes) -> int:
    found = bytes(_FORMATS.decode(data).format)
    if (number := _NUMBERS.get(found)) is not None:
        return number
    quoted = found[:_MAX_REASON].decode(errors="replace")
    if _POSITIVE.fullmatch(found):  # not as an int, which may have any number of digits
        raise NewerFormatError(name, quoted, _KNOWN)
    raise ValueError(f"its format is {quoted}; this library reads {_KNOWN}")


def _states(table: TableSpec, found: _StatesTable) -> tuple[StateSpec, ...]:
    check_columns(table, found.columns)
    states = tuple([StateSpec(each.name, _TABLE_DTYPES[each.dtype], each.width) for each in found.states])
    if len({each.name for each in states}) < len(states):
        raise ValueError(f"table {table.fqn!r} has a state twice")
    return states


def _parts(entry: _Entry, tables: Mapping[str, TableSpec], columns: Mapping[str, frozenset[Range]]) -> tuple[Part, ...]:
    most_quotes = 2 * len(entry.dense) + "".join(entry.dense).count('"')
    unheld = set(entry.dense)
    found = []
    for i, part in enumerate(entry.parts):
        path = f"$.parts[{i}]"
        if bytes(part.dense).count(b'"') > most_quotes:  # before they are decoded: short names take much memory
            raise ValueError(f"a part has more than the {len(entry.dense)} dense tensors of the entry")
        dense = _decoded(_NAMES, part.dense, f"{path}.dense")
        for name in dense:
            if name not in unheld:
                raise ValueError(f"the dense tensor {name!r} is unknown, or two parts hold it")
            unheld.remove(name)
        blocks = _decoded(_BLOCKS, part.blocks, f"{path}.blocks")
        _check_part(part, blocks, path, tables, columns)
        found.append(Part(**structs.asdict(part) | {"blocks": blocks, "dense": dense}))
    if unheld:
        raise ValueError(f"no part holds {len(unheld)} of its {len(entry.dense)} dense tensors")
    return tuple(found)


def _decoded(decoder: Decoder[_T], value: Raw, path: str) -> _T:
    """Decode one field. ``path`` is the path of the field, a prefix of the path in a ValidationError."""
    try:
        return decoder.decode(value)
    except ValidationError as error:
        raise ValidationError(str(error).replace(" - at `$", f" - at `{path}", 1)) from None


def _check_size(stored: _StatesPart | Stored, path: str) -> None:
    """Check that the size of an object of format 2 is the sum of its body and the digests of the body's pieces."""
    if stored.body < 1 or stored.num_bytes != total_bytes(stored.body):
        raise ValueError(f"{stored.num_bytes} bytes, of which {stored.body} precede the digests - at `{path}`")


def _check_names(data: str) -> None:
    """Check that no object has duplicate keys: some JSON parsers use the first value, and some use the last."""
    outer: list[set[str]] = []  # names so far in the objects around the current one
    names: set[str] = set()
    for token in _TOKEN.finditer(data):
        group = token.lastindex
        if group is None:
            continue
        text = token[group]
        if group == 1:
            name = json.loads(f'"{text}"') if "\\" in text else text
            if name in names:
                raise ValueError(f"an object has the name {name!r} twice")
            names.add(name)
        elif text == "{":
            outer.append(names)
            names = set()
        else:
            names = outer.pop()


def _check_part(
    part: _Part,
    blocks: Sequence[Block],
    path: str,
    tables: Mapping[str, TableSpec],
    columns: Mapping[str, frozenset[Range]],
) -> None:
    for block in blocks:
        table = tables[block.table]
        (row, end_row), (column, end_column) = block.rows, block.columns
        if not (row <= end_row <= table.num_rows and column < end_column <= table.dim):
            raise ValueError(f"block {block} is outside its table, which is {table}")
        span = end_row - row
        if block.num_rows > span or (block.ids == "all" and block.num_rows != span):
            raise ValueError(f"block {block} has {block.num_rows} rows in a range of {span}")
        block.encoding.width(end_column - column)
        if (ranges := columns.get(block.table)) is not None and (
            block.columns not in ranges or block.encoding is not Encoding.of(table.dtype_name)
        ):
            raise ValueError(f"block {block} of a table with states is not one of its column ranges in its dtype")
    if isinstance(part, _StatesPart):
        _check_size(part, path)
        if part.states is not None:
            _check_size(part.states, f"{path}.states")
        if (part.states is not None) != any(block.table in columns for block in blocks):
            raise ValueError(f"an object with states must be there exactly if a block has states - at `{path}`")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _dense(spec: _Dense) -> DenseSpec:
    # torch computes strides of empty tensors too, so a dimension of 0 counts as 1
    if math.prod(max(1, size) for size in spec.shape) * 8 > MAX_COUNT:
        raise ValueError(f"the shape {spec.shape} is too large for a tensor")
    return DenseSpec(DENSE_DTYPES[spec.dtype], spec.shape)


def _check_place(manifest: Manifest) -> None:
    version, parent, snapshot = manifest.version, manifest.parent, manifest.snapshot
    if manifest.batches[0] > manifest.batches[1]:
        raise ValueError(f"its batches are {manifest.batches}")
    if manifest.kind == "claim" and manifest.format != FORMAT:
        raise ValueError(f"it is a claim of format {manifest.format}")
    if manifest.kind == "claim" and (manifest.parts or manifest.tables or manifest.dense or manifest.merges):
        raise ValueError("it is a claim with rows")
    fork = manifest.forked_from
    if fork is not None and (
        fork.stream == manifest.stream or Link(fork.version, fork.xxh3) != parent or snapshot is not None
    ):
        raise ValueError(f"it is forked from {fork}, with the parent {parent} and the newest snapshot {snapshot}")
    before = -1 if parent is None else parent.version
    if before >= version or (manifest.merges is None and before != version - 1):
        raise ValueError(f"its parent is version {before}")
    if manifest.merges is not None and manifest.merges.version != version:
        raise ValueError(f"it merges up to version {manifest.merges.version}")
    if manifest.kind == "snapshot" and snapshot != version:
        raise ValueError(f"it is a snapshot, but its newest snapshot is {snapshot}")
    is_own = snapshot == version and manifest.merges is None
    if snapshot is not None and (snapshot > version or (is_own and manifest.kind != "snapshot")):
        raise ValueError(f"it is a {manifest.kind}, but its newest snapshot is version {snapshot}")


def _check_overlaps(manifest: Manifest) -> None:
    """Check that no two blocks of one type overlap, and that the whole blocks of a snapshot cover its tables."""
    listed: dict[str, list[Block]] = {}
    whole: dict[str, list[Block]] = {}
    for part in manifest.parts:
        for block in part.blocks:
            (whole if block.ids == "all" else listed).setdefault(block.table, []).append(block)
    for fqn, table in manifest.tables.items():
        for found in (whole, listed):
            blocks = found.get(fqn, ())
            must_cover = found is whole and manifest.kind == "snapshot"
            if len(blocks) < 2 and not must_cover:  # noqa: PLR2004  a single block cannot overlap
                continue
            if [(block.rows, block.columns) for block in blocks[:2]] == [((0, table.num_rows), (0, table.dim))]:
                continue  # one block of the whole table, as for most tables of a snapshot
            cover = _cover(blocks, table)
            if (cover > 1).any():
                raise ValueError(f"blocks of table {fqn!r} overlap")
            if must_cover and (cover < 1).any():
                raise ValueError(f"the snapshot does not hold all of table {fqn!r}, which is {table}")


def _check_identities(manifest: Manifest) -> None:
    """Check that blocks with raw ids have all columns and one encoding, so that listed rows can overwrite blocks."""
    encodings: dict[str, Encoding] = {}
    owned = [block for part in manifest.parts for block in part.blocks if block.table in manifest.identities]
    for block in owned:
        if block.columns != (0, manifest.tables[block.table].dim):
            raise ValueError(f"block {block} of a table with raw ids does not have all columns")
        if encodings.setdefault(block.table, block.encoding) is not block.encoding:
            raise ValueError(f"table {block.table!r} has raw ids and blocks of several encodings")


def _cover(blocks: Sequence[Block], table: TableSpec) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of blocks that contain each cell of the grid formed by all block edges, ``[rows, columns]``."""
    rows = np.array(sorted({0, table.num_rows, *(edge for block in blocks for edge in block.rows)}))
    columns = np.array(sorted({0, table.dim, *(edge for block in blocks for edge in block.columns)}))
    if len(rows) * len(columns) > _MAX_CELLS:
        raise ValueError(f"its {len(blocks)} blocks of table {table.fqn!r} are too many")
    # A 2-D prefix sum over block corners: filling the cells of each block would take hours for many large blocks.
    cover = np.zeros((len(rows), len(columns)), dtype=np.int64)
    corners = np.array([(*block.rows, *block.columns) for block in blocks], dtype=np.int64).reshape(-1, 4)
    top, bottom = np.searchsorted(rows, corners[:, 0]), np.searchsorted(rows, corners[:, 1])
    left, right = np.searchsorted(columns, corners[:, 2]), np.searchsorted(columns, corners[:, 3])
    for row, column, sign in ((top, left, 1), (bottom, right, 1), (top, right, -1), (bottom, left, -1)):
        np.add.at(cover, (row, column), sign)
    cover.cumsum(0, out=cover).cumsum(1, out=cover)
    return cover[:-1, :-1]
