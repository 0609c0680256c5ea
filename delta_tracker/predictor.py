"""Predictor: brings the tables of a serving model to a stream's newest version, while they are being read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.placement import Placement, place
from delta_tracker.row_target import RowTarget
from delta_tracker.stream.codec import Rows, decode
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.manifest import Manifest, Part
from delta_tracker.stream.storage import Storage, open_storage
from delta_tracker.table_lock import TableLock
from delta_tracker.targets import check_targets, find_targets

_logger = logging.getLogger(__name__)

# Rows written under one hold of the lock. A lookup waits for one chunk at most.
_CHUNK_ROWS = 4096
# A poll costs one probe of the next name; telling a gap from the head costs a listing, so that is done less often.
_GAP_CHECK_SECONDS = 5.0
_MAX_BACK_OFF_SECONDS = 5.0


class Predictor:
    """Applies the versions of a stream, in order and each once, to the tables of a model.

    It starts from the newest snapshot and follows from there. A version is read and checked whole before its first row
    is written: an error leaves the tables and :attr:`version` as they were. Needs neither torchrec nor fbgemm.

    Lookups in other threads stand inside ``with predictor.reading()``: no row changes there. Rows are written in
    chunks between such blocks, so while a version is being applied some rows are of the next version already; none is
    ever torn.

    Args:
        model: a module whose tables are named as the stream's (``<fqn>.weight``): ``nn.Embedding``,
            ``nn.EmbeddingBag``, unsharded TorchRec collections; or a mapping of FQN to tensor. Its tables are looked up
            anew for each version, so that ``model.to(device)`` and the like may be called in between.
        url: the stream, ``file:///directory``, ``s3://bucket/prefix``, ... or an opened
            :class:`~delta_tracker.stream.storage.Storage`.

    Raises:
        InvalidArgumentError: for a model without tables, or a url that names no store.
        StorageError: if the store cannot be opened.

    Example:
        >>> import torch
        >>> predictor = Predictor({"ec.embeddings.user": torch.zeros(10, 4)}, Storage("memory://"))
        >>> predictor.version is None
        True
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor | RowTarget], url: str | Storage) -> None:
        find_targets(model)
        self._model = model
        self._log = StreamLog(open_storage(url))
        self._head: Manifest | None = None  # the last entry of the log that was applied, a claim or not
        self._manifest: Manifest | None = None
        self._tables = TableLock()
        self._syncing = threading.Lock()  # held by whoever moves the version
        self._stop = threading.Event()
        self._follower: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the last snapshot or delta that was applied, None before the first."""
        return self._manifest

    @property
    def version(self) -> int | None:
        """The last version that was applied, claims included, None before the first."""
        return None if self._head is None else self._head.version

    @property
    def error(self) -> Exception | None:
        """What ended :meth:`follow`, or what it is trying to get over; None while all is well."""
        return self._error

    @contextmanager
    def reading(self) -> Iterator[int | None]:
        """Hold the tables still for lookups; gives :attr:`version`. Keep it short: applying waits for its end."""
        with self._tables.reading():
            yield self.version

    def sync(self, limit: int | None = None) -> int:
        """Apply the versions that are committed and not yet applied.

        Args:
            limit: apply this many versions at most; None for all. The first one is the newest snapshot.

        Returns:
            The version that the tables hold now.

        Raises:
            NoSnapshotError: if the stream has no snapshot to start from.
            MissingVersionError: if a version in the middle of the log is gone.
            StreamReplacedError: if another stream stands in its place.
            TableMismatchError: if a table of the stream cannot be received by the model.
            CorruptPartError, MalformedError: if a version is not what it says it is.
            StorageError: if the store cannot be read.
            InvalidArgumentError: for a limit under 1, or inside :meth:`reading`, for whose end it would wait.
        """
        if limit is not None and limit < 1:
            raise InvalidArgumentError("limit", limit, "Pass a count of 1 or more, or None")
        self._refuse_inside_reading("sync()")
        with self._syncing:
            num_applied = 0
            while limit is None or num_applied < limit:
                manifest = self._next()
                if manifest is None:
                    self._check_for_gap()
                    break
                self._apply(manifest)
                num_applied += 1
            assert self._head is not None, "_next raises before the first version"
            return self._head.version

    def follow(self, poll_seconds: float = 0.01) -> None:
        """Keep applying new versions in a background thread until :meth:`stop`.

        It waits for a first snapshot if there is none, and tries again with growing pauses while the store fails. Any
        other error ends it: :attr:`error` holds it, :meth:`stop` raises it, and the tables stay as they were.

        Args:
            poll_seconds: how long to wait before looking for the next version again.

        Raises:
            InvalidArgumentError: if it is following already, or for a time that is negative or not finite.
        """
        if not 0 <= poll_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("poll_seconds", poll_seconds, "Pass seconds, 0 or more")
        if self._follower is not None and self._follower.is_alive():
            raise InvalidArgumentError("follow()", "already following", "Call stop() first")
        self._stop.clear()
        self._error = None
        self._follower = threading.Thread(target=self._run, args=(poll_seconds,), name="predictor", daemon=True)
        self._follower.start()

    def stop(self) -> None:
        """End :meth:`follow` after the version that it is applying; raises the error that ended it before.

        Raises:
            InvalidArgumentError: inside :meth:`reading`, for whose end the version may be waiting.
        """
        self._refuse_inside_reading("stop()")
        follower = self._follower
        if follower is None:
            return
        self._stop.set()
        follower.join()
        self._follower = None
        if self._error is not None:
            raise self._error

    def _refuse_inside_reading(self, call: str) -> None:
        if self._tables.is_reading:
            raise InvalidArgumentError(call, "inside reading()", "Leave the `with predictor.reading()` block first")

    def _run(self, poll_seconds: float) -> None:
        gap_check = time.monotonic() + _GAP_CHECK_SECONDS
        pause = poll_seconds
        while not self._stop.is_set():
            try:
                with self._syncing:
                    manifest = self._next()
                    if manifest is not None:
                        self._apply(manifest)
                    elif time.monotonic() >= gap_check:
                        self._check_for_gap()
                        gap_check = time.monotonic() + _GAP_CHECK_SECONDS
                self._error, pause = None, poll_seconds
                if manifest is not None:
                    continue
            except NoSnapshotError:
                self._error, pause = None, poll_seconds
            except StorageError as error:
                if self._error is None:
                    _logger.warning("the predictor cannot read its stream and keeps trying: %s", error)
                self._error = error
                pause = min(_MAX_BACK_OFF_SECONDS, max(2 * pause, 0.001))
            except Exception as error:
                _logger.exception("the predictor stopped following %s", self._log.storage.url)
                self._error = error
                return
            self._stop.wait(pause)

    def _next(self) -> Manifest | None:
        """The version to apply next, None if there is none yet."""
        held = self._head
        if held is None:
            snapshot = self._log.newest_snapshot()
            if snapshot is None:
                raise NoSnapshotError(self._log.storage.url)
            return snapshot
        manifest = self._log.read(held.version + 1)
        if manifest is None:
            return None
        if manifest.stream != held.stream or manifest.generation < held.generation:
            raise StreamReplacedError(self._log.storage.url, held.version)
        return manifest

    def _check_for_gap(self) -> None:
        """The next version is not there: it was not made yet, is missing, or the whole stream is another one."""
        held = self._head
        assert held is not None, "there is a version before a gap"
        versions = self._log.versions()
        head = versions[-1] if versions else -1
        present = self._log.read(held.version)
        if head < held.version or (present is not None and present.writer != held.writer):
            raise StreamReplacedError(self._log.storage.url, held.version)
        # A version that was committed between the probe and the listing is no gap.
        missing = held.version + 1
        if head > missing and self._log.read(missing) is None:
            raise MissingVersionError(missing, head)

    def _apply(self, manifest: Manifest) -> None:
        """Read and check everything, then write."""
        targets = find_targets(self._model)
        check_targets(manifest, targets)
        rows = [rows for part in manifest.parts for rows in self._load(part, manifest)]
        for placement in place(rows, targets):
            self._write(placement)
        with self._tables.writing():
            self._head = manifest
            if manifest.kind != "claim":
                self._manifest = manifest

    def _load(self, part: Part, manifest: Manifest) -> list[Rows]:
        try:
            data = self._log.storage.read(part.name, max_bytes=part.num_bytes)
        except MalformedError as error:
            raise CorruptPartError(part.name, error.reason) from error
        return decode(part, data, manifest.tables)

    def _write(self, placement: Placement) -> None:
        for chunk in placement.chunks(_CHUNK_ROWS):
            with self._tables.writing():
                chunk.write()
