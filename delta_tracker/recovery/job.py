"""Compare the objects of a job with the states in a version, and load the states into the objects.

:func:`check_fit` is needed because ``torch.optim.Optimizer.load_state_dict`` compares only the number of groups and of
parameters, and the ``load_state_dict`` of a scheduler compares nothing. Both would load the state of a different class,
and the next step would raise an error or give wrong results.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from delta_tracker.arguments import check_type
from delta_tracker.errors import (
    LOAD_BEFORE,
    InvalidArgumentError,
    RankFailedError,
    ReservedConsumerError,
    RestoreMismatchError,
    UnfinishedStepError,
)
from delta_tracker.predictor.model_fit import OnModelChange
from delta_tracker.publisher.training import Recovery, Stateful, check_recovery
from delta_tracker.recovery.optimizer_parameters import GROUPS, OUTSIDE, ParameterMatch, Parameters, matched
from delta_tracker.recovery.training_states import DATA, TrainingStates
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.optimizer_rows import table_states
from delta_tracker.sharding.torchrec_api import await_stashes
from delta_tracker.stream.format.manifest import DenseSpec
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import ShardSpec, TableSpec, TableStates

_UPDATE_SECONDS = 5.0  # longest wait for an update in progress, which would write to restored rows
_WRAPPER = "_dmp_wrapped_module"  # name of the module in a DistributedModelParallel
_REMEDY = (
    "Train two batches before restore(), which overwrites their effect. If training does not call this "
    "DistributedDataParallel, but modules inside it, build it with find_unused_parameters=True, or pass "
    "init_data_parallel=False to DistributedModelParallel"
)
# Schedulers add these keys to the groups of an optimizer; a job may ignore its scheduler. Names of parameters are
# optional, and the parameters are compared on their own.
_OPTIONAL = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names", "params"}
_CLASS_KEY = "decoupled_weight_decay"  # the only difference between the groups of Adam and AdamW


@dataclass(frozen=True, slots=True, eq=False)
class LocalJob:
    """Arguments of :func:`~delta_tracker.recovery.restore.restore` that describe the job, and this process's rank."""

    model: nn.Module
    tracker: ModelDeltaTracker | None
    recovery: Recovery
    data: DataPosition[Any] | None
    ignore: Collection[str]
    rank: int
    world_size: int
    on_model_change: OnModelChange = "stop"

    @property
    def omissions(self) -> str:
        """Text of ``ignore`` and ``on_model_change``. Ranks compare it to check that these arguments are equal."""
        ignore = f"ignore={sorted(map(str, self.ignore))}"
        return ignore if self.on_model_change == "stop" else f"{ignore}, on_model_change={self.on_model_change!r}"

    def check(self) -> None:
        """Raise InvalidArgumentError if a field is invalid."""
        if not isinstance(self.model, nn.Module):
            raise InvalidArgumentError("model", type(self.model), "Pass a module")
        if isinstance(self.ignore, str) or not isinstance(self.ignore, Collection):
            raise InvalidArgumentError("ignore", self.ignore, "Pass a list of names")
        if self.on_model_change not in (known := get_args(OnModelChange)):
            raise InvalidArgumentError("on_model_change", self.on_model_change, f"Pass one of {known}")
        check_recovery(self.recovery)
        if self.data is not None and not isinstance(self.data, DataPosition):
            raise InvalidArgumentError("data", type(self.data), "Pass a DataPosition")
        check_type("tracker", self.tracker, ModelDeltaTracker, "ModelDeltaTracker(model)")
        if self.tracker is not None and self.tracker.model is not self.model:
            raise InvalidArgumentError("tracker", self.tracker, "Pass the tracker of this model")
        self._check_data()

    def _check_data(self) -> None:
        """Check that :attr:`data`, the position in the training data, can be attached to the tracker."""
        data = self.data
        if data is None or self.tracker is None or self.tracker.progress.data_position is data:
            return
        if self.tracker.progress.data_position is not None:
            raise InvalidArgumentError("data", data, "Pass the DataPosition of tracker.attach_data()")
        if DATA in self.ignore and data.num_ahead:
            remedy = "Call tracker.attach_data(data) before the first batch is fetched"
            raise InvalidArgumentError("batches ahead", data.num_ahead, remedy)

    def check_tracker(self, shards: Mapping[str, LocalShard]) -> None:
        """Check that the tracker has these ``shards``, no reserved consumer, and no update in progress."""
        if self.tracker is None:
            return
        for fqn, spec in self.tracker.shards.items():
            if fqn not in shards or shards[fqn].spec != spec:
                raise InvalidArgumentError("tracker", fqn, "Call tracker.reattach(): the table has another shard")
        for name in self.tracker.consumers:
            try:
                handle = self.tracker.reserve(name, holder="restore(...)")
            except ReservedConsumerError as error:
                raise ReservedConsumerError(error.consumer, error.owner, LOAD_BEFORE) from error
            with handle:
                try:
                    handle.wait_for_updates(_UPDATE_SECONDS)
                except UnfinishedStepError as error:
                    remedy = "Call restore() between two batches, without a pipeline that has looked up rows"
                    raise InvalidArgumentError("model", error.reason, remedy) from error

    def load(self, states: TrainingStates, ignore: Collection[str], parameters: Parameters) -> None:
        """Load the training states of a version into the job's objects, except those whose names are in ``ignore``."""
        await_stashes()
        for name, each in self.recovery.training_state.items():
            if name not in ignore:
                state = _state(each, states, (0, "training", name), parameters)
                self._load(f"training_state[{name!r}]", each.load_state_dict, state)
        # The data is first: its loader could draw numbers from random generators, which are usually in rank_state.
        of_rank: dict[str, Any] = {**({} if self.data is None else {DATA: self.data}), **self.recovery.rank_state}
        for name, each in of_rank.items():
            if name in ignore:
                continue
            what, path = (DATA, (DATA,)) if each is self.data else (f"rank_state[{name!r}]", ("rank", name))
            if self.world_size == states.world_size:
                self._load(what, each.load_state_dict, _state(each, states, (self.rank, *path), parameters))
            else:
                self._load(what, each.load_rank_states, states.of_all_ranks(name))

    def _load(self, what: str, load: Callable[[Any], object], state: object) -> None:
        try:
            load(state)
        except Exception as error:
            reason = f"a rejected state of {what}: {type(error).__name__}: {error}"
            raise RankFailedError(self.rank, reason, "restore") from error

    def described(self, shards: Mapping[str, LocalShard], dense: Mapping[str, Tensor]) -> "Job":
        """Return a description of the job. Its ``shards`` are keyed by FQN, its ``dense`` tensors by name."""
        objects = self.recovery.rank_state.items()
        rank = {name: callable(getattr(each, "load_rank_states", None)) for name, each in objects}
        return Job(
            shards={fqn: shard.spec for fqn, shard in shards.items()},
            fused={fqn for fqn, shard in shards.items() if shard.is_fused},
            states={fqn: found for fqn, shard in shards.items() if (found := table_states(shard)) is not None},
            dense={name: spec_of(tensor) for name, tensor in dense.items()},
            training=self.recovery.training_state.keys(),
            rank=rank if self.data is None else {**rank, DATA: self.data.has_rank_states},
            world_size=self.world_size,
        )


