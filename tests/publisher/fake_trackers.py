"""A tracker of plain tensors on any device, with the library's log, reader and row stores, but without TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.coordinator import Draft
from delta_tracker.publisher.exchange import Exchange
from delta_tracker.publisher.rank_tables import EncodingChoice
from delta_tracker.publisher.tracker_reader import TrackerReader
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.consumer_handle import ConsumerHandle, TrackerParts
from delta_tracker.tracker.delta_reader import DeltaReader
from delta_tracker.tracker.hooks import BatchProgress
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Identity, ShardSpec, TableSpec

ROW_OFFSET = 3


class FakeTracker:
    """Tracker of tables that a test writes.

    Args:
        weights: FQN to ``[R, D]`` weights on one device. The rows are the last ``R`` of a table of ``R + 3`` rows.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.model = nn.Module()
        self.tables = {
            fqn: TableSpec(fqn, len(each) + ROW_OFFSET, each.shape[1], each.dtype) for fqn, each in weights.items()
        }
        self.shards = {
            fqn: ShardSpec(table, ROW_OFFSET, table.num_rows - ROW_OFFSET, ((0, table.dim),))
            for fqn, table in self.tables.items()
        }
        self.fused_tables = frozenset(weights)
        self.identities: dict[str, Identity] = {}
        self.num_attached = 1
        stores = {fqn: SegmentStore(len(each), each.device, engine="torch") for fqn, each in weights.items()}
        self.log = ChangeLog(stores, ["default"], delete_on_read=True, max_bytes=None)
        self._hooks: Any = SimpleNamespace(num_updates=lambda: 0, lookups_in_flight=lambda: 0, check_read=lambda: None)
        self.progress = BatchProgress(self.log, self._hooks)
        found = {fqn: SimpleNamespace(spec=spec, is_fused=True) for fqn, spec in self.shards.items()}
        self._tracked: Any = SimpleNamespace(check_attached=lambda: None, shards=found)
        capture: Any = SimpleNamespace(has_scores=False)
        self._reader = DeltaReader(self.log, self._tracked, capture)
        self._num_writes = 0

    @property
    def live(self) -> FakeTracker:
        return self

    @property
    def num_batches(self) -> int:
        return self.log.cursors.num_batches

    def column_views(self, fqn: str) -> list[Tensor]:
        return [self.weights[fqn]]

    def owner_views(self) -> dict[str, Tensor]:
        return {}

    def reserve(self, consumer: str | None, *, holder: str) -> ConsumerHandle:
        parts = TrackerParts(self.log, self._tracked, self._reader, self._hooks, self)
        return ConsumerHandle(self.log.consumers.reserve(consumer, holder), holder, parts)

    def write(self, ids: Mapping[str, Tensor], values: float, *, between: Callable[[], object] | None = None) -> None:
        """Write rows as a fused backward pass does, between the hooks.

        Args:
            ids: FQN to local ids.
            values: what is written to all columns.
            between: called after the first hook and before the write.
        """
        self._num_writes += 1
        self.log.writes.begin_write(self._num_writes, ids)
        if between is not None:
            between()
        for fqn, rows in ids.items():
            self.weights[fqn].index_fill_(0, rows, values)
        self.log.writes.end_write(self._num_writes, tuple(ids))


def tracker_reader(
    tracker: FakeTracker, *, encoding: EncodingChoice = None, dense: Mapping[str, Tensor] | None = None
) -> TrackerReader:
    """Return the reader of a publisher's versions, for a single rank.

    Args:
        tracker: the tracker.
        encoding: as for a publisher.
        dense: name to dense tensor, on any device; no model has it.
    """
    every: Any = tracker
    recorder = Recorder("publisher", tracker, monitor=Monitor())
    exchange = Exchange(timedelta(seconds=60), "publisher", "Publisher(...)", "publish")
    reader = TrackerReader(every, None, top_k=None, dense=None, encoding=encoding, exchange=exchange, recorder=recorder)
    reader.find_dense = lambda: dense or {}
    return reader


def read(draft: Draft) -> dict[str, tuple[list[int], Tensor]]:
    """Return what a draft's writer would write: FQN to global ids and stored rows, with dense tensors by name."""
    copied = draft.copied
    for copy in copied.copies:
        copy.result()
    return read_blocks(copied.rows) | {name: ([], tensor.clone()) for name, tensor in copied.dense.items()}


def read_blocks(rows: Sequence[BlockRows]) -> dict[str, tuple[list[int], Tensor]]:
    """Return FQN to global ids and stored rows, in the order of the ids."""
    return {
        each.block.table: (
            [*range(*each.block.rows)] if each.ids is None else each.ids.tolist(),
            torch.cat([chunk.clone() for chunk in each.chunks()]),
        )
        for each in rows
    }
