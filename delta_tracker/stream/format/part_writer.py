"""Writer of parts, which are safetensors files with rows and dense tensors. ``stream/FORMAT.md`` specifies them.

The file is written directly from the tensors' memory, chunk by chunk, and can be read without a copy. ``save`` of the
``safetensors`` package returns a copy of all bytes, which would make publishing several times slower.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from operator import attrgetter, methodcaller
from typing import Any

import torch
import xxhash
from torch import Tensor

from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import pack_ids
from delta_tracker.stream.format.digests import DIGEST_BYTES, DIGESTS_KEY, PieceHasher, num_digests, total_bytes
from delta_tracker.stream.format.manifest import DTYPE_NAMES, Block, DenseSpec, Part, Stored
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Repeatable, pieces
from delta_tracker.types import dtype_name

SIZE_BYTES = 8
ALIGNMENT = 8
TRAINING_KEY = "state"
HASHED_BYTES = 1 << 20  # size of all tensors from which a part of several tables has a digest of each
METADATA_KEY = "__metadata__"


@dataclass(slots=True, eq=False)
class _Entry:
    """Tensor in the file. Its bytes are the concatenation of ``chunks``."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Iterable[Tensor | memoryview]
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class _FileWriter(Iterable[memoryview]):
    """Writer that yields the bytes of one safetensors file in a single pass. It can be iterated again."""

    # tensors in the order of the file. The chunks of each are read once per iteration of the file
    entries: Sequence[_Entry]
    has_digests: bool  # True for a file of format 2, which ends with the digests of the pieces before them
    hashes_tensors: bool  # True to hash each tensor, too
    num_bytes: int = 0  # size of the file in bytes; 0 until an iteration is complete
    body: int = 0  # number of bytes before the digests; 0 without digests
    xxh3: str = ""  # 128-bit xxh3 of the bytes from `body` on, in hex; empty until an iteration is complete
    tensors: list[xxhash.xxh3_128] = field(default_factory=list)  # of each tensor, up to the current one

    def __iter__(self) -> Iterator[memoryview]:
        """Yield buffers whose concatenation is the file. Write each buffer before requesting the next buffer."""
        size = sum(map(attrgetter("num_bytes"), self.entries))
        head = self._header(size)
        body = len(head) + size
        hasher = PieceHasher() if self.has_digests else xxhash.xxh3_128()
        for buffer in pieces(self._contents(head)):  # small pieces stay in the cache until written
            hasher.update(buffer)
            if self.tensors:
                self.tensors[-1].update(buffer)
            yield buffer
        if isinstance(hasher, PieceHasher):
            digests = memoryview(hasher.digests())
            yield digests
            self.num_bytes, self.body, self.xxh3 = total_bytes(body), body, xxhash.xxh3_128_hexdigest(digests)
        else:
            self.num_bytes, self.xxh3 = body, hasher.hexdigest()

    def _header(self, size: int) -> bytes:
        number = 1
        while True:  # the header has the number of digests, which its own size may change
            digests = [_Entry(DIGESTS_KEY, torch.uint8, (DIGEST_BYTES * number,), ())] if self.has_digests else []
            every = (*self.entries, *digests)
            head = safetensors_header(zip(map(attrgetter("key"), every), every, strict=True))
            if not digests or num_digests(len(head) + size) == number:
                return head
            number = num_digests(len(head) + size)

    def _contents(self, head: bytes) -> Iterator[memoryview]:
        self.tensors.clear()
        yield memoryview(head)
        for entry in self.entries:
            given = 0
            if self.hashes_tensors:
                self.tensors.append(xxhash.xxh3_128())
            for chunk in entry.chunks:
                given += chunk.nbytes
                if chunk.nbytes:
                    yield _bytes_of(chunk, entry) if isinstance(chunk, Tensor) else chunk
            assert given == entry.num_bytes, f"{entry.key} has {given} bytes instead of {entry.num_bytes}"


