"""What the log of changes tells the monitor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Protocol

from delta_tracker.monitor.default import metrics
from delta_tracker.tracker.ages import Lag


class HasRows(Protocol):
    """A store."""

    num_rows: int


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
