"""Apply the versions of a recovery stream on one rank: :class:`ShardFollower`. Calls no collectives."""

import logging
from collections import deque
from collections.abc import Sequence

from delta_tracker.errors import (
    CorruptPartError,
    MalformedError,
    MissingVersionError,
    NotRecoverableError,
    OlderCopyError,
    StorageError,
    StreamError,
    StreamReplacedError,
    kind_of,
    without_traceback,
)
from delta_tracker.predictor.polling import GAP_CHECK_SECONDS
from delta_tracker.recovery.job import LocalJob
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.recovery.recovery_plan import Plan, prepare
from delta_tracker.recovery.targets import RowWriter
from delta_tracker.sharding.interrupted import is_following, mark_incomplete
from delta_tracker.stream.format.manifest import Manifest, Schema
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import check_is_newer, is_forward, next_entry
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.reading.source import Source

_logger = logging.getLogger(__name__)
_FIRST_BACK_OFF_SECONDS = 0.1
_MAX_BACK_OFF_SECONDS = 5.0

# After one of these, the next entry cannot be applied. Another path to a later version may exist.
_FAULTS = (CorruptPartError, MalformedError, MissingVersionError, NotRecoverableError, StreamReplacedError)


class ShardFollower:
    """Reader of a recovery stream for a standby. Writes new rows and optimizer states to this rank's shards.

    If writing an entry fails or is interrupted, the entry is written again. Unlike a
    :class:`~delta_tracker.predictor.reader.Reader`, a follower may return to an older snapshot after an error.

    Attributes:
        error: error of the last attempt to apply an entry; None if it succeeded. :meth:`advance` retries.
        newest: entry up to which all rows have been written. None before the first entry, and while the model may
            contain older rows.
    """

    def __init__(self, log: StreamLog, job: LocalJob, runtime: Runtime = REAL) -> None:
        self.error: StreamError | None = None
        self.newest: Manifest | None = None
        self._log = log
        self._job = job
        self._monotonic = runtime.monotonic
        self._source = Source(0, log.storage, log=log, runtime=runtime)
        self._position: Position | None = None  # after the last entry, which may be a claim
        self._ahead: deque[Manifest] = deque()  # entries of a path that are not written yet
        self._writer: RowWriter | None = None
        self._schema: Schema | None = None  # of the entries that the writer can write
        self._partial: Manifest | None = None  # entry of which some rows may be written, and others not
        self._pause = 0.0
        self._next_try = self._gap_check = 0.0

    @property
    def version(self) -> int | None:
        """Version of :attr:`newest`; None if :attr:`newest` is None."""
        return None if self.newest is None else self.newest.version

    def applied(self) -> Manifest | None:
        """Return the entry to pass as ``applied`` to :func:`~delta_tracker.recovery.recovery_path.recovery_path`.

        This is :attr:`newest`, or None if a later entry was written in part and is no longer in the log.
        """
        self._begin_again_if_restored()
        partial = self._partial
        if self.newest is None or partial is None:
            return self.newest
        return self.newest if Position.after(partial).names(self._log.read(partial.version)) else None

    def advance(self, until: float) -> bool:
        """Apply entries until the end of the log or the monotonic time ``until``. Return True if an entry was applied.

        An entry that is being applied at ``until`` is completed. Errors of the store or of the stream are logged and
        stored in :attr:`error`. After an error, calls do nothing for up to five seconds, and then retry. Raises an
        error if the stream does not match the job or contains no training states.
        """
        self._begin_again_if_restored()
        has_moved = False
        while self._monotonic() >= self._next_try:
            try:
                is_applied = self._step()
            except (StorageError, OlderCopyError, *_FAULTS) as error:
                if isinstance(error, NotRecoverableError) and self._writer is None:
                    raise
                self._failed(error)
                break
            if self.error is not None:
                _logger.warning("standby recovered at version %s: url=%s", self.version, self._log.url)
                self.error, self._pause = None, 0.0
            has_moved |= is_applied
            if not is_applied or self._monotonic() >= until:
                break
        return has_moved

    def retry(self) -> None:
        """Make the next :meth:`advance` retry immediately after an error, and check for missing versions."""
        self._next_try = self._gap_check = 0.0

    def overwritten(self, plan: Plan) -> None:
        """Record that a restore according to ``plan`` failed and may have written rows."""
        if plan.continues:
            self._partial = plan.last
        else:
            self._begin_again()

    def _begin_again_if_restored(self) -> None:
        has_written = self.newest is not None or self._partial is not None
        if has_written and not is_following(self._job.model):
            _logger.warning("standby begins again with the newest snapshot, because the model was restored")
            self._begin_again()

    def _begin_again(self) -> None:
        self.newest = self._partial = self._position = None
        self._ahead.clear()

    def _failed(self, error: StreamError) -> None:
        self._pause = min(_MAX_BACK_OFF_SECONDS, max(2 * self._pause, _FIRST_BACK_OFF_SECONDS))
        self._next_try = self._monotonic() + self._pause
        if self.error is None or kind_of(error) != kind_of(self.error):
            _logger.warning("standby failed and retries: %s", str(error))
        self.error = without_traceback(error)

    def _step(self) -> bool:
        if self._position is None and not self._ahead:
            try:
                self._take_path(recovery_path(self._log))
            except NotRecoverableError as error:
                if error.version is not None:
                    raise
                return False
        entry = None
        try:
            entry = self._ahead[0] if self._ahead else self._next()
            if entry is None:
                return False
            if self.newest is not None and self.applied() is None:
                _logger.warning("standby begins again: a version that it applied in part is not in the log any more")
                self._begin_again()
                return True
            self._apply(entry)
        except _FAULTS as fault:
            if not self._finds_other_path(entry):
                raise
            _logger.warning("standby continues past a version that cannot be applied: %s", str(fault))
            return True
        if self._ahead:
            self._ahead.popleft()
        self._position = Position.after(entry)
        return True

    def _next(self) -> Manifest | None:
        """Return the next entry; None if there is none yet. At intervals, check whether a missing entry was deleted."""
        assert self._position is not None, "an entry was applied"
        looks_for_gap = self.error is not None or self._monotonic() >= self._gap_check
        entry = next_entry(self._log, self._position, self._source.next(self._position, looks_for_gap=looks_for_gap))
        if entry is None and looks_for_gap:
            self._gap_check = self._monotonic() + GAP_CHECK_SECONDS
        return entry

    def _apply(self, entry: Manifest) -> None:
        if entry.kind == "claim":
            return
        if entry.schema != self._schema:
            if entry.kind != "snapshot" or not entry.training:
                reason = "its tables, states or format differ from those of the version before it"
                raise NotRecoverableError(self._log.url, entry.version, reason)
            self._check([entry])
        assert self._writer is not None, "made by _check()"
        held = self.newest
        if held is not None and (entry.stream != held.stream or entry.version <= held.version):
            self.newest = None  # rows that the model has are replaced by older ones
        if self._partial is None or self._partial.version < entry.version:
            self._partial = entry
        mark_incomplete(self._job.model, entry.version, is_following=True)
        self._writer.write(entry)
        self.newest = entry
        if entry.kind == "snapshot" or entry.version >= self._partial.version:
            self._partial = None

    def _finds_other_path(self, faulty: Manifest | None) -> bool:
        """Find a path to the newest version that avoids the entry ``faulty``, if given. Return True if it exists."""
        applied = self.newest if faulty is None and self._partial is None else None
        try:
            path = recovery_path(self._log, applied=applied, avoid=faulty)
            if not self._is_forward(path[-1]):
                return False
            self._take_path(path[1:] if path[0] == applied else path)
        except (StorageError, *_FAULTS) as error:
            _logger.info("standby found no other path: %s", str(error))
            return False
        return bool(self._ahead)

    def _is_forward(self, target: Manifest) -> bool:
        """Return True if ``target`` is newer than the model's rows. Raise OlderCopyError for an older copy."""
        position = self._position
        if self.newest is None or position is None or target.stream != position.stream:
            return True
        if is_forward(self._log, position, target):
            return True
        check_is_newer(self._log, position)
        return False

    def _take_path(self, path: Sequence[Manifest]) -> None:
        if path and path[-1].schema != self._schema:
            self._check(path)
        self._ahead = deque(path)

    def _check(self, path: Sequence[Manifest]) -> None:
        """Compare the last entry of a path with the job, and prepare the writes of its rows."""
        plan = prepare(self._log, path, self._job)
        self._writer = RowWriter(self._log.storage, plan.shard_specs, plan.targets)
        self._schema = path[-1].schema
