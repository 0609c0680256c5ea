"""What a version holds, to be read a few rows at a time: its rows, each as it is in the end, and its dense tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.overlay import Overlay, WholeBlocks
from delta_tracker.stream.format.part_buffer import PartBuffer
from delta_tracker.stream.format.part_reader import MEMORY_BYTES, dense_of, read_parts
from delta_tracker.stream.storage.storage import Storage


class Contents:
    """The rows and dense tensors of a version, all checked when it is made.

    Rows of whole blocks are read with the listed rows already in their places, so that no reader sees a row in between.

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
        whole: blocks that hold all rows of their range, decoded, as they are in the end. Apply them first.
        listed: the other rows, decoded.
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
        tables = manifest.tables
        rows = [each.decoded(tables[each.block.table].dtype) for reader in readers for each in reader.rows]
        whole = [each for each in rows if each.ids is None]
        listed = [each for each in rows if each.ids is not None]
        if whole and listed:
            overlay, blocks = Overlay(listed), WholeBlocks(each.block for each in whole)
            whole = [overlay.over(each) for each in whole]
            listed = [left for each in listed for left in blocks.outside(each)]
        self.whole = whole
        self.listed = listed
        self.dense = dense_of(readers)

    def chunks(self, num_rows: int = 16_384) -> Iterator[tuple[str, Tensor]]:
        """FQN and values ``[n, columns]`` of all its rows, at most ``num_rows`` at a time."""
        for rows in (*self.whole, *self.listed):
            for values in rows.chunks(num_rows):
                yield rows.block.table, values
