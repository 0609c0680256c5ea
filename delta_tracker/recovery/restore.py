"""Restore the state of a training job from a version of a stream: :func:`restore`."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import nn

from delta_tracker.errors import NotRecoverableError
from delta_tracker.predictor.model_fit import OnModelChange
from delta_tracker.publisher.exchange import Exchange, Message, Phase, check_alike
from delta_tracker.publisher.training import Recovery
from delta_tracker.recovery.job import LocalJob
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.recovery.recovery_plan import Plan, prepare
from delta_tracker.sharding.interrupted import mark_complete, mark_incomplete
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Location, open_storage
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.rank_group import DEFAULT_TIMEOUT
from delta_tracker.tracker.tracker import ModelDeltaTracker

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Description of a restored version, returned by :func:`restore`.

    Args:
        stream: id of the stream, a string of 32 hexadecimal digits.
        num_batches: number of batches on which the restored model has been trained.
        event_time: event time in seconds of the last batch trained on, the minimum over all ranks; None if unknown.
        world_size: number of ranks of the job that published the version.
        rank_states: if the number of ranks changed, the per-rank states named in ``ignore``, for the caller to load;
            otherwise empty. Each value lists the states of the ranks that published the version, in rank order, with
            None for a rank without this state. The position in the training data is called ``"data"``.
        differences: with ``on_model_change="continue"``, a message for each item that was not or not fully restored.
    """

    version: int
    stream: str
    num_batches: int
    event_time: float | None
    world_size: int
    rank_states: Mapping[str, Sequence[object]] = field(repr=False)
    differences: tuple[str, ...] = ()


