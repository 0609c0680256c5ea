"""Restore the complete state of a training job from a version of a stream: :func:`restore`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker.distributed import DEFAULT_TIMEOUT
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    NotRecoverableError,
    RestoreFailedError,
    RestoreMismatchError,
)
from delta_tracker.predictor.placement import place
from delta_tracker.predictor.targets import check_targets
from delta_tracker.publisher.exchange import Exchange, Message, Phase, check_alike
from delta_tracker.publisher.training import Stateful
from delta_tracker.recovery.fit import DATA, Job, Saved, check_fit, wanted
from delta_tracker.recovery.path import recovery_path
from delta_tracker.recovery.pending import local_rows, rows_after
from delta_tracker.recovery.targets import as_tables, row_targets, state_targets
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.recovery.warm_up import check_warm
from delta_tracker.row_target import RowTarget, TensorTarget
from delta_tracker.rows import copy_from_host
from delta_tracker.sharding.dense import dense_tensors
from delta_tracker.sharding.discover import LocalShard, discover
from delta_tracker.sharding.interrupted import mark, unmark
from delta_tracker.sharding.optimizer_rows import (
    Scalars,
    check_scalars,
    refuse_unrecoverable,
    state_views,
    table_states,
    write_scalars,
)
from delta_tracker.stream.cursor import Place
from delta_tracker.stream.format.block_rows import CHUNK_BYTES, BlockRows
from delta_tracker.stream.format.manifest import DenseSpec, Manifest, Part, Stored
from delta_tracker.stream.format.overlay import Overlay, WholeBlocks
from delta_tracker.stream.format.part_reader import PartReader, Ranged
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage, open_storage
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import ShardSpec

_logger = logging.getLogger(__name__)
_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Description of a restored version.

    Args:
        version: number of the version.
        stream: id of the stream, 32 hexadecimal digits.
        num_batches: number of batches that the job had trained.
        event_time: smallest event time of the batch that any rank trained last, in seconds; None if it is unknown.
        world_size: number of ranks of the job that published the version.
        rank_states: states that this call did not load, because the number of ranks differs and ``ignore`` has their
            names: name to the states of all ranks that published the version, in rank order. The position in the data
            has the name ``"data"``. Empty at the same number of ranks.
    """

    version: int
    stream: str
    num_batches: int
    event_time: float | None
    world_size: int
    rank_states: Mapping[str, Sequence[object]]


