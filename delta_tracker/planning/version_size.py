"""Sizes of the objects of one version, and the requests that write and read them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from delta_tracker.planning.workload import Workload
from delta_tracker.stream.format.codec import pack_ids
from delta_tracker.stream.format.digests import PIECE_BYTES
from delta_tracker.stream.format.manifest import Block, DenseSpec, IdForm, Link, Manifest, Part
from delta_tracker.stream.format.object_reader import MEMORY_BYTES
from delta_tracker.stream.format.part_writer import safetensors_header
from delta_tracker.stream.log import part_name
from delta_tracker.stream.storage.storage import UPLOAD_BYTES

_SAMPLE = 1 << 16
_HASH = "0" * 32


@dataclass(frozen=True, slots=True)
class VersionSize:
    """Sizes of the objects of one version.

    Args:
        entry_bytes: size of the entry of the log.
        part_bytes: size of each part, in the order of the ranks.
    """

    entry_bytes: int
    part_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects."""
        return self.entry_bytes + sum(self.part_bytes)

    @property
    def num_writes(self) -> int:
        """Requests that write the parts and the entry. A large part is a multipart upload."""
        return 1 + sum(1 if each <= UPLOAD_BYTES else 2 + math.ceil(each / UPLOAD_BYTES) for each in self.part_bytes)

    @property
    def read_bytes(self) -> int:
        """Bytes of the entry and the parts that one predictor receives."""
        return self.entry_bytes + self.reads().num_bytes

    def reads(self, memory_bytes: int = MEMORY_BYTES) -> Reads:
        """Return the requests of one predictor for the parts.

        Parts are read whole as long as they fit in the memory for parts. The others are read twice, in pieces: once to
        check the hash, and once to apply the rows.

        Args:
            memory_bytes: memory for parts.
        """
        left, num_gets, num_heads, num_bytes = memory_bytes, 0, 0, 0
        for each in self.part_bytes:
            if each <= left:
                left, num_gets, num_bytes = left - each, num_gets + 1, num_bytes + each
            else:
                num_gets += 2 * math.ceil(each / PIECE_BYTES)
                num_heads, num_bytes = num_heads + 1, num_bytes + 2 * each
        return Reads(num_gets, num_heads, num_bytes, memory_bytes - left)


@dataclass(frozen=True, slots=True)
class Reads:
    """Requests of one predictor for the parts of one version.

    Args:
        num_gets: number of GET requests.
        num_heads: number of HEAD requests.
        num_bytes: bytes received.
        memory_bytes: memory for the parts that are held.
    """

    num_gets: int
    num_heads: int
    num_bytes: int
    memory_bytes: int


def delta_size(workload: Workload) -> VersionSize:
    """Return the sizes of a delta.

    Example:
        >>> from delta_tracker.types import TableSpec
        >>> table = TableSpec("user", 1_000_000, 64, torch.float32)
        >>> size = delta_size(Workload(tables=(table,), changed=0.01, seconds=60))
        >>> round(size.part_bytes[0], -4)  # 10,000 rows of 256 bytes and their ids of 8 bytes
        2640000
    """
    return _size(workload, is_snapshot=False)


def snapshot_size(workload: Workload) -> VersionSize:
    """Return the sizes of a snapshot, without the rows that change while it is copied."""
    return _size(workload, is_snapshot=True)


def _size(workload: Workload, *, is_snapshot: bool) -> VersionSize:
    parts = []
    for rank in range(workload.ranks):
        blocks = list(_blocks(workload, rank, is_snapshot=is_snapshot))
        dense_bytes = workload.dense_bytes if rank == 0 else 0
        if blocks or dense_bytes:
            name = part_name(1, 1, f"r{rank}")
            parts.append(Part(name, _part_bytes(blocks, dense_bytes), _HASH, tuple(blocks), ()))
    entry = Manifest(
        stream=_HASH,
        generation=1,
        writer=_HASH,
        version=1000,
        kind="snapshot" if is_snapshot else "delta",
        parent=Link(999, _HASH),
        snapshot=1000,
        batches=(100_000, 100_100),
        cut=time.time(),
        created=time.time(),
        tables={each.fqn: each for each in workload.tables},
        parts=tuple(parts),
    )
    return VersionSize(len(entry.to_json()), tuple(part.num_bytes for part in parts))


def _blocks(workload: Workload, rank: int, *, is_snapshot: bool) -> Iterator[Block]:
    for table in workload.tables:
        first, end = workload.rows_of_rank(table, rank)
        share = (end - first) / max(1, table.num_rows)
        num_rows = end - first if is_snapshot else min(end - first, round(workload.rows_per_version(table) * share))
        if num_rows:
            encoding = workload.encoding_of(table)
            form: IdForm = "all" if is_snapshot else encoding.listed_form
            yield Block(table.fqn, (first, end), (0, table.dim), num_rows, form, encoding)


def _part_bytes(blocks: Sequence[Block], dense_bytes: int) -> int:
    tensors: dict[str, DenseSpec] = {}
    for index, block in enumerate(blocks):
        if block.ids == "list":
            tensors[f"{index}.ids"] = DenseSpec("int64", (block.num_rows,))
        elif block.ids == "gaps":
            packed, escapes = _gaps(float(f"{block.num_rows / (block.rows[1] - block.rows[0]):.3g}"))
            tensors[f"{index}.gaps"] = DenseSpec("uint8", (round(packed * block.num_rows),))
            tensors[f"{index}.escapes"] = DenseSpec("int64", (round(escapes * block.num_rows),))
        width = block.encoding.width(block.num_columns)
        tensors[f"{index}.values"] = DenseSpec(block.encoding.dtype_name, (block.num_rows, width))
    if dense_bytes:
        tensors["dense.0"] = DenseSpec("uint8", (dense_bytes,))
    return len(safetensors_header(tensors.items())) + sum(each.num_bytes for each in tensors.values())


@cache
def _gaps(density: float) -> tuple[float, float]:
    """Return the compressed bytes and the number of escapes per id, for ids that are drawn at random.

    Ids that are close to each other take fewer bytes.
    """
    gaps = np.random.default_rng(0).geometric(min(1.0, density), _SAMPLE)
    packed, escapes = pack_ids(torch.from_numpy(np.cumsum(gaps) - 1))
    return len(packed) / _SAMPLE, len(escapes) / _SAMPLE
