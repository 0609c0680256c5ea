"""Differences between a version and a job whose model or optimizers have changed: :func:`model_change_of`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from delta_tracker.errors import RestoreMismatchError
from delta_tracker.predictor.model_fit import fit
from delta_tracker.recovery.job import Job, LocalJob, Saved, check_objects, check_optimizer
from delta_tracker.recovery.optimizer_parameters import Parameters
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.sharding.dense import parameter_names
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """Parts of a version and of a job that a restore skips.

    Args:
        tables: specs of the tables of the version, by FQN. Restored tables have the job's number of rows.
        stateless: FQNs of the tables whose rows are restored without their optimizer states.
        ignore: names of all tables, dense tensors and states that are not restored.
        differences: a message for each item that is not restored, or is restored in part.
        parameters: parameters of the job's model, for matching the states of torch optimizers.
        unloaded: names of ignored per-rank states that the user must load; empty if the number of ranks is unchanged.
    """

    tables: Mapping[str, TableSpec]
    stateless: Collection[str] = ()
    ignore: Collection[str] = ()
    differences: tuple[str, ...] = ()
    parameters: Parameters
    unloaded: Collection[str] = ()


def model_change_of(
    last: Manifest, saved: Saved, own: Job, job: LocalJob, states: TrainingStates, with_raw_ids: Collection[str]
) -> ModelChange:
    """Return the parts of the version ``last`` and of the job that a restore skips.

    These are the items in ``job.ignore`` and, if ``job.on_model_change`` is "continue", all items that differ.
    ``with_raw_ids`` contains the FQNs of the job's tables with managed collisions.
    """
    names = parameter_names(job.model)
    held = {**{fqn: shard.table for fqn, shard in own.shards.items()}, **own.dense}
    former = {**saved.tables, **saved.dense}
    is_changed = any(held.get(name) != former.get(name) and name not in own.fused for name in job.ignore)
    is_moved = _is_moved(last, saved, own, job, names)
    if job.on_model_change == "stop":
        parameters = Parameters(names, _kept(saved, own, job.ignore), is_changed, is_moved)
        return ModelChange(tables=last.tables, ignore=job.ignore, parameters=parameters)
    ignore, rank = set(job.ignore), job.rank if states.world_size == job.world_size else None
    entry = replace(last, dense=saved.dense).narrowed(lambda name: name not in ignore)
    found = fit(entry, {fqn: shard.table for fqn, shard in own.shards.items()}, own.dense, with_raw_ids)
    differences = dict(found.differences)
    for name in sorted({*own.shards, *own.dense} - {*saved.tables, *saved.dense} - ignore):
        differences[name] = f"{name!r} is missing in the version: it keeps its values"
    stateless = {fqn for fqn in found.tables if fqn in differences and fqn not in saved.states and fqn not in own.fused}
    differences |= {f"{fqn} states": f"the states of {fqn!r} are not restored" for fqn in sorted(stateless)}
    for fqn in found.tables.keys() - stateless:
        try:
            check_optimizer(fqn, saved, own)
        except RestoreMismatchError as error:
            stateless.add(fqn)
            differences[f"{fqn} states"] = f"{_difference(error)}: the states of {fqn!r} are not restored"
    is_changed = is_changed or any(name.removesuffix(" states") not in own.fused for name in differences)
    left_out = {*ignore, *stateless, *(differences.keys() - found.tables.keys() - set(found.dense))}
    parameters = Parameters(names, _kept(saved, own, left_out), is_changed, is_moved)
    own_names, saved_names = {*own.training, *own.rank}, {*saved.training, *saved.rank}
    for name in sorted((own_names ^ saved_names) - ignore):
        where = "this job" if name in saved_names else "the version"
        differences[name] = f"the state {name!r} is missing in {where}: it is not restored"
    differences |= _unfit_objects(job, states, rank, ignore | differences.keys(), parameters)
    kept = {*found.tables, *found.dense}
    return ModelChange(
        tables={**last.tables, **found.tables},
        stateless=stateless,
        ignore=ignore | {name for name in differences if name not in kept and not name.endswith(" states")},
        differences=tuple(differences.values()),
        parameters=parameters,
    )


def _unfit_objects(
    job: LocalJob, states: TrainingStates, rank: int | None, left_out: Collection[str], parameters: Parameters
) -> dict[str, str]:
    """Return the reason for each object whose state cannot be restored, by name. Skip the objects in ``left_out``."""
    found = {}
    for argument, source in (("training_state", 0), ("rank_state", rank)):
        for name, each in getattr(job.recovery, argument).items():
            if name in left_out:
                continue
            try:
                check_objects(argument, {} if source is None else {name: each}, states, source or 0, (), parameters)
            except RestoreMismatchError as error:
                found[name] = f"{_difference(error)}: it is not restored"
    return found


def _kept(saved: Saved, own: Job, left_out: Collection[str]) -> set[str]:
    """Return the names of the parameters that are in ``left_out`` or whose optimizer is fused."""
    fused = {*saved.states, *own.fused}
    return {*left_out, *(f"{fqn}.weight" for fqn in {*saved.tables, *own.shards} if fqn in fused or fqn in left_out)}


def _is_moved(last: Manifest, saved: Saved, own: Job, job: LocalJob, names: Mapping[int, Sequence[str]]) -> bool:
    """Return True if the common tables or dense tensors are in different orders. Fused tables are not compared.

    Without "continue", also ignores the order of ``last.dense`` if its publisher may have chosen this order.
    """
    held, former = [*own.shards, *own.dense], [*saved.tables, *saved.dense]
    others = saved.dense.keys() - last.dense.keys()
    is_chosen = job.on_model_change == "stop" and not others.isdisjoint(
        name for each in names.values() for name in each
    )
    for each in (saved.tables, others, () if is_chosen else last.dense):
        group = {name for name in each if name in held and name not in own.fused}
        if [name for name in former if name in group] != [name for name in held if name in group]:
            return True
    return False


def _difference(error: RestoreMismatchError) -> str:
    return f"{error.what} is {error.saved} in the version but {error.found} in this job"
