"""What the rows of a stream tell, in bounded memory: which change most often, and how far they move.

``N`` rows of a version, ``D`` columns of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_tracker.monitor.buckets import HIGHEST, LOWEST, PER_OCTAVE, LogBuckets
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.contents import Contents
from delta_tracker.types import TableSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK_ROWS = 16_384
SAMPLE_BYTES = 256 << 20
NUM_COUNTED = 1 << 20


class RowCounts:
    """How often each id came, of the most frequent ones.

    Exact up to ``capacity`` different ids. Beyond, the sketch of Misra and Gries in the mergeable form of Agarwal et
    al., "Mergeable Summaries" (PODS 2012): a count may be too low by up to :attr:`error`, and an id that came more
    often than that is there.

    Args:
        capacity: how many ids it holds; up to four times as many while it counts.

    Attributes:
        error: the most that a count can be too low by.
    """

    def __init__(self, capacity: int) -> None:
        self.error = 0
        self._capacity = capacity
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._counts: NDArray[np.int64] = np.empty(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count each of ``ids``, ``[N]``, once."""
        for begin in range(0, len(ids), self._capacity):
            piece = ids[begin : begin + self._capacity]
            self._waiting.append(piece)
            self._num_waiting += len(piece)
            if self._num_waiting >= 2 * self._capacity:
                self._settle()

    def top(self, count: int) -> list[tuple[int, int]]:
        """The ``count`` most frequent ids and how often they came, the most frequent first, equal ones by id."""
        self._settle()
        order = np.lexsort((self._ids, -self._counts))[:count]
        return list(zip(self._ids[order].tolist(), self._counts[order].tolist(), strict=True))

    def _settle(self) -> None:
        ids, places = np.unique(np.concatenate([self._ids, *self._waiting]), return_inverse=True)
        counts = np.bincount(places[len(self._ids) :], minlength=len(ids))
        counts[places[: len(self._ids)]] += self._counts
        self._waiting, self._num_waiting = [], 0
        if len(ids) > self._capacity:
            taken = int(np.partition(counts, -self._capacity - 1)[-self._capacity - 1])
            self.error += taken
            ids, counts = ids[counts > taken], counts[counts > taken] - taken
        self._ids, self._counts = ids, counts


class TableMovement:
    """The rows of one table: how often each came, and how far they moved.

    Args:
        spec: the table.
        sample_bytes: memory for the values that are compared; of a larger table every ``stride``-th row is.
        num_counted: how many different rows are counted exactly.

    Attributes:
        stride: one row in so many is compared; 0 if none is.
        counts: in how many deltas each row came.
        moves: L2 distances between a row's value in a version and its value before, 0 left out.
        num_deltas: how many deltas had rows of it.
        unmoved: rows in deltas that were sent with the value that they had already.
    """

    def __init__(self, spec: TableSpec, sample_bytes: int, num_counted: int) -> None:
        self.spec = spec
        slots = sample_bytes // (spec.dim * 4)  # 0 for rows wider than all of it, of which none is compared
        self.stride = max(1, -(-spec.num_rows // slots)) if slots else 0
        self.counts = RowCounts(num_counted)
        self.moves = LogBuckets()
        self.num_deltas = 0
        self.unmoved = 0
        # NaN until a row is seen for the first time, and then nothing is known of how far it moved.
        num_held = -(-spec.num_rows // self.stride) if self.stride else 0
        self._held = np.full((num_held, spec.dim), np.nan, np.float32)

    def add(self, whole: list[BlockRows], listed: list[BlockRows], *, is_delta: bool) -> None:
        """Take in the table's rows of the next version."""
        # The blocks have no row in common, unless they are column shards.
        is_split = any(rows.block.num_columns < self.spec.dim for rows in (*whole, *listed))
        ids = [rows.ids.numpy() for rows in listed if rows.ids is not None]
        if is_delta and ids:
            self.num_deltas += 1
            self.counts.add(np.unique(np.concatenate(ids)) if is_split else np.concatenate(ids))
        compared = [piece for rows in (*whole, *listed) for piece in self._compare(rows)] if self.stride else []
        if not compared:
            return
        squares = np.concatenate([squares for _, squares in compared])
        if is_split:  # a row moved by all of its columns together
            places = np.unique(np.concatenate([slots for slots, _ in compared]), return_inverse=True)[1]
            squares = np.bincount(places, weights=squares)
        distances = np.sqrt(squares[np.isfinite(squares)])
        self._count(distances[distances > 0])
        if is_delta:
            self.unmoved += int((distances == 0).sum())

    def _compare(self, rows: BlockRows) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The sampled rows of a block, as places in the sample, and the squares of their moves."""
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
            with np.errstate(invalid="ignore", over="ignore"):  # a diverged model is no reason to stop
                moves = np.float64(values) - self._held[slots, left:right]
                squares = np.einsum("nd,nd->n", moves, moves)
            self._held[slots, left:right] = values
            yield slots, squares

    def _count(self, distances: NDArray[np.float64]) -> None:
        """As ``moves.extend`` does, for arrays."""
        places = np.clip(np.ceil(np.log2(distances) * PER_OCTAVE) - 1, LOWEST, HIGHEST).astype(np.int64)
        found, counts = np.unique(places, return_counts=True)
        self.moves.positive.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))


class Movement:
    """The rows of versions one after another. Values that were there before the first of them are not known.

    Memory: ``sample_bytes`` of values, 64 bytes for each of ``num_counted`` rows, and what a version takes to read.

    Args:
        specs: FQN to table; other tables, and versions in which one has another shape, are passed over.
        sample_bytes: for all tables together.
        num_counted: for all tables together.
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
        """Take in the next version."""
        manifest = contents.manifest
        blocks: dict[str, tuple[list[BlockRows], list[BlockRows]]] = {}
        for kind, all_rows in enumerate((contents.whole, contents.listed)):
            for rows in all_rows:
                blocks.setdefault(rows.block.table, ([], []))[kind].append(rows)
        for fqn, (whole, listed) in blocks.items():
            table = self.tables.get(fqn)
            spec: Any = manifest.tables[fqn]
            if table is not None and (spec.num_rows, spec.dim) == (table.spec.num_rows, table.spec.dim):
                table.add(whole, listed, is_delta=manifest.kind == "delta")
