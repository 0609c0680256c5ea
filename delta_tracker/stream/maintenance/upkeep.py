"""Upkeep: retention and compaction of a stream beside the publisher that writes it."""

from __future__ import annotations

import logging
import threading

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.interruption import Interrupted, interruptible
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import DEFAULT_MAX_BYTES, check_bounds, compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage

_logger = logging.getLogger(__name__)


class Upkeep:
    """Merges versions and removes old ones in a thread of its own, one pass at a time.

    A pass compacts first, so that what retention then finds is as small as it can be. It never fails its caller: a
    failure is logged once, kept in :attr:`error`, and the next pass tries again. Call it from one thread.

    Args:
        storage: where the stream lies.
        retention: what stays; None removes nothing.
        compact_every: merge after so many versions, 2 or more; None merges nothing.
        retain_every: remove after so many versions. A pass reads every entry of the log.
        fold: as for :func:`~delta_tracker.stream.maintenance.compaction.compact`.
        max_bytes: as there; that much memory a pass takes beside the publisher.
        close_seconds: how long :meth:`close` lets the pass that is under way run.

    Raises:
        InvalidArgumentError: for a bound that is none.
    """

    def __init__(
        self,
        storage: Storage,
        retention: Retention | None,
        *,
        compact_every: int | None = None,
        retain_every: int = 16,
        fold: float = 0.5,
        max_bytes: int = DEFAULT_MAX_BYTES,
        close_seconds: float = 10.0,
    ) -> None:
        if type(retain_every) is not int or retain_every < 1:
            raise InvalidArgumentError("retain_every", retain_every, "Pass an integer of 1 or more")
        if not 0 <= close_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("close_seconds", close_seconds, "Pass seconds, 0 or more")
        check_bounds(fold, max_bytes, 2 if compact_every is None else compact_every, name="compact_every")
        self._log = StreamLog(storage)
        self._retention = retention
        self._compact_every = compact_every
        self._retain_every = retain_every
        self._fold = fold
        self._max_bytes = max_bytes
        self._close_seconds = close_seconds
        self._stop = threading.Event()
        self._compacted: int | None = None  # the version of the last pass of each kind, the first one to begin with
        self._retained: int | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """Why the last pass failed; None if it did not."""
        return self._error

    def after(self, version: int) -> None:
        """``version`` was committed: begin what is due, unless a pass is under way. Never waits, never raises."""
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            return
        if self._compacted is None or self._retained is None:
            self._compacted = self._retained = version - 1
        compacts = self._compact_every is not None and version - self._compacted >= self._compact_every
        retains = self._retention is not None and version - self._retained >= self._retain_every
        if not compacts and not retains:
            return
        self._compacted = version if compacts else self._compacted
        self._retained = version if retains else self._retained
        # No daemon: one that is cut off at the interpreter's end would leave parts behind.
        thread = threading.Thread(target=self._run, args=(compacts, retains), name="upkeep", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # no threads left, or the interpreter is at its end
            self._fail(error)
        else:
            self._thread = thread

    def close(self) -> None:
        """Let the pass that is under way run for ``close_seconds``, then end it; no other begins.

        A pass that is ended leaves the stream as readers and later passes can use it, and at most some parts that no
        entry names, for a later retention. It ends between two requests or pieces; a request that reads is abandoned.
        """
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(self._close_seconds)
            if self._thread.is_alive():
                self._stop.set()
                self._thread.join()

    def _run(self, compacts: bool, retains: bool) -> None:  # noqa: FBT001  positions of a thread's arguments
        try:
            with interruptible(self._stop):
                self._pass(compacts=compacts, retains=retains)
        except Interrupted:
            _logger.info("the upkeep of %s was ended by close()", self._log.storage.url)
        except Exception as error:  # noqa: BLE001  upkeep must never reach training; logged and kept
            self._fail(error)
        else:
            self._error = None

    def _pass(self, *, compacts: bool, retains: bool) -> None:
        if compacts:
            compact(self._log, fold=self._fold, max_bytes=self._max_bytes)
        if retains and self._retention is not None:
            retain(self._log, self._retention)

    def _fail(self, error: Exception) -> None:
        if str(error) != str(self._error):
            _logger.warning("the upkeep of %s failed and will be tried again: %s", self._log.storage.url, error)
        self._error = error
