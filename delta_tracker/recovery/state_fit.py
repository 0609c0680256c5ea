"""Compare the states of optimizers and learning rate schedulers in a version with those of the job.

``torch.optim.Optimizer.load_state_dict`` compares only the numbers of groups and of parameters, and a scheduler's
compares nothing. The state of another class would be loaded, and the next step would fail or be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from delta_tracker.errors import InvalidArgumentError, RestoreMismatchError
from delta_tracker.publisher.training import Stateful
from delta_tracker.recovery.fit import check_same
from delta_tracker.recovery.training_states import TrainingStates

_GROUPS = "param_groups"
# Schedulers add these keys to the groups of an optimizer; a job may ignore its scheduler. Names of parameters are
# optional, and the parameters are compared on their own.
_OPTIONAL = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names", "params"}
_CLASS_KEY = "decoupled_weight_decay"  # the only difference between the groups of Adam and AdamW


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
            _check_optimizer(what, each, states, rank, path)
        elif isinstance(each, LRScheduler):
            _check_scheduler(what, each, states, rank, path)


def _check_optimizer(what: str, optimizer: Stateful, states: TrainingStates, rank: int, path: tuple[str, str]) -> None:
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
        _same_keys(group, saved.keys() - optional, found.keys() - optional)
        if _CLASS_KEY in saved:
            check_same(f"{_CLASS_KEY} in {group}", saved[_CLASS_KEY], found[_CLASS_KEY])


def _check_scheduler(what: str, scheduler: LRScheduler, states: TrainingStates, rank: int, path: Sequence[str]) -> None:
    fields = states.fields(rank, *path) or []
    own = scheduler.state_dict()
    kind = f"the state of {what}, a {type(scheduler).__name__},"
    # Private keys differ between releases of torch; so does verbose.
    _same_keys(kind, *({key for key in keys if key[0] != "_" and key != "verbose"} for keys in (fields, own)))


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [list(group.get("params", ())) for group in groups]


def _by_parameters(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the groups with sorted parameters, in the order of these."""
    ordered = [{**group, "params": sorted(map(str, group.get("params", ())))} for group in groups]
    return sorted(ordered, key=lambda group: group["params"])


def _same_keys(what: str, saved: Collection[str], found: Collection[str]) -> None:
    if set(saved) != set(found):
        only_saved, only_found = sorted(set(saved) - set(found)), sorted(set(found) - set(saved))
        raise RestoreMismatchError(f"the list of keys that differ in {what}", only_saved, only_found)
