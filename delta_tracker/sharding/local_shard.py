"""This rank's shard of a table, and the interface of the objects that contain shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from delta_tracker.types import ShardSpec


class ShardHolder(Protocol):
    """Interface to a module that contains this rank's shards of one or more tables, each in a numbered slot.

    :class:`~delta_tracker.sharding.kernel_memory.Kernel` and
    :class:`~delta_tracker.sharding.plain_tables.PlainTable` implement it.
    """

    @property
    def module(self) -> Any:  # noqa: ANN401  classes of torch and torchrec
        """The PyTorch or TorchRec module that contains the weights."""

    @property
    def is_fused(self) -> bool:
        """True if a fused optimizer updates the rows in the backward pass of a lookup."""

    def weight(self, slot: int) -> Tensor:
        """Return a view of the weights of a slot, ``[rows, columns]``. First flushes the caches."""

    def memory(self, slot: int) -> Tensor | None:
        """Return a view of a slot's weights without flushing caches; None if the slot has no weights. Thread-safe."""

    def rows(self, slot: int, ids: Tensor) -> Tensor:
        """Return a copy of the rows ``ids`` (``[N]`` int64 local ids) of a slot, ``[N, columns]``."""

    def optimizer_states(self, slot: int) -> list[Tensor]:
        """Return a view of each state that a fused optimizer keeps for a slot's rows. The list may be empty."""

    def weight_slots(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return a ``(mapping, key)`` pair for each weight tensor; ``mapping[key]`` is the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """Shard of one table on this rank, and the modules that contain it.

    Args:
        spec: rows and column ranges of the table on this rank.
        holders: module and slot of each column range of ``spec``, in order; empty if the rank has no rows of the table.
        device: device of the shard; the CPU if the rank has no rows of the table.
        is_fused: True if training updates the rows only inside backward passes. It is the same on every rank.
        num_replicas: number of replicas of the shard in 2D parallelism (``DMPCollection``), otherwise 1.
        is_stepped: True if the gradients are sparse. Hooks on optimizer steps then report the rows that are written.
    """

    spec: ShardSpec
    holders: tuple[tuple[ShardHolder, int], ...]
    device: torch.device
    is_fused: bool
    num_replicas: int = 1
    is_stepped: bool = False

    @property
    def is_compared(self) -> bool:
        """True if changed rows are found by comparing the shard with a copy. False if hooks report them."""
        return not (self.is_fused or self.is_stepped)

    @property
    def is_averaged(self) -> bool:
        """True if ``DMPCollection.sync`` averages the shard with its replicas on other ranks."""
        return self.is_fused and self.num_replicas > 1
