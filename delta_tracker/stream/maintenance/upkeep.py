"""Upkeep: background retention and compaction in the publisher's process."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from delta_tracker.arguments import check_count, check_seconds, check_type, refuses_unknown
from delta_tracker.errors import MalformedError, StorageError, kind_of, without_traceback
from delta_tracker.stream.interruption import Interrupted, interruptible
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retained, Retention, RetentionPasses
from delta_tracker.stream.pointer_writer import POINTER_SECONDS
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)
RETAIN_EVERY = 16  # versions between two retention passes
UPKEEP_STEPS = ("start", "compaction", "retention")
"""Steps that may fail: starting the thread of a pass, compaction, and retention."""


class _Step(NamedTuple):
    name: str  # one of UPKEEP_STEPS
    every: int  # number of versions between two runs
    run: Callable[[], bool]  # returns False if it changed nothing


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Settings of the maintenance of a stream, which its publisher runs in background threads of rank 0.

    Args:
        retention: bounds on the versions that the stream retains. Versions beyond these bounds are deleted once every
            16 versions. Only versions before a snapshot can be deleted, so also set ``Cadence(snapshot_every=...)`` or
            ``compact_every``. None retains all versions.
        compact_every: number of versions between two compactions, 2 or more; None disables compaction.
        pointer_seconds: minimum time between two writes of the pointer object ``control/head.json``, with which readers
            over http find new versions. It is written only after commits. Failures are logged. None disables writes.

    Raises:
        InvalidArgumentError: if an argument is invalid.

    Example:
        >>> Upkeep(retention=Retention(versions=500), compact_every=50).pointer_seconds
        1.0
    """

    retention: Retention | None = None
    compact_every: int | None = None
    pointer_seconds: float | None = POINTER_SECONDS

    def __post_init__(self) -> None:
        check_type("retention", self.retention, Retention, "Retention(versions=500)")
        if self.compact_every is not None:
            check_count("compact_every", self.compact_every, 2)
        check_seconds("pointer_seconds", self.pointer_seconds)


class _RetentionStep:
    """Step that runs retention. It logs once if nothing can be deleted because no new snapshot is published."""

    def __init__(self, log: StreamLog, retention: Retention) -> None:
        self._log, self._passes = log, RetentionPasses(log, retention)
        self._bound = retention.versions  # None once it was logged

    def run(self) -> bool:
        if self._passes.run() != Retained():
            return True
        if self._bound is not None:
            num_after = self._num_after_snapshot()
            if num_after > 2 * self._bound + RETAIN_EVERY:
                self._bound = None
                _logger.warning(
                    "retention can delete nothing: %d versions follow the newest snapshot, and only those before it "
                    "are deleted. Set Cadence(snapshot_every=...) or Upkeep(compact_every=...), or call snapshot(): "
                    "url=%s",
                    num_after,
                    self._log.storage.url,
                )
        return False

    def _num_after_snapshot(self) -> int:
        with suppress(MalformedError, StorageError):
            head, snapshot = self._log.head(), self._log.newest_snapshot()
            if head is not None:
                return head.version - (0 if snapshot is None else snapshot.version)
        return 0


class UpkeepThread:
    """Runner of compaction and retention in a background thread, one pass at a time. Not thread-safe.

    A pass runs compaction first, and then retention, even if the compaction failed. A failure is stored in
    :attr:`error`, and logged unless the last failure of the same step was of the same kind. The next pass retries.

    Args:
        upkeep: settings of retention and compaction. This thread does not write the pointer object.
        retain_every: number of versions between retention passes.
        close_seconds: time that :meth:`close` waits for a running pass before it interrupts the pass.
        on_pass: function to call in the background thread after each pass. Its argument is False if the pass succeeded
            and changed nothing, otherwise True. Must not raise.
        on_failure: function to call with the name of a step, one of ``UPKEEP_STEPS``, if it fails. Must not raise.
    """

    def __init__(
        self,
        storage: Storage,
        upkeep: Upkeep,
        *,
        retain_every: int = RETAIN_EVERY,
        close_seconds: float = 10.0,
        on_pass: Callable[[bool], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._log = log = StreamLog(storage)
        self._steps: list[_Step] = []
        if upkeep.compact_every is not None:
            self._steps.append(_Step("compaction", upkeep.compact_every, lambda: compact(log) is not None))
        if upkeep.retention is not None:
            self._steps.append(_Step("retention", retain_every, _RetentionStep(log, upkeep.retention).run))
        self._last: dict[str, int] = {}  # name of a step to the version of its last run, at first the preceding one
        self._close_seconds = close_seconds
        self._on_pass = on_pass
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # One of UPKEEP_STEPS to its last error. Replaced, never changed, because it is read while a pass runs.
        self._errors: dict[str, Exception] = {}

    @property
    def error(self) -> Exception | None:
        """Error of the last compaction or retention, without a traceback; None if neither failed.

        If both failed, this is the error of the step that failed first.
        """
        return next(iter(self._errors.values()), None)

    def after(self, version: int) -> None:
        """Start a pass if one is due after the committed ``version`` and none is running. Never blocks or raises."""
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            return
        for step in self._steps:
            self._last.setdefault(step.name, version - 1)
        due = [step for step in self._steps if version - self._last[step.name] >= step.every]
        if not due:
            return
        self._last |= {step.name: version for step in due}
        # Not a daemon: a daemon killed at the interpreter's exit would leave parts behind.
        thread = threading.Thread(target=self._run, args=(due,), name="upkeep", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start a thread, or the interpreter shuts down
            self._fail("start", error)
        else:
            self._thread = thread

    def close(self) -> None:
        """Wait up to ``close_seconds`` for a running pass, then interrupt the pass. No pass starts after this call."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(self._close_seconds)
            if self._thread.is_alive():
                self._stop.set()
                self._thread.join()

    def _run(self, due: Sequence[_Step]) -> None:
        self._succeed("start")
        has_changed = True  # unless all steps succeed
        try:
            with interruptible(self._stop):
                changes = [self._try(step) for step in due]
            has_changed = any(changes)
        except Interrupted:
            _logger.info("close() interrupted the upkeep pass: url=%s", self._log.storage.url)
        except Exception as error:  # noqa: BLE001  a failure must not reach training; it is logged and kept
            self._fail("start", error)
        finally:
            if self._on_pass is not None:
                self._on_pass(has_changed)

    def _try(self, step: _Step) -> bool:
        """Run one step of a pass. Return False if it succeeded and changed nothing."""
        try:
            has_changed = step.run()
        except Exception as error:  # noqa: BLE001  the next step runs: a store without space needs it
            self._fail(step.name, error)
            return True
        self._succeed(step.name)
        return has_changed

    def _succeed(self, step: str) -> None:
        if step in self._errors:
            self._errors = {other: error for other, error in self._errors.items() if other != step}
            if not self._errors:
                _logger.warning("upkeep recovered: url=%s", self._log.storage.url)

    def _fail(self, step: str, error: Exception) -> None:
        before = self._errors.get(step)
        if before is None or kind_of(error) != kind_of(before):
            _logger.warning("upkeep failed, the next pass retries: url=%s error=%s", self._log.storage.url, error)
        self._errors = {**self._errors, step: without_traceback(error)}
        if self._on_failure is not None:
            self._on_failure(step)
