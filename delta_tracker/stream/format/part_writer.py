"""Writer of parts, which are safetensors files with rows and dense tensors. ``stream/FORMAT.md`` specifies them.

The file is written directly from the tensors' memory, chunk by chunk, and can be read without a copy. The
``safetensors`` package cannot write to an object store without a copy: its ``save`` returns all bytes, which makes a
publish several times slower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import pack_ids
from delta_tracker.stream.format.manifest import DTYPE_NAMES, Part
from delta_tracker.stream.storage.local import pieces

SIZE_BYTES = 8
ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """Tensor in the file. Its values are the concatenation of ``chunks``."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Iterable[Tensor]


class PartWriter:
    """Writer that yields the bytes of one part in a single pass, and then provides the part's record.

    Args:
        name: name of the part in the store.
        rows: rows to write. Each chunk is read after the preceding one was written.
        dense: dense tensors to write, by name; None if there are none.
    """

    def __init__(self, name: str, rows: Sequence[BlockRows], dense: Mapping[str, Tensor] | None = None) -> None:
        self._name = name
        self._blocks = tuple(each.block for each in rows)
        self._dense = tuple(dense or ())
        self._entries = [entry for index, each in enumerate(rows) for entry in _entries(index, each)]
        for index, tensor in enumerate((dense or {}).values()):
            self._entries.append(_Entry(dense_key(index), tensor.dtype, tuple(tensor.shape), [tensor]))
        # Wide items first, so that every tensor starts at a multiple of its item size, for all dtypes and shapes.
        self._entries.sort(key=lambda entry: -entry.dtype.itemsize)
        self._part: Part | None = None

    @property
    def part(self) -> Part:
        """Record of the part for the manifest; available once :meth:`buffers` is exhausted."""
        assert self._part is not None, "buffers() is not exhausted"
        return self._part

    def buffers(self) -> Iterator[memoryview]:
        """Yield buffers whose concatenation is the part.

        The buffers are views of the tensors' memory: write each one before requesting the next.
        """
        digest = xxhash.xxh3_128()
        num_bytes = 0
        for buffer in pieces(self._buffers()):  # small pieces stay in the cache until they are written
            digest.update(buffer)
            num_bytes += len(buffer)
            yield buffer
        self._part = Part(self._name, num_bytes, digest.hexdigest(), self._blocks, self._dense)

    def _buffers(self) -> Iterator[memoryview]:
        header: dict[str, Any] = {}
        sizes = [math.prod(entry.shape) * entry.dtype.itemsize for entry in self._entries]
        end = 0
        for entry, num_bytes in zip(self._entries, sizes, strict=True):
            begin, end = end, end + num_bytes
            header[entry.key] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % ALIGNMENT)
        yield memoryview(len(head).to_bytes(SIZE_BYTES, "little") + head)
        for entry, num_bytes in zip(self._entries, sizes, strict=True):
            given = 0
            for chunk in entry.chunks:
                assert chunk.dtype == entry.dtype, f"{entry.key} is {entry.dtype}, not {chunk.dtype}"
                given += chunk.nbytes
                if chunk.nbytes:
                    yield _bytes_of(chunk)
            assert given == num_bytes, f"the chunks of {entry.key} have {given} bytes instead of {num_bytes}"


def dense_key(index: int) -> str:
    """Return the key under which a part's file stores the ``index``-th dense tensor."""
    return f"dense.{index}"


def _entries(index: int, rows: BlockRows) -> Iterator[_Entry]:
    block = rows.block
    if block.ids == "list":
        assert rows.ids is not None, "a list of ids"
        yield _Entry(f"{index}.ids", torch.int64, (block.num_rows,), [rows.ids])
    elif block.ids == "gaps":
        assert rows.ids is not None, "a list of ids"
        packed, escapes = pack_ids(rows.ids)
        yield _Entry(f"{index}.gaps", torch.uint8, tuple(packed.shape), [packed])
        yield _Entry(f"{index}.escapes", torch.int64, tuple(escapes.shape), [escapes])
    width = block.encoding.width(block.num_columns)
    yield _Entry(f"{index}.values", block.encoding.dtype, (block.num_rows, width), rows.chunks())


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
