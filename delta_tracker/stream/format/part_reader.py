"""Readers of parts, of the states of their rows, and of training states.

A reader checks a whole object against its record before it returns anything. If it reads ranges of an object of format
2, it checks each range before it returns the range.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias

import torch
import xxhash
from torch import Tensor

from delta_tracker.buffers import BufferPool
from delta_tracker.errors import CorruptPartError, LeftOutPartError, StorageError
from delta_tracker.raw_ids import check_owners
from delta_tracker.stream.format.block_rows import BlockRows, newest
from delta_tracker.stream.format.codec import unpack_ids
from delta_tracker.stream.format.digests import DIGESTS_KEY, PIECE_BYTES, total_bytes
from delta_tracker.stream.format.manifest import DTYPE_NAMES, Block, Manifest, Part, Stored
from delta_tracker.stream.format.object_reader import MEMORY_BYTES, PartSource, Ranged, Tensors, source_of
from delta_tracker.stream.format.parse import load_json, reason_of
from delta_tracker.stream.format.part_writer import ALIGNMENT, SIZE_BYTES, TRAINING_KEY
from delta_tracker.stream.format.state_tree import StateReader
from delta_tracker.stream.interruption import Interrupted
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import dtype_name

_MAX_FREE_BYTES = 320 << 20
_MAX_HEADER_BYTES = 64 << 20  # a header has some 200 bytes per table
_IDS_BYTES = 16  # at most, of the row id and the raw id of a row
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)
_Expected: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...] | None]]


@dataclass(frozen=True, slots=True)
class _Span:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class _File:
    """Reader of the tensors of an object, which is a safetensors file. The constructor reads and checks the header.

    ``expected`` maps the name of each tensor, except the digests, to its dtype and shape. The shape is None for a
    vector whose length the header defines.
    """

    def __init__(self, stored: Part | Stored, expected: _Expected, source: PartSource) -> None:
        self._read = source.read
        if stored.body:
            expected = {**expected, DIGESTS_KEY: (torch.uint8, (total_bytes(stored.body) - stored.body,))}
        self.spans = self._layout(stored, expected)
        if isinstance(source, Tensors):
            source.lay_out({key: (span.begin, span.end) for key, span in self.spans.items() if key != DIGESTS_KEY})
        if stored.body and (list(self.spans)[-1], self.spans[DIGESTS_KEY].begin) != (DIGESTS_KEY, stored.body):
            raise ValueError(f"its digests are not its last tensor, after {stored.body} bytes")

    def tensor(self, key: str) -> Tensor:
        span = self.spans[key]
        return self._items(span, span.begin, span.end).view(span.shape)

    def rows(self, key: str, begin: int, end: int) -> Tensor:
        """Return the rows ``begin`` to ``end`` (exclusive) of a tensor with one or two dimensions, as a matrix."""
        span = self.spans[key]
        _, *columns = span.shape
        width = columns[0] if columns else 1
        row_bytes = width * span.dtype.itemsize
        items = self._items(span, span.begin + begin * row_bytes, span.begin + end * row_bytes)
        return items.view(end - begin, width)

    def hexdigest(self, key: str) -> str:
        """Return the xxh3 of a tensor in hex."""
        span, hasher = self.spans[key], xxhash.xxh3_128()
        for begin in range(span.begin, span.end, PIECE_BYTES):
            hasher.update(self._read(begin, min(begin + PIECE_BYTES, span.end)).data)
        return hasher.hexdigest()

    def _items(self, span: _Span, begin: int, end: int) -> Tensor:
        if begin == end:
            return torch.empty(0, dtype=span.dtype, device="cpu")
        return torch.from_numpy(self._read(begin, end)).view(span.dtype)

    def _layout(self, stored: Part | Stored, expected: _Expected) -> dict[str, _Span]:
        size = stored.num_bytes
        header_end = stored.body or size
        header_bytes = int.from_bytes(self._read(0, min(SIZE_BYTES, header_end)).tobytes(), "little")
        position = SIZE_BYTES + header_bytes
        if position > header_end or position % ALIGNMENT or header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"invalid header length: {header_bytes} of {size} bytes")
        start = position
        header = load_json(self._read(SIZE_BYTES, start).tobytes())
        if header.keys() != expected.keys():
            raise ValueError(f"it has the tensors {sorted(header)} instead of {sorted(expected)}")
        spans: dict[str, _Span] = {}
        for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            dtype, shape = expected[key]
            if shape is None:  # the header defines the length
                (length,) = entry["shape"]
                if type(length) is not int or not 0 <= length < 2**63:
                    raise ValueError(f"unexpected length {length!r}")
                shape = (length,)
            end = position + math.prod(shape) * dtype.itemsize  # Size.numel() would overflow
            offsets = [position - start, end - start]
            wanted = {"dtype": DTYPE_NAMES[dtype_name(dtype)], "shape": list(shape), "data_offsets": offsets}
            if json.dumps(entry, sort_keys=True) != json.dumps(wanted, sort_keys=True):  # 1.0 and true equal 1
                raise ValueError(f"its tensor {key} is {entry} instead of {wanted}")
            if end > size:
                raise ValueError(f"its tensor {key} ends beyond its {size} bytes")
            spans[key] = _Span(dtype, shape, position, end)
            position = end
        if position != size:
            raise ValueError(f"{size - position} bytes after its last tensor")
        return spans


class PartReader:
    """Reader of the rows and dense tensors of a part. The constructor checks the whole part.

    A part of at most ``memory_bytes`` is kept in memory, and rows and tensors may be views of it. A larger part takes
    the memory of a few pieces of 8 MiB and of the row ids (8 bytes each).

    Args:
        part: record of the part, from a checked manifest.
        source: source of the part's bytes, some of which may already be read; None creates a source with
            ``memory_bytes``. With a :class:`Ranged`, the constructor reads and checks only the header and the row ids,
            and each later read checks the returned data.
        blocks: indices of the blocks to read; None for all. If given, the ids of other blocks are neither read nor
            checked.
        dense: if ``blocks`` is given, names of the dense tensors to check in the constructor, which then also checks
            the owners of these blocks. None checks no owners, and checks dense tensors when they are read.

    Raises:
        CorruptPartError: if the bytes do not match the record. Later reads may also raise it.
        StorageError: if the store cannot be read.
    """

    def __init__(
        self,
        storage: Storage,
        part: Part,
        manifest: Manifest,
        *,
        memory_bytes: int = MEMORY_BYTES,
        source: "PartSource | None" = None,
        blocks: Collection[int] | None = None,
        dense: Collection[str] | None = None,
    ) -> None:
        self.part = part
        self._storage = storage
        self._memory_bytes = memory_bytes
        self._manifest = manifest
        source = source or source_of(storage, part, memory_bytes, None)
        with _Refusals(part.name):
            # Check the header first: most invalid files are rejected before the rest of a large one is read.
            self._file = _File(part, self._expected(), source)
            source.finish()
            self._ids = {
                index: self._checked_ids(index, block)
                for index, block in enumerate(part.blocks)
                if blocks is None or index in blocks
            }
            names = part.dense if blocks is None else dense
            checked = frozenset(names or ())
            for index, name in enumerate(part.dense):
                is_read = isinstance(source, Tensors) or manifest.dense[name].dtype == torch.bool
                if is_read and name in checked:
                    self._dense(index, name)
            for rows in self.rows if names is not None and manifest.identities else ():
                for ids, owners in rows.owned():
                    slots = torch.arange(ids.start, ids.stop, device="cpu") if isinstance(ids, slice) else ids
                    # A raw id may be mapped to another row while a whole block is copied: then both rows have it.
                    is_unique = rows.ids is not None
                    check_owners(manifest.identities[rows.block.table], slots, owners, is_unique=is_unique)
            for index in self._ids if isinstance(source, Tensors) else ():
                self._file.tensor(f"{index}.values")

    @property
    def rows(self) -> list[BlockRows]:
        """Stored rows of each block, in the order of the part, read lazily. They include owners, but not states."""
        found = []
        for index, ids in self._ids.items():
            block = self.part.blocks[index]
            read = partial(self._file.rows, f"{index}.values")
            has_owners = block.table in self._manifest.identities
            owners = partial(self._file.rows, f"{index}.owners") if has_owners else None
            found.append(BlockRows(block, ids, read, owners=owners))
        return found

    def with_states(self, source: "PartSource | None" = None) -> list[BlockRows]:
        """Return the rows in :attr:`rows` with their optimizer states.

        ``source`` reads the object ``part.states``. None reads and checks the whole object.
        """
        stored = self.part.states
        if stored is None:
            return self.rows
        source = source or source_of(self._storage, stored, self._memory_bytes, None)
        expected: _Expected = {}
        for index in range(len(self.part.blocks)):
            expected |= self._states(index)
        with _Refusals(stored.name):
            file = _File(stored, expected, source)
            source.finish()
        return [
            replace(rows, states=tuple([partial(file.rows, key) for key in self._states(index)]))
            for index, rows in zip(self._ids, self.rows, strict=True)
        ]

    def dense(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the dense tensors of the part by name: only those in ``names``, or all if ``names`` is None."""
        with _Refusals(self.part.name):
            found = enumerate(self.part.dense)
            return {name: self._dense(index, name) for index, name in found if names is None or name in names}

    def check_tensors(self) -> None:
        """Check the part's tensors against the digests in its record, if any. Raise CorruptPartError if they differ."""
        with _Refusals(self.part.name):
            found = (self._file.hexdigest(key) for key in self._file.spans if key != DIGESTS_KEY)
            if self.part.tensors and self.part.tensors != tuple(found):
                raise ValueError("its tensors do not match their digests")

    def _dense(self, index: int, name: str) -> Tensor:
        tensor = self._file.tensor(f"dense.{index}")
        if tensor.dtype == torch.bool:
            _check_flags(name, tensor)
        return tensor

    def _expected(self) -> _Expected:
        """Return the dtype and shape of each tensor, by name. A shape is None if the manifest does not imply it."""
        expected: _Expected = {}
        for index, block in enumerate(self.part.blocks):
            if block.ids == "list":
                expected[f"{index}.ids"] = torch.int64, (block.num_rows,)
            elif block.ids == "gaps":
                expected[f"{index}.gaps"] = torch.uint8, None
                expected[f"{index}.escapes"] = torch.int64, None
            width = block.encoding.width(block.num_columns)
            expected[f"{index}.values"] = block.encoding.dtype, (block.num_rows, width)
            if block.table in self._manifest.identities:
                expected[f"{index}.owners"] = torch.int64, (block.num_rows,)
        for index, name in enumerate(self.part.dense):
            expected[f"dense.{index}"] = self._manifest.dense[name].dtype, self._manifest.dense[name].shape
        return expected

    def _states(self, index: int) -> _Expected:
        block = self.part.blocks[index]
        states = self._manifest.states.get(block.table)
        expected: _Expected = {}
        for number, state in enumerate(() if states is None else states.states):
            width = block.num_columns if state.width == "columns" else 1
            expected[f"{index}.states.{number}"] = state.dtype, (block.num_rows, width)
        return expected

    def _checked_ids(self, index: int, block: Block) -> Tensor | None:
        if block.ids == "all":
            return None
        tensor = self._file.tensor
        if block.ids == "list":
            ids = tensor(f"{index}.ids")
        else:
            ids = unpack_ids(tensor(f"{index}.gaps"), tensor(f"{index}.escapes"), block.num_rows)
        first, end = block.rows
        if len(ids) and (int(ids[0]) < first or int(ids[-1]) >= end):
            raise ValueError(f"ids of table {block.table!r} are outside the rows {block.rows}")
        if not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(f"ids of table {block.table!r} are not ascending and unique")
        return ids


