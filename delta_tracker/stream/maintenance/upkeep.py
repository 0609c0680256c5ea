"""Upkeep: background retention and compaction in the publisher's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from delta_tracker.errors import InvalidArgumentError, kind_of, unraised
from delta_tracker.stream.interruption import Interrupted, interruptible
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import DEFAULT_MAX_BYTES, check_bounds, compact
from delta_tracker.stream.maintenance.retention import Retained, Retention, RetentionPasses
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)

RETAIN_EVERY = 16  # versions between two retention passes
UPKEEP_STEPS = ("start", "compaction", "retention")
"""What may fail: the start of the thread of a pass, or one of its steps."""


class Upkeep:
    """Runner of compaction and retention in a background thread, one pass at a time. Not thread-safe.

    A pass compacts before it deletes, and deletes even if the compaction failed. A failure is kept in :attr:`error`,
    and logged unless the same step failed with the same kind of error before. The next pass retries.

    Args:
        retention: bounds for retention passes; None disables retention.
        compact_every: number of versions between compactions, 2 or more; None disables compaction.
        retain_every: number of versions between retention passes, see
            :class:`~delta_tracker.stream.maintenance.retention.RetentionPasses`.
        fold: see :func:`~delta_tracker.stream.maintenance.compaction.compact`.
        max_bytes: maximum bytes of versions that a compaction holds in memory.
        close_seconds: time that :meth:`close` waits for a running pass before it interrupts the pass.
        on_pass: called in the background thread after each pass, with False if the pass deleted nothing and merged
            nothing, and True otherwise, also if it failed or was interrupted. Must not raise.
        on_failure: called with one of ``UPKEEP_STEPS`` each time it failed. Must not raise.
    """

    def __init__(  # noqa: PLR0913  all but two have a default that most users keep
        self,
        storage: Storage,
        retention: Retention | None,
        *,
        compact_every: int | None = None,
        retain_every: int = RETAIN_EVERY,
        fold: float = 0.5,
        max_bytes: int = DEFAULT_MAX_BYTES,
        close_seconds: float = 10.0,
        on_pass: Callable[[bool], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        if type(retain_every) is not int or retain_every < 1:
            raise InvalidArgumentError("retain_every", retain_every, "Pass an integer of 1 or more")
        if not 0 <= close_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("close_seconds", close_seconds, "Pass seconds, 0 or more")
        check_bounds(fold, max_bytes, 2 if compact_every is None else compact_every, name="compact_every")
        self._log = StreamLog(storage)
        self._passes = None if retention is None else RetentionPasses(self._log, retention)
        self._compact_every = compact_every
        self._retain_every = retain_every
        self._fold = fold
        self._max_bytes = max_bytes
        self._close_seconds = close_seconds
        self._on_pass = on_pass
        self._on_failure = on_failure
        self._stop = threading.Event()
        # Version at the last pass of each kind. The first call of after() sets both to the preceding version.
        self._compacted: int | None = None
        self._retained: int | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # One of UPKEEP_STEPS to its last error. Replaced, never changed, because it is read while a pass runs.
        self._errors: dict[str, Exception] = {}

    @property
    def error(self) -> Exception | None:
        """Error of the last compaction or of the last retention, without a traceback; None if neither failed.

        If both failed, the one that has failed for longer. The error of a step remains until that step succeeds.
        """
        return next(iter(self._errors.values()), None)

    def after(self, version: int) -> None:
        """Start a pass if one is due after the committed ``version`` and none is running. Never blocks or raises."""
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            return
        if self._compacted is None or self._retained is None:
            self._compacted = self._retained = version - 1
        compacts = self._compact_every is not None and version - self._compacted >= self._compact_every
        retains = self._passes is not None and version - self._retained >= self._retain_every
        if not compacts and not retains:
            return
        self._compacted = version if compacts else self._compacted
        self._retained = version if retains else self._retained
        # Not a daemon: a daemon killed at the interpreter's exit would leave parts behind.
        thread = threading.Thread(target=self._run, args=(compacts, retains), name="upkeep", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start a thread, or the interpreter shuts down
            self._fail("start", error)
        else:
            self._thread = thread

    def close(self) -> None:
        """Wait up to ``close_seconds`` for a running pass, then interrupt it. No pass starts after this call.

        An interrupted pass does not wait for the response to a read. The stream stays valid, and a later retention pass
        deletes parts that no entry names.
        """
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(self._close_seconds)
            if self._thread.is_alive():
                self._stop.set()
                self._thread.join()

    def _run(self, compacts: bool, retains: bool) -> None:  # noqa: FBT001  positions of a thread's arguments
        steps = [("compaction", self._compact)] * compacts + [("retention", self._retain)] * retains
        self._succeed("start")
        has_changed = True  # unless all steps succeed
        try:
            with interruptible(self._stop):
                changes = [self._try(step, run) for step, run in steps]
            has_changed = any(changes)
        except Interrupted:
            _logger.info("close() interrupted the upkeep pass: url=%s", self._log.storage.url)
        except Exception as error:  # noqa: BLE001  a failure must not reach training; it is logged and kept
            self._fail("start", error)
        finally:
            if self._on_pass is not None:
                self._on_pass(has_changed)

    def _try(self, step: str, run: Callable[[], bool]) -> bool:
        """Run one step of a pass. Return False if it succeeded and changed nothing."""
        try:
            has_changed = run()
        except Exception as error:  # noqa: BLE001  the next step runs: a store without space needs it
            self._fail(step, error)
            return True
        self._succeed(step)
        return has_changed

    def _compact(self) -> bool:
        return compact(self._log, fold=self._fold, max_bytes=self._max_bytes) is not None

    def _retain(self) -> bool:
        return self._passes is not None and self._passes.run() != Retained()

    def _succeed(self, step: str) -> None:
        if step in self._errors:
            self._errors = {other: error for other, error in self._errors.items() if other != step}
            if not self._errors:
                _logger.warning("upkeep recovered: url=%s", self._log.storage.url)

    def _fail(self, step: str, error: Exception) -> None:
        before = self._errors.get(step)
        if before is None or kind_of(error) != kind_of(before):
            _logger.warning("upkeep failed, the next pass retries: url=%s error=%s", self._log.storage.url, error)
        self._errors = {**self._errors, step: unraised(error)}
        if self._on_failure is not None:
            self._on_failure(step)
