"""Leave out the changed rows whose stored bytes are those that the stream has already."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.publisher.row_record import Bytes, Ids, RowRecord
from delta_tracker.stream.format.block_rows import CHUNK_BYTES, BlockRows, RowReader, gather
from delta_tracker.types import TableSpec

_logger = logging.getLogger(__name__)

UnchangedChoice = Literal["bytes", "digest"] | None
_CHOICES = ("bytes", "digest")
_VALUE_BYTES = 4  # rows are encoded in float32

_Shard = tuple[str, tuple[int, int]]


@dataclass(slots=True)
class _Staged:
    """Rows of the version that is being written.

    Args:
        written: records and the indices of their rows that the version has.
        whole: records of which the version has all rows.
        num_unchanged: FQN to the number of rows that were left out.
        is_committed: True once the version is committed.
    """

    written: list[tuple[RowRecord, Ids]] = field(default_factory=list)
    whole: list[RowRecord] = field(default_factory=list)
    num_unchanged: Counter[str] = field(default_factory=Counter)
    is_committed: bool = False


class StoredRows:
    """Record of what the stream has for each row of this rank, by which unchanged rows are found.

    A row's stored bytes are its values in their encoding, its raw id, and its optimizer's states if the version has
    them. A predictor that has applied all versions holds exactly the recorded bytes. A row is compared only if the
    version that last had it was committed by this object's publisher. Every other row is unknown, and is sent.

    Rows of a shard with some columns of the table only are not compared, because other ranks have the other columns:
    predictors may need whole rows.

    The worker thread of the publisher calls :meth:`begin_snapshot`, :meth:`snapshot_rows` and :meth:`delta_rows`. Once
    the version is committed, and before the worker gets another task, the training thread calls :meth:`commit`, which
    is O(1). The rows of a version without this call stay unknown.

    Args:
        choice: ``"bytes"`` to keep the stored bytes of each row, ``"digest"`` to keep a 128-bit digest. Two different
            rows have equal digests with a probability of 2**-128.

    Raises:
        InvalidArgumentError: if ``choice`` is invalid.
    """

    def __init__(self, choice: UnchangedChoice) -> None:
        if choice not in _CHOICES:
            raise InvalidArgumentError("skip_unchanged", choice, 'Pass "bytes", "digest" or None')
        self._has_digests = choice == "digest"
        self._records: dict[_Shard, tuple[object, RowRecord]] = {}
        self._staged = _Staged()
        self._layout = -1
        self._num_bytes = 0
        self._num_unchanged = 0
        self._reasons: set[str] = set()  # logged

    @property
    def num_bytes(self) -> int:
        """Memory of the records in bytes."""
        return self._num_bytes

    @property
    def num_unchanged(self) -> int:
        """Number of rows that the committed versions left out."""
        return self._num_unchanged

    def begin_snapshot(
        self, rows: Sequence[BlockRows], *, tables: Mapping[str, TableSpec], layout: int
    ) -> list[BlockRows]:
        """Forget all rows, and return the first blocks of a snapshot, which are recorded while they are read.

        Args:
            rows: blocks of the snapshot.
            tables: FQN to table.
            layout: number that changes when the shards may have changed.
        """
        self._staged = _Staged()
        self._forget(layout)
        return self._recorded(rows, tables)

    def snapshot_rows(
        self, rows: Sequence[BlockRows], *, tables: Mapping[str, TableSpec], layout: int
    ) -> list[BlockRows]:
        """Return the last blocks of a snapshot. All of them are recorded. For the arguments see :meth:`begin_snapshot`.

        Lists of rows are recorded now. They replace the rows of the first blocks. Blocks of all rows are recorded while
        they are read.
        """
        if layout != self._layout:
            self._staged = _Staged()
            self._forget(layout)
        listed = [each for each in rows if each.ids is not None]
        for shard, blocks in self._shards(listed, tables):
            self._replace(shard, blocks)
        return listed + self._recorded([each for each in rows if each.ids is None], tables)

    def delta_rows(
        self, rows: Sequence[BlockRows], *, tables: Mapping[str, TableSpec], layout: int, skips: bool = True
    ) -> list[BlockRows]:
        """Return the rows of a delta without those whose stored bytes are known to be unchanged, and record the others.

        Blocks without rows are left out. The memory is bounded by a few chunks of 4 MiB and the ids of the rows.

        Args:
            rows: the changed rows, with lists of ids.
            tables: FQN to table.
            layout: number that changes when the shards may have changed.
            skips: False to return all rows, because the tracker has other consumers.
        """
        self._settle()
        if not skips:
            self._explain("versions with states, while the tracker has other consumers")
        if layout != self._layout:
            self._forget(layout)
        kept: dict[int, BlockRows | None] = {}
        for shard, blocks in self._shards(rows, tables):
            same = self._replace(shard, blocks)
            if not skips or not same.any():
                continue
            self._staged.num_unchanged[shard[0]] += int(same.sum())
            places = torch.from_numpy(np.flatnonzero(~same))
            for each in blocks:
                kept[id(each)] = _picked(each, places) if len(places) else None
        found = [kept.get(id(each), each) for each in rows]
        return [each for each in found if each is not None]

    def commit(self) -> Mapping[str, int]:
        """Record that the version whose rows were given last is committed.

        Returns:
            FQN to the number of rows that the version left out; empty if this was recorded before.
        """
        if self._staged.is_committed:
            return {}
        self._staged.is_committed = True
        self._num_unchanged += self._staged.num_unchanged.total()
        return self._staged.num_unchanged

    def _shards(
        self, rows: Sequence[BlockRows], tables: Mapping[str, TableSpec]
    ) -> Iterator[tuple[_Shard, list[BlockRows]]]:
        """Yield FQN, row range and blocks of each shard that has all columns of its table."""
        found: defaultdict[_Shard, list[BlockRows]] = defaultdict(list)
        for each in rows:
            found[each.block.table, each.block.rows].append(each)
        for shard, blocks in found.items():
            if sum(each.block.num_columns for each in blocks) == tables[shard[0]].dim:
                yield shard, blocks
            else:
                self._explain(f"the table {shard[0]!r}, whose columns are on several ranks")

    def _explain(self, reason: str) -> None:
        """Log once that all changed rows of some versions or tables are sent."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            _logger.warning("skip_unchanged: all changed rows are sent of %s", reason)

    def _settle(self) -> None:
        """Make the rows of the last version known if it is committed, and stage a new version."""
        staged, self._staged = self._staged, _Staged()
        if staged.is_committed:
            for record in staged.whole:
                record.confirm_all()
            for record, ids in staged.written:
                record.confirm(ids)

    def _forget(self, layout: int) -> None:
        self._records = {}
        self._num_bytes = 0
        self._layout = layout

    def _record(self, shard: _Shard, blocks: Sequence[BlockRows], *, is_new: bool = False) -> RowRecord:
        """Return the record of a shard, a new one if its blocks have other parts than before.

        Args:
            shard: FQN and row range.
            blocks: blocks of the shard, one for each column range.
            is_new: True to replace the record.
        """
        parts = [(*each.block.columns, each.block.encoding, *_widths(each)) for each in blocks]
        known = self._records.get(shard)
        if known is not None and known[0] == parts and not is_new:
            return known[1]
        begin, end = shard[1]
        widths = [width for each in blocks for width in _widths(each)]
        record = RowRecord(end - begin, widths, has_digests=self._has_digests)
        self._num_bytes += record.num_bytes - (0 if known is None else known[1].num_bytes)
        self._records[shard] = parts, record
        return record

    def _replace(self, shard: _Shard, blocks: Sequence[BlockRows]) -> NDArray[np.bool_]:
        """Record listed rows of a shard. Return ``[N]``, True for the rows that are known to be equal."""
        record = self._record(shard, blocks)
        ids = blocks[0].ids
        assert ids is not None, "a list of rows"
        assert all(each.ids is ids for each in blocks), "the column ranges of a shard have the same rows"
        places = ids.numpy() - shard[1][0]
        readers = [read for each in blocks for read in _readers(each)]
        num_rows, step = len(places), _step(blocks)
        same = np.zeros(num_rows, np.bool_)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            chunk = places[begin:end]
            same[begin:end] = record.replace(chunk, [_bytes(read(begin, end)) for read in readers])
            self._staged.written.append((record, chunk[~same[begin:end]]))
        return same

    def _recorded(self, rows: Sequence[BlockRows], tables: Mapping[str, TableSpec]) -> list[BlockRows]:
        """Return blocks of all rows, which are recorded while they are read."""
        watched: dict[int, BlockRows] = {}
        for shard, blocks in self._shards(rows, tables):
            record = self._record(shard, blocks, is_new=True)
            self._staged.whole.append(record)
            number = 0
            for each in blocks:
                readers = [_watched(read, record, number + at) for at, read in enumerate(_readers(each))]
                number += len(readers)
                owners = None if each.owners is None else readers[1]
                states = tuple(readers[len(readers) - len(each.states) :])
                watched[id(each)] = replace(each, read=readers[0], owners=owners, states=states)
        return [watched.get(id(each), each) for each in rows]


