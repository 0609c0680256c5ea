"""Predictor, which applies the versions of a stream to a model that serves lookups."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Self

from delta_tracker.arguments import is_number
from delta_tracker.errors import (
    CorruptPartError,
    DenseMismatchError,
    HeldVersionError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    PartialRowsError,
    StaleCacheError,
    StorageError,
    StreamError,
    StreamReplacedError,
    TableMismatchError,
    WaitTimeoutError,
    kind_of,
)
from delta_tracker.forking import Forkable, protect
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.apply import Model
from delta_tracker.predictor.canary import Canary, CanaryBound
from delta_tracker.predictor.follower import Follower
from delta_tracker.predictor.gate import Gate, GateKeeper
from delta_tracker.predictor.gauges import PredictorGauges
from delta_tracker.predictor.identities import identities_after
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.predictor.names import NameChoice
from delta_tracker.predictor.settling import CACHE_FAULTS, Settling
from delta_tracker.predictor.sink_writer import SinkWriter
from delta_tracker.predictor.sources import Sources
from delta_tracker.predictor.status import Served, Status
from delta_tracker.predictor.version_writer import VersionWriter
from delta_tracker.raw_id_index import RawIdIndex
from delta_tracker.row_sink import RowSink
from delta_tracker.stream.cursor import Place, StreamCursor
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.format.part_buffer import PartBuffer
from delta_tracker.stream.heartbeat import Pulse
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.interruption import sleep
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.notify.notifier import Notifier
from delta_tracker.stream.pin import Pin, PinFollower
from delta_tracker.stream.storage.storage import Location, Storage, open_storage
from delta_tracker.uncopied import Uncopied

_logger = logging.getLogger(__name__)

# Errors of a version after which a merged version or a newer snapshot may still be applied.
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
# Number of consecutive storage errors that cause a resync: one object may stay unreadable, for example because of
# missing permissions or a bad sector.
_NUM_TRIES = 3
_NUM_WAYS = 100  # number of resyncs that are remembered
# Number of consecutive versions after which a reader looks for a merged version or a snapshot that leads further.
_CATCH_UP = 8
# A read past a cache waits up to this long: many readers of one cache meet a fault at the same time.
_SPREAD_SECONDS = 1.0
_PIN_SECONDS = 5.0  # maximum time between two looks for a pin


class Predictor(Forkable, Uncopied, remedy="Save or copy its state_dict()"):
    """Reader of a stream that applies each version once, in order, to the tables of a model.

    A predictor starts from the newest snapshot and applies every later version. A version is read into a reused buffer
    of up to 320 MiB and validated completely before its first row is written, so that an invalid version leaves the
    tables and :attr:`version` unchanged. If the next version cannot be applied (it is missing, damaged, removed by
    retention or rejected by the gate, or the url now contains another stream), the predictor resyncs: it continues from
    the newest snapshot or from a merged version, which replaces several versions, and logs a warning. Only models with
    TorchRec modules require torchrec.

    Lookups in other threads run inside ``with predictor.reading()``, where no row changes. Rows are written in chunks,
    each while no thread is inside ``reading()``. While a version is applied, lookups see the new values of some of its
    rows and the old values of others, but no torn (partly written) row. All dense tensors change together after the
    last row. While a manifest is parsed, lookups in other threads wait for Python's interpreter lock, but at most about
    0.2 s at a time for a manifest of 10 MB (1,000 tables on 64 ranks), and 0.35 s for the largest one, 64 MiB.

    If the trainer's tables have managed collisions, the mapping from raw ids to rows is part of each version. It is
    written to the collision modules of the model, which must be in evaluation mode, or to the ``raw_ids`` of tables
    without such modules. While a version is applied, each raw id reads its own row as of the last version or this one,
    or the default row that the trainer's module has for unknown ids; it never reads the row of another id. The mapping
    of a table is replaced in one hold of the lock. Models that were scripted, or traced by ``torch.fx``, are rejected.

    Args:
        model: module whose tables have the same names as the tables of the stream (``<fqn>.weight``), or a mapping of
            FQN to tensor or :class:`~delta_tracker.row_target.RowTarget`. A module may contain ``nn.Embedding``,
            ``nn.EmbeddingBag`` and TorchRec collections, which may be unsharded, sharded or quantized. The tables are
            looked up for each version, so that ``model.to(device)`` may be called between versions. Or a
            :class:`~delta_tracker.row_sink.RowSink`, for lookups in other processes: it keeps the position, all tables
            under their names in the stream and their raw ids, but no dense tensors. Then :meth:`reading`,
            :meth:`state_dict`, :meth:`load_state_dict`, ``names`` and ``raw_ids`` raise InvalidArgumentError.
        url: url of the stream, such as ``file:///directory``, ``s3://bucket/prefix`` or ``https://cache/prefix``, or an
            opened :class:`~delta_tracker.stream.storage.storage.Storage`. A sequence of them names mirrors of the same
            stream: if the current one fails, the predictor continues from another that has the same entry at its
            version.
        names: name in the stream to name in the model, for tables and dense tensors whose names differ. A key that
            ends with a dot, or is empty, is a prefix: ``{"module.": ""}``. Or a function from name to name.
        dense: True to apply the dense parameters and buffers of the stream too; the model must have all of them.
        raw_ids: table name in the stream to :class:`~delta_tracker.raw_id_index.RawIdIndex`, for tables whose raw ids
            are not mapped by a collision module of the model. The predictor changes the indexes.
        gate: bounds on the values of a version; a version that violates a bound is held. None disables the check.
        chunk_rows: maximum number of rows in a chunk. A lookup waits for at most one chunk, or for the change of a
            mapping of raw ids, which writes 24 bytes per row of the table.
        notifier: delivers hints of new versions to :meth:`follow`. Without a notifier, or when it fails, versions are
            found by polling.
        name: name of the heartbeat that is written to the stream every few seconds, see
            :mod:`~delta_tracker.stream.heartbeat`; None disables the heartbeat. A heartbeat requires write permission.
            The name is also the label ``predictor`` of the metrics (default ``"predictor"``), with a suffix ``-2``,
            ``-3``, ... if another predictor of this process has the same name.
        monitor: monitor for the metrics; None for ``delta_tracker.monitor.MONITOR``.
        cache: directory, or :class:`~delta_tracker.stream.host_cache.HostCache`, in which the predictors of one host
            keep the parts that they read, so that each is fetched once.
        canary: distance to keep from the newest version; None to apply each version as soon as it is found.
        follows_pins: True to obey ``delta-tracker rollback`` and ``delta-tracker release``.
        heartbeats: url or store for the heartbeats; None for the first ``url`` that can be written to, and after a
            failover for the new one if it can be.

    Raises:
        InvalidArgumentError: for a model without tables, unknown ``names``, or an invalid ``raw_ids``, ``url``,
            ``gate``, ``canary`` or ``chunk_rows``; for a ``name`` if there is no store to write heartbeats to.
        MissingExtraError: if the model or the url requires a package that is not installed.
        StorageError: if the store cannot be opened.
        BrokenCacheError: if the directory of ``cache`` cannot be used.
        SinkBusyError: if another process writes to the row store.
        SinkError, MalformedSinkError: if the row store cannot be used. :meth:`sync` raises them too.

    Example:
        >>> import torch
        >>> predictor = Predictor({"ec.embeddings.user": torch.zeros(10, 4)}, Storage("memory://"))
        >>> predictor.version is None
        True
    """

    def __init__(  # noqa: PLR0913  all but two have a default that most users keep
        self,
        model: Model | RowSink,
        url: Location | Sequence[Location],
        *,
        names: NameChoice | None = None,
        dense: bool = True,
        raw_ids: Mapping[str, RawIdIndex] | None = None,
        gate: Gate | None = None,
        chunk_rows: int = 4096,
        notifier: Notifier | None = None,
        name: str | None = None,
        monitor: Monitor | None = None,
        cache: str | Path | HostCache | None = None,
        canary: Canary | None = None,
        follows_pins: bool = False,
        heartbeats: Location | None = None,
    ) -> None:
        if isinstance(model, str | Path | Storage):
            raise InvalidArgumentError("model", model, "Pass the model first, and then the url of the stream")
        if type(chunk_rows) is not int or chunk_rows < 1:
            raise InvalidArgumentError("chunk_rows", chunk_rows, "Pass a count of 1 or more")
        if canary is not None and not isinstance(canary, Canary):
            raise InvalidArgumentError("canary", canary, "Pass a Canary, for example Canary(versions=3)")
        recorder = Recorder("predictor", self, name=name, monitor=monitor)
        self._gauges = PredictorGauges(recorder)
        self._sources, self._buffer = Sources(url), PartBuffer()
        self._storage = self._sources.current
        self._cursor = StreamCursor(StreamLog(self._storage))
        self._writer: VersionWriter
        if isinstance(model, RowSink):
            if names or raw_ids:
                text = "Omit it: a row store keeps all tables under the stream's names, and the raw ids of their rows"
                raise InvalidArgumentError("names" if names else "raw_ids", names or raw_ids, text)
            self._writer = SinkWriter(
                model, chunk_rows=chunk_rows, cursor=self._cursor, gauges=self._gauges, recorder=recorder
            )
        else:
            self._writer = ModelWriter(
                model,
                names or {},
                raw_ids=raw_ids,
                takes_dense=dense,
                chunk_rows=chunk_rows,
                cursor=self._cursor,
                gauges=self._gauges,
                recorder=recorder,
            )
        self._cache = HostCache(cache) if isinstance(cache, str | Path) else cache
        self._canary = canary
        self._settling = None if self._storage.lists else Settling()
        self._pins = PinFollower(lambda: self._storage) if follows_pins else None
        self._obeyed = 0  # counter of the last pin or release that was followed
        self._outlived = 0  # counter of the last one whose stream ended before it was followed
        self._overruled = 0  # counter of the newest pin when rollback() was called; 0 after release()
        self._bound = None if canary is None else CanaryBound(canary, self._cursor)
        self._awaited: Pin | None = None  # pin that the canary does not allow yet
        self._cursor.allows = None if canary is None else self._is_allowed
        self._gate = None if gate is None else GateKeeper(gate)
        # The norms of a merged version cannot show which of its versions violates a bound.
        self._skips_versions = gate is None or gate.max_drift is None
        self._in_a_row = _CATCH_UP  # versions applied since the end of the log was seen
        self._read_before = [self._storage]  # stores whose requests are counted
        self._pinned: int | None = None  # version to stay at, or to go to
        self._pin_stream: str | None = None  # its stream; None after rollback()
        self._resyncs = self._num_failures = 0
        self._last_resync = ""
        # Kind and version of a fault, and the entry of a resync after it. Texts of errors differ at each attempt.
        self._ways: deque[tuple[object, int | None, Link]] = deque(maxlen=_NUM_WAYS)
        self._dead_ends: deque[tuple[object, int | None, Link]] = deque(maxlen=_NUM_WAYS)
        self._syncing = threading.Lock()  # held while the version changes
        self._pulse = None if name is None else Pulse(self._store_of_heartbeats(heartbeats), name)
        self._moves_heartbeats = heartbeats is None
        self._follower = Follower(
            self._advance,
            self._cursor,
            self._syncing,
            notifier,
            self._beat,
            self._gauges,
            max_pause_seconds=_PIN_SECONDS if follows_pins else float("inf"),
        )
        protect(self)
        self._gauges.begin(self, self._storage.url, _FAULTS)

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the last applied snapshot or delta; None before the first, and after :meth:`load_state_dict`."""
        return self._writer.manifest

    @property
    def version(self) -> int | None:
        """Number of the last applied version, which may be a claim; None before the first."""
        return self._cursor.version

    @property
    def error(self) -> Exception | None:
        """Current error of :meth:`follow`. If there is none, the error of the version that the gate holds, or None.

        :meth:`follow` retries after most errors.
        """
        return self._follower.error or (None if self._gate is None else self._gate.held)

    def reading(self) -> AbstractContextManager[Served]:
        """Context manager that blocks writes during lookups, and yields the versions that the tables hold.

        Keep the body of the ``with`` statement short and without ``await``: :meth:`follow` and :meth:`sync` cannot
        write rows until it ends.

        If tables are on CUDA devices, the streams that are current when the ``with`` statement begins wait for the last
        write of rows, and the next write waits for all work that these streams have when the statement ends. Launch the
        lookups on these streams. The statement does not wait for the device. This was not run on a GPU.

        In a process that is forked while :meth:`follow` runs, the tables are as they were at the fork, between two
        chunks. If some rows of a version are not written, ``applying`` is the number of this version. The tables do not
        change until the process calls :meth:`follow` or :meth:`sync`. Tables in shared memory are an exception: the
        parent continues to write to them, so do not look them up in a forked process.

        Raises:
            ForkedError: if the process was forked during a long write, so that rows may be torn. :meth:`sync` writes
                them again.
        """
        return self._writer.reading()

    def status(self) -> Status:
        """Return the state of the predictor. Sends a few small requests to the store to find the lag."""
        return self._status(self._follower.lag())

    def _status(self, lag: tuple[int, float] | None) -> Status:
        place, error = self._cursor.place, self.error
        requests: Counter[str] = Counter()
        for storage in self._read_before:
            requests.update(storage.requests)
        return Status(
            stream=None if place is None else place.stream,
            version=self.version,
            lag_versions=None if lag is None else lag[0],
            lag_seconds=None if lag is None else lag[1],
            rows=self._writer.num_rows,
            num_bytes=self._writer.num_bytes,
            resyncs=self._resyncs,
            last_resync=self._last_resync,
            error=None if error is None else f"{type(error).__name__}: {error}",
            pinned=self._pinned,
            admitted=self._writer.num_admitted,
            evicted=self._writer.num_evicted,
            requests=dict(requests),
            cache={} if self._cache is None else dict(self._cache.counts),
            poll_seconds=self._follower.poll_seconds,
        )

    def sync(self, limit: int | None = None) -> int:
        """Apply the committed versions that are not applied yet.

        After :meth:`rollback`, no newer version is applied until :meth:`release`. A predictor that is many versions
        behind applies merged versions and newer snapshots, each of which replaces several versions. If the gate has a
        ``max_drift``, each version is applied by itself.

        Args:
            limit: maximum number of versions to apply; None for all. A merged version counts as one. The first version
                of a new predictor is the newest snapshot.

        Returns:
            Number of the version that the tables hold.

        Raises:
            NoSnapshotError: if the stream has no snapshot to start from.
            HeldVersionError: if the gate rejects the next version.
            MissingVersionError: if a version is missing and no resync is possible.
            StreamReplacedError: if the url now contains another stream, and no resync is possible.
            TableMismatchError, DenseMismatchError: if a version does not fit the model and no resync is possible.
            PartialRowsError: if a table accepts only whole rows, a version has only some columns of a row, and no
                resync is possible.
            CorruptPartError, MalformedError: if a version is damaged and no resync is possible.
            StorageError: if the store cannot be read. The third consecutive storage error causes a resync, in case a
                single object is unreadable.
            StaleCacheError: if the url is an http url, and an object that is missing, short or altered was read once
                past the caches without success. The fault may be over soon: a call that meets it 10 seconds or more
                after the first one resyncs.
            InvalidArgumentError: if ``limit`` is less than 1, or if called inside :meth:`reading`, where it would
                deadlock.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgumentError("limit", limit, "Pass a count of 1 or more, or None")
        self._refuse_inside_reading("sync()")
        try:
            with self._syncing:
                num_applied = 0
                while limit is None or num_applied < limit:
                    before = self._storage
                    if not self._advance(looks_for_gap=True):
                        break
                    num_applied += self._storage is before  # a change of the source applies nothing
        finally:
            self._follower.moved()  # also if a later version raised
        if self._follower.error is not None:
            self._follower.forget_error()
        if self._pulse is not None:
            self._beat()
        assert self.version is not None, "the first advance moves or raises"
        return self.version

    def follow(self, poll_seconds: float | None = None) -> None:
        """Apply new versions in a background thread until :meth:`stop`.

        The thread waits for the first snapshot if there is none. If an attempt fails, the thread retries after a
        pause of up to 5 seconds. An attempt fails, for example, if the store cannot be read, a version does not fit the
        model, memory is exhausted or a ``RowTarget`` raises. The error is reported in :attr:`error`,
        ``status().error``, the heartbeat and the metric ``follow_errors``. The tables keep the last version until the
        next one is applied. If a version was interrupted, :meth:`reading` reports it as ``applying`` until it is
        applied again.

        An exception such as ``SystemExit`` or ``KeyboardInterrupt`` that is raised in the thread ends the thread.
        :attr:`error` is then a :class:`FollowEndedError`, which :meth:`stop` raises.

        By default, a directory is polled every 10 ms, and every 100 ms while no version comes; a remote store every
        second, and every 5 seconds while no version comes. After three hints of the notifier in a row that were right,
        a directory is polled every second and a remote store every 30 seconds, until a version comes without a hint or
        the notifier fails. After a failover, the intervals are those of the new source. Intervals of 0.1 seconds and
        more vary by a quarter. A poll requests one object. While no version comes, the thread sends at most
        ``1 / interval + 2 / 5`` requests a second, plus 1 for each heartbeat; it lists the store only if the publisher
        writes no pointer object, then every 5 to 60 seconds. With a :class:`Canary`, a poll sends two more requests.

        Args:
            poll_seconds: number of seconds between two polls, more than 0, which depend neither on hints nor on the age
                of the newest version; None for the intervals above.

        Raises:
            InvalidArgumentError: if the thread is already running, or ``poll_seconds`` is not positive and finite.
            TableMismatchError, DenseMismatchError: if the newest version can be read within two seconds and does not
                fit the model.
        """
        self._follower.start(poll_seconds, self._check_newest)

    def wait(self, version: int | None = None, timeout: float | None = None) -> int:
        """Wait until :meth:`follow` has applied a version. Does not poll: the thread wakes this call.

        Args:
            version: number of the version; a later one will do. None for any version: the tables can then be served.
            timeout: maximum number of seconds to wait; None for no limit.

        Returns:
            Number of the version that the tables hold.

        Raises:
            WaitTimeoutError: if the version was not applied in time. The message has the error of :meth:`follow`, if
                there is one.
            FollowEndedError: if the thread of :meth:`follow` ended by an error.
            ForkedError: if this process was forked while :meth:`follow` ran in its parent.
            InvalidArgumentError: if the thread is not running and the version is not there, if ``version`` or
                ``timeout`` is invalid, or if called inside :meth:`reading`, where it would deadlock, or in the thread
                of :meth:`follow`.

        Example:
            >>> import torch
            >>> from delta_tracker import ModelDeltaTracker, Publisher
            >>> trained, served = (torch.nn.Sequential(torch.nn.EmbeddingBag(9, 2, sparse=True)) for _ in range(2))
            >>> stream = Storage("memory://")
            >>> with Publisher(ModelDeltaTracker(trained), stream) as publisher, Predictor(served, stream) as predictor:
            ...     predictor.follow()
            ...     snapshot = publisher.snapshot()
            ...     predictor.wait(snapshot.version, timeout=60)
            1
        """
        if version is not None and (type(version) is not int or version < 0):
            raise InvalidArgumentError("version", version, "Pass the number of a version, 0 or more, or None")
        if timeout is not None and not (is_number(timeout) and 0 <= timeout < threading.TIMEOUT_MAX):
            raise InvalidArgumentError("timeout", timeout, "Pass seconds, 0 or more, or None")
        self._refuse_inside_reading("wait()")
        least = 0 if version is None else version
        if not self._follower.wait(lambda: self.version is not None and self.version >= least, timeout):
            raise WaitTimeoutError(self._storage.url, version, self.version, timeout, self.error)
        assert self.version is not None, "checked by the wait"
        return self.version

    def stop(self) -> None:
        """End the thread of :meth:`follow` within about a second, and raise its current error if there is one.

        A request that hangs is abandoned. A version whose parts are still being read is not applied. A version whose
        rows are being written is completed, unless its parts exceed 256 MiB in total and must be read again, or another
        thread does not leave :meth:`reading`. In these two cases the version is interrupted, and ``reading()`` reports
        it as ``applying`` until the next :meth:`follow` or :meth:`sync` applies it completely. A signal handler may
        call this method.

        Raises:
            InvalidArgumentError: if called inside :meth:`reading`, where it could deadlock, or in the thread of
                :meth:`follow`.
        """
        self._refuse_inside_reading("stop()")
        self._follower.stop()

    def __repr__(self) -> str:
        return f"Predictor({self._storage.url!r}, version={self.version})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._follower.stop(raises=kind is None)

    # Forks; see Forkable

    def before_fork(self) -> None:
        """Wait up to one second until no row is being written, and block new writes until the fork is done."""
        self._writer.before_fork()

    def after_fork_in_parent(self) -> None:
        """Allow writes again after :meth:`before_fork`."""
        self._writer.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Drop the threads that exist only in the parent, and replace the locks that they may have held."""
        self._writer.after_fork_in_child()
        self._syncing = threading.Lock()
        self._follower.after_fork_in_child(self._syncing)

    # Gate and rollback

    def accept(self, version: int) -> None:
        """Allow a version to be applied once even if the gate rejects it.

        Args:
            version: number of the version, which may be held now or committed later.

        Raises:
            InvalidArgumentError: if the predictor has no gate, or ``version`` is not an integer of 0 or more.
        """
        if self._gate is None:
            raise InvalidArgumentError(
                "accept()", version, "Build the Predictor with a gate: without one, no version is held"
            )
        self._gate.accept(version)

    def rollback(self, version: int) -> None:
        """Return to an earlier version, and apply no newer version until :meth:`release`. Bypasses the gate.

        All data is read and validated before the first row is written, except that a hash module's probes are checked
        version by version.

        Args:
            version: number of the version. If the version is a snapshot, the stream must still contain it. Otherwise
                the stream must contain a snapshot before it, which may be a merged one, and all versions after that
                snapshot, up to this one. A merged version may replace several of them.

        Raises:
            InvalidArgumentError: if ``version`` is invalid, not committed yet or above the bound of a canary, or if
                called inside :meth:`reading`.
            MissingVersionError, NoSnapshotError: if a required version is missing, for example because retention
                removed it.
            StreamReplacedError: if the stream is not the one whose versions were applied.
            CorruptPartError, MalformedError: if a required version is damaged.
            PartialRowsError, TableMismatchError, DenseMismatchError: if a required version does not fit the model.
            StorageError: if the store cannot be read. If the store fails after the validation, the next
                :meth:`sync` or :meth:`follow` completes the rollback, and ``status().pinned`` is ``version``.
        """
        self._refuse_inside_reading("rollback()")
        with self._syncing:
            order, self._awaited = None if self._pins is None else self._pins.order(), None
            self._return_to(version, overrules=0 if order is None else order.counter)
        self._follower.moved()

    def release(self) -> None:
        """End a :meth:`rollback`: the next :meth:`sync`, or a running :meth:`follow`, applies newer versions again.

        With ``follows_pins``, this also ends a pin for this predictor, if it has followed the pin already. A pin that
        it has not followed yet, for example because of the rollback, is followed next.
        """
        self._pinned, self._overruled = None, 0

    # Start from a saved state

    def state_dict(self) -> dict[str, str | int]:
        """Return the stream position of the tables. Save it together with the tables.

        Saved rows may be newer than the saved position, but not older. The order of saving therefore matters:

        - tables in a file: call this first, then save the tables, or do both in one ``with predictor.reading()``;
        - tables in shared or mapped memory: flush the memory, then write the position to a new file and rename it;
        - before :meth:`rollback`: delete the saved position, and save it again after the call;
        - tables with raw ids: save the position, the tables and the mapping (the buffers of the collision modules, or
          the state of each ``RawIdIndex``) in one ``with predictor.reading()``. No other order is correct.

        Returns:
            Dict with the keys ``stream``, ``version`` and ``xxh3``, and for tables with raw ids ``identities``, a text
            with the buckets of the raw ids. There is no position before the first version, or if an interrupted call
            left rows of unrelated versions in the tables: the dict then has only ``identities``, or is empty. After
            such a dict is loaded, only a snapshot can be applied.
        """
        return self._writer.state_dict()

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Restore the stream position of tables that were saved together with ``state``.

        The next :meth:`sync` or :meth:`follow` continues with the version after this position, or resyncs. Load the
        mapping of raw ids before: the model's state, or that of each ``RawIdIndex``.

        Args:
            state: result of :meth:`state_dict`. If it has no position, the next :meth:`sync` or :meth:`follow` starts
                from the newest snapshot.

        Raises:
            InvalidArgumentError: if ``state`` is invalid or does not fit the mapping of raw ids, or if called inside
                :meth:`reading`.
        """
        self._refuse_inside_reading("load_state_dict()")
        with self._syncing:
            self._writer.load_state_dict(state)
            self._gauges.restored = None
            self._ways.clear()
            self._obeyed = self._outlived = 0  # by the tables of the former position
            if self._settling is not None:
                self._settling.clear()
            self._in_a_row = _CATCH_UP
        self._follower.moved()

    def _check_newest(self) -> None:
        """Raise if the newest version, or the one of a pin that applies, does not fit the model.

        If the stream cannot be read, log the exception and return. No-op between :meth:`rollback` and :meth:`release`.
        """
        if self._pinned is not None:
            return
        try:
            order = None if self._pins is None else self._pins.order()
            pinned = None if order is None or order.kind != "pin" else self._cursor.log.read(order.version)
            is_pinned = pinned is not None and order is not None and pinned.stream == order.stream
            newest = [pinned] if pinned is not None and is_pinned else self._cursor.heads()
        except StreamError as error:
            _logger.info("the newest version was not checked before follow(): %s", error)
            return
        for manifest in newest:
            self._writer.resolve(manifest)

    def _beat(self, *, is_last: bool = False) -> None:
        """Write a heartbeat if one is due or ``is_last`` is True. No-op if heartbeats are disabled."""
        if self._pulse is not None and (is_last or self._pulse.is_due()):
            status = self._status(self._follower.lag_at_rest())
            self._pulse.leave(
                stream=status.stream,
                version=status.version,
                lag_versions=status.lag_versions,
                lag_seconds=status.lag_seconds,
                resyncs=status.resyncs,
                error=status.error,
                canary=None if self._canary is None else self._canary.text,
                pin=self._obeyed,
            )

    def _store_of_heartbeats(self, given: Location | None) -> Storage:
        """Return the store to write heartbeats to. Raise InvalidArgumentError if it cannot be written to."""
        storage = self._sources.writable() if given is None else open_storage(given)
        if storage is None or storage.is_read_only:
            text = "Pass the url of a bucket or directory: heartbeats cannot be written over http"
            raise InvalidArgumentError("heartbeats", given, text)
        return storage

    def _refuse_inside_reading(self, call: str) -> None:
        if self._writer.is_reading:
            raise InvalidArgumentError(call, "inside reading()", "Leave the `with predictor.reading()` block first")

    def _advance(self, *, looks_for_gap: bool) -> bool:
        """Apply the next version and return True. Return False if there is none.

        The caller must hold ``self._syncing``. The errors are those of :meth:`sync`.

        Args:
            looks_for_gap: True to check, if the next version is missing, whether it was deleted or is not committed
                yet.
        """
        has_moved: bool | None = False
        self._writer.restore()
        try:
            if self._pins is not None and (order := self._newest_order(self._pins)) is not None:
                has_moved = self._obeys_despite_caches(order)
            if has_moved is False and self._pinned is None:
                has_moved = self._take_next(looks_for_gap=looks_for_gap)
            elif has_moved is False:
                has_moved = self._stays(looks_for_gap=looks_for_gap)
        except StaleCacheError:
            raise
        except (NoSnapshotError, StorageError):  # without a snapshot, nothing was applied yet
            self._num_failures += 1
            if self._num_failures < _NUM_TRIES - 1 or (other := self._sources.fail_over(self._cursor.place)) is None:
                raise
            self._use(other)
            return True  # sync() must not end here
        self._num_failures = 0
        return bool(has_moved)

    def _newest_order(self, pins: PinFollower) -> Pin | None:
        """Return the newest pin or release. If a forged one was dropped, forget what was done for that one."""
        order = pins.order()
        if (last := pins.take_drop()) is not None:
            self._obeyed, self._outlived = min(self._obeyed, last), min(self._outlived, last)
            self._overruled = min(self._overruled, last)
        return order

    def _stays(self, *, looks_for_gap: bool) -> bool:
        """Apply the version to stay at, or if its stream has ended, the next stream. Return False if at the version."""
        pinned = self._pinned
        if pinned is not None and not self._is_at(pinned):
            self._end_pin_of_former_stream()
            pinned = self._pinned
        if pinned is None:
            return self._take_next(looks_for_gap=looks_for_gap)
        if not self._is_at(pinned):
            self._return_to(pinned, stream=self._pin_stream, completes=True)  # an interrupted rollback
            return True
        return looks_for_gap and self._leaves_pin()

    def _is_at(self, pinned: int) -> bool:
        """Return True if the tables hold the version to stay at, and not one of another stream with its number."""
        place = self._cursor.place
        if place is None or self._writer.is_mixed or place.link.version != pinned:
            return False
        return self._pin_stream in (None, place.stream)

    def _obeys_despite_caches(self, order: Pin, *, leaves_stream: bool = False) -> bool | None:
        """Call :meth:`_obeys`. Over http, read the objects that can cause a fault once more, past the caches."""
        try:
            return self._obeys(order, leaves_stream=leaves_stream)
        except CACHE_FAULTS as found:
            fault, settling, place = found, self._settling, self._cursor.place
        if settling is None:
            raise fault
        former = self._storage, self._cursor.log
        while (doubted := settling.doubt(fault, place, self._storage)) is not None:
            self._buffer = PartBuffer()  # it may hold pieces of the faulty object
            try:
                self._storage, self._cursor.log = doubted, StreamLog(doubted)
                has_moved = self._obeys(order, leaves_stream=leaves_stream)
            except CACHE_FAULTS as another:
                fault = another
            else:
                settling.clear()
                return has_moved
            finally:
                self._storage, self._cursor.log = former
                self._gauges.read_past_cache(doubted.take_count())
        if settling.is_over:
            raise fault
        raise StaleCacheError(self._storage.url, _subject(fault), settling.seconds)

    def _obeys(self, order: Pin, *, leaves_stream: bool = False) -> bool | None:
        """Follow a pin or a release that was not followed yet.

        Args:
            order: the newest pin or release.
            leaves_stream: True if the stream of the applied version has ended, and the order may be one of the next.

        Returns:
            True if versions were applied; False to go on with the next version; None to apply none now, because the
            canary does not allow the version of a release yet, and the versions before it may be bad.
        """
        self._awaited = None
        if self._has_obeyed(order):
            return False
        place = None if leaves_stream or self._has_left_for(order) else self._cursor.place
        if not (self._applies(order, place) if place is not None else self._begins(order, leaves_stream=leaves_stream)):
            return False
        if order.kind == "pin":
            entry = self._named(order)
            if not self._is_allowed(entry):
                self._awaited = order
                return False  # what is allowed is older
            has_moved = self._goes_to_pin(order, entry, place)
        elif self._takes_one(self._released(order)):
            self._pinned, has_moved = None, True
        elif self._cursor.place is None or self._writer.is_mixed:
            raise NoSnapshotError(self._storage.url)
        else:
            return None
        self._obeyed = order.counter
        return has_moved

    def _has_obeyed(self, order: Pin) -> bool:
        """Return True if nothing is left to do for a pin or a release.

        One that was followed is followed again if the tables hold a version of another stream since, because the log
        was replaced by an older copy.
        """
        place = self._cursor.place
        if place is not None and place.stream != order.stream:
            return order.counter <= self._overruled
        return order.counter <= max(self._obeyed, self._outlived, self._overruled)

    def _has_left_for(self, order: Pin) -> bool:
        """Return True if a move to the stream of ``order`` must begin again, because it was interrupted.

        If the tables are mixed, they can begin with any stream.
        """
        place = self._cursor.place
        if place is None or place.stream == order.stream:
            return False
        return self._writer.is_mixed or (self._pinned is not None and self._pin_stream == order.stream)

    def _applies(self, order: Pin, place: Place) -> bool:
        """Return True if versions must be read to follow a pin or a release from a place."""
        if place.stream != order.stream:
            return False
        if self._is_replaced(order.stream):
            self._outlives(order, place)
            return False
        if order.kind == "release" and place.link.version >= order.version and not self._writer.is_mixed:
            self._pinned, self._obeyed = None, order.counter  # nothing to do: the snapshot may be deleted meanwhile
            return False
        return True

    def _outlives(self, order: Pin, place: Place) -> None:
        """Stay at a place until the next stream has a snapshot, if bad versions may follow in the stream that ended."""
        is_past = order.kind == "release" and place.link.version >= order.version
        is_rolled_back = self._pinned is not None and self._pin_stream is None
        if is_past or is_rolled_back or self._writer.is_mixed:
            return
        self._pinned, self._pin_stream = place.link.version, place.stream
        if order.kind == "pin" and place.link == Link(order.version, order.xxh3):
            self._obeyed = order.counter  # a restart at the pin
        else:
            self._outlived = order.counter

    def _begins(self, order: Pin, *, leaves_stream: bool) -> bool:
        """Return True if a reader without a place, or one whose stream has ended, begins with a pin or a release."""
        try:
            head = self._cursor.log.head()
        except (MalformedError, StorageError) as error:
            if leaves_stream and (isinstance(error, MalformedError) or self._keeps_failing):
                return False  # a pin of a former stream must not prevent the recovery from a fault for ever
            raise  # the pin must not be ignored
        return head is not None and head.stream == order.stream

    def _follows_next_stream(self) -> bool | None:
        """Follow a pin or a release of the stream that has replaced the applied one; see :meth:`_obeys`."""
        order, place = None if self._pins is None else self._pins.order(), self._cursor.place
        if order is None or place is None or place.stream == order.stream:
            return False
        return self._obeys_despite_caches(order, leaves_stream=True)

    def _named(self, order: Pin) -> Manifest:
        """Return the entry that a pin or a release names. Raise MissingVersionError if there is none."""
        entry = self._cursor.log.read(order.version)
        is_there = entry is not None and (entry.stream, entry.xxh3) == (order.stream, order.xxh3)
        if self._pins is not None:
            (self._pins.confirm if is_there else self._pins.doubt)(order)
        if entry is None or not is_there:
            remedy = "Pin another version (delta-tracker rollback --replace), or call delta-tracker release"
            raise MissingVersionError(order.version, order.bad).advising(remedy)
        return entry

    def _released(self, order: Pin) -> Iterator[Manifest]:
        """Yield the snapshots to continue from after a release, the newest first.

        Any later one than that of the release will do, and retention may have deleted the one that it names.

        Raises:
            MissingVersionError: if there is none.
        """
        has_later = False
        for later in self._cursor.snapshots(skips_unreadable=self._keeps_failing):
            if later.stream != order.stream or later.link.version <= order.version:
                break
            has_later = True
            yield later
        try:
            entry = self._named(order)
        except MissingVersionError:
            if has_later:
                return
            raise
        if self._is_allowed(entry):
            yield entry

    def _is_allowed(self, entry: Manifest) -> bool:
        """Return True if there is no canary, or if the canary may apply an entry.

        What follows a pin is not allowed before the pin: its time may be earlier, by the clock of another publisher.
        """
        pin = self._awaited
        if pin is not None and entry.stream == pin.stream and entry.version > pin.version:
            return False
        return self._bound is None or self._bound.allows(entry)

    def _is_excluded(self, entry: Manifest) -> bool:
        """Return True if a pin or a release that was found meanwhile, or could not be followed, excludes an entry."""
        order = None if self._pins is None else self._pins.order()
        if order is None or entry.stream != order.stream or self._has_obeyed(order):
            return False
        return entry.version > order.version if order.kind == "pin" else entry.version < order.version

    def _newest_stream(self) -> str | None:
        """Return the stream of the newest entry of the log; None if there is none, or if it is malformed."""
        try:
            head = self._cursor.log.head()
        except MalformedError as error:  # perhaps why a stream was pinned
            _logger.info("cannot tell whether the stream of a pin has ended: %s", str(error))
            return None
        return None if head is None else head.stream

    def _is_replaced(self, stream: str) -> bool:
        """Return True if the newest entry of the log belongs to another stream than ``stream``, which has a pin."""
        return self._newest_stream() not in (None, stream)

    def _end_pin_of_former_stream(self) -> None:
        """If another stream has replaced the stream of a pin that is not reached yet, end the pin.

        A predictor with a whole version of the former stream stays at it: bad versions may follow.
        """
        stream, place = self._pin_stream, self._cursor.place
        if stream is not None and self._is_replaced(stream):
            is_whole = place is not None and place.stream == stream and not self._writer.is_mixed
            self._pinned = place.link.version if place is not None and is_whole else None

    def _goes_to_pin(self, order: Pin, entry: Manifest, place: Place | None) -> bool:
        """Apply the versions that lead from a place to a pin. Return False if the tables hold its version already."""
        is_there = place is not None and place.link == entry.link and not self._writer.is_mixed
        has_moved = not is_there or self._writer.may_be_newer
        if has_moved:
            self._return_to(order.version, stream=order.stream)
        self._pinned, self._pin_stream = order.version, order.stream
        return has_moved

    def _leaves_pin(self) -> bool:
        """Go to the stream that has replaced the pin's stream. Return False if it has no snapshot that is allowed.

        The former stream is not continued meanwhile, because the versions after the pin may be bad.
        """
        stream = self._pin_stream
        newest = None if stream is None else self._newest_stream()
        if newest is None:
            return False
        if newest == stream:
            self._outlived = 0  # the log was replaced by an older copy
            return False
        followed = self._follows_next_stream()
        if followed is not False:
            return followed is True
        snapshots = self._cursor.snapshots(skips_unreadable=self._keeps_failing)
        if not self._takes_one(takewhile(lambda each: each.stream != stream, snapshots)):
            return False
        self._pinned = None
        return True

    def _takes_one(self, snapshots: Iterable[Manifest]) -> bool:
        """Apply the first of some snapshots that can be applied. Return False if there are none.

        Raises:
            StreamError: the fault of the first one, if none can be applied.
        """
        faults = (*_FAULTS, StorageError) if self._keeps_failing else _FAULTS
        first: StreamError | None = None
        num_unreadable = 0
        for snapshot in snapshots:
            try:
                self._take(snapshot, is_elsewhere=True)
            except faults as fault:
                first = first or fault
                self._log_once(("pin", self.version, snapshot.link), fault)
                num_unreadable += isinstance(fault, StorageError)
                if num_unreadable == _NUM_TRIES:
                    break  # an outage, not a single object
                continue
            return True
        if first is not None:
            raise first
        return False

    def _use(self, storage: Storage) -> None:
        """Continue from another source, which has the last applied entry."""
        _logger.warning("continue from another source: url=%s former=%s", storage.url, self._storage.url)
        self._storage, self._num_failures = storage, 0
        if self._pulse is not None and self._moves_heartbeats and not storage.is_read_only:
            self._pulse.move_to(storage)
        if storage not in self._read_before:
            self._read_before.append(storage)
        self._cursor.log = StreamLog(storage)
        self._cursor.rested = None
        self._settling = None if storage.lists else Settling()
        self._buffer = PartBuffer()  # it may hold a part of the former source
        self._gauges.failed_over(storage.url)

    def _contents(self, manifest: Manifest, storage: Storage | None = None) -> Contents:
        """Return the contents of a version, read from ``storage`` or, by default, through the host cache."""
        storage = self._storage if storage is None else storage
        if self._cache is not None:
            storage = self._cache.over(storage, manifest)
        return Contents(storage, manifest, buffer=self._buffer)

    def _take_next(self, *, looks_for_gap: bool) -> bool:
        """Apply the next version, or resync if it cannot be applied. Return False if there is no next version."""
        try:
            has_moved = self._step(looks_for_gap=looks_for_gap)
        except _FAULTS as fault:
            has_moved = self._recovers(fault)
        except StaleCacheError:
            raise
        except StorageError as fault:
            if not self._keeps_failing:
                raise
            has_moved = self._resync(fault)
        if self._settling is not None and (has_moved or looks_for_gap):
            self._settling.clear()
        return has_moved

    def _step(self, *, looks_for_gap: bool) -> bool:
        """Apply the next version, or several at once. Return False if there is none."""
        if self._writer.is_mixed:
            self._cursor.place = None
        is_start = self._cursor.place is None
        if self._in_a_row >= _CATCH_UP and not is_start and self._catches_up():
            return True
        self._gauges.age.rested = self._cursor.rested
        manifest = self._cursor.next()
        if manifest is None:
            self._in_a_row = 0
            if looks_for_gap:
                self._cursor.check_for_gap()
                if self._writer.manifest is None and self._gauges.restored is None:
                    self._find_restored()
            return False
        self._take(manifest)
        self._in_a_row = _CATCH_UP if is_start else self._in_a_row + 1
        return True

    def _find_restored(self) -> None:
        """Read the entry of a loaded position once, from which the age of the rows is known. Errors are ignored."""
        place = self._cursor.place
        if place is None:
            return
        with suppress(StreamError):
            entry = self._cursor.log.read(place.link.version)
            while entry is not None and entry.kind == "claim" and entry.parent is not None:
                entry = self._cursor.log.read(entry.parent.version)
            self._gauges.restored = entry
            self._gauges.reads(place.stream)

    def _recovers(self, fault: StreamError) -> bool:
        """Apply another version after a fault. Return False if the fault is over, or the next version must wait."""
        if self._settling is not None and isinstance(fault, CACHE_FAULTS):
            try:
                return self._settles(fault, self._settling)
            except _FAULTS as believed:
                fault = believed
        return self._resync(fault)

    def _catches_up(self) -> bool:
        """Apply a merged delta or a snapshot that replaces many versions. Return False if there is none to apply."""
        self._in_a_row = 0
        if not self._skips_versions:
            return False
        manifest, before = self._cursor.ahead(), self.version
        if manifest is None:
            return False
        try:
            self._take(manifest)
        except _FAULTS as fault:
            self._cursor.avoid(manifest)
            _logger.info("cannot catch up with version %d: %s", manifest.version, str(fault))
            return False
        self._in_a_row = _CATCH_UP
        self._gauges.caught_up()
        kind = manifest.kind if manifest.merges is None else f"merged {manifest.kind}"
        _logger.info("caught up from version %s to %d with a %s", before, manifest.version, kind)
        return True

    def _settles(self, fault: StreamError, settling: Settling) -> bool:
        """Apply the next version after a fault that may be that of a cache. Return False if there is none after all.

        The objects that can cause the fault are first read again from the cache, after a random wait: another reader
        may have replaced them. Then they are read past the cache, once until a version is applied.

        Raises:
            StaleCacheError: if the fault remains, but may still be that of a cache.
            StreamError: the fault, if it is not that of a cache.
        """
        place, is_first = self._cursor.place, True
        while (doubted := settling.doubt(fault, place, self._storage)) is not None:
            if is_first:
                sleep(random.uniform(0, _SPREAD_SECONDS))  # noqa: S311  no secret
            for storage in (self._storage, doubted) if is_first else (doubted,):
                self._buffer = PartBuffer()  # it may hold pieces of the faulty object
                try:
                    return self._retakes(storage)
                except CACHE_FAULTS as another:
                    fault = another
                finally:
                    self._gauges.read_past_cache(doubted.take_count())
            is_first = False
        if settling.is_over or self._is_retired(place, settling):
            raise fault
        raise StaleCacheError(self._storage.url, _subject(fault), settling.seconds)

    def _retakes(self, storage: Storage) -> bool:
        """Read the next version from a view of the store, and apply it. Return False if there is none."""
        cursor = self._cursor.through(StreamLog(storage))
        manifest = cursor.next()
        if manifest is None:
            cursor.check_for_gap()
            return False
        self._take(manifest, storage=storage)
        return True

    def _is_retired(self, place: Place | None, settling: Settling) -> bool:
        """Return True if retention has deleted the next version, by the pointer past the caches."""
        if place is None or not settling.may_read_pointer():
            return False
        self._gauges.read_past_cache(1)
        log, version = self._cursor.log, place.link.version + 1
        claimed = log.pointer.newest(past_cache=True)
        if claimed is None or claimed.oldest <= version:
            return False
        confirmed = log.pointed(is_due=False)
        return confirmed is not None and confirmed.oldest > version

    @property
    def _keeps_failing(self) -> bool:
        """True if one more consecutive storage error causes a resync."""
        return self._num_failures >= _NUM_TRIES - 1

    def _resync(self, fault: StreamError) -> bool:
        """Recover from ``fault`` by applying a merged version or a snapshot. Raise ``fault`` if none can be applied.

        If the next stream has a pin or a release, that one decides which version is applied. Returns False if the
        canary does not allow it yet.
        """
        before, num_unreadable = self.version, 0
        stream = None if self._cursor.place is None else self._cursor.place.stream
        followed = self._follows_next_stream()
        if followed:
            self._resynced(fault, before)
        if followed is not False:
            return followed is True
        faults = (*_FAULTS, StorageError) if self._keeps_failing else _FAULTS
        for manifest in self._cursor.way_back(fault, skips_unreadable=self._keeps_failing):
            way = kind_of(fault), before, manifest.link
            # An earlier resync with the entry led to the same fault, or a pin excludes the entry.
            if way in self._ways or self._is_excluded(manifest):
                continue
            is_elsewhere = isinstance(fault, StreamReplacedError) or stream not in (None, manifest.stream)
            try:
                self._take(manifest, is_elsewhere=is_elsewhere)
            except faults as another:
                self._log_once(way, another)
                num_unreadable += isinstance(another, StorageError)
                if num_unreadable == _NUM_TRIES:
                    break  # an outage, not a single object
                continue
            self._ways.append(way)
            self._resynced(fault, before)
            return True
        raise fault

    def _log_once(self, way: tuple[object, int | None, Link], fault: StreamError) -> None:
        """Log that a version cannot be applied, once, although this is tried again and again."""
        if way not in self._dead_ends:
            _logger.warning("cannot resync with version %d: %s", way[2].version, str(fault))
            self._dead_ends.append(way)

    def _resynced(self, fault: StreamError, before: int | None) -> None:
        """Record a resync because of a fault at version ``before``."""
        self._resyncs += 1
        self._gauges.resynced(fault)
        self._last_resync = f"version {before} to {self.version}: {type(fault).__name__}: {fault}"
        # As text, because a log handler may keep its arguments, and with the error the rows of the version.
        _logger.warning("resync of %s from version %s to %s: %s", self._storage.url, before, self.version, str(fault))

    def _take(self, manifest: Manifest, *, is_elsewhere: bool = False, storage: Storage | None = None) -> None:
        """Read and validate a version, then write it. See :meth:`VersionWrite.apply`."""
        self._writer.restore()  # an earlier attempt may have failed after its first row
        if self._writer.leaves_rows(manifest):
            raise StreamReplacedError(self._storage.url, manifest.version)
        gate = self._gate if manifest.kind != "claim" else None
        write = self._writer.resolve(manifest)
        if gate is not None:
            gate.recall(manifest)
        contents = self._contents(manifest, storage)
        measure = {} if gate is None else gate.check(manifest, contents)
        write.apply(contents, is_elsewhere=is_elsewhere)
        if gate is not None:
            gate.passed(manifest, measure)

    def _return_to(
        self, version: int, *, stream: str | None = None, overrules: int = 0, completes: bool = False
    ) -> None:
        """Go to ``version`` by a snapshot and its successors, and stay there.

        Args:
            version: number of the version.
            stream: stream of the pin that names the version, which may differ from the applied one; None without a pin.
            overrules: counter of a pin, which no longer applies, like those before it.
            completes: True to complete an interrupted rollback, which :meth:`release` may end meanwhile.
        """
        self._writer.restore()
        entries = self._cursor.path_to(version, is_elsewhere=stream is not None)
        if self._canary is not None and self._cursor.allows is not None and not self._cursor.allows(entries[-1]):
            text = f"Pass an older version: a canary stays {self._canary.text} behind the newest one"
            raise InvalidArgumentError("version", version, text)
        path = [(manifest, self._writer.resolve(manifest)) for manifest in entries]
        identities = self._writer.identities
        for manifest, write in path:
            identities = identities_after(manifest, identities)
            write.check(self._contents(manifest))
        if not completes:
            self._pinned, self._pin_stream, self._overruled = version, stream, max(self._overruled, overrules)
        self._ways.clear()
        if self._gate is not None:
            self._gate.restart()
        for manifest, write in path:
            contents = self._contents(manifest)
            write.apply(contents, is_elsewhere=manifest.kind == "snapshot")
            if self._gate is not None:
                self._gate.passed(manifest, self._gate.follow(manifest, contents))
        _logger.warning("rolled back to version %d of %s", version, self._storage.url)


def _subject(fault: StreamError) -> str:
    """Return what a fault is about, for a message."""
    if isinstance(fault, CorruptPartError | MalformedError):
        return fault.path
    return f"version {fault.version}" if isinstance(fault, MissingVersionError) else "the last applied version"
