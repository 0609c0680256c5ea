"""Values that the library itself saves in the training states of a version: :class:`Library`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar, cast

import torch
from msgspec import Struct, ValidationError, convert
from torch import Tensor

from delta_tracker.errors import CorruptPartError, InvalidArgumentError
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.sharding.collision_states import collision_fault
from delta_tracker.stream.format.field_types import Count, Range
from delta_tracker.types import ShardSpec, TableSpec

_T = TypeVar("_T")


class _Kernel(TypedDict):
    """Numbers of the kernel of a table, see :func:`~delta_tracker.sharding.optimizer_rows.kernel_scalars`."""

    iter: Count
    iter_cpu: Count
    lr: float
    group_lr: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float


class Consumer(Struct, frozen=True):
    """Position of a consumer of the tracker, see :class:`~delta_tracker.publisher.training.ConsumerState`."""

    version: Count | None
    left_out: dict[str, Tensor]
    place: dict[str, Any] | None = None


class _Shard(Struct, frozen=True):
    """Block of a table that a rank had."""

    rows: Range
    columns: tuple[Range, ...]
    replicated: bool


class Library:
    """Reader of the values that the library itself saves in the training states of a version.

    The states are untrusted: a value that is missing or invalid raises :class:`~delta_tracker.errors.CorruptPartError`.
    """

    def __init__(self, states: TrainingStates) -> None:
        self._states = states

    def kernels(self, rank: int) -> dict[str, dict[str, int | float]]:
        """Return the numbers of the kernels that a rank had, by table FQN."""
        held = self._load(rank, "kernels", dict[str, dict[str, Any]])
        numbers = {fqn: {name: _number(value) for name, value in each.items()} for fqn, each in held.items()}
        return cast("dict[str, dict[str, int | float]]", self._converted(rank, "kernels", numbers, dict[str, _Kernel]))

    def shards(self, rank: int, tables: Mapping[str, TableSpec]) -> dict[str, ShardSpec]:
        """Return the blocks that a rank had of ``tables``, which have no fused optimizer, by FQN."""
        held = self._load(rank, "shards", dict[str, _Shard])
        if missing := sorted(tables.keys() - held.keys()):
            raise self._error(rank, "shards", f"it has no tables {missing}")
        found = {}
        for fqn, table in tables.items():
            (first, end), columns = held[fqn].rows, held[fqn].columns
            try:
                found[fqn] = ShardSpec(table, first, end - first, columns, held[fqn].replicated)
            except InvalidArgumentError as error:
                raise self._error(rank, "shards", str(error)) from error
        return found

    def dense(self) -> dict[str, Tensor]:
        """Return the dense tensors that are not in the version itself, by name."""
        return self._load(0, "dense", dict[str, Tensor])

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """Return the buffers that a rank had, by name; an empty dict for rank 0, whose buffers are dense tensors."""
        return self._load(rank, "buffers", dict[str, Tensor]) if rank else {}

    def publisher(self) -> str:
        """Return the name of the publisher's consumer."""
        return self._load(0, "publisher", str)

    def consumers(self, rank: int) -> dict[str, Consumer]:
        """Return the positions of the tracker's other consumers on a rank, by name."""
        found = self._load(rank, "consumers", dict[str, Consumer])
        for name, consumer in found.items():
            if consumer.version is not None and consumer.version > self._states.version:
                raise self._error(rank, "consumers", f"{name!r} had read version {consumer.version}, which is later")
            for fqn, ids in consumer.left_out.items():
                if ids.dtype != torch.int64 or ids.dim() != 1:
                    reason = f"the ids of {name!r} in {fqn!r} are {ids.dtype} {list(ids.shape)}"
                    raise self._error(rank, "consumers", reason)
        return found

    def collision_slots(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the half-open range of slots of each managed-collision module of a rank, by FQN. Reads no tensors."""
        found = {}
        for fqn in self._states.keys(rank, "library", "collisions"):
            read = (self._states.load(rank, "library", "collisions", fqn, name) for name in ("offset", "zch_size"))
            first, size = (self._converted(rank, "collisions", value, Count) for value in read)
            found[fqn] = first, first + size
        return found

    def collision(self, rank: int, fqn: str) -> dict[str, Any]:
        """Return the state of the managed-collision module that a rank had for a table."""
        value = self._states.load(rank, "library", "collisions", fqn)
        found = self._converted(rank, "collisions", value, dict[str, Any])
        if fault := collision_fault(found):
            raise self._error(rank, "collisions", f"{fault} of {fqn!r}")
        return found

    def _load(self, rank: int, key: str, kind: type[_T]) -> _T:
        return self._converted(rank, key, self._states.load(rank, "library", key), kind)

    def _converted(self, rank: int, key: str, value: object, kind: type[_T]) -> _T:
        try:
            return convert(value, kind)
        except ValidationError as error:
            raise self._error(rank, key, str(error)) from error

    def _error(self, rank: int, key: str, reason: str) -> CorruptPartError:
        return CorruptPartError(self._states.name(rank), f"its library.{key} is invalid: {reason.removesuffix('.')}")


def _number(value: object) -> object:
    """Return the number in a tensor without dimensions, and every other value unchanged."""
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
