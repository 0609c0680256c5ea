"""What publisher and predictor tell the monitor: one line at each place that has something to tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from delta_tracker.errors import CorruptPartError, FencedError, PublishError, RankLostError, StorageError
from delta_tracker.monitor.default import MONITOR, metrics
from delta_tracker.monitor.source import Owned
from delta_tracker.predictor.status import Status
from delta_tracker.stream.format.manifest import Manifest

_PUBLISH_FAILURES = (FencedError, PublishError, RankLostError, StorageError)


class HasStatus(Protocol):
    """A predictor."""

    def status(self) -> Status:
        """How it stands."""


def watch_publisher(*, counts_versions: bool) -> None:
    """A publisher begins: an alert has to see its first fault, and a stream that never moves, from 0 on.

    Args:
        counts_versions: it is the one of the ranks that does.
    """
    if counts_versions:
        metrics.published_versions.cell(kind="delta")
    metrics.fences.add(0)
    for failure in _PUBLISH_FAILURES:
        metrics.publish_failures.cell(reason=failure.__name__)


def watch_predictor(predictor: HasStatus, faults: Iterable[type[Exception]]) -> None:
    """A predictor begins, which may go around these faults; its lag is read at each collection while it lives."""
    metrics.refused_parts.cell(reason="corrupt")
    metrics.follow_errors.cell(reason=StorageError.__name__)
    for fault in (*faults, StorageError):
        metrics.resyncs.cell(reason=fault.__name__)
    MONITOR.add_source(Owned("predictor", predictor, record_status, forget_status))


def record_status(predictor: HasStatus) -> None:
    """Tell the monitor how far behind its stream a predictor is; asks the store, in the monitor's thread."""
    status = predictor.status()
    if status.lag_versions is None or status.lag_seconds is None:
        forget_status()  # the store does not answer: what it said before is not how it stands
        return
    metrics.predictor_lag_versions.set(status.lag_versions)
    metrics.predictor_lag_seconds.set(status.lag_seconds)


def forget_status() -> None:
    """It is not known how far behind a predictor is, or it is gone."""
    metrics.predictor_lag_versions.remove()
    metrics.predictor_lag_seconds.remove()


def count_published(manifest: Manifest) -> None:
    """A version was committed."""
    metrics.published_versions.cell(kind=manifest.kind).add(1)
    metrics.published_bytes.cell(kind=manifest.kind).add(manifest.num_bytes)
    for fqn, num_rows in _rows(manifest).items():
        metrics.published_rows.cell(table=fqn).add(num_rows)
    metrics.published_version.set(manifest.version)


def count_failure(error: Exception) -> None:
    """A version was not published."""
    metrics.publish_failures.cell(reason=type(error).__name__).add(1)
    if isinstance(error, FencedError):
        metrics.fences.add(1)


def count_applied(manifest: Manifest) -> None:
    """A version was applied to a predictor's model."""
    metrics.applied_versions.cell(kind=manifest.kind).add(1)
    for fqn, num_rows in _rows(manifest).items():
        metrics.applied_rows.cell(table=fqn).add(num_rows)
    metrics.applied_version.set(manifest.version)


def count_resync(fault: Exception) -> None:
    """A predictor went around a fault of its stream."""
    metrics.resyncs.cell(reason=type(fault).__name__).add(1)
    if isinstance(fault, CorruptPartError):
        metrics.refused_parts.cell(reason="corrupt").add(1)


def count_failed_turn(error: Exception) -> None:
    """A predictor that follows could not go on, and tries again."""
    metrics.follow_errors.cell(reason=type(error).__name__).add(1)


def _rows(manifest: Manifest) -> dict[str, int]:
    """Table to rows in the version's parts."""
    found: dict[str, int] = {}
    for part in manifest.parts:
        for block in part.blocks:
            found[block.table] = found.get(block.table, 0) + block.num_rows
    return found