def _readers(rows: BlockRows) -> list[RowReader]:
    """Return the readers of the parts of a block: values, owners if there are any, states."""
    return [rows.read, *([] if rows.owners is None else [rows.owners]), *rows.states]


def _widths(rows: BlockRows) -> list[int]:
    """Return the number of bytes of each part of a row."""
    return [empty.shape[1] * empty.itemsize for empty in (read(0, 0) for read in _readers(rows))]


def _step(blocks: Sequence[BlockRows]) -> int:
    """Return the number of rows per chunk."""
    return max(1, CHUNK_BYTES // (_VALUE_BYTES * sum(each.block.num_columns for each in blocks)))


def _bytes(rows: Tensor) -> Bytes:
    """Return ``[N, W]`` bytes of rows, a view if they are contiguous."""
    return rows.detach().contiguous().view(torch.uint8).numpy()


def _watched(read: RowReader, record: RowRecord, number: int) -> RowReader:
    """Return a reader that records what it reads."""

    def read_and_record(begin: int, end: int) -> Tensor:
        rows = read(begin, end)
        if begin < end:
            record.write(number, begin, _bytes(rows))
        return rows

    return read_and_record


def _picked(rows: BlockRows, places: Tensor) -> BlockRows:
    """Return the rows at some indices, ``[M]``, ascending, with the same form of ids."""
    assert rows.ids is not None, "a list of rows"
    step = _step([rows])
    return BlockRows(
        replace(rows.block, num_rows=len(places)),
        rows.ids[places],
        _picking(rows.read, places, step),
        tuple(_picking(read, places, step) for read in rows.states),
        None if rows.owners is None else _picking(rows.owners, places, step),
    )


def _picking(read: RowReader, places: Tensor, step: int) -> RowReader:
    """Return a reader of the rows at some indices, which reads at most ``step`` rows of ``read`` at once."""

    def pick(begin: int, end: int) -> Tensor:
        wanted = places[begin:end]
        if not len(wanted):
            return read(0, 0)
        edges = torch.arange(int(wanted[0]) // step + 1, int(wanted[-1]) // step + 1) * step
        ends = [0, *torch.searchsorted(wanted, edges).tolist(), len(wanted)]
        parts = [gather(read, wanted[first:last]) for first, last in pairwise(ends) if first < last]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return pick
