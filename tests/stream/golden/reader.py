"""A second reader, written from ``FORMAT.md`` with JSON, zlib, xxhash and numpy, without code of the library."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
DTYPES |= {"BOOL": "?", "C64": "<c8", "C128": "<c16"}
_TABLE_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<f4"}
_PIECE_BYTES = 1 << 23
_NO_OWNER = (1 << 63) - 1

State = dict[str, np.ndarray[Any, Any]]


def tensors_of(data: bytes) -> State:
    """Return the tensors of a part, bfloat16 as float32 with the same upper bits."""
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = entry["data_offsets"]
        raw = data[start + begin : start + end]
        found[name] = array_of(raw, entry["dtype"]).reshape(entry["shape"])
    return found


def array_of(raw: bytes, dtype: str) -> np.ndarray[Any, Any]:
    """Return the numbers of a tensor, bfloat16 as float32 with the same upper bits."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, DTYPES[dtype])


def digests_of(body: bytes) -> bytes:
    """Return the digests that follow the body of an object of format 2."""
    return b"".join(xxhash.xxh3_128_digest(body[at : at + _PIECE_BYTES]) for at in range(0, len(body), _PIECE_BYTES))


def is_right(data: bytes, record: dict[str, Any]) -> bool:
    """Return True if an object of format 2 has the size, the hash and the digests that its record implies."""
    body, digests = data[: record["body"]], data[record["body"] :]
    is_hashed = xxhash.xxh3_128_hexdigest(digests) == record["xxh3"]
    return len(data) == record["num_bytes"] and is_hashed and digests == digests_of(body)


def training_of(data: bytes) -> Any:
    """Return the value in an object with a training state; tensors as arrays, bfloat16 as float32."""
    state = tensors_of(data)["state"].tobytes()
    length = int.from_bytes(state[:8], "little")
    spans = state[8 + length + -(8 + length) % 64 :]
    return _value(json.loads(state[8 : 8 + length]), spans)


def _value(node: Any, data: bytes) -> Any:
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag in ("i", "f"):
        return int(rest[0], 16) if tag == "i" else struct.unpack(">d", bytes.fromhex(rest[0]))[0]
    if tag == "d":
        return {_value(key, data): _value(each, data) for key, each in rest[0]}
    if tag in ("l", "u"):
        return (list if tag == "l" else tuple)(_value(each, data) for each in rest[0])
    raw = data[rest[-2] : rest[-1]]
    if tag == "b":
        return raw
    return (np.frombuffer(raw, rest[0]) if tag == "n" else array_of(raw, rest[0])).reshape(rest[1])


def ids_of(index: int, block: dict[str, Any], tensors: State) -> list[int]:
    """Return the global ids of a block's rows."""
    if block["ids"] == "all":
        return list(range(*block["rows"]))
    if block["ids"] == "list":
        return [int(each) for each in tensors[f"{index}.ids"]]
    escapes = iter(tensors[f"{index}.escapes"])
    ids, previous = [], -1
    for count in zlib.decompress(tensors[f"{index}.gaps"].tobytes()):
        previous += 1 + int(next(escapes) if count == 255 else count)
        ids.append(previous)
    return ids