def check_warm(model: nn.Module) -> None:
    """Raise InvalidArgumentError if a ``DistributedDataParallel`` module may still reorder its gradient buckets.

    The buckets are reordered after the first backward pass, or with ``static_graph``, after the second one. With three
    or more ranks, the sums of gradients depend on the order of the buckets.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and _may_reorder(module):
            inner = ".".join(part for part in name.split(".") if part != _WRAPPER) or type(module).__name__
            raise InvalidArgumentError("model", f"{inner} without two trained batches", _REMEDY)


def _may_reorder(module: DistributedDataParallel) -> bool:
    if module.find_unused_parameters and not module.static_graph:
        return False  # torch keeps the first order
    logged: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001
    return int(logged.get("iteration", 0)) < 1  # number of the last forward pass, counted from 0


def spec_of(tensor: Tensor) -> DenseSpec:
    """Return the dtype and shape of a tensor."""
    return DenseSpec(tensor.dtype, tuple(tensor.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Contents of a version, for the comparison with a :class:`Job`. Mappings are keyed by FQN or name.

    Args:
        states: optimizer states of each table with a fused optimizer.
        unfused: saved shard of each table without a fused optimizer: this rank's, or any shard if the world size
            changed.
        training: names of the training states that are the same on all ranks.
        rank: names of the per-rank states, including :data:`DATA` if the position in the training data was saved.
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
    """Contents of the job that restores a version, on this rank. Mappings are keyed by FQN or name.

    Args:
        fused: FQNs of the tables with a fused optimizer.
        states: optimizer states of each table that has a fused optimizer and rows on this rank.
        training: names of the objects whose state is the same on all ranks.
        rank: names of the objects with per-rank states, including :data:`DATA` for the position in the training data.
            The value is True for an object that can load the states of a different number of ranks.
    """

    shards: Mapping[str, ShardSpec]
    fused: Collection[str]
    states: Mapping[str, TableStates]
    dense: Mapping[str, DenseSpec]
    training: Collection[str]
    rank: Mapping[str, bool]
    world_size: int


def check_fit(saved: Saved, job: Job, ignore: Collection[str] = (), stateless: Collection[str] = ()) -> None:
    """Check that a version and a job have the same tables, tensors and states, except those named in ``ignore``.

    The optimizer states of the tables in ``stateless`` are not compared. Raises RestoreMismatchError if the version and
    the job differ, and InvalidArgumentError if a name in ``ignore`` exists in neither of them.
    """
    found = (saved.tables, saved.dense, saved.training, saved.rank, job.shards, job.dense, job.training, job.rank)
    known = {name for names in found for name in names}
    for name in ignore:
        if name not in known:
            raise InvalidArgumentError("ignore", name, f"Pass some of {sorted(known)}")
    tables = {fqn: shard.table for fqn, shard in job.shards.items()}
    remedy = f"{RestoreMismatchError.default}, or name these tables and the optimizers that step them in ignore={{...}}"
    _check_keys("tables that differ", saved.tables.keys() - set(ignore), tables.keys() - set(ignore), remedy)
    for fqn in _names(saved.tables, tables, ignore):
        check_same(f"table {fqn!r}", saved.tables.get(fqn), tables.get(fqn))
        if fqn not in stateless:
            check_optimizer(fqn, saved, job)
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


def check_optimizer(fqn: str, saved: Saved, job: Job) -> None:
    """Check that the job's optimizer of the table ``fqn`` can load the saved optimizer states."""
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
    """Raise RestoreMismatchError about ``what`` if ``saved`` and ``found`` differ. None represents a missing value."""
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
    argument: str,
    objects: Mapping[str, Stateful],
    states: TrainingStates,
    rank: int,
    ignore: Collection[str],
    parameters: Parameters,
) -> None:
    """Check that the optimizers and schedulers in ``objects`` can load the states that ``rank`` saved.

    ``argument`` is ``"training_state"`` or ``"rank_state"``. Skips the objects in ``ignore``. For each other object,
    ``states`` must contain a state.
    """
    for name, each in objects.items():
        if name in ignore:
            continue
        what = f"{argument}[{name!r}]"
        path = (argument.removesuffix("_state"), name)
        if getattr(each, GROUPS, None):
            _check_groups(what, each, states, (rank, *path), parameters)
        elif isinstance(each, LRScheduler):
            _check_scheduler(what, each, states, rank, path)


