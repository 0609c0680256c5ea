"""Compare a version with the job that restores it, before anything is written.

``torch.optim.Optimizer.load_state_dict`` compares only the numbers of groups and of parameters, and a scheduler's
compares nothing. The state of another class would be loaded, and the next step would fail or be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from delta_tracker.errors import InvalidArgumentError, RestoreMismatchError
from delta_tracker.publisher.training import Stateful
from delta_tracker.recovery.training_states import DATA, TrainingStates
from delta_tracker.stream.format.manifest import DenseSpec
from delta_tracker.types import ShardSpec, TableSpec, TableStates

_GROUPS = "param_groups"
# Schedulers add these keys to the groups of an optimizer; a job may ignore its scheduler. Names of parameters are
# optional, and the parameters are compared on their own.
_OPTIONAL = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names", "params"}
_CLASS_KEY = "decoupled_weight_decay"  # the only difference between the groups of Adam and AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Contents of a version, by FQN or name.

    Args:
        states: states of the rows of each table with a fused optimizer.
        unfused: shard that this rank had of each other table. At another world size, the shard of any rank.
        training: names of the training states, which are the same for all ranks.
        rank: names of the states of each rank, with :data:`DATA` if it is there.
    """

    tables: Mapping[str, TableSpec]
    states: Mapping[str, TableStates]
    unfused: Mapping[str, ShardSpec]
    dense: Mapping[str, DenseSpec]
    training: Collection[str]
    rank: Collection[str]
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job on this rank that restores a version, by FQN or name.

    Args:
        fused: tables with a fused optimizer.
        states: states that this rank's fused optimizers keep, without the tables that have no rows on this rank.
        training: objects that receive the training states.
        rank: objects that receive a state of a rank, with :data:`DATA` for the position in the data. The value is True
            if the object can load the states of another number of ranks.
    """

    shards: Mapping[str, ShardSpec]
    fused: Collection[str]
    states: Mapping[str, TableStates]
    dense: Mapping[str, DenseSpec]
    training: Collection[str]
    rank: Mapping[str, bool]
    world_size: int


def check_fit(saved: Saved, job: Job, ignore: Collection[str] = ()) -> None:
    """Check that a job can take all of a version, and that the version has all that it needs, except for ``ignore``.

    A name in ``ignore`` that is neither in the version nor in the job raises InvalidArgumentError.
    """
    found = (saved.tables, saved.dense, saved.training, saved.rank, job.shards, job.dense, job.training, job.rank)
    known = {name for names in found for name in names}
    for name in ignore:
        if name not in known:
            raise InvalidArgumentError("ignore", name, f"Pass some of {sorted(known)}")
    tables = {fqn: shard.table for fqn, shard in job.shards.items()}
    remedy = "Build the job like the one that published the version, or name these tables in ignore={...}"
    _check_keys("tables that differ", saved.tables.keys() - set(ignore), tables.keys() - set(ignore), remedy)
    for fqn in _names(saved.tables, tables, ignore):
        check_same(f"table {fqn!r}", saved.tables.get(fqn), tables.get(fqn))
        _check_optimizer(fqn, saved, job)
    for name in _names(saved.dense, job.dense, ignore):
        check_same(f"the dense tensor {name!r}", saved.dense.get(name), job.dense.get(name))
    for name in _names(saved.training, job.training, ignore):
        _check_presence(f"training_state[{name!r}]", name, saved.training, job.training)
    for name in _names(saved.rank, job.rank, ignore):
        what = "data" if name == DATA else f"rank_state[{name!r}]"
        _check_presence(what, name, saved.rank, job.rank)
        if saved.world_size != job.world_size and not job.rank[name]:
            raise RestoreMismatchError(
                f"{what}, which cannot load the states of another number of ranks (no load_rank_states),",
                f"that of a job with world size {saved.world_size}",
                f"needed for world size {job.world_size}",
                f"Name it in ignore={{{name!r}}}, and set it up anew, for example by a new seed or from "
                "Restored.rank_states, or give it a method load_rank_states(states)",
            )


def _check_optimizer(fqn: str, saved: Saved, job: Job) -> None:
    """Check that the states of a table's optimizer can be restored to this rank's shard."""
    expected, shard = saved.states.get(fqn), job.shards[fqn]
    optimizer = f"the optimizer of {fqn!r}"
    is_fused = fqn in job.fused
    if expected is None or not is_fused:
        check_same(optimizer, "not fused" if expected is None else "fused", "fused" if is_fused else "not fused")
        former = saved.unfused[fqn]
        words = ["replicated" if each.is_replicated else "sharded" for each in (former, shard)]
        check_same(f"the sharding of {fqn!r}", *words)
        if saved.world_size == job.world_size and not shard.is_replicated:
            # Its optimizer's state is that of a rank, and torch's load_state_dict compares no shapes.
            check_same(f"this rank's shard of {fqn!r}", _place(former), _place(shard))
        return
    own = job.states.get(fqn)
    if own is None:
        return
    check_same(optimizer, expected.optimizer, own.optimizer)
    check_same(f"the optimizer's state of {fqn!r}", _listed(expected), _listed(own))
    has_ranges = any(state.width == "range" for state in expected.states)
    if has_ranges and not set(shard.columns) <= set(expected.columns):
        what = f"the column ranges of {fqn!r}, for each of which a row has one number,"
        raise RestoreMismatchError(what, list(expected.columns), list(shard.columns))


def _names(saved: Iterable[str], found: Iterable[str], ignore: Collection[str]) -> list[str]:
    return sorted({*saved, *found} - set(ignore))


def check_same(what: str, saved: object, found: object) -> None:
    """Raise RestoreMismatchError unless what a version and a job have is equal; None if one lacks it."""
    if saved != found:
        missing = "missing"
        raise RestoreMismatchError(what, missing if saved is None else saved, missing if found is None else found)


def _check_presence(what: str, name: str, saved: Iterable[str], found: Iterable[str]) -> None:
    if (name in saved) != (name in found):
        is_saved = name in saved
        remedy = f"Pass it, or name it in ignore={{{name!r}}}" if is_saved else f"Name it in ignore={{{name!r}}}"
        words = ("there", "missing") if is_saved else ("missing", "there")
        raise RestoreMismatchError(what, *words, remedy)


def _place(shard: ShardSpec) -> str:
    rows = shard.row_offset, shard.row_offset + shard.num_rows
    return f"the rows {rows} and columns {list(shard.columns)}" if shard.num_rows else "empty"


def _listed(states: TableStates) -> str:
    return ", ".join(f"{each.name} ({each.dtype} per {each.width})" for each in states.states) or "none"


def check_objects(
    argument: str, objects: Mapping[str, Stateful], states: TrainingStates, rank: int, ignore: Collection[str]
) -> None:
    """Check that optimizers and schedulers can take the states of a rank. Reads no tensors of their states.

    ``argument`` is ``"training_state"`` or ``"rank_state"``. Each object has a state in the version.
    """
    for name, each in objects.items():
        if name in ignore:
            continue
        what = f"{argument}[{name!r}]"
        path = (argument.removesuffix("_state"), name)
        if getattr(each, _GROUPS, None):
            _check_groups(what, each, states, rank, path)
        elif isinstance(each, LRScheduler):
            _check_scheduler(what, each, states, rank, path)


def _check_groups(what: str, optimizer: Stateful, states: TrainingStates, rank: int, path: tuple[str, str]) -> None:
    own = optimizer.state_dict()
    if not (isinstance(own, Mapping) and _GROUPS in own):
        remedy = "Call its save_param_groups(True): its state has no param_groups, so its learning rate would be lost"
        raise InvalidArgumentError(what, type(optimizer), remedy)
    fields = states.fields(rank, *path)
    if fields is None or _GROUPS not in fields:
        kind = f"that of an optimizer ({type(optimizer).__name__})"
        raise RestoreMismatchError(f"the state of {what}", f"another one, with the keys {fields or 'none'},", kind)
    saved_groups, own_groups = states.load(rank, *path, _GROUPS), own[_GROUPS]
    saved_names, own_names = _parameters(saved_groups), _parameters(own_groups)
    is_keyed = any(isinstance(name, str) for names in own_names for name in names)
    if is_keyed:  # TorchRec's optimizers, which load groups and states by the names of the parameters
        saved_states = states.fields(rank, *path, "state") or []
        own_states = sorted(map(str, own["state"]))
        check_same(f"the list of parameters with a state of {what}", sorted(saved_states), own_states)
        saved_groups, own_groups = _by_parameters(saved_groups), _by_parameters(own_groups)
        saved_names, own_names = _parameters(saved_groups), _parameters(own_groups)
    else:
        saved_sizes, own_sizes = [[len(names) for names in each] for each in (saved_names, own_names)]
        check_same(f"the list of the numbers of parameters of each group of {what}", saved_sizes, own_sizes)
    check_same(f"the list of the parameters of each group of {what}", saved_names, own_names)
    optional = set() if is_keyed else _OPTIONAL
    for number, (saved, found) in enumerate(zip(saved_groups, own_groups, strict=True)):
        group = f"param_groups[{number}] of {what}"
        _check_keys(f"keys that differ in {group}", saved.keys() - optional, found.keys() - optional)
        if _CLASS_KEY in saved:
            check_same(f"{_CLASS_KEY} in {group}", saved[_CLASS_KEY], found[_CLASS_KEY])


def _check_scheduler(what: str, scheduler: LRScheduler, states: TrainingStates, rank: int, path: Sequence[str]) -> None:
    fields = states.fields(rank, *path) or []
    own = scheduler.state_dict()
    kind = f"keys that differ in the state of {what}, a {type(scheduler).__name__},"
    # Private keys differ between releases of torch; so does verbose.
    saved, found = ({key for key in keys if key[0] != "_" and key != "verbose"} for keys in (fields, own))
    _check_keys(kind, saved, found)


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [list(group.get("params", ())) for group in groups]


def _by_parameters(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the groups with sorted parameters, in the order of these."""
    ordered = [{**group, "params": sorted(map(str, group.get("params", ())))} for group in groups]
    return sorted(ordered, key=lambda group: group["params"])


def _check_keys(what: str, saved: Collection[str], found: Collection[str], *remedy: str) -> None:
    """Check that both have the same keys. A renamed one is in both lists of the message."""
    only_saved, only_found = sorted(set(saved) - set(found)), sorted(set(found) - set(saved))
    if only_saved or only_found:
        raise RestoreMismatchError(f"the list of {what}", only_saved, only_found, *remedy)