def _check_flags(name: str, tensor: Tensor) -> None:
    """Check that a bool tensor contains only the bytes 0 and 1, which torch does not check."""
    if (tensor.view(torch.uint8) > 1).any():
        raise ValueError(f"the bool tensor {name!r} has bytes other than 0 and 1")


@dataclass(frozen=True, slots=True)
class _Refusals(AbstractContextManager[None]):
    """Context manager that converts errors from malformed bytes of the object ``name`` to :class:`CorruptPartError`."""

    name: str

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _FAULTS) and not isinstance(error, CorruptPartError):
            raise CorruptPartError(self.name, reason_of(error)) from error


def read_training(storage: Storage, stored: Stored) -> StateReader:
    """Return a reader of a rank's training state. Loads raise CorruptPartError if the bytes do not match ``stored``."""
    source = Ranged(storage, stored)
    with _Refusals(stored.name):
        span = _File(stored, {TRAINING_KEY: (torch.uint8, None)}, source).spans[TRAINING_KEY]
        return StateReader(lambda begin, end: source.read(span.begin + begin, span.begin + end), span.end - span.begin)


class PartBuffer:
    """Memory that is reused for the parts of successive versions, because allocation takes longer than a read.

    The memory is reusable once every array and tensor that refers to it has been garbage-collected. At most 320 MiB of
    free memory are kept.
    """

    def __init__(self) -> None:
        self.pool = BufferPool(_MAX_FREE_BYTES, min_bytes=1)
        # parts that could not all be read, and their partly read sources, with which the next attempt resumes
        self.begun: tuple[tuple[Part, ...], list[PartSource]] | None = None


