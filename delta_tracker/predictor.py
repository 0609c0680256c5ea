"""Predictor: brings the tables of a serving model to a stream's newest version, while they are being read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, MalformedError, MissingVersionError, NoSnapshotError
from delta_tracker.stream.codec import Rows, decode
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.manifest import Manifest
from delta_tracker.stream.storage import Storage, open_storage
from delta_tracker.targets import check_targets, find_targets

# Rows written under one hold of the lock. A lookup waits for one chunk at most.
_CHUNK_ROWS = 4096
# A poll costs one probe of the next name; telling a gap from the head costs a listing, so that is done less often.
_GAP_CHECK_SECONDS = 5.0


class Predictor:
    """Applies the versions of a stream, in order and each once, to the tables of a model.

    It starts from the newest snapshot and follows from there. A version is read and checked whole before its first row
    is written: an error leaves the tables and :attr:`version` as they were. Needs neither torchrec nor fbgemm.

    Lookups in other threads stand inside ``with predictor.reading()``: no row changes there. Rows are written in
    chunks between such blocks.

    Args:
        model: a module whose tables are named as the stream's (``<fqn>.weight``): ``nn.Embedding``,
            ``nn.EmbeddingBag``, unsharded TorchRec collections; or a mapping of FQN to tensor.
        url: the stream, ``file:///directory``, ``s3://bucket/prefix``, ... or an opened
            :class:`~delta_tracker.stream.storage.Storage`.

    Raises:
        InvalidArgumentError: for a model without tables, or a url that names no store.
        StorageError: if the store cannot be opened.

    Example:
        >>> predictor = Predictor({"ec.embeddings.user": torch.zeros(10, 4)}, Storage("memory://"))
        >>> predictor.version is None
        True
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor], url: str | Storage) -> None:
        self._targets = find_targets(model)
        self._log = StreamLog(open_storage(url))
        self._manifest: Manifest | None = None
        self._tables = threading.Lock()  # held by whoever reads or writes rows
        self._syncing = threading.Lock()  # held by whoever moves the version
        self._stop = threading.Event()
        self._follower: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the version that the tables hold, None before the first."""
        return self._manifest

    @property
    def version(self) -> int | None:
        """The version that the tables hold, None before the first."""
        return None if self._manifest is None else self._manifest.version

    @property
    def error(self) -> Exception | None:
        """What ended :meth:`follow`, None while it goes on."""
        return self._error

    @contextmanager
    def reading(self) -> Iterator[int | None]:
        """Hold the tables still for lookups; gives :attr:`version`. Keep it short: applying waits for its end."""
        with self._tables:
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
            TableMismatchError: if a table has another shape or dtype in the stream, or is not in the model.
            CorruptPartError, MalformedError: if a version is not what it says it is.
            StorageError: if the store cannot be read.
        """
        if limit is not None and limit < 1:
            raise InvalidArgumentError("limit", limit, "Pass a count of 1 or more, or None")
        with self._syncing:
            num_applied = 0
            while limit is None or num_applied < limit:
                manifest = self._next()
                if manifest is None:
                    self._check_for_gap()
                    break
                self._apply(manifest)
                num_applied += 1
            assert self._manifest is not None, "_next raises before the first version"
            return self._manifest.version

    def follow(self, poll_seconds: float = 0.01) -> None:
        """Keep applying new versions in a background thread until :meth:`stop`.

        It waits for a first snapshot if there is none. An error ends it: :attr:`error` holds it, :meth:`stop` raises
        it, and the tables stay at the version that they had.

        Args:
            poll_seconds: how long to wait before looking for the next version again.

        Raises:
            InvalidArgumentError: if it is following already, or for a negative time.
        """
        if poll_seconds < 0:
            raise InvalidArgumentError("poll_seconds", poll_seconds, "Pass 0 or more")
        if self._follower is not None:
            raise InvalidArgumentError("follow()", "already following", "Call stop() first")
        self._stop.clear()
        self._error = None
        self._follower = threading.Thread(target=self._run, args=(poll_seconds,), name="predictor", daemon=True)
        self._follower.start()

    def stop(self) -> None:
        """End :meth:`follow` after the version that it is applying; raises the error that ended it before."""
        if self._follower is None:
            return
        self._stop.set()
        self._follower.join()
        self._follower = None
        if self._error is not None:
            raise self._error

    def _run(self, poll_seconds: float) -> None:
        gap_check = time.monotonic() + _GAP_CHECK_SECONDS
        while not self._stop.is_set():
            try:
                with self._syncing:
                    manifest = self._next()
                    if manifest is not None:
                        self._apply(manifest)
                        continue
                    if time.monotonic() >= gap_check:
                        self._check_for_gap()
                        gap_check = time.monotonic() + _GAP_CHECK_SECONDS
            except NoSnapshotError:
                pass
            except Exception as error:  # noqa: BLE001  a thread has no caller: stop() raises it
                self._error = error
                return
            self._stop.wait(poll_seconds)

    def _next(self) -> Manifest | None:
        """The version to apply next, None if there is none yet."""
        held = self._manifest
        if held is None:
            snapshot = self._log.newest_snapshot()
            if snapshot is None:
                raise NoSnapshotError(self._log.storage.url)
            return snapshot
        manifest = self._log.read(held.version + 1)
        if manifest is None:
            return None
        if manifest.stream != held.stream or manifest.generation < held.generation:
            raise MalformedError(
                f"version {manifest.version}",
                f"stream {manifest.stream} generation {manifest.generation} follows "
                f"stream {held.stream} generation {held.generation}",
            )
        return manifest

    def _check_for_gap(self) -> None:
        """The next version is not there: either nothing is, or it is missing. Only a listing can tell."""
        assert self._manifest is not None, "there is a version before a gap"
        missing = self._manifest.version + 1
        beyond = self._log.versions(after=missing)
        # A version that was committed between the probe and the listing is no gap.
        if beyond and self._log.read(missing) is None:
            raise MissingVersionError(missing, beyond[-1])

    def _apply(self, manifest: Manifest) -> None:
        """Read and check everything, then write."""
        check_targets(manifest, self._targets)
        parts = [decode(part, self._log.storage.read(part.name), manifest.tables) for part in manifest.parts]
        for part in parts:
            for rows in part:
                self._write(rows)
        with self._tables:
            self._manifest = manifest

    @torch.no_grad()
    def _write(self, rows: Rows) -> None:
        block = rows.block
        target = self._targets[block.table][:, block.columns[0] : block.columns[1]]
        for begin in range(0, block.num_rows, _CHUNK_ROWS):
            values = rows.values[begin : begin + _CHUNK_ROWS].to(target.device)
            with self._tables:
                if rows.ids is None:
                    first = block.rows[0] + begin
                    target[first : first + len(values)] = values
                else:
                    target.index_copy_(0, rows.ids[begin : begin + _CHUNK_ROWS].to(target.device), values)
