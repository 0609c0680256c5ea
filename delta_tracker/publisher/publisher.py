"""Publish the changed rows of all ranks to a stream, one version at a time."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from msgspec import to_builtins

from delta_tracker.arguments import check_type, refuses_unknown
from delta_tracker.errors import FencedError, InvalidArgumentError, without_traceback
from delta_tracker.live_objects import Uncopied
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.cadence import Cadence, CadenceProgress
from delta_tracker.publisher.coordinator import Coordinator, declared_states
from delta_tracker.publisher.delivery import Delivery, PublisherHeartbeats
from delta_tracker.publisher.exchange import Join, Message, Phase, VoteExchange, check_alike
from delta_tracker.publisher.rank_tables import EncodingChoice, name_encodings
from delta_tracker.publisher.reports import Reports
from delta_tracker.publisher.tracker_reader import TrackerReader
from delta_tracker.publisher.training import Recovery, check_recovery
from delta_tracker.publisher.versions import Publishes, VersionStateMachine
from delta_tracker.sharding.dense import DenseChoice
from delta_tracker.sharding.interrupted import check_complete
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import ClaimedStream
from delta_tracker.stream.maintenance.upkeep import Upkeep, UpkeepThread
from delta_tracker.stream.notify.notifier import Hints, Notifier
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Location
from delta_tracker.tracker.hooks import BatchProgress
from delta_tracker.tracker.rank_group import DEFAULT_TIMEOUT, RankGroup
from delta_tracker.tracker.top_k import TopK
from delta_tracker.tracker.tracker import ModelDeltaTracker

_logger = logging.getLogger(__name__)
_STANDSTILL_CALLS = 20  # more than the micro-batches of an accumulated batch usually are
_PATIENCE = 0.75  # wait for a sign of life of a rank, of the timeout; the rest is the time between two signs


@refuses_unknown(cadence=Cadence, recovery=Recovery, upkeep=Upkeep)
class Publisher(Uncopied, remedy="Save the tracker's state_dict(), and build a new Publisher after it is loaded"):
    """Writer that publishes the changed rows of a tracker to a stream. Each version contains the rows of all ranks.

    Every rank creates a publisher in its training thread. In this thread, all ranks call :meth:`step` after each batch,
    or :meth:`publish` or :meth:`snapshot` at the same batch. Each rank reads its own rows (the cut), and background
    threads write them. Rank 0 commits the version by creating its manifest. After any failure, every row stays pending.

    Creating a publisher claims the stream, fences every publisher of an older generation, and reserves the consumer.
    The first version is a snapshot, unless the tracker was loaded from a checkpoint; see ``guide/train.md``.

    Args:
        tracker: tracker whose changed rows are published.
        url: url of the stream, such as ``file:///directory`` or ``s3://bucket/prefix``, or an opened
            :class:`~delta_tracker.stream.storage.storage.Storage`. It must be the same store on every rank. After a
            takeover, pass its :class:`~delta_tracker.stream.log.ClaimedStream` to continue with the existing claim.
        consumer: name of the tracker's consumer; None if the tracker has only one.
        top_k: maximum number of rows in a delta. Only the rows that changed most are published. The other rows stay
            pending. None publishes all changed rows.
        dense: dense parameters and buffers to publish: True for the whole model, a module, names in the model's
            ``state_dict``, a list of modules, or a dict that maps names to modules. Each version contains rank 0's
            values of these tensors at the cut. Tensors that are split over the ranks are rejected. False publishes no
            dense tensors. None is the same as False, but logs a warning if the model has trainable dense parameters.
        encoding: :class:`~delta_tracker.stream.format.encoding.Encoding` of all tables, or a mapping from FQNs to
            encodings. Tables without an encoding are stored in their own dtype.
        cadence: schedule of :meth:`step`. None if :meth:`step` is not used.
        upkeep: settings for retention, compaction and the pointer object of the stream; None for ``Upkeep()``.
        recovery: training state to publish with each version, so that :func:`~delta_tracker.recovery.restore.restore`
            can continue training from a version. Entries are then written in format 2. After ``restore``, the first
            version is a delta. After a checkpoint was loaded, it is a snapshot, because the checkpoint may not contain
            the optimizer states. None publishes no training state.
        notifier: notifier that announces each version to waiting predictors. None if predictors only poll the stream.
        timeout: maximum time to wait for the other ranks, also while they create their publishers.
        monitor: monitor for the metrics; None for ``delta_tracker.monitor.MONITOR``.
        runtime: provider of clocks, waits and threads. Replace it in simulations only.
        join: function that creates a process group of all ranks; see
            :class:`~delta_tracker.tracker.rank_group.RankGroup`.
        name: value of the label ``publisher`` of the metrics; None for ``"publisher"``. If another publisher of this
            process has the same name, ``-2``, ``-3``, ... is appended.

    Raises:
        ReservedConsumerError: if the consumer is already reserved.
        DetachedError: if the tracker is detached.
        IncompleteModelError: if a restore of the model failed or was interrupted.
        UnsupportedModelError: if ``recovery`` lacks the optimizer of a table, or if a state cannot be published.
        InvalidArgumentError: if an argument is invalid, or does not match the model, the tracker or another argument,
            for example ``recovery`` with ``top_k``. Also raised if the claim in ``url`` was already used, or if rank 0
            opened a different store.
        UnsupportedStoreError: if the store does not support atomic creation of objects.
        MalformedError: if the stream's newest entry is malformed.
        StorageError: if this rank cannot access the store. If the claim failed, the stream may be claimed nevertheless.
        RankFailedError: if another rank raised one of these errors, or if the ranks passed different values of
            ``top_k``, ``encoding``, ``cadence`` or ``recovery``.
        RankLostError: if a rank dies, or does not create its publisher in time.

    Example:
        >>> import torch
        >>> from delta_tracker import Storage
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True))
        >>> tracker = ModelDeltaTracker(model)
        >>> with Publisher(tracker, Storage("memory://"), cadence=Cadence(batches=100)) as publisher:
        ...     first = publisher.snapshot()
        ...     model(torch.tensor([[7, 42, 7]])).sum().backward()
        ...     torch.optim.SGD(model.parameters(), lr=0.1).step()
        ...     tracker.step()
        ...     publisher.step()  # publishes every 100th batch
        ...     last = publisher.publish()  # now
        >>> (first.num_rows, last.num_rows)
        (1000, 2)
    """

    def __init__(  # noqa: PLR0913, PLR0915  all but two have a default that most users keep
        self,
        tracker: ModelDeltaTracker,
        url: Location | ClaimedStream,
        consumer: str | None = None,
        *,
        top_k: TopK | None = None,
        dense: DenseChoice | bool | None = None,
        encoding: EncodingChoice = None,
        cadence: Cadence | None = None,
        upkeep: Upkeep | None = None,
        recovery: Recovery | None = None,
        notifier: Notifier | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        monitor: Monitor | None = None,
        name: str | None = None,
        runtime: Runtime = REAL,
        join: Join = RankGroup,
    ) -> None:
        _check_tracker(tracker)
        self._caller = threading.get_ident(), os.getpid()
        self._still = _MissingStepDetector(tracker.progress)
        self._closing: list[Callable[[], object]] = []  # calls that free the resources, in reverse order; idempotent
        self._versions: VersionStateMachine | None = None  # None until the publisher is built, and after close()
        self._reader: TrackerReader | None = None
        self._upkeep: UpkeepThread | None = None
        reader: TrackerReader
        self._recorder = recorder = Recorder("publisher", self, name=name, monitor=monitor)
        self._closing.append(recorder.close)

        def prepare() -> dict[str, Any]:
            _check(url, cadence, upkeep, recovery)
            if cadence is not None:
                exchange.vote_every = cadence.calls_per_vote(exchange.group.world_size)
            check_complete(tracker.model)
            nonlocal reader
            self._reader = reader = TrackerReader(
                tracker,
                consumer,
                top_k=top_k,
                dense=dense,
                encoding=encoding,
                exchange=exchange,
                recorder=recorder,
                recovery=recovery,
            )
            failing.callback(reader.close, removes_position=False)
            scored = "" if top_k is None or top_k.score is None else " with a score"
            return {
                "top_k": "no top_k" if top_k is None else f"top_k={replace(top_k, score=None)}{scored}",
                "encoding": f"encoding={name_encodings(encoding)}",
                # Compared before the cadence, which also contains it, because its error message is shorter.
                "vote_every": f"vote_every={exchange.vote_every}",
                "cadence": f"cadence={cadence}",
                "kind": "recovery=None" if recovery is None else "recovery=Recovery(...)",
                "states": {} if recovery is None else to_builtins(reader.tables.latest.states),
            }

        with ExitStack() as failing:
            failing.callback(self._free)
            exchange = VoteExchange(timeout, join)
            self._closing.append(exchange.close)
            self._writer = writer = Coordinator(exchange, recorder, runtime)
            failing.callback(writer.release)
            self._reports = reports = Reports(recorder, writer)
            hints = Hints(notifier, runtime=runtime)
            workers = join("publisher's workers", "Publisher(...)", _PATIENCE * timeout)
            self._closing.append(workers.close)
            messages = exchange.exchange(Phase.BUILDING, Message.of(prepare))
            check_alike(messages, "top_k", "encoding", "vote_every", "cadence", "kind")
            if recovery is not None:
                writer.states = declared_states([message["states"] for message in messages], tracker.tables)
            writer.open(url)
            reader.resume(exchange, writer)
            committed: list[Callable[[Manifest], object]] = []
            if notifier is not None:
                committed.append(lambda entry: hints.announce(entry.stream, entry.version))
            chosen = Upkeep() if upkeep is None else upkeep
            pointer: PointerWriter | None = None
            if chosen.pointer_seconds is not None and writer.is_first:
                pointer = PointerWriter(writer.storage, seconds=chosen.pointer_seconds, runtime=runtime)
                committed.append(pointer.after)
                self._closing.append(pointer.close)
                # The thread of a publisher that is dropped without close() ends, too.
                weakref.finalize(self, pointer.end).atexit = False
            if chosen.retention is not None or chosen.compact_every is not None:
                on_pass = None if pointer is None else lambda has_changed: pointer.rescan() if has_changed else None
                on_failure = reports.upkeep_failed
                self._upkeep = passes = UpkeepThread(writer.storage, chosen, on_pass=on_pass, on_failure=on_failure)
                committed.append(lambda entry: passes.after(entry.version))
                self._closing.append(passes.close)
            self._closing.append(hints.close)
            beats = None
            if recovery is not None and recovery.heartbeat_seconds is not None and writer.is_first:
                beats = PublisherHeartbeats(writer.storage, recovery.heartbeat_seconds, runtime)
                self._closing.append(beats.close)
            delivery = Delivery(writer, workers, (1 - _PATIENCE) * timeout.total_seconds(), committed, runtime)
            self._closing.append(delivery.close)
            failing.pop_all()
        pace = None
        if cadence is not None:
            lead = 0 if exchange.is_alone else exchange.vote_every
            pace = CadenceProgress(cadence, tracker, reader.handle.name, num_batches=lead, runtime=runtime)
        self._versions = VersionStateMachine(reader, writer, exchange, delivery, reports, pace, beats)
        reports.open()

    @property
    def generation(self) -> int:
        """Generation of this publisher's claim."""
        return self._writer.head.generation

    @property
    def stream(self) -> str:
        """Id of the stream: a string of 32 hexadecimal digits."""
        return self._writer.head.stream

    @property
    def version(self) -> int:
        """Last version that this publisher committed. Before its first version, the version number of its claim."""
        return self._writer.head.version

    @property
    def error(self) -> Exception | None:
        """Error of the last version, without a traceback; None if the version was published."""
        return self._reports.error

    @property
    def is_fenced(self) -> bool:
        """True if a newer publisher has claimed the stream. This publisher then publishes no more versions.

        The value changes in the same call of :meth:`step` on all ranks, so that all can stop at the same batch.
        """
        return isinstance(self._reports.error, FencedError)

    @property
    def upkeep_error(self) -> Exception | None:
        """Error of rank 0's last compaction or retention; None if neither failed. Always None on other ranks."""
        return None if self._upkeep is None else self._upkeep.error

    def step(self) -> None:
        """Publish a version if the cadence requires it. Call this method on every rank after each ``tracker.step()``.

        With ``recovery``, call it at the end of each training iteration. With gradient accumulation, call it after the
        last accumulated batch only, because a restored job continues with the batch after the call. A version is
        published only if no update is in progress and no rows were updated since the last ``tracker.step()``. Updates
        of sharded tables without a fused optimizer are not detected. The call waits up to 5 seconds for an update in
        progress. After a wait has timed out, later calls wait at most 0.05 seconds, until a wait succeeds. A model
        output whose backward pass has not run, such as the output of an evaluation, counts as an update in progress.
        Delete such outputs before the call, or compute them under ``torch.no_grad()``.

        Training is blocked only while the rows are read. The rows of a snapshot are copied while training continues.
        Other threads write and commit the version. The result is available in :attr:`error`, the log and the metrics
        after the next vote. Only one version is published at a time. Rows that change in the meantime stay pending.
        Call :meth:`flush` before a pause in training to publish pending rows.

        If a version cannot be published, the error is not raised, but logged and stored in :attr:`error`. All rows stay
        pending, and are published with the next version. After a :class:`~delta_tracker.errors.FencedError` or a
        :class:`~delta_tracker.errors.RankLostError`, the publisher publishes no more versions: end the training loop if
        :attr:`is_fenced` is True.

        Raises:
            InvalidArgumentError: if the publisher has no cadence or is closed, or if the calling thread or process did
                not create the publisher.
        """
        versions = self._checked()
        if not versions.has_cadence:
            raise InvalidArgumentError("cadence", None, "Build the Publisher with cadence=Cadence(...)")
        try:
            versions.count_call()
            self._still.count_call()
            versions.step()
            versions.write_heartbeat_if_due()
        except Exception as error:  # noqa: BLE001  it must not reach training
            self._reports.failed(error, self.version + 1)

    def publish(self) -> Manifest:
        """Publish a delta with the rows that changed since the last version, or a snapshot if one is required.

        The first version is a snapshot, unless the trainer resumed from a checkpoint. A snapshot is also required after
        the tracker dropped the consumer's pending rows. If no rows have changed, an empty version is published, so that
        predictors can measure their lag. A version that :meth:`step` started is completed first. If another program has
        deleted the newest entry of the stream, this method claims the stream again and publishes a snapshot.

        Returns:
            The manifest of the version, which is the same on every rank.

        Raises:
            FencedError: on every rank, if a newer publisher has claimed the stream. Nothing was published.
            RankFailedError: if another rank failed, called another method, or is at another batch; no row is lost.
            UnfinishedStepError: with ``recovery``, if an update is still in progress after the wait described in
                :meth:`step`, or if rows were updated since the last ``tracker.step()``; every row stays pending.
            UnknownOutcomeError: on rank 0, if the store failed during the commit, or a directory cannot be flushed to
                disk. Every row stays pending. The version may have been committed, or may be committed later. If so,
                the next version continues from it. The other ranks raise RankFailedError with ``is_unknown``.
            StorageError: if this rank could not write to the store; every row stays pending.
            RankLostError: if a rank died or did not answer in time; every row stays pending.
            InvalidArgumentError: if the publisher is closed, if the calling thread or process did not create the
                publisher, or if another rank failed to read its rows with ``top_k``.
        """
        return self._publish("delta")

    def snapshot(self) -> Manifest:
        """Publish a snapshot, which contains the current values of all rows of all tables.

        Call this method, for example, after loading or editing weights. Returns the manifest of the snapshot. Raises
        the same errors as :meth:`publish`.
        """
        return self._publish("snapshot")

    def flush(self) -> None:
        """Publish all pending rows, including rows that ``top_k`` did not select. Call it before training pauses.

        Afterwards, all rows that changed before the call are in committed versions. A version that :meth:`step` started
        is completed first. A version is published only if a rank has pending rows, or if training has advanced and
        versions contain tables without a fused optimizer, dense tensors, states or raw ids.

        Every rank must call this method at the same batch. If the call is interrupted, for example by Ctrl-C, repeat it
        to continue. Raises the same errors as :meth:`publish`.
        """
        self._publish("flush")

    def close(self) -> None:
        """Close the publisher: complete the version in progress, release the consumer, and leave the process group.

        Every rank must call this method. Pending rows are not published: call :meth:`flush` first to publish them. The
        stream stays claimed. If the version in progress fails, its error is logged, and its rows stay pending. A
        running compaction or retention pass is interrupted after 10 seconds. The next pass completes its work.

        Raises:
            InvalidArgumentError: if the calling thread or process did not create the publisher. The publisher then
                stays open.
        """
        if self._versions is not None:
            self._checked().finish()
        self._versions = None
        if self._reader is not None:
            self._reader.close(removes_position=True)
        self._reader = None
        self._free()

    def _free(self) -> None:
        """Free the publisher's resources. If this call is interrupted, the next :meth:`close` repeats it."""
        with ExitStack() as stack:
            for call in self._closing:
                stack.callback(call)
        self._closing.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Call :meth:`close`, even after an exception. Waits for all ranks."""
        self.close()

    def __repr__(self) -> str:
        head = self._writer.head
        return f"Publisher({self._writer.storage.url!r}, generation={head.generation}, version={head.version})"

    def _checked(self) -> VersionStateMachine:
        """Return ``self._versions``. Raise InvalidArgumentError if closed, or in another thread or process."""
        if self._versions is None:
            raise InvalidArgumentError("publisher", "closed", "Build a new Publisher")
        thread, process = self._caller
        if os.getpid() != process:
            remedy = "Publish in the process that built it, not in a fork of it"
            raise InvalidArgumentError("process", os.getpid(), remedy)
        if threading.get_ident() != thread:
            raise InvalidArgumentError("thread", threading.current_thread().name, "Publish from the training thread")
        return self._versions

    def _publish(self, name: Publishes) -> Manifest:
        versions = self._checked()
        versions.publish(name)
        return self._result(versions)

    def _result(self, versions: VersionStateMachine) -> Manifest:
        """Return the newest entry, or raise the error of the last version."""
        error, head = self._reports.error, self._writer.head
        versions.returned()  # last: an interrupted call is continued by the same call
        if error is not None:
            raise without_traceback(error)
        return head


class _MissingStepDetector:
    """Detector of training loops in which no version becomes due because they do not call ``tracker.step()``."""

    def __init__(self, progress: BatchProgress) -> None:
        self._progress = progress
        self._num_batches = progress.num_batches
        self._num_calls = 0

    def count_call(self) -> None:
        """Count a call of ``Publisher.step``. Logs one warning if rows change, but ``tracker.step`` is not called."""
        if self._num_batches != self._progress.num_batches:
            self._num_batches, self._num_calls = self._progress.num_batches, 0
            return
        self._num_calls += 1
        if self._num_calls == _STANDSTILL_CALLS and self._progress.num_unstepped:
            text = (
                "rows changed during %d calls of Publisher.step(), but tracker.step() was not called: call it after "
                "each batch, before Publisher.step(), because a cadence counts its calls"
            )
            _logger.warning(text, self._num_calls)


def _check_tracker(tracker: object) -> None:
    if not isinstance(tracker, ModelDeltaTracker):
        given = tracker if isinstance(tracker, str) else type(tracker).__name__
        remedy = "Pass a ModelDeltaTracker first, and then the url"
        if type(tracker).__module__.startswith("torchrec."):
            remedy = "Call patch_torchrec() of delta_tracker.compat before dmp.init_torchrec_delta_tracker()"
        raise InvalidArgumentError("tracker", given, remedy)


def _check(url: object, cadence: object, upkeep: object, recovery: object) -> None:
    """Raise InvalidArgumentError if an argument is invalid, or if ``url`` requires the argument ``recovery``."""
    check_type("cadence", cadence, Cadence, "Cadence(batches=100)")
    check_type("upkeep", upkeep, Upkeep, "Upkeep(compact_every=50)")
    check_recovery(recovery)
    if isinstance(getattr(url, "recovery", None), ClaimedStream):
        remedy = "Pass recovery of the Takeover, or one of its serving, each to a publisher of its own"
        raise InvalidArgumentError("url", type(url).__name__, remedy)
    if isinstance(url, ClaimedStream) and url.has_states and recovery is None:
        raise InvalidArgumentError("url", url, "Pass one of taken.serving, or recovery= as the trainer did")