def _check_groups(
    what: str, optimizer: Stateful, states: TrainingStates, path: tuple[int, str, str], parameters: Parameters
) -> None:
    own, remedy = optimizer.state_dict(), f"Name {path[-1]!r} in ignore={{...}}"
    if not (isinstance(own, Mapping) and GROUPS in own):
        remedy = "Call its save_param_groups(True): its state has no param_groups, so its learning rate would be lost"
        raise InvalidArgumentError(what, type(optimizer), remedy)
    fields = states.fields(*path)
    if fields is None or GROUPS not in fields:
        kind = f"that of an optimizer ({type(optimizer).__name__})"
        raise RestoreMismatchError(f"the state of {what}", f"another one, with the keys {fields or 'none'},", kind)
    saved_groups, own_groups = states.load(*path, GROUPS), own[GROUPS]
    is_keyed = any(isinstance(name, str) for names in _parameters(own_groups) for name in names)
    if is_keyed:  # TorchRec's optimizers, which load groups and states by the names of the parameters
        saved_states = states.fields(*path, "state") or []
        own_states = sorted(map(str, own["state"]))
        check_same(f"the list of parameters with a state of {what}", sorted(saved_states), own_states)
        saved_groups, own_groups = _by_parameters(saved_groups), _by_parameters(own_groups)
    match = matched(optimizer, own, states, path, parameters)
    if match is not None:
        check_same(f"the number of groups of {what}", len(saved_groups), len(own_groups))
        _check_match(what, match, remedy, is_ordered=isinstance(optimizer, optim.LBFGS))
    else:
        kind = f"the list of the parameters of each group of {what}"
        check_same(kind, _parameters(saved_groups), _parameters(own_groups))
    is_by_order = not is_keyed and (match is None or f"{OUTSIDE} (2)" in match.own)
    if (parameters.is_moved and is_by_order) or (parameters.is_changed and (is_keyed or is_by_order)):
        remedy += "" if is_keyed else ", or restore the unchanged job and publish a version, which has the names"
        kind = f"the size or the order of parameters that {what} may have"
        raise RestoreMismatchError(kind, "one", "another", remedy)
    optional = set() if is_keyed else _OPTIONAL
    for number, (saved, found) in enumerate(zip(saved_groups, own_groups, strict=True)):
        group = f"param_groups[{number}] of {what}"
        _check_keys(f"keys that differ in {group}", saved.keys() - optional, found.keys() - optional)
        if _CLASS_KEY in saved:
            check_same(f"{_CLASS_KEY} in {group}", saved[_CLASS_KEY], found[_CLASS_KEY])


