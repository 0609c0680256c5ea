"""Statistics of a tracker, as a :class:`TrackerStats` object and as metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from delta_tracker.monitor.recorder import Recorder
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.log_consumers import ConsumerLag
from delta_tracker.types import Delta, Memory, TrackingMode

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


@dataclass(frozen=True, slots=True, repr=False)
class TrackerStats:
    """Statistics of a tracker on this rank, returned by ``tracker.stats()``. The ``repr`` has a line per consumer.

    Args:
        mode: the tracking mode.
        num_batches: number of ``step()`` calls.
        num_rows: number of rows on this rank, by table FQN.
        lags: lag and pending rows of each consumer, by name.
        memory: memory usage in bytes.

    Example:
        >>> import torch
        >>> from delta_tracker import ModelDeltaTracker
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True))
        >>> tracker = ModelDeltaTracker(model, engine="torch")
        >>> tracker.mark_changed("0", torch.tensor([7, 42])), tracker.step()
        (None, None)
        >>> stats = tracker.stats()
        >>> stats.num_pending("default"), stats.pending_ratio("default")
        (2, 0.002)
        >>> print(repr(stats).splitlines()[0])
        ModelDeltaTracker: 1 table, 1,000 rows on this rank, 1 batch, ID_ONLY, 1,000 bytes
    """

    mode: TrackingMode
    num_batches: int
    num_rows: Mapping[str, int]
    lags: Mapping[str, ConsumerLag]
    memory: Memory

    @classmethod
    def of(cls, log: ChangeLog, mode: TrackingMode, *, counts: bool) -> Self:
        """Return the statistics of a log whose tracking mode is ``mode``. The caller must hold the log's lock.

        Pending rows are counted only if ``counts`` is True: counting waits for the device.
        """
        num_rows = {fqn: store.num_rows for fqn, store in log.segments.stores.items()}
        return cls(mode, log.cursors.num_batches, num_rows, log.consumers.lags(counts=counts), log.segments.memory())

    def num_pending(self, consumer: str) -> int:
        """Return the number of pending rows of a consumer in all tables; 0 if they were not counted."""
        return sum(self.lags[consumer].pending.values())

    def pending_ratio(self, consumer: str) -> float:
        """Return the fraction of all rows that are pending for a consumer, from 0 to 1."""
        return self.num_pending(consumer) / max(1, sum(self.num_rows.values()))

    def __repr__(self) -> str:
        words = (
            _several(len(self.num_rows), "table"),
            f"{sum(self.num_rows.values()):,} rows on this rank",
            _several(self.num_batches, "batch", "batches"),
            self.mode.name,
            f"{self.memory.total_bytes:,} bytes",
        )
        width = max((len(name) for name in self.lags), default=0)
        return "\n".join([f"ModelDeltaTracker: {', '.join(words)}", *(self._line(name, width) for name in self.lags)])

    def _line(self, consumer: str, width: int) -> str:
        lag = self.lags[consumer]
        line = f"  {consumer:<{width}}  {self.num_pending(consumer):,} pending ({self.pending_ratio(consumer):.1%})"
        read = f"last read {_several(lag.batches, 'batch', 'batches')} and {lag.seconds:.1f} s ago"
        return f"{line}, {read}" + ("" if lag.oldest_pending is None else f", oldest row {lag.oldest_pending:.1f} s")


class TrackerGauges:
    """Exporter of a tracker's metrics. It sets gauges of the statistics, and counts the rows that consumers received.

    Args:
        recorder: recorder of the tracker's metrics.
        mode: the tracking mode.
    """

    def __init__(self, recorder: Recorder, mode: TrackingMode) -> None:
        self._recorder = recorder
        self._mode = mode
        self._shown: frozenset[str] = frozenset()  # consumers that have gauges

    def received(self, delta: Delta) -> None:
        """Count the rows of ``delta``, the result of a committed read, by table and consumer."""
        for fqn, rows in delta.items():
            self._recorder.touched_rows.cell(table=fqn, consumer=delta.consumer).add(rows.ids.numel())

    def show(self, log: ChangeLog) -> None:
        """Update the gauges from ``log``. The monitor calls this method in a thread of the monitor.

        Pending rows are counted only if all shards are on the CPU. On other devices, counting would delay training. The
        age of the oldest pending row is reported on every device. If the log's lock cannot be acquired within a second,
        for example during a read with top-k, the gauges do not change.
        """
        if not log.lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            is_counted = all(store.device.type == "cpu" for store in log.segments.stores.values())
            stats = TrackerStats.of(log, self._mode, counts=is_counted)
        finally:
            log.lock.release()
        recorder = self._recorder
        for kind in _KINDS:
            recorder.state_bytes.set(getattr(stats.memory, f"{kind}_bytes"), kind=kind)
        for consumer, lag in stats.lags.items():
            recorder.consumer_lag_batches.set(lag.batches, consumer=consumer)
            recorder.consumer_lag_seconds.set(lag.seconds, consumer=consumer)
            recorder.oldest_pending_seconds.set(lag.oldest_pending or 0, consumer=consumer)
            for fqn, pending in lag.pending.items():
                recorder.pending_rows.set(pending, table=fqn, consumer=consumer)
                recorder.pending_ratio.set(pending / max(1, stats.num_rows[fqn]), table=fqn, consumer=consumer)
        for consumer in self._shown - stats.lags.keys():
            for gauge in _CONSUMER_GAUGES:
                getattr(recorder, gauge).remove(consumer=consumer)
        self._shown = frozenset(stats.lags)


def _several(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
