"""This rank's shard of a table, and the interface of the modules that hold shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from delta_tracker.types import ShardSpec


class ShardHolder(Protocol):
    """Module that holds shards of one or more tables, each in a slot.

    It is a :class:`~delta_tracker.sharding.kernel_memory.Kernel`, or a
    :class:`~delta_tracker.sharding.plain_tables.PlainTable`.
    """

    @property
    def module(self) -> Any:  # noqa: ANN401  classes of torch and torchrec
        """The module."""

    @property
    def is_fused(self) -> bool:
        """True if the module's own optimizer updates rows, inside the backward pass of a lookup."""

    def weight(self, slot: int) -> Tensor:
        """Return the weights of a slot, ``[rows, columns]``, as a tensor that shares the memory of the shard."""

    def memory(self, slot: int) -> Tensor | None:
        """Return the weights of a slot without flushing caches; None if there are none. Any thread may call it."""

    def rows(self, slot: int, ids: Tensor) -> Tensor:
        """Return a copy of the rows ``ids`` (``[N]`` int64 local ids) of a slot, ``[N, columns]``."""

    def optimizer_states(self, slot: int) -> list[Tensor]:
        """Return the states that a fused optimizer keeps for the rows of a slot."""

    def weight_slots(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return the locations of the weight tensors, as pairs of a mapping and a key in the mapping."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """Shard of one table on this rank, and its location.

    Args:
        spec: rows and column ranges of the table on this rank.
        holders: kernel and slot of each column range of ``spec``, in order; empty if the rank has no rows of the table.
        device: device of the shard; the CPU if the rank has no rows of the table.
        is_fused: True if training updates the rows only inside backward passes; the same on every rank.
        num_replicas: number of ranks that hold a replica of the shard in 2D parallelism (``DMPCollection``), otherwise
            1.
        is_stepped: True if hooks on the steps of optimizers report the rows that are written, because the gradients are
            sparse.
    """

    spec: ShardSpec
    holders: tuple[tuple[ShardHolder, int], ...]
    device: torch.device
    is_fused: bool
    num_replicas: int = 1
    is_stepped: bool = False

    @property
    def is_compared(self) -> bool:
        """True if changed rows are found by comparison with a copy, because no hook reports them."""
        return not (self.is_fused or self.is_stepped)

    @property
    def is_averaged(self) -> bool:
        """True if ``DMPCollection.sync`` averages the shard with other replicas."""
        return self.is_fused and self.num_replicas > 1