def read_parts(
    storage: Storage,
    manifest: Manifest,
    *,
    memory_bytes: int = MEMORY_BYTES,
    buffer: PartBuffer | None = None,
    narrowed: Manifest | None = None,
) -> list[PartReader]:
    """Read and check all parts of a version, and return a reader for each.

    ``narrowed`` is a copy of ``manifest`` with only some tables and dense tensors. If it is given, only the parts that
    contain these are read. If a part's record has digests of its tensors, only the required tensors are read.

    Up to ``memory_bytes`` of parts are kept in memory, allocated from ``buffer`` if it is given. After a
    :class:`StorageError` or an interruption, ``buffer`` keeps the bytes read so far. The next call for the same parts
    continues there, but starts a partly read local file again.
    """
    pairs = list(zip(manifest.parts, manifest.parts, strict=True))  # a part, and what is read of it
    if narrowed is not None:
        names = {*narrowed.tables, *narrowed.dense}
        pairs = [(part, part.narrowed(names.__contains__)) for part in manifest.parts]
        pairs = [(part, chosen) for part, chosen in pairs if chosen.blocks or chosen.dense]
    parts = tuple(map(itemgetter(0), pairs))
    begun = None
    if buffer is not None:
        begun, buffer.begun = buffer.begun, None
    sources = [] if begun is None or begun[0] != parts else begun[1]
    if not sources:
        for part, chosen in pairs:
            needed = part.num_bytes if chosen is part else _needed_bytes(part, chosen, manifest)
            held = needed if needed <= memory_bytes else 0
            memory_bytes -= held
            if 0 < held < part.num_bytes:
                sources.append(Tensors(storage, part, _keys(part, chosen)))
            else:
                sources.append(source_of(storage, part, held, None if buffer is None else buffer.pool.allocate(held)))
    readers = []
    try:
        for (part, chosen), source in zip(pairs, sources, strict=True):
            blocks, dense = (None, None) if chosen is part else (_indices(part, chosen), chosen.dense)
            readers.append(PartReader(storage, part, manifest, source=source, blocks=blocks, dense=dense))
    except (LeftOutPartError, StorageError, Interrupted):
        if buffer is not None:
            buffer.begun = parts, sources
        raise
    return readers


