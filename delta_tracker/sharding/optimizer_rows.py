"""Read the state of fused optimizers: the states of each row, and the scalars of each kernel.

Notation: ``R`` is the number of rows of a shard.

The numbers ("scalars") of a kernel are those that training or the user changes: the iteration counters, the learning
rate and the other hyperparameters. ``iter`` is saved in checkpoints; ``iter_cpu`` is the counter that the kernel
computes with, which also counts evaluations and follows ``iter`` only while it is 0. The learning rate exists twice:
the optimizer object of a kernel overwrites the kernel's learning rate with its own at each ``zero_grad`` and ``step``.

Adam, LAMB, LARS and partial row-wise Adam exist on CUDA only, where this module has not been tested.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, RestoreMismatchError, UnsupportedModelError
from delta_tracker.sharding.local_shard import LocalShard, ShardHolder
from delta_tracker.sharding.torchrec_api import tbe_of
from delta_tracker.types import TABLE_DTYPES, StateSpec, TableStates, dtype_name

_PROBLEM = "a table whose states cannot be published"
_REMEDY = "Train it with one fused optimizer with states of float32, float16 or bfloat16, or publish without recovery="
_HYPERPARAMETERS = ("eps", "beta1", "beta2", "weight_decay")
_NAMES = ("iter", "iter_cpu", "lr", "group_lr", *_HYPERPARAMETERS)

Scalars = Mapping[str, int | float | Tensor]


def table_states(shard: LocalShard) -> TableStates | None:
    """Return the states that the fused optimizer keeps for each row of a shard, for the shard's column ranges.

    Returns:
        The states, named ``momentum1`` and ``momentum2``; SGD has none. None for an unfused kernel, and if the rank has
        no rows of the table.

    Raises:
        UnsupportedModelError: if a state has another dtype than float32, float16 or bfloat16, or the column ranges have
            different states.
    """
    found = {
        (str(tbe_of(kernel.module).optimizer.name), _specs(shard, kernel, slot))
        for kernel, slot in shard.holders
        if kernel.is_fused
    }
    if len(found) > 1:
        reason = "its column ranges have different optimizers"
        raise UnsupportedModelError({shard.spec.table.fqn: reason}, _REMEDY, problem=_PROBLEM)
    for optimizer, states in found:
        return TableStates(optimizer, shard.spec.columns, states)
    return None


class StateWatch:
    """Detector of in-place writes to optimizer states, based on the version counters of their tensors.

    Torch's in-place operators increment the counter, for example when an optimizer's state is loaded. The fused
    backward pass does not. The tables of one kernel share a counter: a write to one table is reported for all of them.

    Args:
        shards: function that returns the current shards by table FQN. They change when tables are resharded.
    """

    def __init__(self, shards: Callable[[], Mapping[str, LocalShard]]) -> None:
        self._shards = shards
        self._held = self._versions()

    def written(self) -> Iterator[str]:
        """Yield the FQNs of the tables whose states were written or replaced since the previous call.

        The first call reports writes since this object was created. Tables without states on this rank are omitted. If
        the caller fails before it requests the next FQN, a later call yields the same one again.
        """
        for fqn, versions in self._versions().items():
            if versions and versions != self._held.get(fqn):
                yield fqn
            self._held[fqn] = versions

    def _versions(self) -> dict[str, list[tuple[int, int]]]:
        return {
            fqn: [
                (state.data_ptr(), state._version)  # noqa: SLF001
                for kernel, slot in shard.holders
                for state in kernel.optimizer_states(slot)
            ]
            for fqn, shard in self._shards().items()
        }


def kernel_scalars(shards: Mapping[str, LocalShard]) -> dict[str, dict[str, int | float | Tensor]]:
    """Return the scalars of the kernel of each fused table that this rank holds. Does not wait for a device.

    The numbers are ``iter`` (of a kernel on a device, a live tensor without dimensions), ``iter_cpu``, ``lr`` (learning
    rate of the kernel), ``group_lr`` (learning rate of the optimizer object), ``eps``, ``beta1``, ``beta2`` and
    ``weight_decay``. Raises InvalidArgumentError if the column ranges of a table are in several kernels with different
    numbers.
    """
    numbers: dict[int, dict[str, int | float | Tensor]] = {}  # by id() of the kernel
    found: dict[str, dict[str, int | float | Tensor]] = {}
    for fqn, kernel in _fused(shards):
        own = numbers.get(id(kernel)) or numbers.setdefault(id(kernel), _scalars(kernel))
        first = found.setdefault(fqn, dict(own))
        # Kernels on a device are compared without ``iter``, which would wait for the device: iter_cpu counts the same.
        if _comparable(first) != _comparable(own):
            remedy = f"Train all column ranges of {fqn!r} with the same settings"
            raise InvalidArgumentError("optimizer", [first, own], remedy)
    return found


def check_scalars(shards: Mapping[str, LocalShard], scalars: Mapping[str, Scalars]) -> None:
    """Check that :func:`write_scalars` can write a result of :func:`kernel_scalars`. Writes nothing.

    Raises RestoreMismatchError if a number of a table is missing, or two tables of one kernel have different numbers.
    """
    held: dict[int, tuple[str, Scalars]] = {}
    for fqn, kernel in _fused(shards):
        found = scalars.get(fqn, {})
        if missing := [name for name in _NAMES if name not in found]:
            raise RestoreMismatchError(f"the optimizer's {missing[0]} of {fqn!r}", "missing", "needed")
        first, numbers = held.setdefault(id(kernel), (fqn, found))
        for name in _NAMES:
            if first != fqn and bool(numbers[name] != found[name]):
                what, saved = f"the optimizer's {name} of {fqn!r} and {first!r}", f"{found[name]} and {numbers[name]}"
                raise RestoreMismatchError(what, saved, "the same, as they share a kernel")


def write_scalars(shards: Mapping[str, LocalShard], scalars: Mapping[str, Scalars]) -> None:
    """Set the scalars of all fused kernels that this rank holds, after :func:`check_scalars`."""
    for fqn, kernel in _fused(shards):
        _write(kernel, scalars[fqn])


def unfused_storages(shard: LocalShard) -> set[int]:
    """Return the addresses of the storages of a shard's weights; empty if it is fused, frozen or without rows.

    The weights are ordinary parameters: a parameter of an optimizer is one of them if its storage has such an address.
    """
    return {
        kernel.weight(slot).untyped_storage().data_ptr()
        for kernel, slot in shard.holders
        if not kernel.is_fused and any(parameter.requires_grad for parameter in kernel.module.parameters())
    }


def _fused(shards: Mapping[str, LocalShard]) -> Iterator[tuple[str, ShardHolder]]:
    """Yield the FQN and the kernel of each column range of the tables whose kernel is fused."""
    for fqn, shard in shards.items():
        yield from ((fqn, kernel) for kernel, _ in shard.holders if kernel.is_fused)


def _comparable(scalars: Mapping[str, int | float | Tensor]) -> dict[str, int | float]:
    return {name: number for name, number in scalars.items() if not isinstance(number, Tensor)}


def _scalars(kernel: ShardHolder) -> dict[str, int | float | Tensor]:
    tbe = tbe_of(kernel.module)
    return {
        "iter": int(tbe.iter) if tbe.iter.device.type == "cpu" else tbe.iter.view(()),
        "iter_cpu": int(tbe.iter_cpu),
        "lr": float(tbe.learning_rate_tensor),
        "group_lr": float(_group(kernel)["lr"]),
        **{name: float(getattr(tbe.optimizer_args, name)) for name in _HYPERPARAMETERS},
    }


def _write(kernel: ShardHolder, scalars: Scalars) -> None:
    tbe, group = tbe_of(kernel.module), _group(kernel)
    with torch.no_grad():
        tbe.iter.fill_(int(scalars["iter"]))
        tbe.iter_cpu = tbe.iter_cpu.cpu().fill_(int(scalars["iter_cpu"]))
        tbe.learning_rate_tensor.fill_(float(scalars["lr"]))
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(scalars["group_lr"]))
    else:
        group["lr"] = float(scalars["group_lr"])
    tbe.optimizer_args = tbe.optimizer_args._replace(**{name: float(scalars[name]) for name in _HYPERPARAMETERS})


def _group(kernel: ShardHolder) -> dict[str, Any]:
    """Return the settings in the optimizer object of a kernel, which it copies to the kernel."""
    groups: list[dict[str, Any]] = kernel.module.fused_optimizer.param_groups
    return groups[0]


def _specs(shard: LocalShard, kernel: ShardHolder, slot: int) -> tuple[StateSpec, ...]:
    found = []
    for number, state in enumerate(kernel.optimizer_states(slot), start=1):
        if dtype_name(state.dtype) not in TABLE_DTYPES:
            reason = f"its optimizer has a state of {state.dtype}"
            raise UnsupportedModelError({shard.spec.table.fqn: reason}, _REMEDY, problem=_PROBLEM)
        found.append(StateSpec(f"momentum{number}", state.dtype, "columns" if state.dim() > 1 else "range"))
    return tuple(found)
