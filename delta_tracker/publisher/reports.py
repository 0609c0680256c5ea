"""Report the results of versions, and large deltas, in logs and metrics: :class:`Reports`."""

import logging
from collections import Counter

from delta_tracker.errors import FencedError, LostEntryError, RankLostError, is_unknown, kind_of, without_traceback
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.coordinator import Coordinator
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.maintenance.upkeep import UPKEEP_STEPS
from delta_tracker.stream.storage.url import redacted_url

_logger = logging.getLogger(__name__)
_FAILURES = ("FencedError", "RankFailedError", "RankLostError", "StorageError", "UnfinishedStepError")
_SHARE = 0.5  # of the rows of a table: a larger delta is reported if several follow each other
_NUM_DELTAS = 10


class Reports:
    """Recorder of the results of a publisher's versions. Updates the metrics of the publisher.

    Args:
        writer: writer of the stream. Rank 0 counts the versions and rows of all ranks.

    Attributes:
        error: error of the last version, without a traceback; None if the version was published.
        is_over: True if this publisher can publish no more versions, because it is fenced or has lost a rank.
    """

    def __init__(self, recorder: Recorder, writer: Coordinator) -> None:
        self.error: Exception | None = None
        self.is_over = False
        self._recorder = recorder
        self._writer = writer
        self._failure: tuple[object, ...] | None = None  # kind of the last failure since the last version
        self._large_deltas = LargeDeltas()
        self._measured: int | None = None  # version at which the clock was compared
        self._version = 0  # the newest one that was published

    def open(self) -> None:
        """Create the metrics that alerts use, with value 0. Call this method after the stream has been claimed.

        Alerts can then detect the first failure and the absence of new versions.
        """
        recorder, head = self._recorder, self._writer.head
        recorder.publisher_info.set(1, stream=head.stream, url=redacted_url(self._writer.storage.url))
        if self._writer.is_first:
            recorder.published_versions.cell(kind="delta")
            self._version = head.version
            recorder.published_version.set_function(lambda: self._version)
            for step in UPKEEP_STEPS:
                recorder.upkeep_failures.cell(step=step)
            recorder.watch(lambda _: self._show_skew())
        recorder.fences.cell()
        for failure in _FAILURES:
            recorder.publish_failures.cell(reason=failure)

    def published(self, committed: Manifest) -> None:
        """Record that the version ``committed`` was published: update the metrics, and reset :attr:`error`."""
        if self._writer.is_first:
            recorder = self._recorder
            num_bytes = committed.total_bytes if committed.training else committed.num_bytes
            recorder.published_versions.cell(kind=committed.kind).add(1)
            recorder.published_bytes.cell(kind=committed.kind).add(num_bytes)
            for fqn, num_rows in committed.rows_by_table.items():
                recorder.published_rows.cell(table=fqn).add(num_rows)
            if committed.kind == "delta":
                self._large_deltas.count_rows(committed)
            self._version = committed.version
        if self.is_over:  # a version before the one that failed
            return
        if self._failure is not None:
            _logger.warning("publishing recovered at version %d", committed.version)
        self.error = self._failure = None

    def failed(self, error: Exception, version: int) -> None:
        """Record that ``version`` failed with ``error``. Log the error unless the last version failed the same way."""
        former, self._failure = self._failure, kind_of(error)
        self.error, self.is_over = without_traceback(error), isinstance(error, FencedError | RankLostError)
        if self._failure != former:
            level = logging.ERROR if isinstance(error, FencedError) else logging.WARNING  # it ends training
            _logger.log(level, "%s: %s", _outcome(error, version), error)
        self._recorder.publish_failures.cell(reason=type(error).__name__).add(1)
        if isinstance(error, FencedError):
            self._recorder.fences.cell().add(1)

    def upkeep_failed(self, step: str) -> None:
        """Count a failure of the upkeep step called ``step`` in the metrics. Any thread may call this method."""
        self._recorder.upkeep_failures.cell(step=step).add(1)

    def _show_skew(self) -> None:
        version = self._writer.head.version
        if version != self._measured:
            skew = self._writer.skew()
            if skew is not None:
                self._recorder.publisher_skew_seconds.set(skew)
            self._measured = version


def _outcome(error: Exception, version: int) -> str:
    if isinstance(error, LostEntryError):
        return f"the next version, {version}, must be a snapshot"
    if is_unknown(error):
        return f"whether version {version} was published is unknown"
    return f"version {version} was not published"


class LargeDeltas:
    """Counters of consecutive deltas that contain more than half of a table's rows, one counter per table."""

    def __init__(self) -> None:
        self._num_large: dict[str, int] = {}

    def count_rows(self, delta: Manifest) -> None:
        """Update the counters for a delta. Log a warning about a table at its tenth consecutive large delta."""
        num_rows: Counter[str] = Counter()
        for part in delta.parts:
            for block in part.blocks:
                num_rows[block.table] += block.num_rows if block.columns[0] == 0 else 0  # once per row
        before, self._num_large = self._num_large, {}
        for fqn, count in num_rows.items():
            if count <= _SHARE * delta.tables[fqn].num_rows:
                continue
            self._num_large[fqn] = before.get(fqn, 0) + 1
            if self._num_large[fqn] != _NUM_DELTAS:
                continue
            _logger.warning(
                "each of the last %d deltas has more than half of the rows of %s. If the batches of a version look up "
                "more than half of the table, publish less often to send fewer bytes. Otherwise, the optimizer changes "
                "the other rows: Adam and momentum on dense gradients change every row that was ever looked up, and "
                "weight decay every row. Use sparse=True with SGD, Adagrad or SparseAdam, or a fused optimizer of "
                "TorchRec; the guide's page on training lists optimizers",
                _NUM_DELTAS,
                fqn,
            )
