"""Compare a version with the job on this rank, and prepare all writes of its restore. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from delta_tracker.errors import NotRecoverableError, RestoreMismatchError
from delta_tracker.predictor.targets import check_targets, find_targets
from delta_tracker.recovery.fit import Saved, check_fit
from delta_tracker.recovery.job import LocalJob, spec_of
from delta_tracker.recovery.library import Library
from delta_tracker.recovery.pending import pending_rows, saved_places
from delta_tracker.recovery.plan import Plan
from delta_tracker.recovery.targets import state_targets
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.recovery.warm_up import check_warm
from delta_tracker.row_target import RowTarget, TensorTarget
from delta_tracker.sharding.collision_states import check_collision_slots, check_collision_states
from delta_tracker.sharding.collisions import LocalOwners, local_owners
from delta_tracker.sharding.discover import Discovery, discover
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.optimizer_rows import Scalars, check_scalars, refuse_unrecoverable, state_views
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.types import ShardSpec


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Result of :func:`prepare`.

    Args:
        rank_names: names of the states that differ by rank in the version.
        publisher: name of the consumer of the publisher of the version.
        rerouted: FQNs of the tables whose raw ids are divided among the ranks in another way than in the version.
        pending: consumer to FQN to the local ids of the rows that are pending afterwards; None for all rows.
        places: consumer of another publisher to the saved position of its stream.
    """

    plan: Plan
    states: TrainingStates
    rank_names: Sequence[str]
    publisher: str
    rerouted: Sequence[str]
    pending: Mapping[str, Mapping[str, Tensor | None]]
    places: Mapping[str, object]


def check_model(job: LocalJob) -> tuple[Discovery, dict[str, LocalOwners]]:
    """Check that the model and the tracker of a job can be restored at all, from any version.

    Returns the tables of the model, and FQN to the raw ids of this rank's rows for each table with managed collisions.
    """
    found = discover(job.model)
    owners = local_owners(job.model, found)
    refuse_unrecoverable(found, {fqn: each.module for fqn, each in owners.items()})
    check_warm(job.model)
    job.check_tracker(found.shards)
    return found, owners


def prepare(log: StreamLog, path: Sequence[Manifest], job: LocalJob, applied: Manifest | None = None) -> Prepared:
    """Compare the last version of a :func:`recovery_path` from ``applied`` with the job, and prepare all writes."""
    last = path[-1]
    found, every_owner = check_model(job)
    states = TrainingStates(log.storage, last)
    library = Library(states)
    is_same = states.world_size == job.world_size
    own = job.rank if is_same else 0
    dense, buffers = library.dense(), library.buffers(own)
    unfused = {fqn: table for fqn, table in last.tables.items() if fqn not in last.states}
    rank_names = states.names_of(own) if is_same else names_of_all_ranks(states, job.ignore, log.url, last.version)
    described = job.described(found.shards)
    saved = Saved(
        tables=last.tables,
        states=last.states,
        unfused=library.shards(own, unfused),
        dense={**last.dense, **{name: spec_of(tensor) for name, tensor in dense.items()}},
        training=states.keys(0, "training"),
        rank=rank_names,
        world_size=states.world_size,
    )
    check_fit(saved, described, job.ignore)
    job.check_states(states)
    for name, tensor in buffers.items():
        if name not in job.ignore and described.dense.get(name) != spec_of(tensor):
            raise RestoreMismatchError(f"the buffer {name!r}", spec_of(tensor), described.dense.get(name) or "missing")
    shards = {fqn: found.shards[fqn] for fqn in last.tables if fqn not in job.ignore}
    scalars = _kernels(library, shards, job, states.world_size)
    check_scalars(shards, scalars)
    owners = {fqn: each for fqn, each in every_owner.items() if fqn in shards}
    check_collisions(last, owners, job.ignore)
    plan = Plan(
        storage=log.storage,
        path=path,
        applied=applied,
        shards=shards,
        targets=_targets(job, last, shards),
        scalars=scalars,
        collisions=load_collisions(library, owners, [own] if is_same else range(states.world_size)),
        held=job.dense(found.shards),
        names=last.dense.keys() - set(job.ignore),
        dense={name: tensor for name, tensor in {**dense, **buffers}.items() if name not in job.ignore},
    )
    publisher = library.publisher()
    pending, places = _pending(job, library, publisher, log, last, plan.specs)
    plan.check_objects(() if is_same else last.training)
    rerouted = sorted(fqn for fqn, each in owners.items() if each.identity != last.identities[fqn])
    return Prepared(plan, states, rank_names, publisher, rerouted, pending, places)


