"""Copy the rows of a version from a rank's tables to the host. They are encoded when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.publisher.host_copies import HostCopier, HostCopies, Source
from delta_tracker.stream.format.block_rows import BlockRows
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


@dataclass(frozen=True, slots=True)
class Gathered:
    """Copies of the rows and dense tensors of a version.

    Args:
        rows: the rows.
        dense: name to dense tensor.
        copies: the copies to wait for before ``rows`` and ``dense`` are read.
    """

    rows: Sequence[BlockRows]
    dense: Mapping[str, Tensor]
    copies: HostCopies


class Gatherer:
    """Component that copies a tracker's rows to the host. Only the training thread may call the methods.

    The copies have the tables' dtypes; the reader of the rows encodes them in chunks that fit the CPU cache. All
    encodings are computed on the CPU, so that their bytes do not depend on the device. Memory: 8 bytes per id and the
    bytes of the rows in their tables' dtypes, as described for :class:`~.host_copies.HostCopier`. Rows that
    :meth:`whole` returns take the memory of one chunk.

    Rows of a table in 2D parallelism are copied on the ranks of the first replica only.

    Args:
        tracker: tracker of the rows.
        encodings: FQN to encoding.
        writes_replicas: True if this rank writes replicated tables.
    """

    def __init__(self, tracker: ModelDeltaTracker, encodings: Mapping[str, Encoding], *, writes_replicas: bool) -> None:
        self._tracker = tracker
        self._encodings = encodings
        self._writes_replicas = writes_replicas
        self._copier = HostCopier()

    def gather(self, delta: Delta, *, whole: frozenset[str] = frozenset(), dense: Mapping[str, Tensor]) -> Gathered:
        """Start to copy rows and dense tensors with their current values. The thread does not wait for the copies.

        Omits tables that this rank does not write. The memory of the copies is reused once they have been
        garbage-collected. This method and :meth:`whole` must be called while the context manager
        :func:`~delta_tracker.sharding.kernel_memory.one_cut` is active.

        Args:
            delta: the changed rows.
            whole: FQNs of tables of which all rows are copied, instead of the rows in ``delta``.
            dense: name to dense tensor.

        Returns:
            The copies, with one block of rows for each column range of a shard.
        """
        sources: list[Source] = []
        blocks: list[tuple[Block, int | None, int]] = []  # a block, and the places of its ids and rows in sources
        for fqn, shard in self._shards():
            ids = delta[fqn].ids
            if fqn in whole or len(ids) == 0:
                continue
            form: IdForm = "gaps" if self._encodings[fqn].is_quantized else "list"
            at = len(sources)
            sources.append(Source(ids, offset=shard.row_offset))
            for columns, view in self._columns(fqn, shard):
                blocks.append((self._block(fqn, shard, columns, len(ids), form), at, len(sources)))
                sources.append(Source(view, ids))
        for fqn, shard in self._shards() if whole else ():
            if fqn in whole and shard.num_rows:
                for columns, view in self._columns(fqn, shard):
                    blocks.append((self._block(fqn, shard, columns, shard.num_rows, "all"), None, len(sources)))
                    sources.append(Source(view))
        num_blocks = len(sources)
        if dense:
            sources += [Source(tensor if tensor.dim() else tensor.view(1)) for tensor in dense.values()]
        copies = self._copier.copy(sources)
        rows = []
        for block, ids_at, at in blocks:
            listed = None if ids_at is None else copies.tensors[ids_at]
            rows.append(BlockRows(block, listed, partial(_encoded, copies.tensors[at], block)))
        held = zip(dense.items(), copies.tensors[num_blocks:], strict=True)
        return Gathered(rows, {name: copied.view(tensor.shape) for (name, tensor), copied in held}, copies)

    def whole(self, tables: frozenset[str]) -> list[BlockRows]:
        """Return all rows of some tables, one block for each column range of a shard.

        Each chunk is copied when it is read, which another thread may do, with its values at that time. It has all
        updates that were queued on the device when this method was called.

        Omits tables that this rank does not write.

        Args:
            tables: FQNs of the tables.
        """
        blocks = []
        readers: dict[torch.device, Callable[[Tensor], Tensor]] = {}
        for fqn, shard in self._shards():
            if fqn not in tables or shard.num_rows == 0:
                continue
            for columns, view in self._columns(fqn, shard):
                if view.device not in readers:
                    readers[view.device] = self._copier.reader(view.device)
                block = self._block(fqn, shard, columns, shard.num_rows, "all")
                blocks.append(BlockRows(block, None, partial(_copied, readers[view.device], view, block)))
        return blocks

    def _shards(self) -> Iterator[tuple[str, ShardSpec]]:
        """Yield (table FQN, shard) for the shards whose rows this rank writes."""
        for fqn, shard in self._tracker.shards.items():
            if shard.replica == 0 and (self._writes_replicas or not shard.is_replicated):
                yield fqn, shard

    def _columns(self, fqn: str, shard: ShardSpec) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield each column range of a shard, and the live view of its rows."""
        return zip(shard.columns, self._tracker.column_views(fqn), strict=True)

    def _block(self, fqn: str, shard: ShardSpec, columns: tuple[int, int], num_rows: int, ids: IdForm) -> Block:
        rows = (shard.row_offset, shard.row_offset + shard.num_rows)
        return Block(fqn, rows, columns, num_rows, ids, self._encodings[fqn])


def _encoded(held: Tensor, block: Block, begin: int, end: int) -> Tensor:
    """Return some rows of a copy as they are stored."""
    rows = held[begin:end]
    return rows if rows.dtype == block.encoding.dtype else encode_rows(rows, block.encoding)


def _copied(read: Callable[[Tensor], Tensor], view: Tensor, block: Block, begin: int, end: int) -> Tensor:
    """Copy some rows now, and return them as they are stored."""
    # A copy even without encoding: training may write to the rows between the hash and the write.
    return _encoded(read(view[begin:end]), block, 0, end - begin)
