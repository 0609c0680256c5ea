"""Metrics of a tracker: its memory, and the received rows, pending rows and lag of each consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_tracker.monitor.recorder import Recorder

if TYPE_CHECKING:
    from delta_tracker.tracker.change_log import ChangeLog
    from delta_tracker.tracker.log_consumers import Lag
    from delta_tracker.tracker.tracked_model import TrackedModel
    from delta_tracker.types import Delta

# Timeout for acquiring the lock, shorter than the time after which the monitor treats a source as hung.
_PATIENCE_SECONDS = 1
_KINDS = ("log", "copy", "carried")
_CONSUMER_GAUGES = (
    "consumer_lag_batches",
    "consumer_lag_seconds",
    "oldest_pending_seconds",
    "pending_rows",
    "pending_ratio",
)


class TrackerGauges:
    """Exporter of a tracker's metrics: gauges, and counters of the rows that the consumers received.

    Args:
        recorder: recorder of the tracker's metrics.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._shown: frozenset[str] = frozenset()  # consumers that have gauges

    def received(self, delta: Delta) -> None:
        """Count the rows of a committed read, by table and consumer."""
        for fqn, rows in delta.items():
            self._recorder.touched_rows.cell(table=fqn, consumer=delta.consumer).add(len(rows))

    def show(self, log: ChangeLog, model: TrackedModel) -> None:
        """Set the gauges. The monitor calls this method in its own thread.

        Pending rows are counted only if all shards are on the CPU. On a GPU, counting would wait for the device, and
        the next hook for the lock. The age of the oldest pending row is reported on every device. If the lock cannot be
        acquired within a second, for example during a read with top-k, the gauges keep their values.
        """
        if not log.lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            memory = log.segments.memory()
            lags = log.consumers.lags(counts=all(shard.device.type == "cpu" for shard in model.shards.values()))
            num_rows = {fqn: store.num_rows for fqn, store in log.segments.stores.items()}
        finally:
            log.lock.release()
        for kind in _KINDS:
            self._recorder.state_bytes.set(getattr(memory, f"{kind}_bytes"), kind=kind)
        for consumer, lag in lags.items():
            self._show_consumer(consumer, lag, num_rows)
        for consumer in self._shown - lags.keys():
            for gauge in _CONSUMER_GAUGES:
                getattr(self._recorder, gauge).remove(consumer=consumer)
        self._shown = frozenset(lags)

    def _show_consumer(self, consumer: str, lag: Lag, num_rows: dict[str, int]) -> None:
        recorder = self._recorder
        recorder.consumer_lag_batches.set(lag.batches, consumer=consumer)
        recorder.consumer_lag_seconds.set(lag.seconds, consumer=consumer)
        recorder.oldest_pending_seconds.set(lag.oldest_pending or 0, consumer=consumer)
        for fqn, pending in lag.pending.items():
            recorder.pending_rows.set(pending, table=fqn, consumer=consumer)
            recorder.pending_ratio.set(pending / max(1, num_rows[fqn]), table=fqn, consumer=consumer)