def restore(  # noqa: PLR0913  all but two have a default
    model: nn.Module,
    url: str | Storage,
    version: int | None = None,
    *,
    tracker: ModelDeltaTracker | None = None,
    training_state: Mapping[str, Stateful] | None = None,
    rank_state: Mapping[str, Stateful] | None = None,
    data: DataPosition[Any] | None = None,
    ignore: Collection[str] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Restored:
    """Restore the training state of a version that a ``Publisher(..., states="optimizer")`` published. A collective.

    All ranks call it in their training threads, after they have built the model, the optimizers and the tracker, and
    before they build a publisher. If the model contains ``DistributedDataParallel``, as a ``DistributedModelParallel``
    with dense parameters does, they train two batches before the call, whose effect the call overwrites. Train them
    without a pipeline, or create a new pipeline after the call.

    Each rank reads only the rows of its shards. The number of ranks and the sharding plan may differ from those of the
    job that published the version, with these exceptions. Row-wise optimizers have one number for each row and column
    range, so the column ranges of their tables must be those of the version. The optimizer of a table with a DENSE
    kernel is in ``rank_state``, so the table must have the same shards.

    If the number of ranks differs, the states in ``training_state`` are those of rank 0, as always. An object in
    ``rank_state``, or the loader of ``data``, receives the states of all ranks: its method
    ``load_rank_states(states)`` is called with the list of these states. If it has no such method, name it in
    ``ignore``, and use :attr:`Restored.rank_states`.

    Everything is compared before the first write. If the call raises after the first write, or is interrupted, the
    model raises :class:`~delta_tracker.errors.InterruptedRestoreError` when it is called, until a restore completes.

    Afterwards, training continues as after the version: bit for bit, if the number of ranks, the plan and the software
    are the same. A publisher that is then built with the same tracker continues the stream without a snapshot. The
    pending rows of the tracker's other consumers are those of the versions that they had not read, and at most one
    version more, with unknown old states. After a snapshot that they had not read, all rows are pending.

    Args:
        model: the model.
        url: url of the stream, or its :class:`~delta_tracker.stream.storage.storage.Storage`.
        version: version to restore, the same on all ranks; None for the newest.
        tracker: tracker of the model; None if there is none.
        training_state: objects whose states are the same on all ranks, by the names that the publisher had.
        rank_state: objects whose states differ by rank, by the names that the publisher had.
        data: position in the training data.
        ignore: names of tables, dense tensors, training states and states of ranks (``"data"`` for ``data``) that are
            in the version or in this job, and are not restored; the same on all ranks.
        timeout: maximum wait for the slowest rank, in each of four steps. One step reads and writes all rows.

    Returns:
        Description of the restored version.

    Raises:
        NotRecoverableError: if the stream has no such version with states, or a needed object is missing.
        RestoreMismatchError: if the version does not fit the job.
        InvalidArgumentError: if an argument is invalid, or the model has not been trained as described above.
        TableMismatchError: if a table cannot be written.
        UnsupportedModuleError: if the model has modules whose state cannot be published.
        UnsupportedOptimizerError: if it has such optimizers.
        ReservedConsumerError: if a consumer of the tracker is reserved, for example by a publisher.
        MalformedError: if an entry does not follow the format.
        CorruptPartError: if an object does not match its entry.
        StorageError: if the store cannot be read.
        RestoreFailedError: if another rank raised one of these errors.
        RankLostError: if a rank dies, or does not make the call in time.
    """
    exchange = Exchange(timeout, name="restore", call="restore(...)", failed=RestoreFailedError)
    try:
        objects = _Objects(training_state or {}, rank_state or {}, data)
        return _Restoration(exchange, model, url, version, tracker, objects, ignore).run()
    finally:
        exchange.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Objects:
    """Objects that receive the states of a version; see the arguments of :func:`restore`."""

    training: Mapping[str, Stateful]
    rank: Mapping[str, Stateful]
    data: DataPosition[Any] | None

    def check(self) -> None:
        """Validate the objects.

        Raises:
            InvalidArgumentError: if one is invalid, or a name occurs twice.
        """
        for argument, objects in (("training_state", self.training), ("rank_state", self.rank)):
            if not isinstance(objects, Mapping):
                raise InvalidArgumentError(argument, type(objects), "Pass a mapping of name to object")
            for name, each in objects.items():
                if not callable(getattr(each, "load_state_dict", None)):
                    raise InvalidArgumentError(f"{argument}[{name!r}]", type(each), "Give it a method load_state_dict")
        if self.data is not None and not isinstance(self.data, DataPosition):
            raise InvalidArgumentError("data", type(self.data), "Pass a DataPosition")
        repeated = sorted({*self.training, DATA} & {*self.rank, *([DATA] if DATA in self.training else [])})
        if repeated:
            remedy = f"Give each state another name, and not {DATA!r}"
            raise InvalidArgumentError("training_state and rank_state", repeated, remedy)

    @property
    def names_of_ranks(self) -> dict[str, bool]:
        """Name of each state of a rank. The value is True if the states of other numbers of ranks can be loaded."""
        found = {name: callable(getattr(each, "load_rank_states", None)) for name, each in self.rank.items()}
        return found if self.data is None else {**found, DATA: self.data.has_rank_states}

    def load(self, states: TrainingStates, rank: int, ignore: Collection[str], *, is_same: bool) -> None:
        """Load the states of all objects.

        Args:
            states: training states of the version.
            rank: this rank.
            ignore: names of objects that are not loaded.
            is_same: True if the number of ranks is that of the version.
        """
        for name, each in self.training.items():
            if name not in ignore:
                each.load_state_dict(states.load(0, "training", name))
        # The states of random generators are usually in rank_state: other objects must not draw numbers after them.
        objects: dict[str, Any] = {**({} if self.data is None else {DATA: self.data}), **self.rank}
        for name, each in objects.items():
            if name in ignore:
                continue
            if is_same:
                each.load_state_dict(states.load(rank, *_path(name)))
            else:
                each.load_rank_states(_of_all_ranks(states, name))


class _Restoration:
    """One call of :func:`restore` on this rank.

    The other arguments are those of :func:`restore`.

    Args:
        exchange: communication with the other ranks.
        objects: objects that receive states.
    """

    def __init__(
        self,
        exchange: Exchange,
        model: nn.Module,
        url: str | Storage,
        version: int | None,
        tracker: ModelDeltaTracker | None,
        objects: _Objects,
        ignore: Collection[str],
    ) -> None:
        self._exchange = exchange
        self._rank = exchange.rank
        self._world_size = exchange.group.world_size
        self._model = model
        self._url = url
        self._version = version
        self._tracker = tracker
        self._objects = objects
        self._ignore = ignore
        self._plan: _Plan | None = None

    def run(self) -> Restored:
        exchange = self._exchange
        messages = exchange.exchange(Phase.RESOLVING, Message.of(self._resolve))
        check_alike(messages, "version", "ignore", failed=RestoreFailedError)
        version, xxh3 = messages[0]["chosen"]
        exchange.exchange(Phase.FITTING, Message.of(lambda: self._fit(version, xxh3)))
        plan = self._fitted()
        mark(self._model, plan.last.version)
        exchange.exchange(Phase.RESTORING, Message.of(self._write))
        exchange.exchange(Phase.LOADING, Message.of(self._load))
        unmark(self._model)
        _logger.info("restored version %d of stream %s", plan.last.version, plan.last.stream)
        return Restored(
            version=plan.last.version,
            stream=plan.last.stream,
            num_batches=plan.last.batches[1],
            event_time=plan.last.event_time,
            world_size=plan.states.world_size,
            rank_states=plan.unloaded,
        )

    def _resolve(self) -> dict[str, Any]:
        """Validate the arguments and open the store. On rank 0, choose the version."""
        if not isinstance(self._model, nn.Module):
            raise InvalidArgumentError("model", type(self._model), "Pass a module")
        if isinstance(self._ignore, str):
            raise InvalidArgumentError("ignore", self._ignore, "Pass a list of names")
        self._objects.check()
        if self._tracker is not None and self._tracker.model is not self._model:
            raise InvalidArgumentError("tracker", self._tracker, "Pass the tracker of this model")
        log = StreamLog(open_storage(self._url))
        chosen = None
        if self._rank == 0:
            last = recovery_path(log, self._version)[-1]
            chosen = last.version, last.link.xxh3
        names = sorted(map(str, self._ignore))
        return {"chosen": chosen, "version": f"version={self._version!r}", "ignore": f"ignore={names}"}

    def _fit(self, version: int, xxh3: str) -> dict[str, Any]:
        """Compare the version with the job on this rank, and prepare all writes. Writes nothing."""
        storage = open_storage(self._url)
        log = StreamLog(storage)
        path = recovery_path(log, version)
        last = path[-1]
        if (last.version, last.link.xxh3) != (version, xxh3):
            raise NotRecoverableError(storage.url, version, "this rank finds another version in its store than rank 0")
        found = discover(self._model)
        refuse_unrecoverable(self._model, found)
        check_warm(self._model)
        job = self._job(found.shards)
        states = TrainingStates(storage, last)
        own = self._rank if states.world_size == self._world_size else 0
        dense: dict[str, Tensor] = _optional(states, 0, "dense")
        buffers: dict[str, Tensor] = _optional(states, own, "buffers") if own else {}
        saved = Saved(
            tables=last.tables,
            states=last.states,
            unfused=_former_shards(_optional(states, own, "shards"), last, storage.url),
            dense={**last.dense, **{name: _spec(tensor) for name, tensor in dense.items()}},
            training=states.keys(0, "training"),
            rank=[*states.keys(own, "rank"), *([DATA] if states.load(own, DATA) is not None else [])],
            world_size=states.world_size,
        )
        check_fit(saved, job, self._ignore)
        for name, tensor in buffers.items():
            if name not in self._ignore and job.dense.get(name) != _spec(tensor):
                raise RestoreMismatchError(f"the buffer {name!r}", _spec(tensor), job.dense.get(name) or "missing")
        shards = {fqn: found.shards[fqn] for fqn in last.tables if fqn not in self._ignore}
        scalars = self._scalars(states, shards)
        check_scalars(shards, scalars)
        specs = {fqn: shard.spec for fqn, shard in shards.items()}
        self._plan = plan = _Plan(
            storage=storage,
            path=path,
            states=states,
            shards=shards,
            specs=specs,
            targets=self._targets(last, shards),
            scalars=scalars,
            dense=self._kept(dense),
            buffers=self._kept(buffers),
            pending=self._pending(log, states, last, specs),
        )
        _check_objects(storage, version, plan.objects(self._dense_names(last)))
        return {}

    def _job(self, shards: Mapping[str, LocalShard]) -> Job:
        """Return the description of the job on this rank."""
        if self._tracker is not None:
            for fqn, spec in self._tracker.shards.items():
                if fqn not in shards or shards[fqn].spec != spec:
                    raise InvalidArgumentError("tracker", fqn, "Call tracker.reattach(): the table has another shard")
            for name in self._tracker.consumers:
                self._tracker.reserve(name, holder="restore(...)").release()  # raises if it is reserved
        states = {fqn: found for fqn, shard in shards.items() if (found := table_states(shard)) is not None}
        return Job(
            shards={fqn: shard.spec for fqn, shard in shards.items()},
            fused={fqn for fqn, shard in shards.items() if shard.is_fused},
            states=states,
            dense={name: _spec(tensor) for name, tensor in self._dense().items()},
            training=self._objects.training.keys(),
            rank=self._objects.names_of_ranks,
            world_size=self._world_size,
        )

    def _dense(self) -> dict[str, Tensor]:
        return dense_tensors(self._model, self._model, skip_sharded=True)

    def _kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in self._ignore}

    def _dense_names(self, last: Manifest) -> set[str]:
        return set(last.dense) - set(self._ignore)

    def _scalars(self, states: TrainingStates, shards: Mapping[str, LocalShard]) -> dict[str, Scalars]:
        """Return the numbers of the kernels of this rank's fused tables, by FQN.

        At the same world size, they are those that this rank had. Those of other tables are from the ranks that had the
        table, and must be equal on all of them.
        """
        needed = {fqn for fqn, shard in shards.items() if any(kernel.is_fused for kernel, _ in shard.places)}
        own = _numbers(states, self._rank) if states.world_size == self._world_size else {}
        found: dict[str, Scalars] = {fqn: numbers for fqn, numbers in own.items() if fqn in needed}
        missing = needed - found.keys()
        for rank in range(states.world_size) if missing else ():
            for fqn, numbers in _numbers(states, rank).items():
                if fqn in missing and found.setdefault(fqn, numbers) != numbers:
                    what = f"the optimizer's counters of {fqn!r} on the ranks that had it"
                    raise RestoreMismatchError(what, f"{found[fqn]} and {numbers}", "to be the same on all ranks")
        return found

    def _targets(self, last: Manifest, shards: Mapping[str, LocalShard]) -> dict[str, RowTarget]:
        """Return the targets of the rows and of the states, by the name of the table or state table."""
        tables = {fqn: last.tables[fqn] for fqn in shards}
        targets = row_targets(self._model, tables)
        check_targets(replace(last, tables=tables), targets)
        kept = {fqn: states for fqn, states in last.states.items() if fqn in shards}
        views = {fqn: state_views(shards[fqn]) for fqn in kept}
        found = state_targets({fqn: shard.spec for fqn, shard in shards.items()}, views, kept)
        for name, target in found.items():
            if isinstance(target, TensorTarget) and target.obstacle:
                raise RestoreMismatchError(f"the state {name.split()}", "a tensor", target.obstacle)
        return {**targets, **found}

    def _pending(
        self, log: StreamLog, states: TrainingStates, last: Manifest, shards: Mapping[str, ShardSpec]
    ) -> dict[str, dict[str, Tensor | None]]:
        """Return the rows that are pending for the tracker's consumers after the restore, as local ids.

        The version has all rows that were pending for its publisher. For another consumer, it has the last version of
        which the consumer had read all rows, and the rows that the consumer's reads left out.
        """
        if self._tracker is None:
            return {}
        publisher = states.load(0, "library", "publisher")
        every: dict[str, Tensor | None] = dict.fromkeys(self._tracker.shards)
        found: dict[str, dict[str, Tensor | None]] = {}
        for name in self._tracker.consumers:
            if name != publisher:
                rows = self._pending_of(name, log, states, last, shards)
                found[name] = dict(every) if rows is None else rows
        return found

    def _pending_of(
        self, name: str, log: StreamLog, states: TrainingStates, last: Manifest, shards: Mapping[str, ShardSpec]
    ) -> dict[str, Tensor | None] | None:
        """Return the pending rows of a consumer; None for all rows."""
        assert self._tracker is not None, "it has the consumer"
        ranks = range(states.world_size)
        if not all(name in _optional(states, rank, "consumers") for rank in ranks):
            return None
        saved = [states.load(rank, "library", "consumers", name) for rank in ranks]
        versions = [each["version"] for each in saved]
        rows = None if None in versions else rows_after(log, last, min(versions), shards)
        if rows is None:
            return None
        found: dict[str, Tensor | None] = {}
        for fqn, spec in self._tracker.shards.items():
            left_out = [local_rows(each["left_out"][fqn], spec) for each in saved if fqn in each["left_out"]]
            found[fqn] = torch.cat([rows.get(fqn, torch.empty(0, dtype=torch.int64)), *left_out]).unique()  # type: ignore[no-untyped-call]
            if fqn not in shards:  # ignored
                found[fqn] = None
        return found

    @torch.no_grad()
    def _write(self) -> dict[str, Any]:
        """Write the rows, their states, the numbers of the kernels, and the dense tensors."""
        plan = self._fitted()
        for entry in plan.path:
            plan.write_rows(entry)
        write_scalars(plan.shards, plan.scalars)
        held, names = self._dense(), self._dense_names(plan.last)
        for part in plan.last.parts:
            if names.intersection(part.dense):
                reader = PartReader(
                    plan.storage, part, plan.last, source=Ranged(plan.storage, part), blocks=frozenset()
                )
                _copy(held, {name: tensor for name, tensor in reader.dense().items() if name in names})
        _copy(held, plan.dense)
        _copy(held, plan.buffers)  # after the tensors of rank 0
        return {}

    def _load(self) -> dict[str, Any]:
        """Load the states of the objects, then that of the tracker."""
        plan = self._fitted()
        states, is_same = plan.states, plan.states.world_size == self._world_size
        self._objects.load(states, self._rank, self._ignore, is_same=is_same)
        if not is_same:
            names = [name for name in self._ignore if name == DATA or states.has(0, *_path(name))]
            plan.unloaded.update({name: _of_all_ranks(states, name) for name in names})
        if self._tracker is not None:
            publisher = states.load(0, "library", "publisher")
            note = Place(plan.last.stream, plan.last.link).to_dict()
            notes = {publisher: note} if publisher in self._tracker.consumers else {}
            self._tracker.restore_from_stream(plan.last.batches[1], plan.pending, notes)
        return {}

    def _fitted(self) -> _Plan:
        assert self._plan is not None, "made by _fit()"
        return self._plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that a restore writes on this rank.

    Args:
        storage: store of the stream.
        path: entries to apply, in order.
        states: training states of all ranks in the last entry.
        shards: FQN to shard, for each table that is restored.
        specs: FQN to the description of the shard.
        targets: name of a table or state table to its memory.
        scalars: FQN to the numbers of the table's kernel.
        dense: dense tensors that are in the training state of rank 0, by name.
        buffers: dense tensors of this rank that differ from those of rank 0, by name.
        pending: consumer to FQN to the local ids of the pending rows; None for all rows.
        unloaded: see :attr:`Restored.rank_states`; filled when the states are loaded.
    """

    storage: Storage
    path: Sequence[Manifest]
    states: TrainingStates
    shards: Mapping[str, LocalShard]
    specs: Mapping[str, ShardSpec]
    targets: Mapping[str, RowTarget]
    scalars: Mapping[str, Scalars]
    dense: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    pending: Mapping[str, Mapping[str, Tensor | None]]
    unloaded: dict[str, Sequence[object]] = field(default_factory=dict)

    @property
    def last(self) -> Manifest:
        """Entry with the training states."""
        return self.path[-1]

    def objects(self, dense: Collection[str]) -> Iterable[Part | Stored]:
        """Yield all objects that this rank reads for rows and for the dense tensors with the given names."""
        for entry in self.path:
            for part in entry.parts:
                has_rows = bool(wanted(part, self.specs))
                if has_rows or (entry is self.last and set(dense).intersection(part.dense)):
                    yield part
                if has_rows and part.states is not None:
                    yield part.states

    def write_rows(self, entry: Manifest) -> None:
        """Write the rows of a version that are in this rank's shards, with their states."""
        rows: list[BlockRows] = []
        for part in entry.parts:
            if blocks := wanted(part, self.specs):
                source = Ranged(self.storage, part)
                reader = PartReader(self.storage, part, entry, source=source, blocks=blocks)
                rows += reader.with_states(None if part.states is None else Ranged(self.storage, part.states))
        whole = [each for each in rows if each.ids is None]
        listed = [each for each in rows if each.ids is not None]
        if whole and listed:
            overlay, blocks_held = Overlay(listed), WholeBlocks(each.block for each in whole)
            whole = [overlay.over(each) for each in whole]
            listed = [left for each in listed for left in blocks_held.outside(each)]
        for group in (whole, listed):
            tables = [table for each in group for table in as_tables(each, entry.states.get(each.block.table))]
            for placement in place(tables, self.targets):
                num_rows = max(1, CHUNK_BYTES // (placement.target.dim * _VALUE_BYTES))
                for chunk in placement.chunks(num_rows):
                    chunk.write()


def _numbers(states: TrainingStates, rank: int) -> dict[str, dict[str, int | float]]:
    """Return the numbers of the kernels that a rank had, by table FQN."""
    return {
        fqn: {name: _number(value) for name, value in numbers.items()}
        for fqn, numbers in states.load(rank, "library", "kernels").items()
    }


def _number(value: float | Tensor) -> int | float:
    return value.item() if isinstance(value, Tensor) else value


def _path(name: str) -> tuple[str, ...]:
    """Return the path of a state of a rank in the training state."""
    return (DATA,) if name == DATA else ("rank", name)


def _of_all_ranks(states: TrainingStates, name: str) -> list[object]:
    return [states.load(rank, *_path(name)) for rank in range(states.world_size)]


def _optional(states: TrainingStates, rank: int, key: str) -> dict[str, Any]:
    """Return a dict of ``library`` in the training state of a rank; an empty dict if it is missing."""
    found: dict[str, Any] = states.load(rank, "library", key) if states.has(rank, "library", key) else {}
    return found


def _former_shards(saved: Mapping[str, Any], last: Manifest, url: str) -> dict[str, ShardSpec]:
    """Return the shards of the tables without a fused optimizer, as ``library.shards`` describes them, by FQN."""
    found = {}
    for fqn, table in last.tables.items():
        if fqn not in last.states:
            if fqn not in saved:
                raise NotRecoverableError(url, last.version, f"its training state does not describe table {fqn!r}")
            (first, end), columns = saved[fqn]["rows"], saved[fqn]["columns"]
            found[fqn] = ShardSpec(
                table, first, end - first, tuple((each[0], each[1]) for each in columns), saved[fqn]["replicated"]
            )
    return found


def _check_objects(storage: Storage, version: int, objects: Iterable[Part | Stored]) -> None:
    """Check that the objects exist and have their sizes.

    Raises:
        NotRecoverableError: if an object is missing.
        CorruptPartError: if an object has another size.
        StorageError: if the store cannot be read.
    """
    for each in objects:
        size = storage.size(each.name)
        if size is None:
            raise NotRecoverableError(storage.url, version, f"{each.name} is missing")
        if size != each.num_bytes:
            raise CorruptPartError(each.name, f"it has {size} bytes instead of {each.num_bytes}")


def _copy(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        copy_from_host(held[name], tensor)


def _spec(tensor: Tensor) -> DenseSpec:
    return DenseSpec(tensor.dtype, tuple(tensor.shape))
