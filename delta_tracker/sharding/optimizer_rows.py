"""Read the state of fused optimizers, which consists of states for each row and scalars for each kernel.

Notation: ``R`` is the number of rows of a shard.

The scalars of a kernel are the numbers that training or the user changes: the iteration counters, the learning rate and
the other hyperparameters. ``iter`` is saved in checkpoints. The kernel computes with ``iter_cpu``, which also counts
evaluations and is set from ``iter`` only while ``iter_cpu`` is 0. The kernel and its optimizer object each have a
learning rate. Each ``zero_grad`` and ``step`` copies the optimizer object's learning rate to the kernel.

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
    """Return a description of the states that a fused optimizer keeps for the rows of a shard.

    Returns:
        Name, dtype and shape of each state. The names are ``momentum1`` and ``momentum2``. SGD has no states. None if
        the optimizer is not fused or the rank has no rows of the table.

    Raises:
        UnsupportedModelError: if the dtype of a state is not float32, float16 or bfloat16, or if the column ranges of
            the shard have different optimizers or states.
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

    In-place operators of torch increment the counter, for example when an optimizer's state is loaded. The fused
    backward pass does not increment it. All tables of a kernel share one counter. Therefore a write to one table is
    reported for all tables of the kernel.

    Args:
        shards: function that returns the current shards by table FQN. After a reshard, it returns new shards.
    """

    def __init__(self, shards: Callable[[], Mapping[str, LocalShard]]) -> None:
        self._shards = shards
        self._held = self._versions()

    def written(self) -> Iterator[str]:
        """Yield the FQNs of the tables whose states were written or replaced since the previous call.

        The first call reports writes since this object was created. Tables that have no states on this rank are left
        out. If the caller raises an error before it requests the next FQN, the next call yields the same FQN again.
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
    """Return the scalars (counters and hyperparameters) of the optimizer of each fused table on this rank, by FQN.

    The scalars of a table are ``iter``, ``iter_cpu``, ``lr`` (learning rate of the kernel), ``group_lr`` (learning rate
    of the optimizer object), ``eps``, ``beta1``, ``beta2`` and ``weight_decay``. On a GPU, ``iter`` is a 0-dimensional
    tensor that shares the kernel's memory. This function does not wait for the device. Raises InvalidArgumentError if
    the column ranges of a table are in several kernels that have different scalars.
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
    """Check that :func:`write_scalars` can write ``scalars``, a saved result of :func:`kernel_scalars`.

    Raises RestoreMismatchError if a scalar of a table is missing, or if two tables of one kernel have different values.
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
    """Set the scalars of all fused kernels on this rank. Call :func:`check_scalars` first."""
    for fqn, kernel in _fused(shards):
        _write(kernel, scalars[fqn])


def unfused_storages(shard: LocalShard) -> set[int]:
    """Return the storage addresses of a shard's weights. Use them to find the optimizers that update the shard.

    An optimizer updates the shard if the storage of one of the optimizer's parameters has one of these addresses. The
    set is empty if the shard is fused or frozen, or if it has no rows.
    """
    return {
        kernel.weight(slot).untyped_storage().data_ptr()
        for kernel, slot in shard.holders
        if not kernel.is_fused and any(parameter.requires_grad for parameter in kernel.module.parameters())
    }


def _fused(shards: Mapping[str, LocalShard]) -> Iterator[tuple[str, ShardHolder]]:
    """Yield the table FQN and the kernel of each column range in a fused kernel."""
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
    """Return the settings of the optimizer object of a kernel. The object copies them to the kernel."""
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
