"""Publish a tracker's changed rows from all ranks to a stream, one version at a time."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Self

from torch import nn

from delta_tracker.arguments import is_number
from delta_tracker.distributed import DEFAULT_TIMEOUT, Gathering
from delta_tracker.errors import (
    FencedError,
    InvalidArgumentError,
    LostEntryError,
    NeedsSnapshotError,
    PublishError,
    RankLostError,
    is_unknown,
    kind_of,
    unraised,
)
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.cadence import Cadence, Pace
from delta_tracker.publisher.coordinator import Coordinator, Draft, Share
from delta_tracker.publisher.declared_states import states_message
from delta_tracker.publisher.exchange import Count, Exchange, Message, Phase, Vote, check_alike
from delta_tracker.publisher.flight import Committing, Copying, Flight, Writing
from delta_tracker.publisher.gauges import PublisherGauges
from delta_tracker.publisher.heartbeats import Heartbeats
from delta_tracker.publisher.row_gatherer import EncodingChoice, name_encodings
from delta_tracker.publisher.stored_rows import StoredRows, UnchangedChoice
from delta_tracker.publisher.training import Stateful
from delta_tracker.publisher.version_source import Training, VersionSource
from delta_tracker.sharding.interrupted import check_complete
from delta_tracker.stream.claimed import ClaimedStream
from delta_tracker.stream.format.manifest import Kind, Manifest, Part
from delta_tracker.stream.heartbeat import BEAT_SECONDS
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.maintenance.upkeep import Upkeep
from delta_tracker.stream.notify.notifier import Hints, Notifier
from delta_tracker.stream.pointer_writer import POINTER_SECONDS, PointerWriter
from delta_tracker.stream.storage.storage import Location
from delta_tracker.tracker.top_k import TopK
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta
from delta_tracker.uncopied import Uncopied

_logger = logging.getLogger(__name__)

_STANDSTILL_CALLS = 20  # more than the micro-batches of an accumulated batch usually are


class Publisher(Uncopied, remedy="Save the tracker's state_dict(), and build a new Publisher after it is loaded"):
    """Writer that publishes a tracker's changed rows to a stream, as versions with the rows of all ranks.

    Every rank builds a publisher in its training thread. In this thread, all ranks call :meth:`publish` or
    :meth:`snapshot` at the same batch, or :meth:`step` after each batch. At the cut each rank reads its own rows. A
    background thread of each rank writes them, and the background thread of rank 0 creates the manifest. Only the
    training thread starts collectives, which transfer a few hundred bytes and no rows. The version is committed when
    rank 0 has created its manifest. Until then it is invisible to predictors, and after any failure every row stays
    pending.

    If a publisher is deleted without :meth:`close`, its worker thread ends after the current task, and a running
    retention or compaction completes. The rows of an unfinished version stay pending. The next operation of the tracker
    releases the consumer, and a new publisher starts with a snapshot.

    For a snapshot, tables with a fused optimizer are copied while training continues. The rows that change during the
    copy are read at the cut and are part of the same version. The copy needs the memory of a few chunks of 4 MiB.

    Building a publisher claims the stream and fences every publisher of an older generation. The first version is a
    snapshot, unless the tracker's state was loaded from a checkpoint of the same stream. In that case it is a
    delta, without ``top_k``. It has the rows that were pending in the checkpoint and the rows of all versions after the
    checkpoint, with the trainer's values. The publisher reserves its consumer, so that no other code can commit rows
    that are not published yet. If the constructor raises, it has released all its resources, and all ranks may build a
    new publisher.

    Args:
        tracker: tracker of the rows.
        url: url of the stream, such as ``file:///directory`` or ``s3://bucket/prefix``, or an opened
            :class:`~delta_tracker.stream.storage.storage.Storage`; the same store on every rank. Or the
            :class:`~delta_tracker.stream.claimed.ClaimedStream` of a takeover, which is not claimed again.
        consumer: name of the tracker's consumer; None if the tracker has only one.
        top_k: bound on the rows of a delta: only the rows that changed most are published, and the others stay pending.
            None publishes all changed rows.
        dense: module of the model, whose dense parameters and buffers are published, or names in the model's
            ``state_dict``. Each version contains these tensors with rank 0's values at the cut. Tensors of which each
            rank has a part are rejected by name. None publishes no dense tensors.
        encoding: :class:`~delta_tracker.stream.format.encoding.Encoding` of all tables, or a mapping of FQN to
            encoding. Tables without an encoding are stored in their own dtype.
        cadence: bounds at which :meth:`step` publishes; None if :meth:`step` is not used.
        retention: versions that the stream keeps. A background thread of rank 0 removes other versions periodically.
            Only versions before a snapshot can be removed: create snapshots with ``cadence.snapshot_every`` or
            ``compact_every``. None keeps all versions.
        compact_every: number of versions between two compactions, 2 or more; None disables compaction. Compaction
            runs in the same background thread as the retention.
        notifier: delivers a hint of each version to waiting predictors; None if predictors only poll.
        timeout: maximum wait for the other ranks, including the wait until every rank has built its publisher.
        monitor: monitor for the metrics; None for ``delta_tracker.monitor.MONITOR``.
        states: ``"optimizer"`` publishes the training state with each version, so that
            :func:`~delta_tracker.recovery.restore.restore` can continue training from it: the states of the fused
            optimizers for each published row, the dense tensors, the objects in ``training_state`` and ``rank_state``,
            and the position in the data. The entries have format 2. After ``restore``, a publisher starts with a delta.
            After a load of a checkpoint, it starts with a snapshot, because the checkpoint may lack the states of the
            optimizers. None publishes values only.
        training_state: name to object with ``state_dict`` and ``load_state_dict``, such as the dense optimizer and the
            learning rate scheduler. Rank 0's state is published. Needs ``states``. Trainable dense parameters that no
            passed optimizer has are logged.
        rank_state: the same for objects whose state differs between the ranks. Each rank's state is published.
        heartbeat_seconds: time between two heartbeats, which show a :class:`~delta_tracker.recovery.standby.Standby`
            that training advances. Rank 0 writes them in a thread of its own while :meth:`step`, :meth:`publish` or
            :meth:`snapshot` is called, with ``states`` only. None for no heartbeats.
        pointer_seconds: minimum time between two writes of the pointer object ``control/head.json``, by which readers
            over http find new versions. Rank 0 writes it in a thread of its own, only after commits. Its failures are
            logged. None to write none: readers over http then find no version.
        skip_unchanged: leave changed rows out of deltas if their stored bytes are those that the stream has already:
            the values in their encoding, the raw id, and the states with ``states``. Predictors are equal with and
            without it. ``"bytes"`` keeps these bytes for each row of this rank, ``"digest"`` a 128-bit digest, so that
            a changed row is lost with a probability of 2**-128. See :attr:`stored_bytes` for the memory. A row is
            compared from the version on in which this publisher last sent it; after a failed version its rows are sent
            again, and after a resharding all changed rows. All changed rows are sent of a table whose columns are on
            several ranks, and of a version with ``states`` while the tracker has other consumers. None sends all
            changed rows.
        name: label ``publisher`` of the metrics; None for ``"publisher"``. If another publisher of this process has the
            same name, a suffix ``-2``, ``-3``, ... is added.

    Raises:
        UnknownConsumerError: if the tracker has no such consumer.
        ReservedConsumerError: if the consumer is already reserved.
        DetachedError: if the tracker is detached.
        InterruptedRestoreError: if a restore of the model was interrupted.
        UnsupportedModuleError, UnsupportedOptimizerError, UnsupportedTableError: if ``states`` is given and a table has
            a training state that cannot be published, or is not fused and has no optimizer in ``training_state`` or
            ``rank_state``.
        InvalidArgumentError: if an argument is invalid, if ``states`` is given together with ``top_k`` or with an
            encoding, if the dense names or the encoding do not fit the model, if
            ``top_k`` has no ``score`` and the tracking mode computes none, if the claim in ``url`` was used, or if rank
            0 uses another store.
        UnsafeStoreError: if the store has no atomic create.
        MalformedError: if the stream's newest entry is malformed.
        StorageError: if this rank cannot use the store. If the store failed during the claim, the stream may be
            claimed, and its former publisher fenced.
        PublishError: if another rank raised one of these errors, or if ``top_k``, ``encoding``, ``cadence``, ``states``
            or ``skip_unchanged`` differ between the ranks.
        RankLostError: if a rank dies, or does not build a publisher in time.

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
        dense: nn.Module | Iterable[str] | None = None,
        encoding: EncodingChoice = None,
        cadence: Cadence | None = None,
        retention: Retention | None = None,
        compact_every: int | None = None,
        notifier: Notifier | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        monitor: Monitor | None = None,
        name: str | None = None,
        states: Literal["optimizer"] | None = None,
        training_state: Mapping[str, Stateful] | None = None,
        rank_state: Mapping[str, Stateful] | None = None,
        heartbeat_seconds: float | None = BEAT_SECONDS,
        pointer_seconds: float | None = POINTER_SECONDS,
        skip_unchanged: UnchangedChoice = None,
    ) -> None:
        _check_tracker(tracker)
        self._tracker = tracker
        self._still = _Standstill(tracker)
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._upkeep: Upkeep | None = None
        self._pointer: PointerWriter | None = None
        self._beats: Heartbeats | None = None
        self._source: VersionSource | None = None
        self._stored: StoredRows | None = None
        self._flight: Flight | None = None
        self._votes: Gathering | None = None  # started, not counted yet
        self._error: Exception | None = None
        self._failure: tuple[object, ...] | None = None  # kind of the last failure since the last version
        self._num_steps = 0
        self._num_owed = 0  # votes of calls of step() that failed or were interrupted before they voted
        self._is_open = False

        def prepare() -> dict[str, Any]:
            _check(cadence, retention, heartbeat_seconds, pointer_seconds)
            _check_claim(url, states)
            if cadence is not None:
                self._vote_every = cadence.calls_per_vote(self._exchange.group.world_size)
            check_complete(tracker.model)
            training = _training(states, training_state, rank_state)
            self._stored = None if skip_unchanged is None else StoredRows(skip_unchanged)
            self._source = VersionSource(
                tracker,
                consumer,
                top_k=top_k,
                dense=dense,
                encoding=encoding,
                exchange=self._exchange,
                recorder=self._recorder,
                training=training,
            )
            return {
                "top_k": _budget(top_k),
                "encoding": f"encoding={name_encodings(encoding)}",
                # Compared before the cadence, which also contains it, because its error message is shorter.
                "vote_every": f"vote_every={self._vote_every}",
                "cadence": f"cadence={cadence}",
                "kind": f"states={states!r} and skip_unchanged={skip_unchanged!r}",
                "states": states_message(self._source.states),
            }

        self._recorder = Recorder("publisher", self, name=name, monitor=monitor)
        try:
            self._exchange = Exchange(timeout)
        except BaseException:
            self._recorder.close()
            raise
        self._vote_every = 1
        self._is_first = self._exchange.rank == 0
        self._writer = Coordinator(self._exchange, self._recorder)
        self._gauges = PublisherGauges(self._recorder, counts_versions=self._is_first)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._hints = Hints(notifier)
        self._announces = notifier is not None
        try:
            messages = self._exchange.exchange(Phase.BUILDING, Message.of(prepare))
            check_alike(messages, "top_k", "encoding", "vote_every", "cadence", "kind")
            if states is not None:
                self._writer.declare(messages, tracker.tables)
            self._writer.stored = self._stored
            self._writer.open(url)
            self._checked_source().resume(self._exchange, self._writer)
            self._start_heartbeats(None if states is None else heartbeat_seconds)
            if pointer_seconds is not None and self._is_first:
                self._pointer = PointerWriter(self._writer.storage, seconds=pointer_seconds)
                # The thread of a publisher that is dropped without close() ends, too.
                weakref.finalize(self, self._pointer.end).atexit = False
            if retention is not None or compact_every is not None:
                pointer = self._pointer
                on_pass = None if pointer is None else lambda has_changed: pointer.rescan() if has_changed else None
                self._upkeep = Upkeep(
                    self._writer.storage,
                    retention,
                    compact_every=compact_every,
                    on_pass=on_pass,
                    on_failure=self._gauges.upkeep_failed,
                )
        except BaseException:
            self._writer.release()
            self.close()
            raise
        self._is_open = True
        self._gauges.begin(self._writer)
        self._cadence = cadence
        self._pace = None
        if cadence is not None:
            name = self._checked_source().handle.name
            self._pace = Pace(cadence, tracker, name, num_batches=self._vote_every)

    def _start_heartbeats(self, seconds: float | None) -> None:
        if seconds is not None and self._is_first:
            self._beats = Heartbeats(self._writer.storage, seconds)

    @property
    def generation(self) -> int:
        """Generation of this publisher."""
        return self._writer.head.generation

    @property
    def stream(self) -> str:
        """Id of the stream: 32 hexadecimal digits."""
        return self._writer.head.stream

    @property
    def version(self) -> int:
        """Number of the last version that this publisher committed, or of its claim if it has committed no version."""
        return self._writer.head.version

    @property
    def error(self) -> Exception | None:
        """Error of the last version, without a traceback, if the version was not published; None otherwise."""
        return self._error

    @property
    def is_fenced(self) -> bool:
        """True if a newer publisher has claimed the stream, so that this one publishes no more versions.

        It becomes True on all ranks in the same call of :meth:`step`, so that all training loops end at one batch.
        """
        return isinstance(self._error, FencedError)

    @property
    def num_unchanged(self) -> int:
        """Number of rows of this rank that committed versions left out because of ``skip_unchanged``."""
        return 0 if self._stored is None else self._stored.num_unchanged

    @property
    def stored_bytes(self) -> int:
        """Memory in bytes of the record that ``skip_unchanged`` needs on this rank; 0 without it.

        For each row of a compared table, one byte, and either 16 bytes or the stored bytes of the row. The operating
        system provides the memory when a row is first sent.
        """
        return 0 if self._stored is None else self._stored.num_bytes

    @property
    def upkeep_error(self) -> Exception | None:
        """Error of the last compaction or of the last retention.

        None if neither failed, if there has been no run yet, or if this rank is not rank 0.
        """
        return None if self._upkeep is None else self._upkeep.error

    def step(self) -> None:
        """Publish when a bound of the cadence is reached. Call it on every rank after each ``tracker.step()``.

        With ``states``, call it in the last line of the training loop, and with gradient accumulation only after the
        last batch that is accumulated: a version has the state from which the next batch continues. Training then waits
        up to 5 seconds for an update in progress. After a wait that timed out, later waits take up to 0.05 seconds,
        until one succeeds. Such a version is not published: if the loop keeps the output of a model whose backward pass
        has not run, for example of an evaluation, delete it before the call, or compute it under ``torch.no_grad()``.
        Nor is a version if rows were updated since the last ``tracker.step()``. Updates of sharded tables without a
        fused optimizer are not observed.

        Training waits while the rows are read, and twice per version for a short message from the other ranks. The
        ranks vote on each state of a version. With ``Cadence.vote_every`` of k, every k-th call counts the votes that
        the k-th call before it sent, and sends the next ones; the other calls do nothing. A version therefore takes at
        least 4 k + 1 calls. It makes progress only in these calls: call :meth:`flush` before training pauses. Only one
        version is published at a time. Rows that change while it is published stay pending in the tracker. A slow store
        therefore makes the next version larger, but needs no additional memory.

        If a version cannot be published, this method does not raise the error. The error is logged and kept in
        :attr:`error`, all rows stay pending, and the next version contains them. After a
        :class:`~delta_tracker.errors.FencedError` or a :class:`~delta_tracker.errors.RankLostError`, the publisher does
        not try to publish another version: end the training loop if :attr:`is_fenced`.

        Raises:
            InvalidArgumentError: if the publisher has no cadence or is closed, or if called from another thread or
                process than the one that built the publisher.
        """
        self._checked_source()
        if self._pace is None:
            raise InvalidArgumentError("cadence", None, "Build the Publisher with cadence=Cadence(...)")
        try:
            number = self._num_steps + 1
            self._num_steps, self._num_owed = number, self._num_owed + (number % self._vote_every == 0)
            self._still.look()
            while self._num_owed:  # more than one if the other ranks are ahead
                self._count_and_vote()
            self._beat()
        except Exception as error:  # noqa: BLE001  it must not reach training
            self._fail(error)

    def publish(self) -> Manifest:
        """Publish the rows that changed since the last version, or a snapshot if one is needed.

        The first version is a snapshot, unless the trainer resumed from a checkpoint. A snapshot is also needed after
        the tracker dropped the consumer's pending rows. A version without changed rows is published too, so that
        predictors can measure their lag. Rows whose update is in progress are in this version and again in the next.
        A version that :meth:`step` started is finished first. If another program has deleted the newest entry of the
        stream, the stream is claimed again, and a snapshot is published.

        Returns:
            The committed manifest, the same on every rank.

        Raises:
            FencedError: if a newer publisher has claimed the stream; raised on every rank. Nothing was published.
            PublishError: if another rank failed, called another method, or is at another batch; every row stays
                pending.
            UpdateInProgressError: with ``states``, if an update was still in progress after the wait that :meth:`step`
                describes; every row stays pending.
            MissingStepError: with ``states``, if rows were updated since the last ``tracker.step()``, so that the next
                batch has begun; every row stays pending.
            UnknownOutcomeError: on rank 0, if the store failed during the commit; every row stays pending. The version
                may have been published, or may appear later; the next version then follows it. The other ranks raise
                PublishError with ``is_unknown``.
            NotDurableError: on rank 0, if the version was published, but may be missing after a power loss, unless it
                is raised for a part.
            StorageError: if this rank could not write; every row stays pending.
            RankLostError: if a rank died or did not answer in time; every row stays pending.
            InvalidArgumentError: if the publisher is closed, if called from another thread or process than the one that
                built the publisher, or if the read with ``top_k`` failed on another rank.
        """
        return self._publish("delta")

    def snapshot(self) -> Manifest:
        """Publish every row of every table with its current value, for example after weights were loaded or edited.

        The errors are those of :meth:`publish`.

        Returns:
            The committed manifest, the same on every rank.
        """
        return self._publish("snapshot")

    def flush(self) -> None:
        """Finish a version that :meth:`step` started. Every rank must call this method at the same batch.

        Raises a copy of :attr:`error` if it is not None. The errors are those of :meth:`publish`.
        """
        self._checked_source()
        self._land()
        self._exchange.send_owed_message()
        if self._error is not None:
            raise unraised(self._error)

    def close(self) -> None:
        """Finish a version that :meth:`step` started, release the consumer and leave the process group.

        Every rank must call this method. The stream stays claimed. If the version fails, its error is logged, and the
        rows stay pending. A running retention or compaction is interrupted after 10 seconds; the next run completes the
        work.

        Raises:
            InvalidArgumentError: if called from another thread or process than the one that built the publisher. The
                publisher then stays open.
        """
        if self._source is not None:
            self._checked_source()
        if self._source is not None:
            self._land()
            if self._is_open:
                self._exchange.send_owed_message()
            self._source.close(forgets=self._is_open)
        self._source = None
        self._worker.shutdown()
        if self._beats is not None:
            self._beats.close()
        self._hints.close()
        if self._upkeep is not None:
            self._upkeep.close()
        if self._pointer is not None:
            self._pointer.close()
        self._exchange.close()
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Call :meth:`close`, also after an exception: the other ranks then wait for it, and this rank for them."""
        self.close()

    def __repr__(self) -> str:
        head = self._writer.head
        return f"Publisher({self._writer.storage.url!r}, generation={head.generation}, version={head.version})"

    def _checked_source(self) -> VersionSource:
        """Return the source of the rows, after checking that the publisher is open.

        Raises:
            InvalidArgumentError: if the publisher is closed, or if called from another thread or process than the one
                that built the publisher.
        """
        if self._source is None:
            raise InvalidArgumentError("publisher", "closed", "Build a new Publisher")
        if os.getpid() != self._process:
            raise InvalidArgumentError(
                "process", os.getpid(), "Publish in the process that built it, not in a fork of it"
            )
        if threading.get_ident() != self._thread:
            raise InvalidArgumentError("thread", threading.current_thread().name, "Publish from the training thread")
        return self._source

    # All ranks change ``_flight`` at the same batch, because they count the same votes.

    def _publish(self, kind: Kind) -> Manifest:
        source = self._checked_source()
        self._land()
        for each in (kind, "snapshot"):
            self._error = None
            try:
                vote = self._writer.vote(Phase.PUBLISHING, *source.place())
                needs_snapshot = source.needs_snapshot or self._writer.needs_snapshot
                wants_snapshot = needs_snapshot or each == "snapshot"
                vote = vote._replace(is_due=True, wants_snapshot=wants_snapshot, is_repairing=source.is_repairing)
            except Exception as error:  # noqa: BLE001  raised below, after the vote for which the other ranks wait
                self._fail(error)
                self._votes = self._start_votes(Vote(Phase.FAILED))
                self._drop_votes()
                break
            self._votes = self._start_votes(vote)
            self._complete()
            if not isinstance(self._error, LostEntryError):  # otherwise all ranks repeat it
                break
        if self._error is not None:
            raise unraised(self._error)
        if self._beats is not None:
            self._beat()
        return self._writer.head

    def _beat(self) -> None:
        """Write a heartbeat if one is due, unless this publisher is fenced or has lost a rank."""
        if self._beats is not None and not isinstance(self._error, FencedError | RankLostError):
            self._beats.beat(self._writer.head)

    def _land(self) -> None:
        """Finish the version that is being published, if there is one. If it fails, set :attr:`error`."""
        while self._num_owed:
            self._count_and_vote()
        if self._flight is None:
            self._drop_votes()
        self._complete()

    def _complete(self) -> None:
        """Vote and count votes until no version is being published."""
        while (flight := self._flight) is not None or self._votes is not None:
            if self._votes is None and flight is not None:
                if self._beats is not None:
                    self._beats.wait(flight.job, self._writer.head)
                flight.job.exception()  # waits, and costs less than futures.wait()
                self._votes = self._start_votes(flight.vote())
            # While another rank writes, this publisher is alive. Before a version is begun, the other ranks may hang.
            if self._count_votes(None if flight is None or self._beats is None else self._beat):
                continue
            # If the version failed only on this rank, the other ranks wait for its next message or vote.
            if isinstance(flight, Committing):
                self._exchange.send_owed_message()
            else:
                self._votes = self._start_votes(Vote(Phase.FAILED))
                self._drop_votes()

    def _count_and_vote(self) -> None:
        """Count the votes that the previous call started, enter the next state, and start the next votes."""
        self._count_votes()
        if isinstance(self._error, FencedError | RankLostError):
            self._num_owed = 0
            return
        vote = self._step_vote() if self._flight is None else self._flight.vote()
        # One statement, so that an interrupt cannot come between the two assignments.
        self._votes, self._num_owed = self._start_votes(vote), self._num_owed - 1

    def _start_votes(self, vote: Vote) -> Gathering:
        """Send this rank's vote. If the other ranks still wait for this rank in a read, the read fails first."""
        if self._source is not None:
            self._source.fail_expected_read()
        return self._exchange.start_votes(vote)

    def _step_vote(self) -> Vote:
        """Return this rank's vote while no version is being published."""
        source = self._checked_source()
        vote = self._writer.vote(Phase.STEPPING, *source.place())._replace(is_repairing=source.is_repairing)
        pace = self._pace
        if pace is None:
            return vote
        try:
            assert self._cadence is not None, "there is a pace"
            every = self._cadence.snapshot_every
            wants_snapshot = (
                source.needs_snapshot
                or self._writer.needs_snapshot
                or (every is not None and self._is_snapshot_due(every))
            )
            return vote._replace(is_due=pace.is_due(is_clock=self._is_first), wants_snapshot=wants_snapshot)
        except Exception as error:  # noqa: BLE001  step() must not raise it, and the other ranks wait for a vote
            self._fail(error)
            return vote

    def _is_snapshot_due(self, every: int) -> bool:
        """Return True if ``cadence.snapshot_every`` demands that the next version is a snapshot.

        Earlier publishers' snapshots count: a trainer that resumes does not send all rows again.
        """
        head = self._writer.head
        return head.snapshot is None or head.version + 1 - head.snapshot >= every

    def _drop_votes(self) -> None:
        """Wait for the last votes, and begin no version."""
        try:
            if self._votes is not None:
                count = self._exchange.count(self._votes)
                if count.most.phase == Phase.PUBLISHING and count.is_alike:  # the other ranks begin the version
                    self._expect_read(count)
        except PublishError:
            pass  # raised on the other ranks, too: no rank begins a version
        except RankLostError as error:
            self._fail(error)
        self._votes = None

    def _expect_read(self, count: Count) -> None:
        """Note that the other ranks wait for this one in the read of a delta, if the votes start a delta."""
        if self._source is not None and not count.most.wants_snapshot:
            self._source.expect_read(is_repairing=count.most.is_repairing)

    def _count_votes(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """Wait for the votes that were started last, and enter the next state. An interrupted wait changes nothing.

        Args:
            meanwhile: called several times per second during the wait; None for no calls.

        Returns:
            The result of :meth:`_advance`; True if no votes were started. Also True if the votes could not be counted,
            because ranks called different methods or a rank was lost: the version then failed on every rank.
        """
        if self._votes is None:
            return True
        try:
            count = self._exchange.count(self._votes, meanwhile)
        except (PublishError, RankLostError) as error:
            self._votes = None
            self._fail(error)
            return True
        if count.most.is_due and count.is_alike:
            self._expect_read(count)
        self._votes = None
        return self._advance(count)

    def _advance(self, count: Count) -> bool:
        """Enter the next state, according to the votes of all ranks.

        Returns:
            False if the version failed, on all ranks or only on this rank; else True.
        """
        flight = self._flight
        if count.most.is_working:
            return True
        try:
            match flight:
                case None if count.most.is_due:
                    if not count.is_alike:
                        self._writer.compare_places(*self._checked_source().place())
                        self._expect_read(count)
                    kind: Kind = "snapshot" if count.most.wants_snapshot else "delta"
                    self._begin(kind, is_repairing=count.most.is_repairing)
                case Copying():
                    self._cut(flight.kind, flight.job, is_repairing=False)
                case Writing():
                    share = flight.job.result()
                    job = self._start_commit(share, self._writer.tally(share, count.most.num_bytes))
                    self._flight = Committing(kind=flight.kind, read=flight.read, job=job)
                case Committing():
                    self._flight = None  # if this rank is interrupted here, the others have finished the version
                    try:
                        committed = self._writer.accept(flight.job.result(), count.most.num_bytes)
                    except Exception:
                        self._flight = flight
                        raise
                    self._finish(flight.read, committed)
        except Exception as error:  # noqa: BLE001  kept: publish() raises it, step() must not
            self._fail(error)
            return False
        return True

    def _begin(self, kind: Kind, *, is_repairing: bool) -> None:
        if kind == "delta":
            # Not deferred: with top_k its read is a collective, which the other ranks have started.
            self._cut(kind, None, is_repairing=is_repairing)
        else:
            self._copy(kind)
        if self._pace is not None:
            self._pace.restart()

    def _copy(self, kind: Kind) -> None:
        """Start to track changes, and to copy and write all rows of the tables with a fused optimizer in the worker."""
        job: Future[Part | None]
        try:
            source = self._checked_source()
            rows, form = source.copy(), source.format
            _, tables, _ = source.place()
            layout = source.layout
            job = self._worker.submit(lambda: self._writer.write_copy(rows, tables=tables, layout=layout, form=form))
        except Exception as error:  # noqa: BLE001  raised at the cut, which sends it to the other ranks
            job = Future()
            job.set_exception(error)
        self._flight = Copying(kind=kind, job=job)

    def _cut(self, kind: Kind, copied: Future[Part | None] | None, *, is_repairing: bool) -> None:
        """Read the rows of a version, and start a worker task that writes them.

        Args:
            kind: ``"snapshot"`` or ``"delta"``.
            copied: result of the copy for a snapshot; None for a delta.
            is_repairing: for a delta, True to read all rows, without ``top_k``.
        """
        read: Delta | None = None
        draft: Draft | Exception
        try:
            part = None if copied is None else copied.result()
            draft, read = self._checked_source().cut(kind, part, is_repairing=is_repairing)
        except NeedsSnapshotError as error:  # dropped since the vote
            draft = error.advising("Publish again: the next version is a snapshot")
        except Exception as error:  # noqa: BLE001  sent to the other ranks with the share, then raised
            draft = error
        self._flight = Writing(kind=kind, read=read, job=self._worker.submit(self._writer.write, draft))

    def _start_commit(self, share: Share, messages: Sequence[Mapping[str, Any]]) -> Future[Message]:
        """Start to commit a version in rank 0's worker. Return a future of this rank's message to the other ranks."""

        def commit() -> dict[str, Any]:
            manifest = self._writer.commit(share, messages)
            if self._announces:
                self._hints.announce(manifest.stream, manifest.version)
            if self._pointer is not None:
                self._pointer.after(manifest)
            if self._upkeep is not None:
                self._upkeep.after(manifest.version)
            return self._writer.answer()

        if self._is_first:
            return self._worker.submit(Message.of, commit)
        job: Future[Message] = Future()
        job.set_result(Message.of(self._writer.answer))
        return job

    def _finish(self, read: Delta | None, committed: Manifest) -> None:
        """Record that a version was published, and commit its read in the tracker."""
        self._checked_source().end(read, committed)
        if self._stored is not None:
            self._gauges.left_out(self._stored.commit())
        self._gauges.published(committed)
        if self._failure is not None:
            _logger.warning("publishing recovered at version %d", committed.version)
        self._error = self._failure = None

    def _fail(self, error: Exception) -> None:
        """Record an error. If a version is being published, abort it; its rows stay pending."""
        flight, self._flight = self._flight, None
        former, self._failure = self._failure, kind_of(error)
        self._error = unraised(error)
        if self._failure != former:
            level = logging.ERROR if isinstance(error, FencedError) else logging.WARNING  # it ends training
            _logger.log(level, "%s: %s", _outcome(error, self.version + 1), error)
        self._gauges.failed(error)
        if flight is not None:
            try:
                self._checked_source().end(flight.read, None)
            except Exception:
                _logger.exception("the read of a version that failed could not be aborted: the next one replaces it")


class _Standstill:
    """Finds a training loop that calls ``Publisher.step`` without ``tracker.step``, so that nothing is ever due."""

    def __init__(self, tracker: ModelDeltaTracker) -> None:
        self._tracker = tracker
        self._num_batches = tracker.num_batches
        self._num_calls = 0

    def look(self) -> None:
        """Count a call of ``Publisher.step``. Warn once if many calls saw updates, but no batch end."""
        if self._num_batches != self._tracker.num_batches:
            self._num_batches, self._num_calls = self._tracker.num_batches, 0
            return
        self._num_calls += 1
        if self._num_calls == _STANDSTILL_CALLS and self._tracker.num_unstepped:
            text = (
                "rows changed during %d calls of Publisher.step(), but tracker.step() was not called: call it after "
                "each batch, before Publisher.step(), because a cadence counts its calls"
            )
            _logger.warning(text, self._num_calls)


def _outcome(error: Exception, version: int) -> str:
    """Return a text that says what became of a version."""
    if isinstance(error, LostEntryError):
        return f"the next version, {version}, must be a snapshot"
    return (
        f"whether version {version} was published is unknown"
        if is_unknown(error)
        else f"version {version} was not published"
    )


def _check_tracker(tracker: object) -> None:
    if not isinstance(tracker, ModelDeltaTracker):
        given = tracker if isinstance(tracker, str) else type(tracker).__name__
        raise InvalidArgumentError("tracker", given, "Pass a ModelDeltaTracker first, and then the url")


def _budget(top_k: TopK | None) -> str:
    """Return a text that is equal on all ranks whose budgets are equal."""
    if top_k is None:
        return "no top_k"
    return f"top_k={replace(top_k, score=None)}" + (" with a score" if top_k.score is not None else "")


def _check_claim(url: object, states: str | None) -> None:
    """Check that a recovery stream that a takeover has claimed continues with states."""
    if isinstance(url, ClaimedStream) and url.has_states and states is None:
        raise InvalidArgumentError("url", url, "Pass one of taken.serving, or states= as the trainer did")


def _check(cadence: object, retention: object, heartbeat_seconds: float | None, pointer_seconds: float | None) -> None:
    """Check some arguments of a publisher.

    Raises:
        InvalidArgumentError: if one is invalid.
    """
    if cadence is not None and not isinstance(cadence, Cadence):
        raise InvalidArgumentError("cadence", cadence, "Pass a Cadence, for example Cadence(batches=100)")
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidArgumentError("retention", retention, "Pass a Retention, for example Retention(versions=500)")
    for argument, seconds in (("heartbeat_seconds", heartbeat_seconds), ("pointer_seconds", pointer_seconds)):
        if seconds is not None and not (is_number(seconds) and 0 < seconds < threading.TIMEOUT_MAX):
            raise InvalidArgumentError(argument, seconds, "Pass seconds above 0, or None")


def _training(
    states: object, training_state: Mapping[str, Stateful] | None, rank_state: Mapping[str, Stateful] | None
) -> Training | None:
    """Return the objects whose states are published; None if only values are published.

    Raises:
        InvalidArgumentError: if ``states`` is invalid, or None although there are such objects.
    """
    if states == "optimizer":
        return Training(training_state or {}, rank_state or {})
    if states is not None:
        raise InvalidArgumentError("states", states, 'Pass "optimizer" or None')
    for name, objects in (("training_state", training_state), ("rank_state", rank_state)):
        if objects is not None:
            raise InvalidArgumentError(name, sorted(objects), 'Pass states="optimizer", too')
    return None