def safetensors_header(
    specs: Iterable[tuple[str, DenseSpec | _Entry]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a safetensors file before its first tensor. ``specs`` are in the order of the file."""
    header: dict[str, Any] = {} if metadata is None else {METADATA_KEY: metadata}
    end = 0
    for key, spec in specs:
        begin, end = end, end + spec.num_bytes
        header[key] = {"dtype": DTYPE_NAMES[dtype_name(spec.dtype)], "shape": spec.shape, "data_offsets": (begin, end)}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    return len(head).to_bytes(SIZE_BYTES, "little") + head


def put_part(
    storage: Storage,
    name: str,
    rows: Sequence[BlockRows],
    dense: Mapping[str, Tensor] | None = None,
    *,
    states_name: str | None,
) -> Part:
    """Write a part and, in format 2, the object with the states of its rows. Return the record for the manifest.

    Each chunk of ``rows`` is read after the preceding one has been written, and the states are read after all values.
    If the store fails, either or both objects may have been created. The object ``states_name`` is written only if a
    row has states. Pass ``states_name=None`` for format 1.
    """
    dense = dense or {}
    entries = list(chain.from_iterable(map(_entries, count(), rows)))
    for index, tensor in enumerate(dense.values()):
        entries.append(_Entry(f"dense.{index}", tensor.dtype, tuple(tensor.shape), [tensor]))
    blocks = tuple(map(attrgetter("block"), rows))
    num_bytes = sum(map(attrgetter("num_bytes"), entries))
    is_hashed = num_bytes >= HASHED_BYTES and is_shared(blocks, has_dense=bool(dense))
    file = _put(storage, name, entries, has_digests=states_name is not None, hashes_tensors=is_hashed)
    tensors = tuple(map(methodcaller("hexdigest"), file.tensors))
    part = Part(name, file.num_bytes, file.xxh3, blocks, tuple(dense), file.body, tensors=tensors)
    if states_name is None:
        for each in rows:
            assert not each.states, "format 1 has no states"
            assert each.owners is None, "format 1 has no owners"
        return part
    entries = list(chain.from_iterable(map(_state_entries, count(), rows)))
    return replace(part, states=_stored(states_name, _put(storage, states_name, entries))) if entries else part


def is_shared(blocks: Sequence[Block], *, has_dense: bool) -> bool:
    """Return True if a part contains several tables, or tables and dense tensors."""
    return len(set(map(attrgetter("table"), blocks))) + has_dense > 1


def put_training(storage: Storage, name: str, buffers: Iterable[memoryview], num_bytes: int) -> Stored:
    """Write the object with the training state of a rank. Return the record for the manifest.

    The training state is the concatenation of ``buffers``, ``num_bytes`` in total. ``buffers`` is iterated again if the
    write is repeated. If the store fails, the object may have been created.
    """
    return _stored(name, _put(storage, name, [_Entry(TRAINING_KEY, torch.uint8, (num_bytes,), buffers)]))


def _put(
    storage: Storage, name: str, entries: Iterable[_Entry], *, has_digests: bool = True, hashes_tensors: bool = False
) -> _FileWriter:
    # Wide items first, so that each tensor starts at a multiple of its item size.
    ordered = sorted(entries, key=attrgetter("dtype.itemsize"), reverse=True)
    file = _FileWriter(ordered, has_digests, hashes_tensors)
    storage.put(name, file)
    return file


def _stored(name: str, file: _FileWriter) -> Stored:
    return Stored(name, file.num_bytes, file.body, file.xxh3)


def _entries(index: int, rows: BlockRows) -> list[_Entry]:
    block, found = rows.block, []
    if block.ids == "list":
        assert rows.ids is not None, "a list of ids"
        found.append(_Entry(f"{index}.ids", torch.int64, (block.num_rows,), [rows.ids]))
    elif block.ids == "gaps":
        assert rows.ids is not None, "a list of ids"
        packed, escapes = pack_ids(rows.ids)
        found.append(_Entry(f"{index}.gaps", torch.uint8, tuple(packed.shape), [packed]))
        found.append(_Entry(f"{index}.escapes", torch.int64, tuple(escapes.shape), [escapes]))
    if rows.owners is not None:
        owners = Repeatable(partial(rows.chunks, read=rows.owners))
        found.append(_Entry(f"{index}.owners", torch.int64, (block.num_rows,), owners))
    width = block.encoding.width(block.num_columns)
    found.append(_Entry(f"{index}.values", block.encoding.dtype, (block.num_rows, width), Repeatable(rows.chunks)))
    return found


def _state_entries(index: int, rows: BlockRows) -> Iterator[_Entry]:
    for number, read in enumerate(rows.states):
        like = read(0, 0)
        shape = rows.block.num_rows, like.shape[1]
        yield _Entry(f"{index}.states.{number}", like.dtype, shape, Repeatable(partial(rows.chunks, read=read)))


def _bytes_of(tensor: Tensor, entry: _Entry) -> memoryview:
    assert tensor.dtype == entry.dtype, f"{entry.key} is {entry.dtype}, not {tensor.dtype}"
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
