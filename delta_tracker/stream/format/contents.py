"""What a version holds, to be read a few rows at a time: its rows, each as it is in the end, and its dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.stream.format.encoding import decode_rows
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.format.part_reader import MEMORY_BYTES, PartReader, dense_of, read_parts
from delta_tracker.stream.storage.part_buffer import PartBuffer
from delta_tracker.stream.storage.storage import Storage


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """The rows of a block.

    Args:
        block: what they are rows of.
        ids: ``[N]`` int64 global ids, ascending and unique; None where the block holds all rows of its range.
        read: gives the values ``[end - begin, columns]`` of the rows ``begin`` to ``end``, in the table's dtype.
    """

    block: Block
    ids: Tensor | None
    read: Callable[[int, int], Tensor]


class Contents:
    """The rows and dense tensors of a version, all checked when it is made.

    Listed rows are newer than whole blocks, whose rows may have been copied while they were written. They are laid
    over them as they are read, so that nobody ever sees a row in between.

    Args:
        storage: where the version lies.
        manifest: its entry.
        memory_bytes: how much of its parts may be held in memory; the others are read again as they are needed.
        buffer: the memory that they are held in; new memory without it.

    Raises:
        CorruptPartError: if a part is not exactly what its record says.
        StorageError: if the store cannot be read.

    Attributes:
        manifest: as given.
        whole: the blocks that hold all rows of their range, as they are in the end. To be applied first.
        listed: the blocks of other rows.
        dense: name to dense tensor.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        memory_bytes: int = MEMORY_BYTES,
        buffer: PartBuffer | None = None,
    ) -> None:
        self.manifest = manifest
        readers = read_parts(storage, manifest, memory_bytes=memory_bytes, buffer=buffer)
        rows = [
            _rows(reader, index, manifest.tables[block.table].dtype)
            for reader in readers
            for index, block in enumerate(reader.part.blocks)
        ]
        whole = [each for each in rows if each.ids is None]
        listed = [each for each in rows if each.ids is not None]
        self.whole = [_overlaid(each, listed) for each in whole]
        self.listed = [each for each in listed if not any(_covers(block, each) for block in whole)]
        self.dense = dense_of(readers)

    def chunks(self, num_rows: int = 16_384) -> Iterator[tuple[str, Tensor]]:
        """FQN and values ``[n, columns]`` of all its rows, at most ``num_rows`` at a time."""
        for rows in (*self.whole, *self.listed):
            for begin in range(0, rows.block.num_rows, num_rows):
                yield rows.block.table, rows.read(begin, min(begin + num_rows, rows.block.num_rows))


def _rows(reader: PartReader, index: int, dtype: torch.dtype) -> BlockRows:
    block = reader.part.blocks[index]
    return BlockRows(
        block,
        reader.ids(index),
        lambda begin, end: decode_rows(reader.stored(index, begin, end), block.encoding, block.num_columns, dtype),
    )


def _covers(whole: BlockRows, listed: BlockRows) -> bool:
    outer, inner = whole.block, listed.block
    return (
        outer.table == inner.table
        and outer.rows[0] <= inner.rows[0] <= inner.rows[1] <= outer.rows[1]
        and outer.columns[0] <= inner.columns[0] <= inner.columns[1] <= outer.columns[1]
    )


def _overlaid(whole: BlockRows, listed: Sequence[BlockRows]) -> BlockRows:
    """The rows of a whole block, some columns of some of which stand in listed blocks."""
    block = whole.block
    over = [
        each
        for each in listed
        if each.block.table == block.table
        and each.block.columns[0] < block.columns[1]
        and block.columns[0] < each.block.columns[1]
    ]
    if not over:
        return whole

    def read(begin: int, end: int) -> Tensor:
        values = whole.read(begin, end)
        first = block.rows[0] + begin
        is_own = False
        for each in over:
            assert each.ids is not None, "listed"
            start, stop = torch.searchsorted(each.ids, torch.tensor([first, block.rows[0] + end])).tolist()
            if start == stop:
                continue
            if not is_own:
                values, is_own = values.clone(), True
            left = max(block.columns[0], each.block.columns[0])
            right = min(block.columns[1], each.block.columns[1])
            newer = each.read(start, stop)[:, left - each.block.columns[0] : right - each.block.columns[0]]
            values[each.ids[start:stop] - first, left - block.columns[0] : right - block.columns[0]] = newer
        return values

    return BlockRows(block, None, read)
