"""Metrics of a publisher."""

from __future__ import annotations

from delta_tracker.errors import FencedError, RankFailedError, RankLostError, StorageError, UnfinishedStepError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.coordinator import Coordinator
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.maintenance.upkeep import UPKEEP_STEPS
from delta_tracker.stream.storage.url import shown_url

_FAILURES = (FencedError, RankFailedError, RankLostError, StorageError, UnfinishedStepError)


class PublisherGauges:
    """Metrics of one publisher: versions, rows and failures.

    Args:
        recorder: recorder of the publisher.
        counts_versions: True on rank 0, which counts the versions and rows of all ranks.
    """

    def __init__(self, recorder: Recorder, *, counts_versions: bool) -> None:
        self._recorder = recorder
        self._counts_versions = counts_versions
        self._measured: int | None = None  # version at which the clock was compared

    def begin(self, stream: Coordinator) -> None:
        """Create the metrics that alerts use, even though there is nothing to count yet.

        Alerts can then detect the first failure and the absence of new versions.

        Args:
            stream: the stream, whose last entry is the publisher's claim.
        """
        head, url = stream.head, stream.storage.url
        self._recorder.publisher_info.set(1, stream=head.stream, url=shown_url(url))
        if self._counts_versions:
            self._recorder.published_versions.cell(kind="delta")
            self._recorder.published_version.set(head.version)
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
        num_bytes = manifest.total_bytes if manifest.training else manifest.num_bytes
        self._recorder.published_versions.cell(kind=manifest.kind).add(1)
        self._recorder.published_bytes.cell(kind=manifest.kind).add(num_bytes)
        for fqn, num_rows in manifest.rows_by_table.items():
            self._recorder.published_rows.cell(table=fqn).add(num_rows)
        self._recorder.published_version.set(manifest.version)

    def upkeep_failed(self, step: str) -> None:
        """Count a compaction or retention that failed. Any thread may call it."""
        self._recorder.upkeep_failures.cell(step=step).add(1)

    def _show_skew(self, stream: Coordinator) -> None:
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
