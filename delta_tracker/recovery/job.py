"""Job on this rank that a restore writes: :class:`LocalJob`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from delta_tracker.errors import LOAD_BEFORE, InvalidArgumentError, ReservedConsumerError, UpdateInProgressError
from delta_tracker.recovery.fit import DATA, Job
from delta_tracker.recovery.objects import Objects
from delta_tracker.sharding.dense import dense_tensors
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.optimizer_rows import table_states
from delta_tracker.stream.format.manifest import DenseSpec
from delta_tracker.tracker.tracker import ModelDeltaTracker

_UPDATE_SECONDS = 5.0  # longest wait for an update in progress, which would write to restored rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalJob:
    """Job on this rank that a restore writes, see :func:`~delta_tracker.recovery.restore.restore` for its parts."""

    model: nn.Module
    tracker: ModelDeltaTracker | None
    objects: Objects
    ignore: Collection[str]
    rank: int
    world_size: int

    def check(self) -> None:
        """Raise InvalidArgumentError if an argument of the restore is invalid."""
        if not isinstance(self.model, nn.Module):
            raise InvalidArgumentError("model", type(self.model), "Pass a module")
        if isinstance(self.ignore, str) or not isinstance(self.ignore, Collection):
            raise InvalidArgumentError("ignore", self.ignore, "Pass a list of names")
        self.objects.check()
        if self.tracker is not None and self.tracker.model is not self.model:
            raise InvalidArgumentError("tracker", self.tracker, "Pass the tracker of this model")
        self._check_data()

    def _check_data(self) -> None:
        """Check that the position in the data can be attached. Fetched batches are lost if a state is loaded."""
        data = self.objects.data
        if data is None or self.tracker is None or self.tracker.data_position is data:
            return
        if self.tracker.data_position is not None:
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
                except UpdateInProgressError as error:
                    remedy = "Call restore() between two batches, without a pipeline that has looked up rows"
                    raise InvalidArgumentError("model", f"{error.what} in progress", remedy) from error

    def dense(self, shards: Mapping[str, LocalShard]) -> dict[str, Tensor]:
        """Return the dense tensors of the model, by name, without the weights of the sharded tables."""
        return dense_tensors(self.model, self.model, tables=shards.keys(), skip_sharded=True)

    def described(self, shards: Mapping[str, LocalShard]) -> Job:
        """Return the description of the job, whose model has these shards by FQN."""
        return Job(
            shards={fqn: shard.spec for fqn, shard in shards.items()},
            fused={fqn for fqn, shard in shards.items() if shard.is_fused},
            states={fqn: found for fqn, shard in shards.items() if (found := table_states(shard)) is not None},
            dense={name: spec_of(tensor) for name, tensor in self.dense(shards).items()},
            training=self.objects.training.keys(),
            rank=self.objects.takes_rank_states,
            world_size=self.world_size,
        )


def spec_of(tensor: Tensor) -> DenseSpec:
    """Return the dtype and the shape of a tensor."""
    return DenseSpec(tensor.dtype, tuple(tensor.shape))