def _needed_bytes(part: Part, chosen: Part, manifest: Manifest) -> int:
    """Return an upper bound of the number of bytes to read for ``chosen``, a subset of ``part``."""
    if not part.tensors:
        return part.num_bytes
    num_bytes = sum(manifest.dense[name].num_bytes for name in chosen.dense)
    for block in chosen.blocks:
        values = block.encoding.width(block.num_columns) * block.encoding.dtype.itemsize
        num_bytes += block.num_rows * (values + _IDS_BYTES)
    return min(num_bytes, part.num_bytes)


def _indices(part: Part, chosen: Part) -> list[int]:
    tables = {block.table for block in chosen.blocks}
    return [index for index, block in enumerate(part.blocks) if block.table in tables]


def _keys(part: Part, chosen: Part) -> set[str]:
    """Return the keys of the dense tensors in ``chosen``, and the prefixes of the keys of its blocks, in ``part``."""
    dense = set(chosen.dense)
    keys = {f"dense.{index}" for index, name in enumerate(part.dense) if name in dense}
    return keys.union(map(str, _indices(part, chosen)))


def dense_of(readers: Iterable[PartReader], names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the dense tensors in the parts of ``readers``, by name. ``names`` selects tensors; None selects all."""
    found: dict[str, Tensor] = {}
    for reader in readers:
        if reader.part.dense:
            found |= reader.dense(names)
    return found


class Contents:
    """Rows and dense tensors of a version. The constructor reads and checks all parts; see :func:`read_parts`.

    If ``narrowed`` is given, a copy of ``manifest`` with some of its tables and dense tensors, only these are read.

    Attributes:
        manifest: manifest of the version, or ``narrowed``.
        whole: decoded whole blocks, overwritten with listed rows, which may be newer. Apply them before ``listed``.
        listed: decoded listed rows, except rows whose listed columns are all in one whole block.
        dense: name to dense tensor.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        memory_bytes: int = MEMORY_BYTES,
        buffer: PartBuffer | None = None,
        narrowed: Manifest | None = None,
    ) -> None:
        self.manifest = narrowed or manifest
        readers = read_parts(storage, manifest, memory_bytes=memory_bytes, buffer=buffer, narrowed=narrowed)
        tables = self.manifest.tables
        rows = [each.decoded(tables[each.block.table].dtype) for reader in readers for each in reader.rows]
        self.whole, self.listed = newest(rows)
        self.dense = dense_of(readers, self.manifest.dense)

    def owners(self) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        """Yield the raw ids of the rows of all tables with raw ids. Yields whole blocks before listed rows.

        Each item is the table FQN, the ``n`` global row ids as a slice or as ascending int64, and the ``[n]`` int64 raw
        ids, 2**63 - 1 for a row without a raw id. Do not write to the tensors.
        """
        for rows in (*self.whole, *self.listed):
            for ids, owners in rows.owned():
                yield rows.block.table, ids, owners

    def chunks(self, num_rows: int = 16_384) -> Iterator[tuple[str, Tensor]]:
        """Yield all rows as pairs of a table FQN and decoded values, ``[n, columns]`` with ``n <= num_rows``."""
        for rows in (*self.whole, *self.listed):
            for values in rows.chunks(num_rows):
                yield rows.block.table, values