def restore(  # noqa: PLR0913  all but two have a default
    model: nn.Module,
    url: Location,
    version: int | None = None,
    *,
    tracker: ModelDeltaTracker | None = None,
    recovery: Recovery | None = None,
    data: DataPosition[Any] | None = None,
    ignore: Collection[str] = (),
    on_model_change: OnModelChange = "stop",
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Restored:
    """Restore the training state from a version that a ``Publisher(..., recovery=...)`` wrote. A collective.

    Training can then continue from this version. Call this function on all ranks in the training thread, after creating
    the model, the optimizers and the tracker, and before creating a publisher. If the model contains
    ``DistributedDataParallel``, first train on two batches without a pipeline. The section "Continuous checkpoints" of
    ``guide/recover.md`` describes which results are reproduced, and how the two jobs may differ.

    Each rank reads only the rows of its shards. Nothing is written before all checks have succeeded. If the call fails
    or is interrupted while it writes, calls of the model raise :class:`~delta_tracker.errors.IncompleteModelError`
    until a restore completes.

    Args:
        model: the model.
        url: url or :class:`~delta_tracker.stream.storage.storage.Storage` of the stream.
        version: version to restore, the same on all ranks; None for the newest version.
        tracker: tracker of the model.
        recovery: objects whose states are loaded, with the names used in the publisher; None for ``Recovery()``.
        data: position in the training data to restore. It is also attached to the tracker.
        ignore: names of tables, dense tensors and states that are not restored, the same on all ranks. ``"data"`` is
            the name of the position in the training data.
        on_model_change: "stop" to raise an error if the version does not match the job, or "continue" to restore the
            parts that match; see ``guide/recover.md``. It must be the same on all ranks.
        timeout: maximum time to wait for the slowest rank in each of four steps. One step reads and writes all rows.

    Raises:
        NotRecoverableError: if the version does not exist or contains no states, or if an object is missing in the
            store. The error's ``version`` is None on all ranks if the stream has no version yet.
        RestoreMismatchError, ModelMismatchError: if the version does not match the job.
        InvalidArgumentError: if an argument is invalid, if ``DistributedDataParallel`` was not trained on two batches,
            or if an update is in progress.
        UnsupportedModelError: if a part of the model cannot be restored.
        ReservedConsumerError: if a consumer of the tracker is reserved, for example by a publisher.
        MalformedError, CorruptPartError, StorageError: if the version is damaged, or if the store cannot be read.
        RankFailedError: if an object cannot load its state, or if another rank raised one of these errors.
        RankLostError: if a rank dies, is interrupted, or does not make the call in time.

    Example:
        >>> recovery = Recovery(training_state={"optimizer": optimizer})  # doctest: +SKIP
        >>> restored = restore(model, url, recovery=recovery)  # doctest: +SKIP
    """
    with closing(Exchange(timeout, name="restore", call="restore(...)", action="restore")) as exchange:
        ranks = exchange.rank, exchange.group.world_size
        objects = Recovery() if recovery is None else recovery
        job = LocalJob(model, tracker, objects, data, ignore, *ranks, on_model_change)
        return Restoration(exchange, url, version, job).run()


@dataclass(slots=True, eq=False)
class Restoration:
    """Restore of a version on this rank, used by :func:`restore` and by a standby.

    Args:
        applied: entry up to which all rows have already been written to the model. It may differ between ranks.
        keeps_mark: True if the caller marks the model as incomplete and removes the mark afterwards.
    """

    exchange: Exchange
    url: Location
    version: int | None
    job: LocalJob
    applied: Manifest | None = None
    keeps_mark: bool = False
    plan: Plan | None = field(default=None, init=False)  # None before anything can be written
    _path: list[Manifest] | None = field(default=None, init=False)  # on rank 0, from _resolve()
    _unloaded: Mapping[str, Sequence[object]] = field(default_factory=dict, init=False)

    def run(self) -> Restored:
        """Restore the version, and return a description of it. A collective."""
        exchange, model = self.exchange, self.job.model
        messages = exchange.exchange(Phase.RESOLVING, Message.of(self._resolve))
        check_alike(messages, "version", "ignore", action="restore")
        if messages[0]["nothing"] is not None:
            raise NotRecoverableError(open_storage(self.url).url, None, messages[0]["nothing"])
        version, xxh3 = messages[0]["chosen"]
        exchange.exchange(Phase.FITTING, Message.of(lambda: self._prepare(version, xxh3)))
        plan = self.plan
        assert plan is not None, "made by _prepare()"
        if not self.keeps_mark:
            mark_incomplete(model, version)
        exchange.exchange(Phase.RESTORING, Message.of(lambda: self._write(plan)))
        exchange.exchange(Phase.LOADING, Message.of(lambda: self._load(plan)))
        if not self.keeps_mark:
            mark_complete(model)
        if plan.rerouted and self.job.rank == 0:
            _logger.warning("unknown raw ids read other rows than before in the tables %s", plan.rerouted)
        for each in plan.change.differences if self.job.rank == 0 else ():
            _logger.warning("not restored: %s", each)
        _logger.info("restored version %d of stream %s", version, plan.last.stream)
        return Restored(
            version=version,
            stream=plan.last.stream,
            num_batches=plan.last.batches[1],
            event_time=plan.last.event_time,
            world_size=plan.states.world_size,
            rank_states=self._unloaded,
            differences=plan.change.differences,
        )

    def _resolve(self) -> dict[str, Any]:
        self.job.check()
        storage, chosen, nothing = open_storage(self.url), None, None
        if self.job.rank == 0:
            try:
                self._path = recovery_path(StreamLog(storage), self.version, applied=self.applied)
                chosen = self._path[-1].version, self._path[-1].link.xxh3
            except NotRecoverableError as error:
                if error.version is not None:
                    raise
                nothing = error.reason  # raised on all ranks, which may start without a restore
        version = f"version={self.version!r}"
        return {"chosen": chosen, "nothing": nothing, "version": version, "ignore": self.job.omissions}

    def _prepare(self, version: int, xxh3: str) -> dict[str, Any]:
        log = StreamLog(open_storage(self.url))
        path = self._path or recovery_path(log, version, applied=self.applied)
        if (path[-1].version, path[-1].link.xxh3) != (version, xxh3):
            reason = "this rank finds another version in its store than rank 0"
            raise NotRecoverableError(log.storage.url, version, reason)
        self.plan = prepare(log, path, self.job, self.applied)
        return {}

    def _write(self, plan: Plan) -> dict[str, Any]:
        plan.write()
        self.job.model.zero_grad(set_to_none=True)  # gradients of the batches before the restore
        return {}

    def _load(self, plan: Plan) -> dict[str, Any]:
        job = self.job
        job.load(plan.states, plan.change.ignore, plan.change.parameters)
        self._unloaded = {name: plan.states.of_all_ranks(name) for name in plan.change.unloaded}
        if job.tracker is not None:
            job.tracker.checkpoint.restore_from_stream(plan.last.batches[1], *plan.consumers)
            if job.data is not None:
                job.tracker.attach_data(job.data)
        return {}
