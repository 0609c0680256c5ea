"""Copy the rows of a version from a rank's tables, and encode them in chunks that fit the CPU cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from delta_tracker.buffers import BufferPool
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.block_rows import CHUNK_BYTES, BlockRows
from delta_tracker.stream.format.encoding import Encoding, encode_rows
from delta_tracker.stream.format.manifest import Block, IdForm
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta, ShardSpec

EncodingChoice = Encoding | Mapping[str, Encoding] | None


def choose_encodings(choice: EncodingChoice, tracker: ModelDeltaTracker) -> dict[str, Encoding]:
    """Return the encoding of each table, by FQN.

    Args:
        choice: one encoding for all tables, a mapping of FQN to encoding, or None. Tables without an encoding are
            stored in their own dtype.
        tracker: tracker of the tables.

    Raises:
        InvalidArgumentError: for an unknown table, an invalid encoding, or an encoding that does not support the number
            of columns of a shard.
    """
    own = {fqn: Encoding.of(table.dtype) for fqn, table in tracker.tables.items()}
    chosen = dict(choice) if isinstance(choice, Mapping) else dict.fromkeys(own, choice) if choice is not None else {}
    for fqn, encoding in chosen.items():
        if fqn not in own:
            raise InvalidArgumentError("encoding", fqn, f"Pass some of the tables {sorted(own)}")
        if not isinstance(encoding, Encoding):
            raise InvalidArgumentError("encoding", encoding, f"Pass some of {[str(known) for known in Encoding]}")
        for first, end in tracker.shards[fqn].columns:
            encoding.width(end - first)  # raises if the width is not supported
    return own | chosen


class Gatherer:
    """Component that copies a tracker's rows into reused buffers. Only the training thread may call the methods.

    Rows of a table in 2D parallelism are copied on the ranks of the first replica only.

    The buffers occupy about as much memory as the encoded rows of the largest recent version. Rows that :meth:`whole`
    returns with ``now=False`` do not use the buffers.

    Args:
        tracker: tracker of the rows.
        encodings: FQN to encoding.
        writes_replicas: True if this rank writes replicated tables.
    """

    def __init__(self, tracker: ModelDeltaTracker, encodings: Mapping[str, Encoding], *, writes_replicas: bool) -> None:
        self._tracker = tracker
        self._encodings = encodings
        self._writes_replicas = writes_replicas
        self._pool = BufferPool(sys.maxsize)

    @torch.no_grad()
    def changed(self, delta: Delta, *, without: frozenset[str] = frozenset()) -> list[BlockRows]:
        """Return copies of a delta's rows with their current values, one block for each column range of a shard.

        Omits tables that this rank does not write. The memory of the blocks is reused once they have been
        garbage-collected. This method and :meth:`whole` must be called while the context manager
        :func:`~delta_tracker.sharding.kernel_memory.one_cut` is active.

        Args:
            delta: the changed rows.
            without: FQNs of tables to leave out.
        """
        return [
            self._gather(fqn, shard, columns, view, delta[fqn].ids)
            for fqn, shard in self._shards()
            if len(delta[fqn]) and fqn not in without
            for columns, view in zip(shard.columns, self._tracker.column_views(fqn), strict=True)
        ]

    @torch.no_grad()
    def whole(self, tables: frozenset[str], *, now: bool) -> list[BlockRows]:
        """Return all rows of some tables, one block for each column range of a shard.

        Omits tables that this rank does not write.

        Args:
            tables: FQNs of the tables.
            now: True to copy the rows now; False to copy each chunk when it is read, with its values at that time.
        """
        blocks = []
        for fqn, shard in self._shards():
            if fqn not in tables or shard.num_rows == 0:
                continue
            encoding = self._encodings[fqn]
            for columns, view in zip(shard.columns, self._tracker.column_views(fqn), strict=True):
                block = Block(fqn, _row_range(shard), columns, shard.num_rows, "all", encoding)
                copied = BlockRows(block, None, partial(_copy, view, encoding))
                blocks.append(self._copied(copied) if now else copied)
        return blocks

    def _shards(self) -> Iterator[tuple[str, ShardSpec]]:
        """Yield (table FQN, shard) for the shards whose rows this rank writes."""
        for fqn, shard in self._tracker.shards.items():
            if shard.replica == 0 and (self._writes_replicas or not shard.is_replicated):
                yield fqn, shard

    def _gather(self, fqn: str, shard: ShardSpec, columns: tuple[int, int], view: Tensor, ids: Tensor) -> BlockRows:
        encoding = self._encodings[fqn]
        form: IdForm = "gaps" if encoding.is_quantized else "list"
        block = Block(fqn, _row_range(shard), columns, len(ids), form, encoding)
        stored = self._memory(block)
        step = _chunk_rows(view)
        for begin in range(0, len(ids), step):
            chunk = ids[begin : begin + step]
            out = stored[begin : begin + len(chunk)]
            if view.device == out.device and view.dtype == out.dtype:
                torch.index_select(view, 0, chunk, out=out)
            elif view.device == out.device:
                encode_rows(view.index_select(0, chunk), encoding, out=out)
            else:
                out.copy_(encode_rows(view.index_select(0, chunk), encoding))
        return BlockRows.of(block, ids.cpu() + shard.row_offset, stored)

    def _copied(self, rows: BlockRows) -> BlockRows:
        """Read the rows in chunks, and return a copy of them in memory from the buffer pool."""
        stored, begin = self._memory(rows.block), 0
        for chunk in rows.chunks():
            stored[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return BlockRows.of(rows.block, rows.ids, stored)

    def _memory(self, block: Block) -> Tensor:
        """Return an uninitialized CPU tensor ``[rows, stored columns]`` for a block's rows, from the buffer pool."""
        stored = torch.from_numpy(self._pool.lend(block.num_rows * block.row_bytes))
        return stored.view(block.encoding.dtype).view(block.num_rows, -1)


@torch.no_grad()
def _copy(view: Tensor, encoding: Encoding, begin: int, end: int) -> Tensor:
    # Copy even without encoding: training may write to the rows between the hash and the write.
    return encode_rows(view[begin:end].clone(), encoding).cpu()


def _row_range(shard: ShardSpec) -> tuple[int, int]:
    return shard.row_offset, shard.row_offset + shard.num_rows


def _chunk_rows(view: Tensor) -> int:
    return max(1, CHUNK_BYTES // max(1, view.shape[1] * view.element_size()))
