"""Rows and dense tensors of a version, read in chunks.

A whole block holds all rows of its range. Listed rows are stored with their ids.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.object_reader import MEMORY_BYTES
from delta_tracker.stream.format.overlay import newest
from delta_tracker.stream.format.part_reader import PartBuffer, dense_of, read_parts
from delta_tracker.stream.storage.storage import Storage


class Contents:
    """Rows and dense tensors of a version. The constructor reads and checks all parts, see :func:`read_parts`.

    Attributes:
        manifest: manifest of the version.
        whole: whole blocks, decoded, with the listed rows, which may be newer, written over them. Apply these first.
        listed: listed rows, decoded. Rows whose listed columns all lie in one whole block are omitted.
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
        self.whole, self.listed = newest(rows)
        self.dense = dense_of(readers)

    def owners(self) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        """Yield the raw ids of all rows of tables with raw ids: of the whole blocks first, then of the listed rows.

        Each item has the table FQN, the ``n`` global row ids as a slice or as ascending int64, and the ``[n]`` int64
        raw ids, 2**63 - 1 for a row without one. Do not write to the tensors: they may be views of a part.
        """
        for rows in (*self.whole, *self.listed):
            for ids, owners in rows.owned():
                yield rows.block.table, ids, owners

    def chunks(self, num_rows: int = 16_384) -> Iterator[tuple[str, Tensor]]:
        """Yield all rows as pairs of a table FQN and decoded values, ``[n, columns]`` with ``n <= num_rows``."""
        for rows in (*self.whole, *self.listed):
            for values in rows.chunks(num_rows):
                yield rows.block.table, values
