"""A second reader, written from ``FORMAT.md`` with JSON, zlib and numpy, without code of the library."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
_DTYPES |= {"BOOL": "?"}

State = dict[str, np.ndarray[Any, Any]]


def tensors_of(data: bytes) -> State:
    """Return the tensors of a part, bfloat16 as float32 with the same upper bits."""
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = entry["data_offsets"]
        raw = data[start + begin : start + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw, _DTYPES[entry["dtype"]])
        found[name] = values.reshape(entry["shape"])
    return found


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


def apply(root: Path, entry: dict[str, Any], state: State) -> None:
    """Apply a manifest to tables and dense tensors."""
    for fqn, table in entry["tables"].items():
        state.setdefault(fqn, np.zeros((table["num_rows"], table["dim"]), _DTYPES[table["dtype"]]))
    read = [(part, tensors_of((root / part["name"]).read_bytes())) for part in entry["parts"]]
    for is_whole in (True, False):
        for part, tensors in read:
            for index, block in enumerate(part["blocks"]):
                if (block["ids"] == "all") == is_whole:
                    first, end = block["columns"]
                    state[block["table"]][ids_of(index, block, tensors), first:end] = _values(index, block, tensors)
    for part, tensors in read:
        for index, name in enumerate(part["dense"]):
            state[name] = tensors[f"dense.{index}"]
