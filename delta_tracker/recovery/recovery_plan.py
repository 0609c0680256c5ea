"""Check that a version fits the job on this rank, and restore the version: :func:`prepare` and :class:`Plan`."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import NotRecoverableError, RestoreMismatchError
from delta_tracker.predictor.served_model import check_targets, find_targets
from delta_tracker.recovery.job import LocalJob, Saved, check_fit, check_objects, check_warm, spec_of
from delta_tracker.recovery.model_change import ModelChange, model_change_of
from delta_tracker.recovery.recovery_path import pending_rows
from delta_tracker.recovery.targets import RowWriter, state_targets
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.row_target import RowTarget, TensorTarget
from delta_tracker.rows import copy_from_host
from delta_tracker.sharding.collision_states import check_collision_slots, check_collision_states, load_collision_states
from delta_tracker.sharding.collisions import LocalOwners, local_owners
from delta_tracker.sharding.dense import dense_tensors
from delta_tracker.sharding.discover import Discovery, discover
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.optimizer_rows import Scalars, check_scalars, write_scalars
from delta_tracker.sharding.refusals import refuse_unrecoverable
from delta_tracker.sharding.weights import state_views
from delta_tracker.stream.format.manifest import Manifest, Part, Stored
from delta_tracker.stream.format.object_reader import Ranged, check_size
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.format.shard_rows import wanted
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Everything that a restore reads and writes on this rank, returned by :func:`prepare`.

    Args:
        path: entries to apply, in order. The last entry contains the training states.
        continues: True if the rows of the first entry have already been written to the model.
        shards: shards of the tables to restore, by FQN.
        targets: memory to write to, by name of the table or state table.
        scalars: iteration counters and hyperparameters to restore in the kernel of each table, by FQN.
        collisions: managed-collision module of each table, and the saved states to load, by FQN.
        held: dense tensors of the model to write to, by name.
        names: names of the dense tensors to read from the parts of the last entry.
        dense: values of the dense tensors and of this rank's buffers that the training states contain, by name.
        consumers: result of :func:`pending_rows`.
        rerouted: FQNs of the tables whose buckets, which map unknown raw ids to rows, differ from the version's.
        change: parts of the version and of the job that are not restored.
    """

    storage: Storage
    path: Sequence[Manifest]
    continues: bool
    shards: Mapping[str, LocalShard]
    targets: Mapping[str, RowTarget]
    scalars: Mapping[str, Scalars]
    collisions: Mapping[str, tuple[object, Sequence[Mapping[str, Any]]]]
    held: Mapping[str, Tensor]
    names: Collection[str]
    dense: Mapping[str, Tensor]
    states: TrainingStates
    consumers: tuple[Mapping[str, Mapping[str, Tensor | None]], Mapping[str, object]]
    rerouted: Sequence[str]
    change: ModelChange

    @property
    def last(self) -> Manifest:
        """Entry to restore, which contains the training states."""
        return self.path[-1]

    @property
    def shard_specs(self) -> dict[str, ShardSpec]:
        """Specs of the shards of the tables to restore, by FQN."""
        return {fqn: shard.spec for fqn, shard in self.shards.items()}

    def check_objects(self, others: Iterable[Stored]) -> None:
        """Check the existence and sizes of ``others`` and of the objects that :meth:`write` reads from the store."""
        objects = [*self._objects(), *others]
        sizes: dict[str, int] = {}
        # In a local directory, a listing would also read the status of the files of all later versions.
        if objects and self.storage.is_remote:
            first = min(each.name for each in objects)[:-1]  # sorts before all of them
            sizes = {each.name: each.num_bytes for each in self.storage.objects("parts", after=first)}
        for each in objects:
            size = sizes[each.name] if each.name in sizes else self.storage.size(each.name)
            if size is None:
                raise NotRecoverableError(self.storage.url, self.last.version, f"{each.name} is missing")
            check_size(each, size, self.storage)

    @torch.no_grad()
    def write(self) -> None:
        """Read the entries, and write the rows, optimizer states and dense tensors to the model."""
        writer = RowWriter(self.storage, self.shard_specs, self.targets)
        for entry in self.path[self.continues :]:
            writer.write(entry)
        write_scalars({fqn: self.shards[fqn] for fqn in self.scalars}, self.scalars)
        for module, states in self.collisions.values():
            load_collision_states(module, states)
        for part in self.last.parts:
            if not set(part.dense).isdisjoint(self.names):
                source = Ranged(self.storage, part)
                reader = PartReader(self.storage, part, self.last, source=source, blocks=frozenset())
                self._copy({name: tensor for name, tensor in reader.dense().items() if name in self.names})
        self._copy(self.dense)

    def _objects(self) -> Iterable[Part | Stored]:
        specs = self.shard_specs
        for number, entry in enumerate(self.path):
            for part in entry.parts:
                has_rows = number >= self.continues and bool(wanted(part, specs))
                if has_rows or (entry is self.last and not set(part.dense).isdisjoint(self.names)):
                    yield part
                if has_rows and part.states is not None:
                    yield part.states

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            copy_from_host(self.held[name], tensor)


