"""What the monitor learns about a tracker: its memory, and each consumer's pending rows and lag."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Protocol

from delta_tracker.monitor.default import MONITOR, metrics
from delta_tracker.monitor.source import Owned
from delta_tracker.tracker.consumer_lag import Lag

if TYPE_CHECKING:
    from delta_tracker.tracker.change_log import ChangeLog
    from delta_tracker.tracker.tracked_model import TrackedModel

# Below the time after which the monitor takes a source for one that hangs.
_PATIENCE_SECONDS = 1
_KINDS = ("log", "copy", "carried")


class HasRows(Protocol):
    """A store."""

    num_rows: int


class TrackerGauges:
    """Sets a tracker's gauges, once per collection of the monitor, for as long as this object lives.

    Args:
        log: the tracker's log.
        model: the tracked model.
    """

    def __init__(self, log: ChangeLog, model: TrackedModel) -> None:
        self._log = log
        self._model = model
        self._told: dict[str, tuple[str, ...]] = {}  # the consumers, with the tables, whose gauges are set
        MONITOR.add_source(Owned("delta_tracker", self, TrackerGauges.record, partial(_forget, self._told)))

    def record(self) -> None:
        """Set the gauges. Called in the monitor's thread.

        Rows on a device are not counted here, because the holder of the log's lock would wait for the device, and the
        next hook for the lock; how long rows are pending is reported of them too. While a read has the lock for long,
        as one with top-k may that waits for other ranks, the gauges stay what they were.
        """
        log = self._log
        if not log.lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            memory = log.memory()
            for kind in _KINDS:
                metrics.state_bytes.set(getattr(memory, f"{kind}_bytes"), kind=kind)
            log.tell(counts=all(shard.device.type == "cpu" for shard in self._model.shards.values()))
            self._told.clear()
            self._told.update(dict.fromkeys(log.consumers, tuple(log.stores)))
        finally:
            log.lock.release()


def _forget(told: Mapping[str, Collection[str]]) -> None:
    """Remove the gauges of a tracker that is gone."""
    for kind in _KINDS:
        metrics.state_bytes.remove(kind=kind)
    for consumer, fqns in told.items():
        forget_consumer(consumer, fqns)


def tell_pending(consumer: str, num_pending: Mapping[str, int], stores: Mapping[str, HasRows]) -> None:
    """So many rows of each table are pending for a consumer, of those that this rank's stores have."""
    for fqn, pending in num_pending.items():
        metrics.pending_rows.set(pending, table=fqn, consumer=consumer)
        metrics.pending_ratio.set(pending / max(1, stores[fqn].num_rows), table=fqn, consumer=consumer)


def tell_received(consumer: str, rows: Mapping[str, Sized]) -> None:
    """A consumer's read was committed: it has these rows of each table."""
    for fqn, received in rows.items():
        metrics.touched_rows.cell(table=fqn, consumer=consumer).add(len(received))


def tell_lag(consumer: str, lag: Lag) -> None:
    """A consumer is so far behind."""
    metrics.consumer_lag_batches.set(lag.batches, consumer=consumer)
    metrics.consumer_lag_seconds.set(lag.seconds, consumer=consumer)
    metrics.oldest_pending_seconds.set(lag.oldest_pending or 0, consumer=consumer)


def forget_consumer(consumer: str, fqns: Iterable[str]) -> None:
    """A consumer is gone: nobody is behind any more."""
    for gauge in (metrics.consumer_lag_batches, metrics.consumer_lag_seconds, metrics.oldest_pending_seconds):
        gauge.remove(consumer=consumer)
    for gauge in (metrics.pending_rows, metrics.pending_ratio):
        for fqn in fqns:
            gauge.remove(table=fqn, consumer=consumer)
