"""Predictor: applies the versions of a stream to a model that serves lookups."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from delta_tracker.arguments import check_count, check_switch, check_type, is_number, refuses_unknown
from delta_tracker.errors import InvalidArgumentError, WaitTimeoutError
from delta_tracker.live_objects import Uncopied
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.follower import Follower, PredictorHeartbeats, lag
from delta_tracker.predictor.gate import Gate, GateKeeper
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.predictor.predictor_gauges import PredictorGauges
from delta_tracker.predictor.reader import Reader
from delta_tracker.predictor.served_model import Model, ModelTarget
from delta_tracker.predictor.sink_writer import SinkWriter
from delta_tracker.predictor.status import Counts, Served, Status, type_and_message
from delta_tracker.predictor.version_writer import Destination, VersionWriter
from delta_tracker.sinks.row_sink import RowSink
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.notify.notifier import Notifier
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.reading.decide import FAULTS
from delta_tracker.stream.reading.orders import OrderPolicy
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.reading.source import Sources
from delta_tracker.stream.storage.storage import Location, Storage


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Rules that determine which versions a predictor applies, and when.

    Args:
        gate: bounds on the values of a version. A version that violates a bound is held. None disables the check.
        canary: distance to keep from the newest version; None to apply each version as soon as possible.
        follows_pins: True to follow the pins and releases that ``delta-tracker rollback`` and ``release`` write.

    Raises:
        InvalidArgumentError: if an argument is invalid.

    Example:
        >>> Rollout(gate=Gate(max_drift=0.5), canary=Canary(versions=3)).follows_pins
        False
    """

    gate: Gate | None = None
    canary: Canary | None = None
    follows_pins: bool = False

    def __post_init__(self) -> None:
        check_type("gate", self.gate, Gate, "Gate(max_drift=0.5)")
        check_type("canary", self.canary, Canary, "Canary(versions=3)")
        check_switch("follows_pins", self.follows_pins)