def check_model(job: LocalJob) -> tuple[Discovery, dict[str, LocalOwners]]:
    """Check that the model of a job can be restored. Return its tables, and readers of this rank's raw ids by FQN."""
    found = discover(job.model)
    owners = local_owners(job.model, found)
    refuse_unrecoverable(found, {fqn: each.module for fqn, each in owners.items()})
    check_warm(job.model)
    job.check_tracker(found.shards)
    return found, owners


def prepare(log: StreamLog, path: Sequence[Manifest], job: LocalJob, applied: Manifest | None = None) -> Plan:
    """Check that the last entry of ``path`` fits the job, and return a plan for restoring it.

    ``path`` must be the result of :func:`recovery_path` for the same ``applied``.
    """
    last = path[-1]
    found, every_owner = check_model(job)
    states = TrainingStates(log.storage, last)
    is_same = states.world_size == job.world_size
    own = job.rank if is_same else 0
    dense, buffers = states.dense(), states.buffers(own)
    unfused = {fqn: table for fqn, table in last.tables.items() if fqn not in last.states}
    rank_names = states.names_of(own) if is_same else names_of_all_ranks(states, job.ignore, log.url)
    held = dense_tensors(job.model, job.model, tables=found.shards.keys(), skip_sharded=True)
    described = job.described(found.shards, held)
    saved = Saved(
        tables=last.tables,
        states=last.states,
        unfused=states.shards(own, unfused),
        dense={**last.dense, **{name: spec_of(tensor) for name, tensor in dense.items()}},
        training=states.keys(0, "training"),
        rank=rank_names,
        world_size=states.world_size,
    )
    change = model_change_of(last, saved, described, job, states, every_owner.keys())
    ignore, stateless = change.ignore, change.stateless
    check_fit(replace(saved, tables=change.tables), described, ignore, stateless)
    check_objects("training_state", job.recovery.training_state, states, 0, ignore, change.parameters)
    if is_same:
        check_objects("rank_state", job.recovery.rank_state, states, own, ignore, change.parameters)
    for name, tensor in buffers.items():
        if name not in ignore and described.dense.get(name) != spec_of(tensor):
            raise RestoreMismatchError(f"the buffer {name!r}", spec_of(tensor), described.dense.get(name) or "missing")
    shards = {fqn: found.shards[fqn] for fqn in last.tables if fqn not in ignore}
    with_states = {fqn: shard for fqn, shard in shards.items() if fqn not in stateless}
    scalars = _kernels(states, with_states, own if is_same else None)
    check_scalars(with_states, scalars)
    owners = {fqn: each for fqn, each in every_owner.items() if fqn in shards}
    check_collisions(last, owners, ignore)
    kept = {fqn: each for fqn, each in last.states.items() if fqn in with_states}
    targets = _targets(job, replace(last, tables=change.tables, states=kept), shards)
    collisions = load_collisions(states, owners, [own] if is_same else range(states.world_size))
    whole = {fqn: shard.spec for fqn, shard in shards.items() if shard.spec.table == last.tables[fqn]}
    consumers = pending_rows(job.tracker, states, log, last, whole)
    plan = Plan(
        storage=log.storage,
        path=path,
        continues=applied is not None and path[0].link == applied.link,
        shards=shards,
        targets=targets,
        scalars=scalars,
        collisions=collisions,
        held=held,
        names=last.dense.keys() - set(ignore),
        dense={name: tensor for name, tensor in {**dense, **buffers}.items() if name not in ignore},
        states=states,
        consumers=consumers,
        rerouted=sorted(fqn for fqn, each in owners.items() if each.identity != last.identities[fqn]),
        change=replace(change, unloaded=[] if is_same else [name for name in rank_names if name in ignore]),
    )
    plan.check_objects(() if is_same else last.training)
    return plan


