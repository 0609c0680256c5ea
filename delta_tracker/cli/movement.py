"""Statistics of row updates, in bounded memory: the most frequently updated rows, and the L2 norms of updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from delta_tracker.monitor.buckets import LogBuckets
from delta_tracker.types import TableSpec

if TYPE_CHECKING:
    from delta_tracker.stream.format.block_rows import BlockRows
    from delta_tracker.stream.format.part_reader import Contents

_CHUNK_ROWS = 16_384
SAMPLE_BYTES = 256 << 20
NUM_COUNTED = 1 << 20


class RowCounts:
    """Counter of the most frequent row ids.

    Counts are exact for up to ``capacity`` different ids. With more ids, the counter is a mergeable Misra-Gries sketch;
    see Agarwal et al., "Mergeable Summaries" (PODS 2012). Counts may then be too low by up to :attr:`error`, and every
    id that occurs more than :attr:`error` times is kept.

    Args:
        capacity: maximum number of ids to keep. Ids are counted in batches, so up to four times as many ids may be in
            memory.

    Attributes:
        error: maximum difference between a count and the exact count.
    """

    def __init__(self, capacity: int) -> None:
        self.error = 0
        self._capacity = capacity
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._counts: NDArray[np.int64] = np.empty(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count each element of ``ids``, an ``[N]`` int64 array."""
        for begin in range(0, len(ids), self._capacity):
            piece = ids[begin : begin + self._capacity]
            self._waiting.append(piece)
            self._num_waiting += len(piece)
            if self._num_waiting >= 2 * self._capacity:
                self._count_waiting()

    def top(self, count: int) -> list[tuple[int, int]]:
        """Return up to ``count`` pairs of an id and its count, most frequent ids first. Ties are sorted by id."""
        self._count_waiting()
        order = np.lexsort((self._ids, -self._counts))[:count]
        return list(zip(self._ids[order].tolist(), self._counts[order].tolist(), strict=True))

    def _count_waiting(self) -> None:
        ids, indices = np.unique(np.concatenate([self._ids, *self._waiting]), return_inverse=True)
        counts = np.bincount(indices[len(self._ids) :], minlength=len(ids))
        counts[indices[: len(self._ids)]] += self._counts
        self._waiting, self._num_waiting = [], 0
        if len(ids) > self._capacity:
            taken = int(np.partition(counts, -self._capacity - 1)[-self._capacity - 1])
            self.error += taken
            ids, counts = ids[counts > taken], counts[counts > taken] - taken
        self._ids, self._counts = ids, counts


