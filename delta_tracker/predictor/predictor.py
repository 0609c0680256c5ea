"""Predictor: keeps a serving model at a stream's newest version, while it is being read."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from delta_tracker.errors import (
    CorruptPartError,
    DenseMismatchError,
    ForkedError,
    HeldVersionError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    PartialRowsError,
    StorageError,
    StreamError,
    StreamReplacedError,
    TableMismatchError,
)
from delta_tracker.forking import Forkable, protect
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.apply import Applier, Model, Receiver
from delta_tracker.predictor.follower import Follower
from delta_tracker.predictor.gate import Gate, GateKeeper
from delta_tracker.predictor.gauges import PredictorGauges
from delta_tracker.predictor.lock import TableLock
from delta_tracker.predictor.status import Served, Status
from delta_tracker.stream.cursor import Place, StreamCursor
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.format.part_buffer import PartBuffer
from delta_tracker.stream.heartbeat import Pulse
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.notify.notifier import Notifier
from delta_tracker.stream.storage.storage import Storage, open_storage

_logger = logging.getLogger(__name__)

# Faults of the stream that another entry may lead past.
_FAULTS = (
    CorruptPartError,
    DenseMismatchError,
    HeldVersionError,
    MalformedError,
    MissingVersionError,
    PartialRowsError,
    StreamReplacedError,
    TableMismatchError,
)
# After so many failures in a row at one place a way around is looked for: one object may be unreadable for good, for
# want of permission or for a bad sector.
_NUM_TRIES = 3
_NUM_WAYS = 100  # ways around faults that are remembered


class Predictor(Forkable):
    """Applies the versions of a stream, in order and each once, to the tables of a model.

    It starts from the newest snapshot and follows from there. A version is read and checked whole before its first row
    is written, in memory that is kept for the next, up to 320 MiB: an error leaves the tables and :attr:`version` as
    they were. Where the next one cannot be had (a gap, damage, retention, the gate, another stream in its place) it
    goes on from a merged version or the newest snapshot, and logs that. Models of plain torch need no torchrec.

    Lookups in other threads stand inside ``with predictor.reading()``: no row changes there. Rows are written in
    chunks between such blocks, so while a version is being applied some rows are of the next version already; none is
    ever torn. Dense tensors change all at once, at its end.

    Args:
        model: a module whose tables are named as the stream's (``<fqn>.weight``): ``nn.Embedding``,
            ``nn.EmbeddingBag``, TorchRec collections, unsharded, sharded or quantised; or a mapping of FQN to tensor or
            :class:`~delta_tracker.row_target.RowTarget`. Its tables are looked up anew for each version, so that
            ``model.to(device)`` and the like may be called in between.
        url: the stream, ``file:///directory``, ``s3://bucket/prefix``, ... or an opened
            :class:`~delta_tracker.stream.storage.storage.Storage`.
        names: name in the stream to name in the model, of tables and of dense tensors, where they differ.
        dense: apply dense parameters and buffers too, if the stream has any; the model must then have them all.
        gate: bounds that a version must keep to; one that does not is held back.
        chunk_rows: rows written under one hold of the lock: a lookup waits for one chunk at most.
        notifier: carries hints of new versions, for :meth:`follow`; without it, or when it fails, polling finds them.
        name: leave a heartbeat of this name beside the stream every few seconds, see
            :mod:`~delta_tracker.stream.heartbeat`; None for none. It needs leave to write there. The name is also the
            label ``predictor`` of the metrics, ``"predictor"`` if None. There a name that another predictor of this
            process has is followed by ``-2``, ``-3``, ...
        monitor: where this predictor records its metrics; None for ``delta_tracker.monitor.MONITOR``.

    Raises:
        InvalidArgumentError: for a model without tables, names that it has not, or a url that names no store.
        StorageError: if the store cannot be opened.

    Example:
        >>> import torch
        >>> predictor = Predictor({"ec.embeddings.user": torch.zeros(10, 4)}, Storage("memory://"))
        >>> predictor.version is None
        True
    """

    def __init__(  # noqa: PLR0913  all but two have a default that most users keep
        self,
        model: Model,
        url: str | Storage,
        *,
        names: Mapping[str, str] | None = None,
        dense: bool = True,
        gate: Gate | None = None,
        chunk_rows: int = 4096,
        notifier: Notifier | None = None,
        name: str | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        if type(chunk_rows) is not int or chunk_rows < 1:
            raise InvalidArgumentError("chunk_rows", chunk_rows, "Pass a count of 1 or more")
        recorder = Recorder("predictor", self, name=name, monitor=monitor)
        self._gauges = PredictorGauges(recorder)
        self._lock = TableLock()
        self._applier = Applier(
            model, names or {}, takes_dense=dense, lock=self._lock, chunk_rows=chunk_rows, recorder=recorder
        )
        self._storage, self._buffer = open_storage(url), PartBuffer()
        self._cursor = StreamCursor(StreamLog(self._storage))
        self._gate = None if gate is None else GateKeeper(gate)
        self._manifest: Manifest | None = None
        self._begun: Manifest | None = None  # the newest version of which some rows may be there, and not all
        self._is_mixed = False  # rows of versions of which none leads to the others: only a snapshot helps
        self._pinned: int | None = None
        self._rows = self._num_bytes = self._resyncs = self._num_failures = 0
        self._last_resync = ""
        self._ways: deque[tuple[str, Link]] = deque(maxlen=_NUM_WAYS)
        self._dead_ends: deque[tuple[str, Link]] = deque(maxlen=_NUM_WAYS)
        self._syncing = threading.Lock()  # held by whoever moves the version
        self._pulse = None if name is None else Pulse(self._storage, name)
        self._follower = Follower(self._advance, self._cursor, self._syncing, notifier, self._beat, self._gauges)
        self._is_torn = False
        protect(self)
        self._gauges.begin(_FAULTS)

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the last snapshot or delta that was applied, None before the first."""
        return self._manifest

    @property
    def version(self) -> int | None:
        """The last version that was applied, claims included, None before the first."""
        return self._cursor.version

    @property
    def error(self) -> Exception | None:
        """What ended :meth:`follow`, or what it is trying to get over; None while all is well."""
        return self._follower.error or (None if self._gate is None else self._gate.held)

    @contextmanager
    def reading(self) -> Iterator[Served]:
        """Hold the tables still for lookups, and say what they hold. Short, and without ``await``: applying waits.

        A process that is forked while :meth:`follow` runs has the tables as they were at that moment, between two
        chunks, and ``applying`` says if some rows of a version are missing. Nothing changes them there until it calls
        :meth:`follow` or :meth:`sync` itself. That is not so for tables in shared memory, which the parent goes on
        writing to: do not look them up in a forked process.

        Raises:
            ForkedError: if a write took so long that the fork came in the middle of it, and rows may be torn; until
                :meth:`sync` has applied that version.
        """
        with self._lock.reading():
            if self._is_torn:
                raise ForkedError("rows were being written, and may be torn here", "Call sync() in this process first")
            yield Served(self.version, None if self._begun is None else self._begun.version)

    def status(self) -> Status:
        """How it stands. Asks the store for its lag."""
        place, lag, error = self._cursor.place, self._follower.lag(), self.error
        return Status(
            stream=None if place is None else place.stream,
            version=self.version,
            lag_versions=None if lag is None else lag[0],
            lag_seconds=None if lag is None else lag[1],
            rows=self._rows,
            num_bytes=self._num_bytes,
            resyncs=self._resyncs,
            last_resync=self._last_resync,
            error=None if error is None else f"{type(error).__name__}: {error}",
            pinned=self._pinned,
        )

    def sync(self, limit: int | None = None) -> int:
        """Apply the versions that are committed and not yet applied; none after :meth:`rollback`.

        Args:
            limit: apply this many versions at most; None for all. The first one is the newest snapshot.

        Returns:
            The version that the tables hold now.

        Raises:
            NoSnapshotError: if the stream has no snapshot to start from.
            HeldVersionError: if the gate holds the next version back.
            MissingVersionError: if a version is gone and nothing leads past it.
            StreamReplacedError: if another stream stands in its place, and has no snapshot.
            TableMismatchError, DenseMismatchError: if the model cannot receive a version, and nothing leads past it.
            PartialRowsError: if a table takes whole rows and gets a part of one, and nothing leads past it.
            CorruptPartError, MalformedError: if a version is not what it says it is, and nothing leads past it.
            StorageError: if the store cannot be read. The third time in a row, an object that cannot be read is a fault
                like the others: a newer snapshot or a merged version leads past it, if there is one that can.
            InvalidArgumentError: for a limit under 1, or inside :meth:`reading`, for whose end it would wait.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgumentError("limit", limit, "Pass a count of 1 or more, or None")
        self._refuse_inside_reading("sync()")
        with self._syncing:
            for _ in itertools.count() if limit is None else range(limit):
                if not self._advance(looks_for_gap=True):
                    break
        self._follower.forget_error()
        self._beat()
        assert self.version is not None, "the first advance moves or raises"
        return self.version

    def follow(self, poll_seconds: float = 0.01) -> None:
        """Keep applying new versions in a background thread until :meth:`stop`.

        It waits for a first snapshot if there is none. Any error is retried with growing pauses, up to 5 seconds, and
        shown in :attr:`error`, ``status().error``, the heartbeat and the metric ``follow_errors``: of the store, of a
        version that the model cannot receive, memory that runs short, whatever a ``RowTarget`` raises. Meanwhile the
        tables keep the last version. Of one that was cut short :meth:`reading` says so in ``applying`` until it is
        applied again.

        Only ``SystemExit``, ``KeyboardInterrupt`` and the like, raised in the thread, end it: :attr:`error` then is a
        :class:`FollowEndedError`, which :meth:`stop` raises.

        Args:
            poll_seconds: seconds to wait before looking for the next version again, 0 or more.

        Raises:
            InvalidArgumentError: if it is following already, or for a time that is negative or not finite.
            TableMismatchError, DenseMismatchError: if the stream can be read within two seconds, and the model cannot
                receive its newest version.
        """
        self._follower.start(poll_seconds, self._check_newest)

    def stop(self) -> None:
        """End :meth:`follow` within about a second; raises what ended it before, or holds it up now.

        It waits for no store: a request that hangs is abandoned. A version whose parts are still being read is not
        applied. Of one whose rows are being written all are written, unless its parts have to be read again, being
        larger than 256 MiB together, or another thread stays inside :meth:`reading`; until the next call applies it
        whole, ``reading()`` then says that it is being applied. A signal handler may call it.

        Raises:
            InvalidArgumentError: inside :meth:`reading`, for whose end the version may be waiting, or in the thread of
                :meth:`follow`.
        """
        self._refuse_inside_reading("stop()")
        self._follower.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._follower.stop(raises=kind is None)

    # Forks; see Forkable

    def before_fork(self) -> None:
        """Wait until no row is being written, a second at most."""
        self._lock.before_fork()

    def after_fork_in_parent(self) -> None:
        """Let rows be written again."""
        self._lock.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Forget the threads of the parent and the locks that they held."""
        self._is_torn = self._lock.after_fork_in_child() or self._is_torn
        self._syncing = threading.Lock()
        self._follower.after_fork_in_child(self._syncing)

    # Gate and rollback

    def accept(self, version: int) -> None:
        """Let a version through the gate once, now or when it comes.

        Raises:
            InvalidArgumentError: if there is no gate.
        """
        if self._gate is None:
            raise InvalidArgumentError("accept()", version, "Build the Predictor with a gate: nothing is held without")
        self._gate.accept(version)

    def rollback(self, version: int) -> None:
        """Return to an earlier version and stay there until :meth:`release` or a restart. The gate is not asked.

        All that it takes is read and checked before the first row is written.

        Args:
            version: a version that the stream still has whole: a snapshot and all versions after it.

        Raises:
            InvalidArgumentError: for a version that the stream has not had yet, or inside :meth:`reading`.
            MissingVersionError, NoSnapshotError: if retention took what it consists of.
            StreamReplacedError: if the stream is not the one whose versions were applied.
            CorruptPartError, MalformedError, PartialRowsError, TableMismatchError, DenseMismatchError: as :meth:`sync`.
            StorageError: if the store cannot be read. Where it failed after all was checked, ``status().pinned`` is
                the version: the next :meth:`sync`, or :meth:`follow`, goes on with the rollback.
        """
        self._refuse_inside_reading("rollback()")
        with self._syncing:
            self._return_to(version)

    def release(self) -> None:
        """Go on to newer versions after :meth:`rollback`."""
        self._pinned = None

    # Start-up from a kept state

    def state_dict(self) -> dict[str, str | int]:
        """The place of the tables in the stream, to be kept beside them; empty if only a snapshot leads on from them.

        Rows that are newer than the place says do no harm; rows that are older do. So write the place after its rows:

        - tables in a file of their own: first this, then the tables, or both in one ``with predictor.reading()``;
        - tables in shared or mapped memory: flush that, then write this to a new file and rename it;
        - before :meth:`rollback`: remove what was kept, and keep the place again once it has returned.
        """
        place = self._cursor.place
        return {} if place is None or self._is_mixed else place.to_dict()

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Go on from tables that were kept together with ``state``. What the stream has no more leads to a resync.

        Raises:
            InvalidArgumentError: if it is not what :meth:`state_dict` returned, or inside :meth:`reading`.
        """
        self._refuse_inside_reading("load_state_dict()")
        place = Place.from_dict(state) if state else None
        with self._syncing, self._lock.writing():
            self._cursor.place, self._is_mixed = place, False
            self._manifest = self._begun = None
            self._is_torn = False
            self._ways.clear()

    def _check_newest(self) -> None:
        """Refuse a stream whose newest version the model cannot receive; one that cannot be read now is not refused."""
        if self._pinned is not None:
            return
        try:
            newest = self._cursor.heads()
        except StreamError as error:
            _logger.info("the newest version cannot be checked before follow() starts: %s", error)
            return
        for manifest in newest:
            self._applier.resolve(manifest)

    def _beat(self, *, is_last: bool = False) -> None:
        """Leave a heartbeat, if one is due or it is the last."""
        if self._pulse is not None and (is_last or self._pulse.is_due()):
            status = self.status()
            self._pulse.leave(
                stream=status.stream,
                version=status.version,
                lag_versions=status.lag_versions,
                lag_seconds=status.lag_seconds,
                resyncs=status.resyncs,
                error=status.error,
            )

    def _refuse_inside_reading(self, call: str) -> None:
        if self._lock.is_reading:
            raise InvalidArgumentError(call, "inside reading()", "Leave the `with predictor.reading()` block first")

    def _advance(self, *, looks_for_gap: bool) -> bool:
        """Apply one version, if there is one. The caller holds the lock of those who move the version.

        Args:
            looks_for_gap: list the log if the next version is not there, to tell a gap from the head.

        Raises: as :meth:`sync`.
        """
        if self._pinned is not None:
            if self._pinned == self.version and not self._is_mixed:
                return False
            self._return_to(self._pinned)  # a rollback that was cut short
            return True
        try:
            has_moved = self._take_next(looks_for_gap=looks_for_gap)
        except StorageError:
            self._num_failures += 1
            raise
        self._num_failures = 0
        return has_moved

    def _take_next(self, *, looks_for_gap: bool) -> bool:
        """Apply the next version, if there is one, or one that leads past it."""
        try:
            if self._is_mixed:
                self._cursor.place = None
            manifest = self._cursor.next()
            if manifest is None:
                if looks_for_gap:
                    self._cursor.check_for_gap()
                return False
            self._take(manifest)
        except _FAULTS as fault:
            self._resync(fault)
        except StorageError as fault:
            if not self._keeps_failing:
                raise
            self._resync(fault)
        return True

    @property
    def _keeps_failing(self) -> bool:
        """Whether this attempt is one too many to wait for the store."""
        return self._num_failures >= _NUM_TRIES - 1

    def _resync(self, fault: StreamError) -> None:
        """Go around a fault; raises it if nothing leads past it."""
        before, num_unreadable = self.version, 0
        faults = (*_FAULTS, StorageError) if self._keeps_failing else _FAULTS
        for manifest in self._cursor.way_back(fault, skips_unreadable=self._keeps_failing):
            way = str(fault), manifest.link
            if way in self._ways:
                continue  # it led to the same fault again
            try:
                self._take(manifest, is_elsewhere=isinstance(fault, StreamReplacedError))
            except faults as another:
                if way not in self._dead_ends:  # said once, though it is tried again
                    _logger.warning("version %d leads past no fault: %s", manifest.version, another)
                    self._dead_ends.append(way)
                num_unreadable += isinstance(another, StorageError)
                if num_unreadable == _NUM_TRIES:
                    break  # no single object: an outage
                continue
            self._ways.append(way)
            self._resyncs += 1
            self._gauges.resynced(fault)
            self._last_resync = f"version {before} to {manifest.version}: {type(fault).__name__}: {fault}"
            _logger.warning("resync of %s from version %s to %d: %s", self._storage.url, before, self.version, fault)
            return
        raise fault

    def _take(self, manifest: Manifest, *, is_elsewhere: bool = False) -> None:
        """Read and check everything, then write."""
        if self._leaves_rows(manifest):
            raise StreamReplacedError(self._storage.url, manifest.version)
        gate = self._gate if manifest.kind != "claim" else None
        receiver = self._applier.resolve(manifest)
        if gate is not None:
            gate.recall(manifest)
        contents = Contents(self._storage, manifest, buffer=self._buffer)
        measure = {} if gate is None else gate.check(manifest, contents)
        self._apply(receiver, contents, is_elsewhere=is_elsewhere)
        if gate is not None:
            gate.passed(manifest, measure)

    def _return_to(self, version: int) -> None:
        """Roll back, or go on with a rollback."""
        path = [(manifest, self._applier.resolve(manifest)) for manifest in self._cursor.path_to(version)]
        for manifest, receiver in path:
            receiver.place(Contents(self._storage, manifest, buffer=self._buffer))
        self._pinned = version
        self._ways.clear()
        if self._gate is not None:
            self._gate.restart()
        for manifest, receiver in path:
            contents = Contents(self._storage, manifest, buffer=self._buffer)
            self._apply(receiver, contents, is_elsewhere=manifest.kind == "snapshot")
            if self._gate is not None:
                self._gate.passed(manifest, self._gate.follow(manifest, contents))
        _logger.warning("rolled back to version %d of %s", version, self._storage.url)

    def _apply(self, receiver: Receiver, contents: Contents, *, is_elsewhere: bool) -> None:
        """Write a version.

        Args:
            receiver: the model as it was looked up for the version.
            contents: its rows.
            is_elsewhere: it is no later version of what the tables hold, so that nothing but itself leads on from there
                if it is cut short.
        """
        manifest = contents.manifest
        placements = receiver.place(contents)
        self._is_mixed = self._is_mixed or is_elsewhere
        with self._lock.writing():
            self._begin(manifest)
        for num_rows in self._applier.write(placements):
            self._rows += num_rows
        with self._lock.writing():
            receiver.write_dense(contents)
            self._cursor.moved(manifest)
            self._finish(manifest)
            self._manifest = self._manifest if manifest.kind == "claim" else manifest
        self._is_mixed = False
        self._num_bytes += manifest.num_bytes
        self._gauges.applied(manifest)

    def _begin(self, manifest: Manifest) -> None:
        """Some rows of a version are about to be written."""
        begun = self._begun
        if begun is None or begun.stream != manifest.stream or begun.version <= manifest.version:
            self._begun = manifest

    def _leaves_rows(self, manifest: Manifest) -> bool:
        """Whether rows of another entry of the same version are there, which this one need not have."""
        begun = self._begun
        is_other = begun is not None and begun.version == manifest.version and begun.link != manifest.link
        return is_other and manifest.kind != "snapshot"

    def _finish(self, manifest: Manifest) -> None:
        """All rows of a version are written.

        A version that was cut short may lie ahead: a merged one or a snapshot, after which the versions before it could
        be read again. Its rows stay there until a version that has them all is applied.
        """
        begun = self._begun
        if begun is None or manifest.kind == "snapshot" or begun.version <= manifest.version:
            self._begun, self._is_torn = None, False
