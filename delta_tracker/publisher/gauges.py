"""Metrics of a publisher."""

from __future__ import annotations

from typing import Protocol

from delta_tracker.errors import (
    FencedError,
    PublishError,
    RankLostError,
    StorageError,
    UnfinishedStepError,
)
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.monitor.series import Cell
from delta_tracker.stream.format.manifest import Kind, Manifest
from delta_tracker.stream.maintenance.upkeep import UPKEEP_STEPS
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.url import shown_url

_FAILURES = (FencedError, PublishError, RankLostError, StorageError, UnfinishedStepError)


class ClaimedLog(Protocol):
    """Protocol of a stream that a publisher writes."""

    head: Manifest

    @property
    def storage(self) -> Storage:
        """Store of the stream."""

    def skew(self) -> float | None:
        """Return this host's clock minus the store's in seconds, at the commit of :attr:`head`."""


class PublisherGauges:
    """Metrics of one publisher: versions, rows and failures.

    Args:
        recorder: recorder of the publisher.
        counts_versions: True on rank 0, which counts the versions and rows of all ranks.
    """

    def __init__(self, recorder: Recorder, *, counts_versions: bool) -> None:
        self._recorder = recorder
        self._counts_versions = counts_versions
        self._version_cells: dict[Kind, tuple[Cell, Cell]] = {}
        self._row_cells: dict[str, Cell] = {}
        self._version_cell: Cell  # set by begin()
        self._measured: int | None = None  # version at which the clock was compared

    def begin(self, stream: ClaimedLog) -> None:
        """Create the metrics that alerts use, even though there is nothing to count yet.

        Alerts can then detect the first failure and the absence of new versions.

        Args:
            stream: the stream, whose last entry is the publisher's claim.
        """
        head, url = stream.head, stream.storage.url
        self._recorder.publisher_info.set(1, stream=head.stream, url=shown_url(url))
        if self._counts_versions:
            self._recorder.published_versions.cell(kind="delta")
            self._version_cell = self._recorder.published_version.cell()
            self._version_cell.add(head.version)
            for step in UPKEEP_STEPS:
                self._recorder.upkeep_failures.cell(step=step)
            self._recorder.watch(lambda _: self._show_skew(stream))
        self._recorder.fences.cell()
        for failure in _FAILURES:
            self._recorder.publish_failures.cell(reason=failure.__name__)

    def published(self, manifest: Manifest) -> None:
        """Count a committed version and its rows. No-op on ranks that do not count versions."""
        if not self._counts_versions:
            return
        kind = manifest.kind
        if kind not in self._version_cells:
            recorder = self._recorder
            self._version_cells[kind] = (
                recorder.published_versions.cell(kind=kind),
                recorder.published_bytes.cell(kind=kind),
            )
        versions, num_bytes = self._version_cells[kind]
        versions.add(1)
        num_bytes.add(manifest.total_bytes if manifest.training else manifest.num_bytes)
        for fqn, num_rows in manifest.rows_by_table.items():
            if fqn not in self._row_cells:
                self._row_cells[fqn] = self._recorder.published_rows.cell(table=fqn)
            self._row_cells[fqn].add(num_rows)
        self._version_cell.add(manifest.version)

    def upkeep_failed(self, step: str) -> None:
        """Count a compaction or retention that failed. Any thread may call it."""
        self._recorder.upkeep_failures.cell(step=step).add(1)

    def _show_skew(self, stream: ClaimedLog) -> None:
        """Set the gauge of the clock's skew, once per version. Runs in the collector's thread."""
        version = stream.head.version
        if version != self._measured:
            skew = stream.skew()
            if skew is not None:
                self._recorder.publisher_skew_seconds.set(skew)
            self._measured = version

    def failed(self, error: Exception) -> None:
        """Count a version that was not published because of ``error``."""
        self._recorder.publish_failures.cell(reason=type(error).__name__).add(1)
        if isinstance(error, FencedError):
            self._recorder.fences.cell().add(1)