class TableMovement:
    """Statistics of the updates of one table: the number of updates of each row, and the L2 norms of updates.

    Args:
        spec: spec of the table.
        sample_bytes: maximum size in bytes of the sample of rows, whose previous values are stored in float32. If the
            table is larger, only every ``stride``-th row is sampled.
        num_counted: maximum number of different updated rows for which :attr:`counts` is exact.

    Attributes:
        stride: distance between sampled rows. 0 if no row is sampled because a single row exceeds ``sample_bytes``.
        counts: counter of the deltas that contain each row.
        moves: distribution of the nonzero L2 distances between successive values of a sampled row.
        num_deltas: number of deltas that contain the ids of changed rows of the table.
        unmoved: number of updates of sampled rows that did not change the value.
    """

    def __init__(self, spec: TableSpec, sample_bytes: int, num_counted: int) -> None:
        self.spec = spec
        slots = sample_bytes // (spec.dim * 4)  # 0 if one row exceeds sample_bytes; then no row is compared
        self.stride = max(1, -(-spec.num_rows // slots)) if slots else 0
        self.counts = RowCounts(num_counted)
        self.moves = LogBuckets()
        self.num_deltas = 0
        self.unmoved = 0
        # NaN until a row's first value, for which the distance is unknown.
        num_held = -(-spec.num_rows // self.stride) if self.stride else 0
        self._held = np.full((num_held, spec.dim), np.nan, np.float32)

    def add(self, blocks: Sequence[BlockRows], *, is_delta: bool) -> None:
        """Add the rows of the table that the next version contains.

        ``blocks`` must contain blocks with all rows of a range first, and then blocks with row ids.
        """
        # Two blocks contain the same row only if they are column shards.
        is_split = any(rows.block.num_columns < self.spec.dim for rows in blocks)
        ids = [rows.ids.numpy() for rows in blocks if rows.ids is not None]
        if is_delta and ids:
            self.num_deltas += 1
            self.counts.add(np.unique(np.concatenate(ids)) if is_split else np.concatenate(ids))
        compared = [piece for rows in blocks for piece in self._compare(rows)] if self.stride else []
        if not compared:
            return
        squares = np.concatenate([squares for _, squares in compared])
        if is_split:  # add up the squares of a row's column shards
            indices = np.unique(np.concatenate([slots for slots, _ in compared]), return_inverse=True)[1]
            squares = np.bincount(indices, weights=squares)
        distances = np.sqrt(squares[np.isfinite(squares)])
        self.moves.extend(distances[distances > 0].tolist())
        if is_delta:
            self.unmoved += int((distances == 0).sum())

    def _compare(self, rows: BlockRows) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Compare the sampled rows of a block with their stored values, then store the new values.

        Yields:
            Indices of rows in the sample, and the squared L2 distance between the new and previous values of each row
            over the columns of the block. The distance is NaN for a row without a previous value.
        """
        left, right = rows.block.columns
        for begin in range(0, rows.block.num_rows, _CHUNK_ROWS):
            end = min(begin + _CHUNK_ROWS, rows.block.num_rows)
            first = rows.block.rows[0]
            ids = np.arange(first + begin, first + end) if rows.ids is None else rows.ids[begin:end].numpy()
            is_sampled = ids % self.stride == 0
            if not is_sampled.any():
                continue
            values = rows.read(begin, end).float().numpy()[is_sampled]
            slots = ids[is_sampled] // self.stride
            with np.errstate(invalid="ignore", over="ignore"):  # a diverged model must not fail the report
                moves = np.float64(values) - self._held[slots, left:right]
                squares = np.einsum("nd,nd->n", moves, moves)
            self._held[slots, left:right] = values
            yield slots, squares


class Movement:
    """Statistics of the updates of several tables in successive versions.

    Memory usage is ``sample_bytes``, 64 bytes for each of ``num_counted`` rows, and the memory for reading a version.

    Args:
        specs: specs of the tables, by FQN. Other tables, and versions in which a table has another shape, are skipped.
        sample_bytes: maximum total size of the samples of all tables, in bytes; see :class:`TableMovement`.
        num_counted: maximum number of updated rows that are counted exactly, for all tables together.

    Attributes:
        tables: statistics of each table by FQN.
    """

    def __init__(
        self, specs: dict[str, TableSpec], *, sample_bytes: int = SAMPLE_BYTES, num_counted: int = NUM_COUNTED
    ) -> None:
        share = max(1, len(specs))
        self.tables = {
            fqn: TableMovement(spec, max(1, sample_bytes // share), max(1024, num_counted // share))
            for fqn, spec in specs.items()
        }

    def add(self, contents: Contents) -> None:
        """Add the rows of the next version to the statistics of their tables."""
        manifest = contents.manifest
        blocks: dict[str, list[BlockRows]] = defaultdict(list)
        for rows in (*contents.whole, *contents.listed):
            blocks[rows.block.table].append(rows)
        for fqn, of_table in blocks.items():
            table, spec = self.tables.get(fqn), manifest.tables[fqn]
            if table is not None and (spec.num_rows, spec.dim) == (table.spec.num_rows, table.spec.dim):
                table.add(of_table, is_delta=manifest.kind == "delta")