def names_of_all_ranks(states: TrainingStates, ignore: Collection[str], url: str, version: int) -> list[str]:
    """Return the names of the states that differ by rank, each of which all ranks must have unless it is ignored."""
    names = [set(states.names_of(rank)) for rank in range(states.world_size)]
    every = set().union(*names)
    for rank, each in enumerate(names):
        if missing := sorted(every - each - set(ignore)):
            reason = f"rank {rank} had no states {missing}: restore it with {states.world_size} ranks, or ignore them"
            raise NotRecoverableError(url, version, reason)
    return sorted(every)


def _kernels(library: Library, shards: Mapping[str, LocalShard], job: LocalJob, world_size: int) -> dict[str, Scalars]:
    """Return the numbers of the kernels of this rank's fused tables, by FQN.

    Those that this rank had are used at the same world size. Others must be equal on all ranks that had the table.
    """
    needed = {fqn for fqn, shard in shards.items() if any(kernel.is_fused for kernel, _ in shard.places)}
    own = library.kernels(job.rank) if world_size == job.world_size else {}
    found: dict[str, Scalars] = {fqn: numbers for fqn, numbers in own.items() if fqn in needed}
    missing = needed - found.keys()
    for rank in range(world_size) if missing else ():
        for fqn, numbers in library.kernels(rank).items():
            if fqn in missing and found.setdefault(fqn, numbers) != numbers:
                what, saved = f"the list of the optimizer's counters of {fqn!r}", f"{found[fqn]} on one rank"
                raise RestoreMismatchError(what, f"{saved} and {numbers} on another", "one for all ranks")
    return found


def load_collisions(
    library: Library, owners: Mapping[str, LocalOwners], ranks: Iterable[int]
) -> dict[str, tuple[object, list[dict[str, Any]]]]:
    """Return the managed-collision module of each table in ``owners``, and the states of its slots, by FQN.

    Of the ``ranks`` of the version, reads the states only from those that had the slots.
    """
    saved = {rank: library.collision_slots(rank) for rank in ranks} if owners else {}
    found = {}
    for fqn, each in owners.items():
        slots = {rank: held[fqn] for rank, held in saved.items() if fqn in held}
        joined = set(check_collision_slots(fqn, each.module, slots.values()))
        states = [library.collision(rank, fqn) for rank, range_ in slots.items() if range_ in joined]
        check_collision_states(fqn, each.module, states, each.identity)
        found[fqn] = each.module, states
    return found


def check_collisions(last: Manifest, owners: Collection[str], ignore: Collection[str]) -> None:
    """Check that the same tables have managed collisions in the version and, by ``owners``, in the job."""
    if differing := sorted((last.identities.keys() ^ set(owners)) - set(ignore)):
        words = ["with" if differing[0] in each else "without" for each in (last.identities, owners)]
        raise RestoreMismatchError(f"table {differing[0]!r}", *(f"{word} managed collisions" for word in words))


def _targets(job: LocalJob, last: Manifest, shards: Mapping[str, LocalShard]) -> dict[str, RowTarget]:
    """Return the targets of the rows and of the states, by the name of the table or state table."""
    tables = {fqn: last.tables[fqn] for fqn in shards}
    targets = {fqn: target for fqn, target in find_targets(job.model).items() if fqn in tables}  # also write caches
    check_targets(replace(last, tables=tables), targets)
    kept = {fqn: states for fqn, states in last.states.items() if fqn in shards}
    views = {fqn: state_views(shards[fqn]) for fqn in kept}
    found = state_targets({fqn: shard.spec for fqn, shard in shards.items()}, views, kept)
    for name, target in found.items():
        if isinstance(target, TensorTarget) and target.obstacle:
            fqn, _, state = name.partition("\n")
            raise RestoreMismatchError(f"the state {state!r} of {fqn!r}", "a writable tensor", target.obstacle)
    return {**targets, **found}


def _pending(
    job: LocalJob, library: Library, publisher: str, log: StreamLog, last: Manifest, shards: Mapping[str, ShardSpec]
) -> tuple[dict[str, dict[str, Tensor | None]], dict[str, dict[str, Any]]]:
    """Return ``pending`` and ``places`` of :class:`Prepared`, also for the tables that are not restored."""
    if job.tracker is None:
        return {}, {}
    consumers = job.tracker.consumers
    others = [name for name in consumers if name != publisher]
    saved = [library.consumers(rank) for rank in range(len(last.training))] if others else []
    found = pending_rows(others, saved, log, last, shards)
    unrestored = dict.fromkeys(fqn for fqn in job.tracker.shards if fqn not in shards)
    return {name: {**found.get(name, {}), **unrestored} for name in consumers}, saved_places(saved, found)
