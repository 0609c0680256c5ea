"""Second job that is ready to continue training when the first job fails: :class:`Standby`."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn

from delta_tracker.arguments import is_number
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    LivePublisherError,
    MalformedError,
    NotRecoverableError,
    RankFailedError,
    StorageError,
    StreamError,
    StreamReplacedError,
    TakeoverFailedError,
    without_traceback,
)
from delta_tracker.live_objects import Uncopied
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.model_fit import OnModelChange
from delta_tracker.publisher.exchange import Exchange, Message, Phase, check_alike
from delta_tracker.publisher.training import Recovery
from delta_tracker.recovery.job import LocalJob
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.recovery.recovery_plan import check_model
from delta_tracker.recovery.restore import Restoration, Restored
from delta_tracker.recovery.shard_follower import ShardFollower
from delta_tracker.recovery.streams import GONE, RecoveryStream, ServingStreams
from delta_tracker.sharding.interrupted import mark_complete, mark_incomplete
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter, check_predictor_name
from delta_tracker.stream.log import Claim, ClaimedStream, StreamLog
from delta_tracker.stream.reading.runtime import REAL, Runtime
from delta_tracker.stream.storage.storage import Location, Storage, open_storage
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.rank_group import DEFAULT_TIMEOUT
from delta_tracker.tracker.tracker import ModelDeltaTracker

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Takeover:
    """Result of a takeover by a :class:`Standby`. Pass the claimed streams to new publishers.

    Args:
        recovery: claimed recovery stream.
        serving: claimed serving streams, in the order of the argument ``serving`` of :class:`Standby`.
        seconds: duration of the takeover in seconds, from the decision to its completion.

    Example:
        >>> taken = standby.take_over()  # doctest: +SKIP
        >>> publisher = Publisher(tracker, taken.recovery, recovery=Recovery())  # doctest: +SKIP
    """

    restored: Restored
    recovery: ClaimedStream
    serving: tuple[ClaimedStream, ...]
    seconds: float


class Standby(Uncopied, remedy="Build a new Standby where it is needed"):
    """Job that follows the recovery stream of a trainer, and continues training when the trainer fails.

    Create a standby on all ranks after the model, the optimizers and the tracker. Then call :meth:`follow`, which
    returns when this job has taken over, and create the publishers.

    Until the takeover, each rank applies the published rows and optimizer states to its shards, and a call of the model
    raises :class:`~delta_tracker.errors.IncompleteModelError`. A takeover first claims the recovery stream and so
    fences the former trainer. It then restores the newest version before the claim, like
    :func:`~delta_tracker.recovery.restore.restore`, and claims the serving streams. The section "Warm standby" of
    ``guide/recover.md`` describes the limits, and what to do after a failure.

    The constructor and all methods except :meth:`close` are collectives. ``restore`` documents the arguments ``model``,
    ``tracker``, ``recovery``, ``data``, ``ignore`` and ``on_model_change``, and their errors.

    Args:
        url: url or storage of the recovery stream. The trainer must publish it with ``Publisher(..., recovery=...)``.
        serving: urls or storages of all serving streams of the trainer.
        name: name of this job in its heartbeats and in the label ``standby`` of the metrics. It must differ from the
            names of predictors and of other standbys.
        look_seconds: interval between two polls of the stream, in seconds. Ranks also exchange messages at about this
            interval.
        timeout: maximum time to wait for the slowest rank. It must be long enough to read and write a whole snapshot.
        runtime: provider of clocks and waits. Replace it in simulations only.

    Example:
        >>> standby = Standby(model, url, tracker=tracker, data=data, serving=[serving_url])  # doctest: +SKIP
        >>> taken = standby.follow(silence=30)  # returns when the publisher is silent for 30 s  # doctest: +SKIP
        >>> publisher = Publisher(tracker, taken.recovery, recovery=Recovery())  # doctest: +SKIP
        >>> serving = Publisher(tracker, taken.serving[0], "serving")  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913  all but two have a default
        self,
        model: nn.Module,
        url: Location,
        *,
        tracker: ModelDeltaTracker | None = None,
        recovery: Recovery | None = None,
        data: DataPosition[Any] | None = None,
        ignore: Collection[str] = (),
        on_model_change: OnModelChange = "stop",
        serving: Sequence[Location] = (),
        name: str = "standby",
        look_seconds: float = 1.0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        monitor: Monitor | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        self._timeout = timeout
        self._look_seconds = look_seconds
        self._runtime = runtime
        with self._meeting("Standby(...)") as exchange:
            ranks = exchange.rank, exchange.group.world_size
            objects = Recovery() if recovery is None else recovery
            self._job = LocalJob(model, tracker, objects, data, ignore, *ranks, on_model_change)
            messages = exchange.exchange(Phase.BUILDING, Message.of(lambda: self._build(url, name, serving)))
            check_alike(messages, "ignore", "serving", action="restore")
        self._is_first = self._job.rank == 0
        self._recorder = Recorder("standby", self, name=name, monitor=monitor)  # on rank 0, also of all ranks
        self._recorder.takeover_failures.cell()  # an alert then sees the first one
        if self._is_first:
            self._recorder.takeovers.cell()
        self._recovery = RecoveryStream(self._log, name, look_seconds, self._recorder, runtime)
        self._follower = ShardFollower(self._log, self._job, runtime)
        self._ended = ""  # why no further call is possible

    @property
    def version(self) -> int | None:
        """Last version that this rank has applied; None if it has not applied any version."""
        return self._follower.version

    @property
    def error(self) -> StreamError | None:
        """Error of this rank's last attempt to apply a version; None if it succeeded. The next poll retries."""
        return self._follower.error

    def follow(self, silence: float | None = None) -> Takeover:
        """Follow the stream until this job has taken over. A collective.

        Args:
            silence: number of seconds without a version or heartbeat, according to the store's clock, after which this
                job takes over. None to take over only when the command ``delta-tracker takeover`` requests it. It must
                be the same on all ranks. The stream is not claimed while a rank has an :attr:`error`.

        Raises:
            NotRecoverableError: on all ranks, if the versions contain no states. Also raised with ``version`` None if
                there is no stream, or if the publisher is silent and has published no version. In this case, start a
                job without calling :func:`restore`.
            StreamReplacedError: on all ranks, if the publisher is silent, and the stream had versions but now contains
                only a claim.
            TakeoverFailedError: if the takeover failed after the claim. To continue the takeover, call
                :meth:`take_over` or this method again.
            InvalidArgumentError: if ``silence`` is invalid or less than the interval between the publisher's
                heartbeats, if a serving stream is missing or does not belong to the trainer, or if this job has already
                taken over.
            RestoreMismatchError, ModelMismatchError: if the stream does not match the job.
            RankFailedError: if another rank raised one of these errors.
            RankLostError: if a rank dies, is interrupted, or does not make the call in time.
        """
        with self._meeting("Standby.follow(...)") as exchange:
            while True:
                messages = exchange.exchange(Phase.FOLLOWING, Message.of(lambda: self._turn(silence)))
                check_alike(messages, "call", action="restore")
                decision = messages[0]["decision"]
                self._check_due(decision)
                self._recovery.shown = _lowest(messages), _first(messages, "obstacle") or None
                is_due = decision.get("is_due", False)
                # A takeover that has begun continues as soon as all ranks can read the store.
                reason = _first(messages, "outage" if decision.get("is_own") else "obstacle") if is_due else ""
                if is_due and not reason:
                    began = self._runtime.monotonic()
                    check = Message.of(lambda: {"obstacle": self._serving_obstacle()})
                    reason = _first(exchange.exchange(Phase.CHECKING, check), "obstacle")
                    if not reason:
                        claimed = self._claim(exchange, self._log.storage, partial(self._recovery.claim, decision))
                        if isinstance(claimed, ClaimedStream):
                            return self._complete(exchange, claimed, began)
                        reason = str(claimed)
                if reason and self._is_first:
                    self._recovery.log_once(f"standby does not take over: {reason}")
                if not any(message["has_moved"] for message in messages):
                    self._runtime.sleep(self._look_seconds)

    def sync(self) -> int | None:
        """Apply all committed versions on all ranks. A collective.

        Returns the lowest :attr:`version` of all ranks; None if a rank has applied no version. Also raises the errors
        of :meth:`follow`.

        Raises:
            StorageError: if the store cannot be read.
            MalformedError, CorruptPartError, MissingVersionError, StreamReplacedError: if a version cannot be applied.
            OlderCopyError: if the store contains an older copy of the stream.
        """
        with self._meeting("Standby.sync()") as exchange:
            return _lowest(self._catch_up(exchange, "sync()", raises=True))

    def take_over(self, *, force: bool = False, silence: float = 30.0) -> Takeover:
        """Take over immediately, or complete a takeover that failed. A collective.

        Also raises the errors of :meth:`follow`.

        Args:
            force: True to take over even if the publisher may be alive or a version cannot be applied.
            silence: number of seconds without a version or heartbeat, measured by the store's clock, after which the
                publisher is considered dead. Ignored if ``force`` is True.

        Raises:
            LivePublisherError: on all ranks, if the publisher is alive, or if another job has claimed the stream.
            TakeoverFailedError: on all ranks, if the takeover failed after the claim. Call this method again to
                continue. Without ``force``, also raised before the claim if a version cannot be applied.
            StreamReplacedError: on all ranks, if the stream had versions, but is now missing or contains only a claim.
            StorageError: if the store fails. If the claim was created nevertheless, the next call uses it.
        """
        began = self._runtime.monotonic()
        with self._meeting("Standby.take_over(...)") as exchange:
            judge = Message.of(lambda: self._takeover_decision(force=force, silence=silence))
            messages = exchange.exchange(Phase.FOLLOWING, judge)
            check_alike(messages, "call", action="restore")
            decision = messages[0]["decision"]
            self._check_due(decision)
            if not decision["is_own"]:
                if not force:
                    found = self._catch_up(exchange, messages[0]["call"], raises=False)
                    if obstacle := _first(found, "obstacle"):
                        head, applied = decision["after"][0], _lowest(found)
                        raise TakeoverFailedError(self._log.url, head, obstacle, is_claimed=False, applied=applied)
                exchange.exchange(Phase.CHECKING, Message.of(self._check_serving))
            claimed = self._claim(exchange, self._log.storage, partial(self._recovery.claim, decision))
            if not isinstance(claimed, ClaimedStream):
                raise claimed
            return self._complete(exchange, claimed, began)

    def close(self) -> None:
        """Close the standby. If it has not taken over, calls of the model still raise an error. Not a collective."""
        self._ended = self._ended or "closed"
        self._recorder.close()

    def _meeting(self, call: str) -> closing[Exchange]:
        return closing(Exchange(self._timeout, name="standby", call=call, action="restore"))

    def _build(self, url: Location, name: str, serving: Sequence[Location]) -> dict[str, Any]:
        job = self._job
        job.check()
        check_predictor_name(name)
        if not (is_number(self._look_seconds) and 0 <= self._look_seconds < threading.TIMEOUT_MAX):
            raise InvalidArgumentError("look_seconds", self._look_seconds, "Pass seconds, 0 or more")
        check_model(job)
        self._log = StreamLog(open_storage(url))
        self._serving = ServingStreams(self._log, serving)
        serving_streams = f"{len(self._serving.storages)} serving streams"
        return {"ignore": job.omissions, "serving": serving_streams}

    def _turn(self, silence: float | None) -> dict[str, Any]:
        if silence is not None:
            _check_silence(silence)
        turn = self._advanced(f"follow(silence={silence})")
        turn["outage"] = turn["obstacle"] if isinstance(self.error, StorageError) else ""
        if not turn["obstacle"] and self.version is not None and not self._serving.is_checked:
            turn["obstacle"] = self._serving_obstacle()
        turn["decision"] = self._recovery.decide_follow(silence, self.version) if self._is_first else {}
        return turn

    def _advanced(self, call: str) -> dict[str, Any]:
        """Apply versions for about ``look_seconds``. Return this rank's message, which contains its error, if any."""
        self._check_open()
        has_moved = self._follower.advance(self._runtime.monotonic() + self._look_seconds)
        obstacle = "" if self.error is None else _text(self.error)
        return {"call": call, "has_moved": has_moved, "version": self.version, "obstacle": obstacle}

    def _catch_up(self, exchange: Exchange, call: str, *, raises: bool) -> list[dict[str, Any]]:
        """Apply all versions on all ranks. Return the last messages. If not ``raises``, raise StorageError only."""

        def act() -> dict[str, Any]:
            turn = self._advanced(call)
            if self.error is not None and (raises or isinstance(self.error, StorageError)):
                raise without_traceback(self.error)
            return turn

        self._follower.retry()
        while True:
            messages = exchange.exchange(Phase.FOLLOWING, Message.of(act))
            check_alike(messages, "call", action="restore")
            if not any(message["has_moved"] for message in messages):
                self._recovery.shown = _lowest(messages), _first(messages, "obstacle") or None
                return messages

    def _check_serving(self) -> dict[str, Any]:
        """Check the serving streams against the last applied version, or the newest version if none was applied."""
        version = self._follower.newest
        if version is None:
            try:
                version = recovery_path(self._log)[-1]
            except (MalformedError, NotRecoverableError) as error:
                _logger.info("the ids of the serving streams are not checked: %s", str(error))
        self._serving.check(version)
        return {}

    def _serving_obstacle(self) -> str:
        """Check the serving streams. Return the text of an error that delays the check; empty if it succeeded."""
        try:
            self._check_serving()
        except (CorruptPartError, MalformedError, StorageError) as error:
            return _text(error)
        return ""

    def _takeover_decision(self, *, force: bool, silence: float) -> dict[str, Any]:
        self._check_open()
        _check_silence(silence)
        decision = self._recovery.decide_takeover(self.version, force=force, silence=silence) if self._is_first else {}
        return {"call": f"take_over(force={bool(force)}, silence={silence})", "decision": decision}

    def _check_due(self, decision: Mapping[str, Any]) -> None:
        if "gone" in decision:
            raise StreamReplacedError(self._log.url, decision["gone"]).with_remedy(GONE)
        if "nothing" in decision:
            raise NotRecoverableError(self._log.url, None, decision["nothing"])
        if "live" in decision:
            raise LivePublisherError(self._log.url, *decision["live"])

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidArgumentError("standby", self._ended, "Build a new Standby")

    def _claim(self, exchange: Exchange, storage: Storage, claim: Callable[[], Claim]) -> ClaimedStream | StreamError:
        """Claim a stream on rank 0. Return the claimed stream, or the error if the claim failed."""
        failure: StreamError | None = None
        own: Claim | None = None

        def act() -> dict[str, Any]:
            nonlocal own, failure
            if not self._is_first:
                return {}
            try:
                own = claim()
            except LivePublisherError as error:
                return {"live": [error.generation, error.version, error.seconds]}
            except (MalformedError, StorageError, StreamReplacedError) as error:
                failure = error  # the claim may have been created
                return {"failure": _text(error)}
            return {"entry": own.data.decode()}

        found = exchange.exchange(Phase.CLAIMING, Message.of(act))[0]
        if "live" in found:
            return LivePublisherError(storage.url, *found["live"])
        if "failure" in found:
            return failure or RankFailedError(0, found["failure"], "restore")
        entry = own.head if own is not None else parse_manifest("claim of rank 0", found["entry"].encode())
        return ClaimedStream(storage=storage, claim=own, entry=entry, has_states=storage is self._log.storage)

    def _complete(self, exchange: Exchange, claimed: ClaimedStream, began: float) -> Takeover:
        try:
            restored, serving = self._restore_and_claim(exchange, claimed)
        except Exception as error:
            self._recorder.takeover_failures.cell().add(1)
            failed = TakeoverFailedError(self._log.url, claimed.entry.version, _text(error).removesuffix("."))
            _logger.error("%s", str(failed))  # noqa: TRY400  the error is raised
            raise failed from error
        mark_complete(self._job.model)
        self._ended = "this job has taken over"
        seconds = self._runtime.monotonic() - began
        if self._is_first:
            for gauge in (self._recorder.standby_version, self._recorder.standby_lag_versions):
                gauge.remove()
            self._recorder.takeovers.cell().add(1)
            self._recorder.takeover_seconds.cell().add(seconds)
            _logger.warning("took over at version %d in %.1f s: url=%s", restored.version, seconds, self._log.url)
        return Takeover(restored=restored, recovery=claimed, serving=tuple(serving), seconds=seconds)

    def _restore_and_claim(self, exchange: Exchange, claimed: ClaimedStream) -> tuple[Restored, list[ClaimedStream]]:
        applied: Manifest | None = None

        def check() -> dict[str, Any]:
            nonlocal applied
            entry = self._log.read(claimed.entry.version)
            if entry is None or entry.link != claimed.entry.link:
                remedy = "Give all ranks the same store: this one lacks rank 0's claim"
                raise InvalidArgumentError("url", self._log.url, remedy)
            applied = self._follower.applied()
            return {}

        exchange.exchange(Phase.CHECKING, Message.of(check))
        # All writes follow the claim, so that no version can be committed behind the one that is restored.
        mark_incomplete(self._job.model, claimed.entry.version, is_following=True)
        version, storage = claimed.entry.version, self._log.storage
        restoration = Restoration(exchange, storage, version, self._job, applied=applied, keeps_mark=True)
        try:
            restored = restoration.run()
            if self._is_first:
                PublisherHeartbeatWriter(storage, 0.0).write(claimed.entry)  # the only heartbeat, without period
            serving = list(self._claim_serving(exchange, claimed))
        except BaseException:
            if restoration.plan is not None:
                self._follower.overwritten(restoration.plan)
            raise
        return restored, serving

    def _claim_serving(self, exchange: Exchange, claimed: ClaimedStream) -> Iterator[ClaimedStream]:
        for number, storage in enumerate(self._serving.storages):
            found = self._claim(exchange, storage, partial(self._serving.claim, number, claimed.entry))
            if not isinstance(found, ClaimedStream):
                raise found
            yield found


def _check_silence(silence: float) -> None:
    if type(silence) not in (int, float) or not 0 < silence < threading.TIMEOUT_MAX:
        raise InvalidArgumentError("silence", silence, "Pass seconds above 0, at least three heartbeats")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first(messages: Sequence[Mapping[str, Any]], key: str) -> str:
    return next((f"rank {rank} has {each[key]}" for rank, each in enumerate(messages) if each[key]), "")


def _lowest(messages: Sequence[Mapping[str, Any]]) -> int | None:
    versions = [message["version"] for message in messages]
    return None if None in versions else min(versions)