@refuses_unknown(rollout=Rollout)
class Predictor(Uncopied, remedy="Save or copy its state_dict()"):
    """Stream reader that applies each version once, in order, to the tables of a model.

    A predictor starts from the newest snapshot and applies every later version. It validates a version completely
    before it writes the first row. ``guide/fleet.md`` describes all rules, failover and limits.

    Lookups in other threads must run inside ``with predictor.reading()``, which blocks writes. While a version is being
    applied, lookups may read some of its rows, but never a torn (partly written) row or the row of a different raw id.
    All dense tensors change together after the last row. Managed-collision modules of the model must be in evaluation
    mode.

    Args:
        model: module with the same table names as the stream (``<fqn>.weight``), or a mapping of FQN to tensor or
            :class:`~delta_tracker.row_target.RowTarget`. A module may contain ``nn.Embedding``, ``nn.EmbeddingBag`` and
            TorchRec collections (unsharded, sharded or quantized). The predictor looks up the tables for each version,
            so ``model.to(device)`` may be called between versions. The predictor also applies the dense tensors of the
            stream, and the model must have all of them. Pass a
            :class:`~delta_tracker.predictor.served_model.ModelTarget` to map names, skip dense tensors, or add mappings
            of raw ids. Pass a :class:`~delta_tracker.sinks.row_sink.RowSink` to write the tables, but no dense tensors,
            to a row store for lookups in other processes.
        url: url of the stream, such as ``file:///directory``, ``s3://bucket/prefix`` or ``https://cache/prefix``, or an
            opened :class:`~delta_tracker.stream.storage.storage.Storage`; or a sequence of copies of one stream in
            order of preference. An object that is missing in one copy is read from another copy.
        rollout: rules that determine which versions are applied, and when; None to apply all versions.
        tables: names or patterns, such as ``"user.*"``, of the tables and dense tensors of the stream to read and
            apply; None for all. See ``guide/serve.md``.
        name: name of the heartbeat; None to disable heartbeats. A heartbeat is written to the stream every few seconds
            and requires write permission. The name is also the value of the metric label ``predictor``, which is
            ``"predictor"`` by default. A suffix ``-2``, ``-3``, ... makes the label unique in the process.
        monitor: monitor for the metrics; None for ``delta_tracker.monitor.MONITOR``.
        cache: directory, or :class:`~delta_tracker.stream.host_cache.HostCache`, that the predictors of a host share to
            fetch each part only once; None to disable the cache.
        heartbeats: url or store to write heartbeats to. None for the first writable ``url`` and, after a failover to a
            writable ``url``, for this ``url``.
        runtime: provider of the clock, waits, random numbers and threads that the predictor uses.

    Raises:
        InvalidArgumentError: for an invalid argument, such as a model without tables.
        MissingExtraError: if the model or the url requires a package that is not installed.
        StorageError: if the store cannot be opened.
        SinkError: if the row store cannot be used, for example because another process writes to it.

    Example:
        >>> import torch
        >>> predictor = Predictor({"ec.embeddings.user": torch.zeros(10, 4)}, Storage("memory://"))
        >>> predictor.version is None
        True
    """

    def __init__(  # noqa: PLR0913  all but two have a default that most users keep
        self,
        model: Model | ModelTarget | RowSink,
        url: Location | Sequence[Location],
        *,
        rollout: Rollout | None = None,
        tables: str | Sequence[str] | None = None,
        cache: str | Path | HostCache | None = None,
        name: str | None = None,
        heartbeats: Location | None = None,
        monitor: Monitor | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        check_type("cache", None if isinstance(cache, str | Path) else cache, HostCache, "'/var/cache/streams'")
        if isinstance(model, str | Path | Storage):
            raise InvalidArgumentError("model", model, "Pass the model first, and then the url of the stream")
        check_type("rollout", rollout, Rollout, "Rollout(follows_pins=True)")
        rollout = rollout or Rollout()
        recorder = Recorder("predictor", self, name=name, monitor=monitor)
        self._gauges = PredictorGauges(recorder, runtime)
        sources = Sources(url, rollout.canary, runtime=runtime)
        self._cache = HostCache(cache) if isinstance(cache, str | Path) else cache
        self._gate = None if rollout.gate is None else GateKeeper(rollout.gate)
        self._choice = TableChoice(tables)
        self._destination: Destination
        if isinstance(model, RowSink):
            self._destination = SinkWriter(model, self._gauges, self._choice)
        else:
            target = model if isinstance(model, ModelTarget) else ModelTarget(model)
            self._destination = ModelWriter(target, self._gauges, self._choice)
        self._writer = VersionWriter(self._destination, choice=self._choice, gate=self._gate, cache=self._cache)
        self._reader = Reader(
            sources,
            self._writer,
            self._gauges,
            OrderPolicy(follows_pins=rollout.follows_pins, is_canary=rollout.canary is not None),
            # The norms of a merged version cannot show which of its versions violates a bound.
            skips_versions=rollout.gate is None or rollout.gate.max_drift is None,
            runtime=runtime,
        )
        beats = None if name is None else PredictorHeartbeats(self._reader, name, heartbeats)
        self._follower = Follower(self._reader, beats)
        self._gauges.begin(self._reader.storage.url, FAULTS, self._gate)

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the last applied snapshot or delta; None if there is none, and after :meth:`load_state_dict`.

        The manifest lists only the tables and dense tensors that were applied.
        """
        return self._destination.manifest

    @property
    def version(self) -> int | None:
        """Number of the last applied version, possibly a claim; None before the first version."""
        return self._reader.version

    @property
    def error(self) -> Exception | None:
        """Current error of :meth:`follow` or error of the held version; None if there is neither."""
        return self._follower.current_error

    def reading(self, *streams: torch.cuda.Stream) -> AbstractContextManager[Served]:
        """Context manager that blocks writes during lookups, and yields the versions that the tables contain.

        Keep the body of the ``with`` statement short, and do not use ``await`` in it: :meth:`follow` and :meth:`sync`
        cannot write rows until the body ends.

        If tables are on CUDA devices, launch the lookups on the streams that are current at entry, or pass other
        ``streams``: ``with predictor.reading(stream), torch.cuda.stream(stream):``. These streams wait for the last
        write of rows. The next write waits for the work that was launched on these streams before exit. The host does
        not wait for the devices. This has not been tested on a GPU.

        Raises InvalidArgumentError for a stream of a device without tables, and FollowEndedError if a fork has left
        torn rows; see ``guide/serve.md`` for the rules for forks.
        """
        return self._destination.reading(*streams)

    def status(self) -> Status:
        """Return the state of the predictor. Sends a few small requests to the store to determine the lag."""
        reader = self._reader
        lag_versions, lag_seconds = lag(reader) or (None, None)
        position = reader.position  # after the lag, so that an old version does not seem to be the newest
        requests: Counter[str] = Counter()
        for source in reader.sources.all:
            requests.update(source.storage.requests)
        return Status(
            stream=None if position is None else position.stream,
            version=None if position is None else position.version,
            lag_versions=lag_versions,
            lag_seconds=lag_seconds,
            resyncs=reader.resyncs.count,
            last_resync=reader.resyncs.last,
            error=type_and_message(self.error),
            pinned=reader.pinned,
            poll_seconds=self._follower.poll_seconds,
            notice=reader.ignored.notice,
            why=reader.why,
            left_out=self._writer.left_out,
            differences=self._destination.differences,
            counts=Counts(
                rows=self._gauges.num_rows,
                num_bytes=self._gauges.num_bytes,
                admitted=self._gauges.num_admitted,
                evicted=self._gauges.num_evicted,
                requests=dict(requests),
                cache={} if self._cache is None else dict(self._cache.counts),
            ),
        )

    def sync(self, limit: int | None = None) -> int:
        """Apply all committed versions that are not applied yet. ``guide/fleet.md`` describes the rules.

        After a :meth:`rollback` or at a pinned version, no newer version is applied until a release.

        Args:
            limit: maximum number of versions to apply; None for all. A merged version counts as one.

        Returns:
            Number of the last applied version.

        Raises:
            NoSnapshotError: if the stream has no snapshot to start from.
            HeldVersionError: if the gate rejects the next version.
            StorageError: if the store cannot be read.
            StaleCacheError: if an object is missing, truncated or altered in an HTTP cache, even after it was read
                again with a request that bypasses the cache.
            StreamError: if no resync is possible and the next version is missing or damaged, belongs to another stream
                or an older copy, or does not fit the model. ``guide/errors.md`` lists the types and remedies.
        """
        if limit is not None:
            check_count("limit", limit)
        self._refuse_inside_reading("sync()")
        try:
            with self._follower.lock:
                num_applied = 0
                while (limit is None or num_applied < limit) and self._reader.advance(looks_for_gap=True):
                    num_applied += 1
        finally:
            self._follower.wake_waiters()  # also if a later version raised
        self._follower.after_sync()
        position = self._destination.position
        assert position is not None, "the first advance moves or raises"
        return position.link.version

    def follow(self, poll_seconds: float | None = None, notifier: Notifier | None = None) -> None:
        """Apply new versions in a background thread until :meth:`stop` is called.

        The thread waits until the stream has a snapshot. If an attempt fails, the thread reports the error in
        :attr:`error`, the heartbeat and the metric ``follow_errors``, and retries after a pause of up to 5 seconds.

        ``SystemExit``, ``KeyboardInterrupt`` or a similar exception ends the thread. :attr:`error` is then a
        :class:`FollowEndedError`, and :meth:`stop` raises this error.

        Args:
            poll_seconds: seconds between two polls, more than 0; None for the intervals in ``guide/fleet.md``.
            notifier: source of hints about new versions; None to find versions only by polling.

        Raises:
            InvalidArgumentError: if an argument is invalid, or if the thread is already running.
            ModelMismatchError: if no version was applied yet, and the thread finds within two seconds that the newest
                version does not fit the model. After the first version, the error is only reported.
        """
        self._follower.start(poll_seconds, notifier)

    def wait(self, version: int | None = None, timeout: float | None = None) -> int:
        """Wait until the thread of :meth:`follow` has applied a version. Does not poll the store.

        Args:
            version: version to wait for; a newer version also ends the wait. None to wait for the first version.
            timeout: maximum number of seconds to wait; None for no limit.

        Returns:
            Number of the last applied version.

        Raises:
            WaitTimeoutError: if the version was not applied in time. The message includes the error of :meth:`follow`,
                if there is one.
            FollowEndedError: if the thread ended with an error, or exists only in the parent process.
            InvalidArgumentError: if the version was not applied and the thread is not running, or if the thread itself
                calls this method.
        """
        if version is not None and (type(version) is not int or version < 0):
            raise InvalidArgumentError("version", version, "Pass the number of a version, 0 or more, or None")
        if timeout is not None and not (is_number(timeout) and 0 <= timeout < threading.TIMEOUT_MAX):
            raise InvalidArgumentError("timeout", timeout, "Pass seconds, 0 or more, or None")
        self._refuse_inside_reading("wait()")
        least = 0 if version is None else version
        if not self._follower.wait(lambda: self.version is not None and self.version >= least, timeout):
            raise WaitTimeoutError(self._reader.storage.url, version, self.version, timeout, self.error)
        assert self.version is not None, "checked by the wait"
        return self.version

    def stop(self) -> None:
        """Stop the thread of :meth:`follow` within about a second, and raise its current error if there is one.

        If the thread is writing a version to a model, it usually completes the version. It stops earlier if another
        thread does not leave :meth:`reading`, or if the parts exceed 256 MiB in total and must be read again. A signal
        handler may call this method, but the thread itself must not.
        """
        self._refuse_inside_reading("stop()")
        self._follower.stop()

    def __repr__(self) -> str:
        return f"Predictor({self._reader.storage.url!r}, version={self.version})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._follower.stop(raises=kind is None)

    # Gate and rollback

    def accept(self, version: int) -> None:
        """Make the gate accept ``version`` once. The version may be held already, or may not be committed yet."""
        if self._gate is None:
            text = "Build the Predictor with a gate: without one, no version is held"
            raise InvalidArgumentError("accept()", version, text)
        self._gate.accept(version)

    def rollback(self, version: int) -> None:
        """Return to an earlier version, and apply no newer version until :meth:`release` is called.

        The gate is bypassed. With ``follows_pins``, a newer pin or release of the stream ends the rollback. All data is
        read and validated before the first row is written.

        Raises:
            InvalidArgumentError: if ``version`` is invalid, not committed yet or newer than the canary allows.
            StreamError: if a required version is missing or damaged, belongs to another stream or does not fit the
                model. If the store fails after the validation, the next :meth:`sync` or :meth:`follow` completes the
                rollback.
        """
        self._refuse_inside_reading("rollback()")
        with self._follower.lock:
            self._reader.rollback(version)
        self._follower.wake_waiters()

    def release(self) -> None:
        """End a :meth:`rollback`: the next :meth:`sync`, or a running :meth:`follow`, applies newer versions again.

        With ``follows_pins``, the newest pin or release of the stream then applies again. If there is no rollback to
        end, this predictor ignores the current pin of the stream until the next pin is written.
        """
        self._reader.release()

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
            Dict of plain values, such as ``stream`` and ``version``. It contains no position before the first version,
            or if an interrupted call left rows of unrelated versions in the tables. After loading a dict without a
            position, only a snapshot can be applied.
        """
        return self._destination.state_dict() | self._choice.saved()

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Restore the stream position of tables that were saved together with ``state``.

        The next :meth:`sync` or :meth:`follow` continues with the version after this position, or resyncs. A
        :meth:`rollback` is not part of the state. Load the mapping of raw ids first: the state of the model, or of each
        ``RawIdIndex``. Raises InvalidArgumentError if ``state`` is invalid or does not fit the loaded mapping.
        """
        self._refuse_inside_reading("load_state_dict()")
        with self._follower.lock:
            self._destination.load_state_dict(self._choice.position_in(state))
            self._gauges.served = None
            self._reader.loaded()
        self._follower.wake_waiters()

    def _refuse_inside_reading(self, call: str) -> None:
        if self._destination.is_reading:
            raise InvalidArgumentError(call, "inside reading()", "Leave the `with predictor.reading()` block first")
