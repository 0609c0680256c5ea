"""Rows to the bytes of a part and back.

A part is a safetensors file (https://huggingface.co/docs/safetensors: eight bytes of header size, a JSON header, the
tensors' bytes). Block ``i`` of its record in the manifest has the tensors ``{i}.ids``, ``[N]`` int64 global ids,
ascending and unique, unless the block is whole, and ``{i}.values``, ``[N, columns]`` in the table's dtype.

The layout is written straight from the tensors' memory and read without a copy: ``safetensors`` itself offers
neither over an object store, and through its ``save`` to bytes a publish is several times slower.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from delta_tracker.errors import CorruptPartError
from delta_tracker.stream.manifest import DTYPE_NAMES, Block, Part
from delta_tracker.types import TableSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIZE_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of one block.

    Args:
        block: what they are rows of.
        ids: ``[N]`` int64 global ids, ascending and unique; None if the block is whole.
        values: ``[N, columns]`` in the table's dtype.
    """

    block: Block
    ids: Tensor | None
    values: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that stand in the part, by the end of their name."""
        if self.ids is not None:
            yield "ids", self.ids
        yield "values", self.values


def encode(rows: Sequence[Rows], name: str) -> tuple[Part, list[memoryview]]:
    """The record and the bytes of a part.

    Args:
        rows: what goes into it.
        name: the part's name in the store.

    Returns:
        The record, and the buffers whose concatenation is the part. They are views of the tensors' memory: write
        them before it changes.
    """
    named = [(f"{index}.{kind}", tensor) for index, each in enumerate(rows) for kind, tensor in each.tensors()]
    # Ids first: every tensor then starts at a multiple of its item size, whatever the dtypes and shapes.
    named.sort(key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in named:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    buffers = [memoryview(len(head).to_bytes(_SIZE_BYTES, "little") + head)]
    buffers += [_bytes_of(tensor) for _, tensor in named if tensor.nbytes]
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    num_bytes = sum(len(buffer) for buffer in buffers)
    return Part(name, num_bytes, digest.hexdigest(), tuple(each.block for each in rows)), buffers


def decode(part: Part, data: NDArray[np.uint8] | None, tables: Mapping[str, TableSpec]) -> list[Rows]:
    """Check a part against its record and read it.

    Args:
        part: the record, from a checked manifest.
        data: the object's bytes, None if there is none. The rows are views of it.
        tables: the manifest's tables.

    Raises:
        CorruptPartError: if the bytes are not exactly what the record says.
    """
    if data is None:
        raise CorruptPartError(part.name, "it does not exist")
    if len(data) != part.num_bytes:
        raise CorruptPartError(part.name, f"it has {len(data)} bytes instead of {part.num_bytes}")
    if xxhash.xxh3_128_hexdigest(data.data) != part.xxh3:
        raise CorruptPartError(part.name, f"its xxh3 is not {part.xxh3}")
    try:
        tensors = _read_layout(data, _expected(part, tables))
        rows = [
            Rows(block, None if block.whole else tensors[f"{index}.ids"], tensors[f"{index}.values"])
            for index, block in enumerate(part.blocks)
        ]
        for each in rows:
            _check_ids(each)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptPartError(part.name, f"{type(error).__name__}: {error}") from error
    return rows


def _expected(part: Part, tables: Mapping[str, TableSpec]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for index, block in enumerate(part.blocks):
        if not block.whole:
            expected[f"{index}.ids"] = torch.int64, (block.num_rows,)
        num_columns = block.columns[1] - block.columns[0]
        expected[f"{index}.values"] = tables[block.table].dtype, (block.num_rows, num_columns)
    return expected


def _read_layout(
    data: NDArray[np.uint8], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Views of the tensors, whose names, dtypes and shapes must be the expected ones and fill the file."""
    header_bytes = int.from_bytes(data[:_SIZE_BYTES].tobytes(), "little")
    start = _SIZE_BYTES + header_bytes
    if start > len(data) or start % _ALIGNMENT:
        raise ValueError(f"its header claims {header_bytes} bytes of {len(data)}")
    header = json.loads(data[_SIZE_BYTES:start].tobytes())
    if header.keys() != expected.keys():
        raise ValueError(f"it holds the tensors {sorted(header)} instead of {sorted(expected)}")
    tensors, position = {}, 0
    for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape = expected[key]
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        wanted = {"dtype": _dtype_name(dtype), "shape": list(shape), "data_offsets": [position, position + num_bytes]}
        if entry != wanted:
            raise ValueError(f"its tensor {key} is {entry} instead of {wanted}")
        if start + position + num_bytes > len(data):
            raise ValueError(f"its tensor {key} ends beyond its {len(data)} bytes")
        span = data[start + position : start + position + num_bytes]
        tensors[key] = torch.from_numpy(span).view(dtype).view(shape)
        position += num_bytes
    if start + position != len(data):
        raise ValueError(f"{len(data) - start - position} bytes after its last tensor")
    return tensors


def _check_ids(rows: Rows) -> None:
    if rows.ids is None or not len(rows.ids):
        return
    first, end = rows.block.rows
    if int(rows.ids[0]) < first or int(rows.ids[-1]) >= end:
        raise ValueError(f"ids of table {rows.block.table!r} lie outside its rows {rows.block.rows}")
    if not bool((rows.ids[1:] > rows.ids[:-1]).all()):
        raise ValueError(f"ids of table {rows.block.table!r} are not ascending and unique")


def _dtype_name(dtype: torch.dtype) -> str:
    return "I64" if dtype == torch.int64 else DTYPE_NAMES[dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