def _check_match(what: str, match: ParameterMatch, remedy: str, *, is_ordered: bool) -> None:
    remedy += ", or give the optimizer the parameters that it had, in the same groups"
    _check_keys(f"parameters that differ in {what}", match.saved, match.own, remedy)
    for name, (group, _) in match.saved.items():
        if group != match.own[name][0]:
            raise RestoreMismatchError(f"the group of {name!r} in {what}", group, match.own[name][0], remedy)
    if is_ordered and list(match.saved) != list(match.own):
        raise RestoreMismatchError(f"the parameters of {what}", list(match.saved), list(match.own), remedy)


def _state(each: Stateful, states: TrainingStates, path: tuple[Any, ...], parameters: Parameters) -> Any:  # noqa: ANN401
    state = states.load(*path)
    if not getattr(each, GROUPS, None):
        return state
    own = each.state_dict()
    match = matched(each, own, states, path, parameters)
    return state if match is None else match.renumbered(state, own)


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
    """Return copies of the groups with sorted ``params``, in ascending order of ``params``."""
    ordered = [{**group, "params": sorted(map(str, group.get("params", ())))} for group in groups]
    return sorted(ordered, key=lambda group: group["params"])


def _check_keys(what: str, saved: Collection[str], found: Collection[str], *remedy: str) -> None:
    """Raise RestoreMismatchError if ``saved`` and ``found`` have different keys."""
    only_saved, only_found = sorted(set(saved) - set(found)), sorted(set(found) - set(saved))
    if only_saved or only_found:
        raise RestoreMismatchError(f"the list of {what}", only_saved, only_found, *remedy)