def _values(index: int, block: dict[str, Any], tensors: State) -> np.ndarray[Any, Any]:
    stored = tensors[f"{index}.values"]
    columns = block["columns"][1] - block["columns"][0]
    if block["encoding"] == "INT8":
        scale, bias = stored[:, columns:].copy().view("<f4").astype("f8").T
        return (stored[:, :columns] * scale[:, None] + bias[:, None]).astype("f4")
    if block["encoding"] == "INT4":
        pairs = stored[:, : columns // 2]
        codes = np.stack([pairs & 15, pairs >> 4], 2).reshape(len(stored), columns)
        scale, bias = stored[:, columns // 2 :].copy().view("<f2").astype("f4").T
        return codes * scale[:, None] + bias[:, None]
    return stored


def _to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to the nearest bfloat16, ties to even, as float32 with the same upper bits."""
    bits = values.astype("<f4").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype("<u4").view("<f4")
    return np.where(np.isnan(values), np.float32("nan"), rounded)


def apply_states(root: Path, entry: dict[str, Any], state: State) -> None:
    """Apply the states of a manifest's rows, under the keys ``table/state``; one column per range or column."""
    for fqn, table in entry["tables"].items():
        for each in table["states"]:
            width = table["dim"] if each["width"] == "columns" else len(table["columns"])
            state.setdefault(f"{fqn}/{each['name']}", np.zeros((table["num_rows"], width), np.float32))
    parts = [part for part in entry["parts"] if part["states"] is not None]
    read = [
        (part, *(tensors_of((root / each["name"]).read_bytes()) for each in (part, part["states"]))) for part in parts
    ]
    for is_whole in (True, False):
        for part, tensors, states in read:
            for index, block in enumerate(part["blocks"]):
                table = entry["tables"][block["table"]]
                for number, each in enumerate(table["states"] if (block["ids"] == "all") == is_whole else ()):
                    first, end = block["columns"]
                    if each["width"] == "range":
                        first = table["columns"].index(block["columns"])
                        end = first + 1
                    rows = ids_of(index, block, tensors)
                    state[f"{block['table']}/{each['name']}"][rows, first:end] = states[f"{index}.states.{number}"]


def bucket_of(identity: dict[str, Any], raw_id: int) -> int:
    """Return the index of the bucket of a raw id."""
    count = len(identity["buckets"])
    size = -(-identity["hash_size"] // count)
    unsigned = raw_id % (1 << 64)
    return unsigned // size if unsigned < size * count else unsigned % count


def row_of(identity: dict[str, Any], owners: np.ndarray[Any, Any], raw_id: int) -> int | None:
    """Return the row that a lookup of a raw id reads; None if it reads no row."""
    rows = np.flatnonzero(owners == raw_id)
    default: int | None = identity["buckets"][bucket_of(identity, raw_id)]["default"]
    return int(rows[0]) if len(rows) and raw_id != _NO_OWNER else default


def faults_of(identity: dict[str, Any], rows: list[int], owners: list[int], *, is_whole: bool) -> list[str]:
    """Return the rules that the owners of a block break."""
    found, seen = [], set()
    for row, owner in zip(rows, owners, strict=True):
        if owner == _NO_OWNER:
            continue
        bucket = identity["buckets"][bucket_of(identity, owner)]
        if not bucket["rows"][0] <= row < bucket["rows"][1]:
            found.append(f"{owner} owns row {row}, which is not in its bucket")
        if row in [each["default"] for each in identity["buckets"]]:
            found.append(f"{owner} owns the default row {row}")
        if owner in seen and not is_whole:
            found.append(f"{owner} owns two rows")
        seen.add(owner)
    return found


def _apply_owners(entry: dict[str, Any], read: list[tuple[dict[str, Any], State]], state: State) -> None:
    """Apply the owners of a manifest's rows, under the keys ``table/owners``."""
    for fqn, table in entry["tables"].items():
        if table.get("identity") is None:
            continue
        new: dict[int, int] = {}
        for is_whole in (True, False):
            for part, tensors in read:
                for index, block in enumerate(part["blocks"]):
                    if block["table"] == fqn and (block["ids"] == "all") == is_whole:
                        rows, owners = ids_of(index, block, tensors), tensors[f"{index}.owners"].tolist()
                        assert not faults_of(table["identity"], rows, owners, is_whole=is_whole)
                        new.update(zip(rows, owners, strict=True))
        owned = [owner for owner in new.values() if owner != _NO_OWNER]
        assert len(owned) == len(set(owned)), "a raw id owns two rows of the version"
        held = state.setdefault(f"{fqn}/owners", np.full(table["num_rows"], _NO_OWNER, np.int64))
        held[np.isin(held, owned)] = _NO_OWNER
        held[list(new)] = list(new.values())


def apply(root: Path, entry: dict[str, Any], state: State) -> None:
    """Apply a manifest to tables, the owners of their rows, and dense tensors."""
    for fqn, table in entry["tables"].items():
        state.setdefault(fqn, np.zeros((table["num_rows"], table["dim"]), _TABLE_DTYPES[table["dtype"]]))
    read = [(part, tensors_of((root / part["name"]).read_bytes())) for part in entry["parts"]]
    for is_whole in (True, False):
        for part, tensors in read:
            for index, block in enumerate(part["blocks"]):
                if (block["ids"] == "all") == is_whole:
                    first, end = block["columns"]
                    values = _values(index, block, tensors)
                    if entry["tables"][block["table"]]["dtype"] == "BF16":
                        values = _to_bfloat16(values)
                    state[block["table"]][ids_of(index, block, tensors), first:end] = values
    _apply_owners(entry, read, state)
    for part, tensors in read:
        for index, name in enumerate(part["dense"]):
            state[name] = tensors[f"dense.{index}"]
