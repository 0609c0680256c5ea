"""Keep a second job ready that continues training when the first one fails: :class:`Standby`."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn

from delta_tracker.distributed import DEFAULT_TIMEOUT
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    LivePublisherError,
    MalformedError,
    NotRecoverableError,
    RestoreFailedError,
    StandbyBehindError,
    StorageError,
    StreamError,
    StreamReplacedError,
    TakeoverFailedError,
    UnsafeStoreError,
    unraised,
)
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.exchange import Exchange, Message, Phase, check_alike
from delta_tracker.publisher.training import Stateful
from delta_tracker.recovery.following import Following
from delta_tracker.recovery.job import LocalJob
from delta_tracker.recovery.objects import Objects
from delta_tracker.recovery.path import recovery_path
from delta_tracker.recovery.preparation import check_model
from delta_tracker.recovery.restore import Restoration, Restored
from delta_tracker.recovery.serving_streams import ATTEMPTS, ServingStreams
from delta_tracker.recovery.standby_gauges import StandbyGauges
from delta_tracker.sharding.interrupted import mark_following, unmark
from delta_tracker.stream.claimed import ClaimedStream
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.heartbeat import PublisherPulse, check_name
from delta_tracker.stream.liveness import Liveness, Signs
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.storage.storage import Location, open_storage
from delta_tracker.stream.takeover_request import read_request
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.uncopied import Uncopied

_logger = logging.getLogger(__name__)

_GONE = "Check the url, mount or restore its store, and call again"
_MIN_HEARTBEATS = 3  # a silence below this number of heartbeats is logged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Takeover:
    """Result of a takeover.

    Args:
        restored: description of the restored version.
        recovery: claim of the recovery stream, the first argument after the tracker of the new ``Publisher``.
        serving: claims of the serving streams, in the order of :class:`Standby`'s argument.
        seconds: time from the decision to take over to the return of the call, in seconds.

    Example:
        >>> taken = standby.take_over()  # doctest: +SKIP
        >>> publisher = Publisher(tracker, taken.recovery, states="optimizer")  # doctest: +SKIP
    """

    restored: Restored
    recovery: ClaimedStream
    serving: tuple[ClaimedStream, ...]
    seconds: float


class Standby(Uncopied, remedy="Build a new Standby where it is needed"):
    """Second job that follows the recovery stream of a trainer, and takes its place when the trainer fails.

    All ranks build it after the model, the optimizers and the tracker, and before a publisher. They then call
    :meth:`follow`, which returns when this job has taken over:

        standby = Standby(model, url, tracker=tracker, training_state=states, data=data, serving=[serving_url])
        taken = standby.follow(silence=30.0)
        publisher = Publisher(tracker, taken.recovery, states="optimizer", training_state=states)
        serving = Publisher(tracker, taken.serving[0], "serving")

    Until then, each rank writes the rows and optimizer states of its shards as they are published. A takeover claims
    the recovery stream first, which fences the former trainer. It then restores the newest version before the claim as
    :func:`~delta_tracker.recovery.restore.restore` does, except for rows that are written already, on any number of
    ranks and any plan that ``restore`` accepts. Then it claims the serving streams.

    A former trainer that still runs is fenced at its next version. Until then it trains, and publishes to the serving
    streams. Its batches after its last version are lost, and the new publishers take those serving rows back. A loop
    with ``step()`` has to end when :attr:`~delta_tracker.publisher.publisher.Publisher.is_fenced` is True.

    Before a claim, all ranks must be able to apply the newest version, and the serving streams must be those of the
    trainer. If a takeover fails after the claim, the claim is kept, so that no job trains: call :meth:`take_over`
    again, or :func:`~delta_tracker.recovery.restore.restore` an older version if one is damaged. The position of a
    standby is only in memory. After a restart, it reads a snapshot.

    The arguments ``tracker``, ``training_state``, ``rank_state``, ``data`` and ``ignore`` are those of ``restore``. A
    model with ``DistributedDataParallel`` must have trained two batches, as for ``restore``. The constructor and the
    methods except :meth:`close` are collectives.

    Args:
        model: the model. From the first written row until the takeover is complete, its forward pass raises
            :class:`~delta_tracker.errors.FollowingError`.
        url: url of the recovery stream, or its storage. Its versions need ``states="optimizer"``.
        tracker: tracker of the model; None if there is none.
        training_state: objects whose states are the same on all ranks.
        rank_state: objects whose states differ by rank.
        data: position in the training data.
        ignore: names that are not restored.
        serving: urls of the serving streams that the trainer publishes, or their storages. They are compared with the
            ids of the streams in the recovery stream when the first version is applied, and before a claim.
        name: name of the heartbeat of this job in the store, and label ``standby`` of the metrics. It must differ from
            those of predictors. Standbys with the same name replace each other's heartbeat.
        look_seconds: time between two looks at the stream, in seconds. A rank that applies versions answers the others
            after this time and the version in progress.
        timeout: maximum wait for the slowest rank, which may read and write a whole snapshot meanwhile.
        monitor: monitor of the metrics; None for the program's default.

    Raises:
        InvalidArgumentError: if an argument is invalid, or the model was not trained as described above.
        UnsupportedModuleError: if the model has modules whose state cannot be published.
        UnsupportedOptimizerError: if it has such optimizers.
        UnsupportedTableError: if it has such tables.
        ReservedConsumerError: if a consumer of the tracker is reserved, for example by a publisher.
        StorageError: if the store cannot be opened.
        RestoreFailedError: if another rank raised one of these errors.
        RankLostError: if a rank dies, or does not make the call in time.

    Example:
        >>> standby = Standby(model, "s3://bucket/recovery", tracker=tracker)  # doctest: +SKIP
        >>> taken = standby.follow(silence=30)  # returns when the publisher is silent for 30 s  # doctest: +SKIP
        >>> publisher = Publisher(tracker, taken.recovery, states="optimizer")  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913  all but two have a default
        self,
        model: nn.Module,
        url: Location,
        *,
        tracker: ModelDeltaTracker | None = None,
        training_state: Mapping[str, Stateful] | None = None,
        rank_state: Mapping[str, Stateful] | None = None,
        data: DataPosition[Any] | None = None,
        ignore: Collection[str] = (),
        serving: Sequence[Location] = (),
        name: str = "standby",
        look_seconds: float = 1.0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        monitor: Monitor | None = None,
    ) -> None:
        self._timeout = timeout
        self._serving_urls = serving
        self._look_seconds = look_seconds
        with self._meeting("Standby(...)") as exchange:
            self._job = LocalJob(
                model=model,
                tracker=tracker,
                objects=Objects(training_state or {}, rank_state or {}, data),
                ignore=ignore,
                rank=exchange.rank,
                world_size=exchange.group.world_size,
            )
            messages = exchange.exchange(Phase.BUILDING, Message.of(lambda: self._build(url, name)))
            check_alike(messages, "ignore", "serving", failed=RestoreFailedError)
        self._is_first = self._job.rank == 0
        self._gauges = StandbyGauges(
            Recorder("standby", self, name=name, monitor=monitor), counts_versions=self._is_first
        )
        self._liveness = Liveness(self._storage, name)
        self._following = Following(self._log, self._job)
        # The id of the claim is drawn before the claim, which is found again if the store's answer is lost.
        self._writer = secrets.token_hex(16)
        self._claimed: Manifest | None = None  # this job's claim of the recovery stream
        self._next_look = 0.0
        self._seen: int | None = None  # newest snapshot that rank 0 has seen; None before the first
        self._shown: tuple[int | None, str | None] = None, None  # version and error of all ranks, for the heartbeat
        self._checked_silence: tuple[float, float] | None = None  # and time between heartbeats
        self._reason = ""  # why there was no takeover
        self._ended = ""  # why no further call is possible

    @property
    def version(self) -> int | None:
        """Last version whose rows this rank has written; None before the first."""
        return self._following.version

    @property
    def error(self) -> StreamError | None:
        """Error that currently delays this rank, and that the next looks retry; None if there is none."""
        return self._following.error

    def follow(self, silence: float | None = None) -> Takeover:
        """Follow the stream until this job has taken over. A collective.

        Args:
            silence: take over when neither a version nor a heartbeat of the trainer's publisher was seen for more than
                this number of seconds, by the store's clock. None to take over only if ``delta-tracker takeover`` was
                called. The same on all ranks. In both cases, the stream is claimed only while no rank has an
                :attr:`error`, because the takeover could not be completed.

        Raises:
            NotRecoverableError: on all ranks with ``version`` None, if there is no stream, or if its publisher is
                silent and no version was published: start a job without a restore. Also if the versions have no states.
            StreamReplacedError: on all ranks, if the publisher is silent, and the stream that had versions has only a
                claim now.
            RestoreMismatchError: if the stream does not fit the job.
            TakeoverFailedError: if the takeover failed after the claim. Call :meth:`take_over` or this method again.
            InvalidArgumentError: if an argument is invalid, if ``silence`` is below the time between two heartbeats of
                the publisher, if a serving stream is missing or is not the trainer's, or if this job has taken over
                already.
            TableMismatchError: if a table cannot be written.
            RestoreFailedError: if another rank raised one of these errors.
            RankLostError: if a rank dies, is interrupted, or does not make the call in time.
        """
        with self._meeting("Standby.follow(...)") as exchange:
            while True:
                messages = exchange.exchange(Phase.FOLLOWING, Message.of(lambda: self._turn(silence)))
                check_alike(messages, "call", failed=RestoreFailedError)
                verdict = messages[0]["verdict"]
                self._raise_if_nothing(verdict)
                self._shown = _lowest(messages), _first(messages, "obstacle") or None
                is_due = verdict.get("is_due", False)
                # A takeover that has begun continues as soon as all ranks can read the store.
                reason = _first(messages, "outage" if verdict.get("is_own") else "obstacle") if is_due else ""
                if is_due and not reason:
                    began = time.monotonic()
                    found = exchange.exchange(Phase.CHECKING, Message.of(self._serving_obstacle))
                    reason = _first(found, "obstacle")
                    claimed = None if reason else self._claim(exchange, verdict)
                    if isinstance(claimed, ClaimedStream):
                        return self._complete(exchange, claimed, began)
                    reason = reason or str(claimed)
                if reason:
                    self._log_once(f"standby does not take over: {reason}")
                if not any(message["has_moved"] for message in messages):
                    time.sleep(self._look_seconds)

    def sync(self) -> int | None:
        """Apply the versions that are committed, on all ranks. A collective.

        Returns:
            The lowest version that a rank has applied; None if there is no version yet.

        Raises:
            StorageError: if the store cannot be read.
            MalformedError, CorruptPartError, MissingVersionError, StreamReplacedError: if a version cannot be applied.
            OlderCopyError: if the store shows an older copy of the stream. The applied version is kept.
            NotRecoverableError, RestoreMismatchError, InvalidArgumentError, TableMismatchError, RestoreFailedError,
            RankLostError: as :meth:`follow` raises them.
        """
        with self._meeting("Standby.sync()") as exchange:
            self._following.retry()
            while True:
                messages = exchange.exchange(Phase.FOLLOWING, Message.of(lambda: self._advanced("sync()")))
                check_alike(messages, "call", failed=RestoreFailedError)
                if not any(message["has_moved"] for message in messages):
                    break
            self._shown = _lowest(messages), None
            return _lowest(messages)

    def take_over(self, *, force: bool = False, silence: float = 30.0) -> Takeover:
        """Take over now. A collective.

        After a :class:`~delta_tracker.errors.TakeoverFailedError`, this method completes the takeover with the same
        claim.

        Args:
            force: True to fence a publisher that may be alive, also if this standby cannot apply its last version.
            silence: without ``force``, number of seconds without a version or heartbeat of the publisher, by the
                store's clock, after which it is considered dead.

        Raises:
            LivePublisherError: on all ranks, if the publisher is alive, or if another job claimed the stream meanwhile.
            StandbyBehindError: on all ranks, without ``force``, if a version cannot be applied. Nothing was claimed.
            StreamReplacedError: on all ranks, if the stream that had versions is missing or has only a claim.
            StorageError: if the store fails. If the stream was claimed nevertheless, the next call uses that claim.
            NotRecoverableError, TakeoverFailedError, InvalidArgumentError, RestoreFailedError, RankLostError: as
                :meth:`follow` raises them.
        """
        began = time.monotonic()
        with self._meeting("Standby.take_over(...)") as exchange:
            judge = Message.of(lambda: self._judged(force=force, silence=silence))
            messages = exchange.exchange(Phase.FOLLOWING, judge)
            check_alike(messages, "call", failed=RestoreFailedError)
            verdict = messages[0]["verdict"]
            self._raise_if_nothing(verdict)
            if "live" in verdict:
                raise LivePublisherError(self._storage.url, *verdict["live"])
            if not verdict["is_own"]:
                if not force:
                    self._catch_up(exchange, messages[0]["call"], verdict["after"][0])
                exchange.exchange(Phase.CHECKING, Message.of(self._check_serving))
            claimed = self._claim(exchange, verdict)
            if not isinstance(claimed, ClaimedStream):
                raise claimed
            return self._complete(exchange, claimed, began)

    def close(self) -> None:
        """End the metrics of this standby. The model still raises, unless this job has taken over. Not a collective."""
        self._ended = self._ended or "closed"
        self._gauges.close()

    @contextmanager
    def _meeting(self, call: str) -> Iterator[Exchange]:
        """Context manager for the communication of one call."""
        exchange = Exchange(self._timeout, name="standby", call=call, failed=RestoreFailedError)
        try:
            yield exchange
        finally:
            exchange.close()

    def _build(self, url: Location, name: str) -> dict[str, Any]:
        """Validate the arguments and open the stores."""
        job = self._job
        job.check()
        check_name(name)
        if not 0 <= self._look_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgumentError("look_seconds", self._look_seconds, "Pass seconds, 0 or more")
        check_model(job)
        self._storage = open_storage(url)
        self._log = StreamLog(self._storage)
        self._serving = ServingStreams(self._log, self._serving_urls)
        return {
            "ignore": f"ignore={sorted(map(str, job.ignore))}",
            "serving": f"{len(self._serving)} serving streams",
        }

    def _turn(self, silence: float | None) -> dict[str, Any]:
        """Apply versions for about the time of a look. On rank 0, decide on a takeover."""
        self._check_open()
        if silence is not None:
            _check_silence(silence)
        has_moved = self._following.advance(time.monotonic() + self._look_seconds)
        error = self._following.error
        obstacle = "" if error is None else _text(error)
        if not obstacle and self.version is not None and not self._serving.is_checked:
            obstacle = self._serving_obstacle()["obstacle"]
        return {
            "call": f"follow(silence={silence})",
            "has_moved": has_moved,
            "version": self.version,
            "obstacle": obstacle,  # why this rank could not complete a takeover
            "outage": obstacle if isinstance(error, StorageError) else "",
            "verdict": self._decided(silence) if self._is_first else {},
        }

    def _advanced(self, call: str, *, raises: bool = True) -> dict[str, Any]:
        """Apply versions for about the time of a look, and raise the error that ended this.

        Args:
            call: text of the call.
            raises: False to raise only errors of the store.
        """
        self._check_open()
        has_moved = self._following.advance(time.monotonic() + self._look_seconds)
        error = self._following.error
        if error is not None and (raises or isinstance(error, StorageError)):
            raise unraised(error)
        obstacle = "" if error is None else _text(error)
        return {"call": call, "has_moved": has_moved, "version": self.version, "obstacle": obstacle}

    def _catch_up(self, exchange: Exchange, call: str, head: int) -> None:
        """Apply the versions that are committed, on all ranks.

        Args:
            exchange: communication with the other ranks.
            call: text of the call.
            head: newest version.
        """
        self._following.retry()
        while True:
            messages = exchange.exchange(Phase.FOLLOWING, Message.of(lambda: self._advanced(call, raises=False)))
            if not any(message["has_moved"] for message in messages):
                break
        reason = _first(messages, "obstacle")
        self._shown = _lowest(messages), reason or None
        if reason:
            raise StandbyBehindError(self._storage.url, _lowest(messages), head, reason)

    def _check_serving(self) -> dict[str, Any]:
        """Check the serving streams against the last applied version or, before the first, against the newest one."""
        version = self._following.newest
        if version is None:
            try:
                version = recovery_path(self._log)[-1]
            except (MalformedError, NotRecoverableError) as error:
                _logger.info("the ids of the serving streams are not checked: %s", str(error))
        self._serving.check(version)
        return {}

    def _serving_obstacle(self) -> dict[str, Any]:
        """Check the serving streams. Return an error of the store, and raise it if they are other streams."""
        try:
            self._check_serving()
        except (CorruptPartError, MalformedError, StorageError) as error:
            return {"obstacle": _text(error)}
        return {"obstacle": ""}

    def _decided(self, silence: float | None) -> dict[str, Any]:
        """Return the decision of rank 0 whether to take over now. Looks at the store at most once per interval."""
        if time.monotonic() < self._next_look:
            return {}
        self._next_look = time.monotonic() + self._look_seconds
        try:
            signs = self._liveness.look(*self._shown)
            known = self._known_version(None if signs is None else signs.head)
            if signs is None:
                if known is None:
                    return {"nothing": "the stream is empty"}
                self._log_once(f"standby waits: {StreamReplacedError(self._storage.url, known).advising(_GONE)}")
                return {}
            request = read_request(self._storage, signs.head, signs.last)
        except (MalformedError, StorageError) as error:
            self._log_once(f"standby cannot look at the publisher: {error}")
            return {}
        if silence is not None:
            self._check_interval(silence, signs)
        self._gauges.saw(self._shown[0], signs.head)
        is_silent = silence is not None and signs.silent_seconds > silence
        if request is None and not is_silent and not self._is_own(signs.head):
            return {}
        return self._due(signs.head, is_forced=request is not None and request.force, last=signs.last)

    def _judged(self, *, force: bool, silence: float) -> dict[str, Any]:
        """Return the decision of rank 0 whether it may take over."""
        self._check_open()
        _check_silence(silence)
        verdict: dict[str, Any] = {}
        if self._is_first:
            signs = None if force else self._liveness.look(*self._shown)
            if signs is not None:
                self._check_interval(silence, signs)
            head = signs.head if signs is not None else self._log.head() if force else None
            known = self._known_version(head)
            if head is None:
                verdict = {"nothing": "the stream is empty"} if known is None else {"gone": known}
            elif signs is not None and signs.silent_seconds < silence and not self._is_own(head):
                verdict = {"live": [head.generation, head.version, signs.silent_seconds]}
            else:
                verdict = self._due(head, is_forced=force, last=None if signs is None else signs.last)
        return {"call": f"take_over(force={bool(force)}, silence={silence})", "verdict": verdict}

    def _known_version(self, head: Manifest | None) -> int | None:
        """Remember the newest snapshot, and return a version that rank 0 has applied or seen; None if there was none.

        Args:
            head: newest entry of the stream; None if there is no stream.
        """
        if head is not None and head.snapshot is not None:
            self._seen = head.snapshot
        return self._seen if self.version is None else self.version

    def _due(self, head: Manifest, *, is_forced: bool, last: float | None) -> dict[str, Any]:
        """Return the decision to take over, if there is a version.

        Args:
            head: newest entry of the stream.
            is_forced: True to claim the stream also if its publisher commits a version or leaves a heartbeat meanwhile.
            last: time of the publisher's last sign of life; None if it is unknown.
        """
        if head.snapshot is None:
            known = self._known_version(head)
            return {"nothing": "the stream has only a claim"} if known is None else {"gone": known}
        return {
            "is_due": True,
            "after": [head.version, head.xxh3],
            "generation": head.generation,
            "is_forced": bool(is_forced),
            "is_own": self._is_own(head),
            "last": last,
        }

    def _is_own(self, head: Manifest) -> bool:
        """Return True if the newest entry is the claim of this job."""
        return head.kind == "claim" and head.writer == self._writer

    def _raise_if_nothing(self, verdict: Mapping[str, Any]) -> None:
        if "gone" in verdict:
            raise StreamReplacedError(self._storage.url, verdict["gone"]).advising(_GONE)
        if "nothing" in verdict:
            raise NotRecoverableError(self._storage.url, None, verdict["nothing"])

    def _check_interval(self, silence: float, signs: Signs) -> None:
        """Check a number of seconds of silence against the time between two heartbeats of the publisher."""
        seconds = signs.heartbeat_seconds
        if seconds is None or self._checked_silence == (silence, seconds):
            return
        if silence < seconds:
            remedy = (
                f"Pass at least {_MIN_HEARTBEATS * seconds:g}: the publisher leaves a heartbeat every {seconds:g} s"
            )
            raise InvalidArgumentError("silence", silence, remedy)
        if silence < _MIN_HEARTBEATS * seconds:
            _logger.warning("a live publisher may look dead: silence=%g heartbeat_seconds=%g", silence, seconds)
        self._checked_silence = silence, seconds

    def _log_once(self, reason: str) -> None:
        """Log on rank 0 why there is no takeover, unless the last call had the same reason."""
        if self._is_first and reason != self._reason:
            _logger.warning("%s", reason)
        self._reason = reason

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidArgumentError("standby", self._ended, "Build a new Standby")

    def _claim(self, exchange: Exchange, verdict: Mapping[str, Any]) -> ClaimedStream | StreamError:
        """Claim the recovery stream. Return the error if there is a newer entry, or if the store fails.

        Args:
            exchange: communication with the other ranks.
            verdict: result of :meth:`_due`.
        """
        failure: StreamError | None = None
        claim: Claim | None = None

        def act() -> dict[str, Any]:
            nonlocal claim, failure
            if not self._is_first:
                return {}
            try:
                self._storage.probe()
                self._check_still_silent(verdict)
                claim = self._claim_after(verdict)
            except LivePublisherError as error:
                return {"live": [error.generation, error.version, error.seconds]}
            except (MalformedError, StorageError, StreamReplacedError, UnsafeStoreError) as error:
                failure = error  # the claim may have been created
                return {"failure": f"{type(error).__name__}: {error}"}
            return {"entry": claim.data.decode()}

        found = exchange.exchange(Phase.CLAIMING, Message.of(act))[0]
        if "live" in found:
            return LivePublisherError(self._storage.url, *found["live"])
        if "failure" in found:
            return failure or RestoreFailedError(0, found["failure"])
        entry = claim.head if claim is not None else parse_manifest("claim of rank 0", found["entry"].encode())
        self._claimed = entry
        return ClaimedStream(storage=self._storage, claim=claim, entry=entry, has_states=True)

    def _check_still_silent(self, verdict: Mapping[str, Any]) -> None:
        """Check that the publisher left no sign of life since the decision: to catch up may have taken minutes."""
        if verdict["is_forced"] or verdict["is_own"] or verdict["last"] is None:
            return
        signs = self._liveness.look(*self._shown)
        if signs is not None and signs.last > verdict["last"]:
            raise LivePublisherError(self._storage.url, signs.head.generation, signs.head.version, signs.silent_seconds)

    def _claim_after(self, verdict: Mapping[str, Any]) -> Claim:
        """Claim the recovery stream on rank 0.

        The claim follows the entry of the decision. If the decision is forced, it may follow a later entry of the same
        publisher. It never follows another claim than its own: that standby has taken over already.
        """
        writer, after = self._new_writer(), Link(*verdict["after"])
        if not verdict["is_forced"]:
            return self._log.claim(after=after, writer=writer)
        for _ in range(ATTEMPTS):
            head = self._log.head()
            if head is None:
                raise StreamReplacedError(self._storage.url, after.version).advising(_GONE)
            if head.generation != verdict["generation"] and not self._is_own(head):
                raise LivePublisherError(self._storage.url, head.generation, head.version)
            try:
                return self._log.claim(after=head.link, writer=writer)
            except LivePublisherError:
                continue  # the former publisher has committed a version
        raise StorageError(self._storage.url, f"lost {ATTEMPTS} claims to versions of the former publisher")

    def _new_writer(self) -> str:
        """Return the id of the next claim: that of the last one, unless another publisher has followed it."""
        if self._claimed is not None:
            head = self._log.head()
            if head is None or head.link != self._claimed.link:
                self._writer, self._claimed = secrets.token_hex(16), None
        return self._writer

    def _complete(self, exchange: Exchange, claimed: ClaimedStream, began: float) -> Takeover:
        """Restore the version before the claim, and claim the serving streams. Removes the mark of the model."""
        try:
            pulse = PublisherPulse(self._storage, 0.0) if self._is_first else None  # the only heartbeat, without period
            restored, serving = self._restore_and_claim(
                exchange, claimed, lambda: None if pulse is None else pulse.leave(claimed.entry)
            )
        except Exception as error:
            self._gauges.failed(error)
            reason = f"{type(error).__name__}: {str(error).removesuffix('.')}"
            failed = TakeoverFailedError(self._storage.url, claimed.entry.version, reason)
            _logger.error("%s", str(failed))  # noqa: TRY400  the error is raised
            raise failed from error
        unmark(self._job.model)
        self._ended = "this job has taken over"
        seconds = time.monotonic() - began
        self._gauges.took_over(seconds)
        if self._is_first:
            version, url = restored.version, self._storage.url
            _logger.warning("took over at version %d in %.1f s: url=%s", version, seconds, url)
        return Takeover(restored=restored, recovery=claimed, serving=tuple(serving), seconds=seconds)

    def _restore_and_claim(
        self, exchange: Exchange, claimed: ClaimedStream, beat: Callable[[], None]
    ) -> tuple[Restored, list[ClaimedStream]]:
        """Restore the newest version before the claim, and claim the serving streams."""
        applied: Manifest | None = None

        def check() -> dict[str, Any]:
            nonlocal applied
            entry = self._log.read(claimed.entry.version)
            if entry is None or entry.link != claimed.entry.link:
                remedy = "Give all ranks the same store: this one lacks rank 0's claim"
                raise InvalidArgumentError("url", self._storage.url, remedy)
            applied = self._following.applied()
            return {}

        exchange.exchange(Phase.CHECKING, Message.of(check))
        # All writes follow the claim, so that no version can be committed behind the one that is restored.
        mark_following(self._job.model, claimed.entry.version)
        version = claimed.entry.version
        restoration = Restoration(exchange, self._storage, version, self._job, applied=applied, keeps_mark=True)
        try:
            restored = restoration.run()
            beat()
            serving = [self._claim_serving(exchange, claimed, number) for number in range(len(self._serving))]
        except BaseException:
            if restoration.plan is not None:
                self._following.overwritten(restoration.plan)
            raise
        return restored, serving

    def _claim_serving(self, exchange: Exchange, claimed: ClaimedStream, number: int) -> ClaimedStream:
        """Claim a serving stream, unless another job has claimed the recovery stream."""
        claim: Claim | None = None

        def act() -> dict[str, Any]:
            nonlocal claim
            if not self._is_first:
                return {}
            claim = self._serving.claim(number, claimed.entry)
            return {"entry": claim.data.decode()}

        found = exchange.exchange(Phase.CLAIMING, Message.of(act))[0]
        entry = claim.head if claim is not None else parse_manifest("claim of rank 0", found["entry"].encode())
        return ClaimedStream(storage=self._serving.storage(number), claim=claim, entry=entry, has_states=False)


def _check_silence(silence: float) -> None:
    """Check a number of seconds of silence."""
    if type(silence) not in (int, float) or not 0 < silence < threading.TIMEOUT_MAX:
        raise InvalidArgumentError("silence", silence, "Pass seconds above 0, at least three heartbeats")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first(messages: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the first text under a key with its rank; "" if all ranks have none."""
    return next((f"rank {rank} has {each[key]}" for rank, each in enumerate(messages) if each[key]), "")


def _lowest(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the lowest version that a rank has applied; None if a rank has applied none."""
    versions = [message["version"] for message in messages]
    return None if None in versions else min(versions)
