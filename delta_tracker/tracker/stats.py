"""State of a tracker in one value: :class:`TrackerStats`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from delta_tracker.tracker.log_consumers import Lag
from delta_tracker.types import Memory, TrackingMode


@dataclass(frozen=True, slots=True, repr=False)
class TrackerStats:
    """State of a tracker on this rank. Its ``repr`` is a table with a line for each consumer.

    Args:
        mode: the tracking mode.
        num_batches: number of ``step()`` calls.
        num_rows: table FQN to the number of rows on this rank.
        lags: consumer to its lag and its pending rows by table.
        memory: memory usage.

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
    lags: Mapping[str, Lag]
    memory: Memory

    def num_pending(self, consumer: str) -> int:
        """Return the number of pending rows of a consumer in all tables."""
        return sum(self.lags[consumer].pending.values())

    def pending_ratio(self, consumer: str) -> float:
        """Return the number of pending rows of a consumer divided by that of all rows."""
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


def _several(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
