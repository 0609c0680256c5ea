"""Job on this rank that a restore writes: :class:`LocalJob`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import (
    LOAD_BEFORE,
    InvalidArgumentError,
    RankFailedError,
    ReservedConsumerError,
    UnfinishedStepError,
)
from delta_tracker.publisher.training import Recovery, check_recovery
from delta_tracker.recovery.fit import Job
from delta_tracker.recovery.training_states import DATA, TrainingStates
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.optimizer_rows import table_states
from delta_tracker.stream.format.manifest import DenseSpec
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.tracker import ModelDeltaTracker

_UPDATE_SECONDS = 5.0  # longest wait for an update in progress, which would write to restored rows
_WRAPPER = "_dmp_wrapped_module"  # name of the module in a DistributedModelParallel
_REMEDY = (
    "Train two batches before restore(), which overwrites their effect. If training does not call this "
    "DistributedDataParallel, but modules inside it, build it with find_unused_parameters=True, or pass "
    "init_data_parallel=False to DistributedModelParallel"
)


@dataclass(frozen=True, slots=True, eq=False)
class LocalJob:
    """Job on this rank that a restore writes, see :func:`~delta_tracker.recovery.restore.restore` for its parts."""

    model: nn.Module
    tracker: ModelDeltaTracker | None
    recovery: Recovery
    data: DataPosition[Any] | None
    ignore: Collection[str]
    rank: int
    world_size: int

    def check(self) -> None:
        """Raise InvalidArgumentError if an argument of the restore is invalid."""
        if not isinstance(self.model, nn.Module):
            raise InvalidArgumentError("model", type(self.model), "Pass a module")
        if isinstance(self.ignore, str) or not isinstance(self.ignore, Collection):
            raise InvalidArgumentError("ignore", self.ignore, "Pass a list of names")
        check_recovery(self.recovery)
        if self.data is not None and not isinstance(self.data, DataPosition):
            raise InvalidArgumentError("data", type(self.data), "Pass a DataPosition")
        if self.tracker is not None and self.tracker.model is not self.model:
            raise InvalidArgumentError("tracker", self.tracker, "Pass the tracker of this model")
        self._check_data()

    def _check_data(self) -> None:
        """Check that the position in the data can be attached. Fetched batches are lost if a state is loaded."""
        data = self.data
        if data is None or self.tracker is None or self.tracker.progress.data_position is data:
            return
        if self.tracker.progress.data_position is not None:
            raise InvalidArgumentError("data", data, "Pass the DataPosition of tracker.attach_data()")
        if DATA in self.ignore and data.num_ahead:
            remedy = "Call tracker.attach_data(data) before the first batch is fetched"
            raise InvalidArgumentError("batches ahead", data.num_ahead, remedy)

    def check_tracker(self, shards: Mapping[str, LocalShard]) -> None:
        """Check that the tracker has these shards of the model, no owner, and no update in progress."""
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

    def load(self, states: TrainingStates) -> None:
        """Load the states of all objects that are not in ``ignore``."""
        for name, each in self.recovery.training_state.items():
            if name not in self.ignore:
                self._load(f"training_state[{name!r}]", each.load_state_dict, states.load(0, "training", name))
        # The data is first: its loader could draw numbers from random generators, which are usually in rank_state.
        of_rank: dict[str, Any] = {**({} if self.data is None else {DATA: self.data}), **self.recovery.rank_state}
        for name, each in of_rank.items():
            if name in self.ignore:
                continue
            what = DATA if each is self.data else f"rank_state[{name!r}]"
            if self.world_size == states.world_size:
                self._load(what, each.load_state_dict, states.of_rank(self.rank, name))
            else:
                self._load(what, each.load_rank_states, states.of_all_ranks(name))

    def _load(self, what: str, load: Callable[[Any], object], state: object) -> None:
        try:
            load(state)
        except Exception as error:
            reason = f"a rejected state of {what}: {type(error).__name__}: {error}"
            raise RankFailedError(self.rank, reason, "restore") from error

    def described(self, shards: Mapping[str, LocalShard], dense: Mapping[str, Tensor]) -> Job:
        """Return the description of the job, whose model has these shards by FQN, and dense tensors by name."""
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
    """Raise InvalidArgumentError unless ``DistributedDataParallel`` has trained enough to order the gradients.

    It groups gradients into buckets, whose order it changes once, after the first backward pass, or with
    ``static_graph`` after the second one. With three ranks or more, another order gives other sums. A module that
    training does not call, but only modules inside it, is rejected nevertheless: only the user knows that.
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
    """Return the dtype and the shape of a tensor."""
    return DenseSpec(tensor.dtype, tuple(tensor.shape))