def names_of_all_ranks(states: TrainingStates, ignore: Collection[str], url: str) -> list[str]:
    """Return the names of per-rank states. Raise NotRecoverableError if a rank lacks a state outside ``ignore``."""
    names = [set(states.names_of(rank)) for rank in range(states.world_size)]
    every = set().union(*names)
    for rank, each in enumerate(names):
        if missing := sorted(every - each - set(ignore)):
            reason = f"rank {rank} had no states {missing}: restore it with {states.world_size} ranks, or ignore them"
            raise NotRecoverableError(url, states.version, reason)
    return sorted(every)


def _kernels(states: TrainingStates, shards: Mapping[str, LocalShard], own: int | None) -> dict[str, Scalars]:
    """Return the counters and hyperparameters of the kernels of this rank's fused tables, by FQN.

    Uses the values that rank ``own`` saved. For a table that rank ``own`` did not save, or if ``own`` is None, all
    ranks that saved the table must have the same values.
    """
    needed = {fqn for fqn, shard in shards.items() if any(kernel.is_fused for kernel, _ in shard.holders)}
    numbers = {} if own is None else states.kernels(own)
    found: dict[str, Scalars] = {fqn: each for fqn, each in numbers.items() if fqn in needed}
    missing = needed - found.keys()
    for rank in range(states.world_size) if missing else ():
        for fqn, each in states.kernels(rank).items():
            if fqn in missing and found.setdefault(fqn, each) != each:
                what, saved = f"the list of the optimizer's counters of {fqn!r}", f"{found[fqn]} on one rank"
                raise RestoreMismatchError(what, f"{saved} and {each} on another", "one for all ranks")
    return found


def load_collisions(
    states: TrainingStates, owners: Mapping[str, LocalOwners], ranks: Iterable[int]
) -> dict[str, tuple[object, list[dict[str, Any]]]]:
    """Return the managed-collision module of each table in ``owners`` and the states saved for its slots, by FQN.

    ``ranks`` are the saved ranks whose states may be used. Only the states of ranks that had these slots are read.
    """
    saved = {rank: states.collision_slots(rank) for rank in ranks} if owners else {}
    found = {}
    for fqn, each in owners.items():
        slots = {rank: held[fqn] for rank, held in saved.items() if fqn in held}
        joined = set(check_collision_slots(fqn, each.module, slots.values()))
        read = [states.collision(rank, fqn) for rank, range_ in slots.items() if range_ in joined]
        check_collision_states(fqn, each.module, read, each.identity)
        found[fqn] = each.module, read
    return found


def check_collisions(last: Manifest, owners: Collection[str], ignore: Collection[str]) -> None:
    """Raise RestoreMismatchError unless ``owners`` are the tables with managed collisions in the version ``last``."""
    if differing := sorted((last.identities.keys() ^ set(owners)) - set(ignore)):
        words = ["with" if differing[0] in each else "without" for each in (last.identities, owners)]
        raise RestoreMismatchError(f"table {differing[0]!r}", *(f"{word} managed collisions" for word in words))


def _targets(job: LocalJob, last: Manifest, shards: Mapping[str, LocalShard]) -> dict[str, RowTarget]:
    tables = {fqn: last.tables[fqn] for fqn in shards}
    targets = {fqn: target for fqn, target in find_targets(job.model).items() if fqn in tables}  # also write caches
    check_targets(replace(last, tables=tables), targets)
    views = {fqn: state_views(shards[fqn]) for fqn in last.states}
    found = state_targets({fqn: shard.spec for fqn, shard in shards.items()}, views, last.states)
    for name, target in found.items():
        if isinstance(target, TensorTarget) and target.obstacle:
            fqn, _, state = name.partition("\n")
            raise RestoreMismatchError(f"the state {state!r} of {fqn!r}", "a writable tensor", target.obstacle)
    return {**targets, **found}
