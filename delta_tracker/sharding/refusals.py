"""Reject models that write rows without calling the tracker's hooks.

Hooks report evictions, ``load_state_dict`` and the backward passes of lookups. The modules and optimizers that are
rejected here write other rows of fused tables, or write at other times. Tables without a fused optimizer are compared
with a copy, which finds all writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.sharding.discover import Discovery, walk
from delta_tracker.sharding.torchrec_api import (
    Torchrec,
    is_fully_sharded,
    kernel_arguments,
    known_torchrec,
    planned_kernel,
    tbe_of,
)

# Names of fbgemm's EmbOptimType and WeightDecayMode that write a row only in the backward pass of a lookup of the row.
_OPTIMIZERS = frozenset(
    {
        "EXACT_SGD",
        "EXACT_ADAGRAD",
        "EXACT_ROWWISE_ADAGRAD",
        "ADAM",
        "PARTIAL_ROWWISE_ADAM",
        "LAMB",
        "PARTIAL_ROWWISE_LAMB",
        "LARS_SGD",
    }
)
_WEIGHT_DECAYS = frozenset({"NONE", "L2", "DECOUPLE", "COUNTER", "COWCLIP"})


def refuse_unseen_writes(model: nn.Module, found: Discovery) -> None:
    """Raise an error if rows of a tracked table may be written without calling a hook.

    Args:
        model: the model in which ``found`` was discovered.
        found: its tracked tables.

    Raises:
        UnsupportedModelError: if a fused optimizer writes rows outside the backward pass, or is unknown, if
            a ``DMPCollection`` writes rows that its hook cannot report, or if the model prunes fused tables.
    """
    torchrec = known_torchrec()
    _refuse_replicas(model, found, torchrec)
    _refuse_pruning(model, found, torchrec)
    _refuse_optimizers(found)


def _refuse_replicas(model: nn.Module, found: Discovery, torchrec: Torchrec) -> None:
    """Reject tables of which a ``DMPCollection`` writes rows that the hook on its ``sync`` cannot report.

    The sharding environment of a collection shows that the collection is in a ``DMPCollection``, also if ``model`` does
    not contain this wrapper.
    """
    wrapped = {
        part
        for module in model.modules()
        if isinstance(module, torchrec.replicas)
        for part in module._dmp_wrapped_module.modules()  # type: ignore[union-attr]  # noqa: SLF001
    }
    remapped = {getattr(module, "_embedding_module", None) for module in model.modules()}
    obstacles: dict[str, str] = {}
    for module_fqn, module in found.modules.items():
        is_2d = isinstance(getattr(module, "_env", None), torchrec.replica_env)
        for fqn in _tables(found, module_fqn) if is_2d or module in wrapped else []:
            if not is_2d:
                obstacles[fqn] = "in a DMPCollection, which averages it although it was sharded without replicas"
            elif module not in wrapped:
                obstacles[fqn] = "in a DMPCollection that is not in the model, so that its sync() cannot be hooked"
            elif is_fully_sharded(module):
                obstacles[fqn] = (
                    "in a DMPCollection with FULLY_SHARDED, which averages replicas in each forward pass "
                    "and frees their weights until the backward pass"
                )
            elif module in remapped:
                obstacles[fqn] = "in a DMPCollection, each of whose replicas maps ids to other rows of it"
            elif planned_kernel(module, fqn.rpartition(".")[2]) == "fused_uvm_caching":
                obstacles[fqn] = "in a DMPCollection, whose sync() does not average cached rows of FUSED_UVM_CACHING"
    if obstacles:
        raise UnsupportedModelError(
            obstacles,
            "Pass the whole DMPCollection, use ShardingStrategy.DEFAULT or PER_MODULE, the kernels FUSED or FUSED_UVM "
            "and no managed collisions, or name the tables in fqns_to_skip to train them untracked",
        )


def _refuse_pruning(model: nn.Module, found: Discovery, torchrec: Torchrec) -> None:
    """Reject in-training pruning of fused tables, because it resets rows in the forward pass without calling a hook."""
    lookups = {
        id(_unwrapped(lookup)): [fqn for fqn in _tables(found, module_fqn) if found.shards[fqn].is_fused]
        for module_fqn, module in found.modules.items()
        for lookup in module._lookups  # type: ignore[union-attr]  # noqa: SLF001
    }
    pruned: dict[str, str] = {}
    for fqn, module in walk(model, "", torchrec, set()):
        if isinstance(module, torchrec.pruning):
            tables = _named(lookups, module.lookups)  # type: ignore[arg-type]
            if tables:
                pruned[fqn] = f"a GenericITEPModule, which resets rows of {', '.join(tables)}"
    if pruned:
        raise UnsupportedModelError(
            pruned, "Train these tables without pruning, or name them in fqns_to_skip to train them untracked"
        )


def _tables(found: Discovery, module_fqn: str) -> list[str]:
    """Return the FQNs of the tracked tables of a collection."""
    prefix = f"{module_fqn}." if module_fqn else ""
    return [fqn for fqn in found.tables if fqn.startswith(prefix)]


def _named(tables: Mapping[int, list[str]], lookups: Iterable[nn.Module]) -> list[str]:
    return sorted({fqn for lookup in lookups for fqn in tables.get(id(_unwrapped(lookup)), [])})


def _unwrapped(lookup: nn.Module) -> nn.Module:
    while isinstance(lookup, DistributedDataParallel):
        lookup = lookup.module
    return lookup


def _refuse_optimizers(found: Discovery) -> None:
    """Reject fused optimizers missing from ``_OPTIMIZERS``, and weight decays missing from ``_WEIGHT_DECAYS``.

    The sharding plan is checked first. It contains the optimizers of all ranks, so that every rank raises the same
    error. The optimizers that this rank's kernels use are checked next.
    """
    strange: dict[str, list[str]] = {}
    for module_fqn, module in found.modules.items():
        arguments = kernel_arguments(module)
        for fqn in _tables(found, module_fqn):
            for planned in arguments.get(fqn.rpartition(".")[2], []) if found.shards[fqn].is_fused else []:
                name = _strange(planned.get("optimizer", "EXACT_SGD"), planned.get("weight_decay_mode"))
                strange.setdefault(name, []).append(fqn)
    for kernel in found.kernels:
        if kernel.is_fused:
            tbe = tbe_of(kernel.module)
            name = _strange(tbe.optimizer, getattr(tbe, "weight_decay_mode", None))
            strange.setdefault(name, []).extend(fqn for fqn, _ in kernel.slots if fqn is not None)
    strange.pop("", None)
    if strange:
        name, tables = next(iter(strange.items()))
        raise UnsupportedModelError(
            dict.fromkeys(tables, name),
            "Train them with another fused optimizer, or name them in fqns_to_skip to train them untracked",
            problem="tables whose optimizer is not known to write only rows that a backward pass looked up",
        )


def _strange(optimizer: object, decay: object) -> str:
    """Return the name of an unsupported optimizer or weight decay; an empty string if both are supported."""
    name, mode = getattr(optimizer, "name", str(optimizer)), getattr(decay, "name", "NONE")
    if name not in _OPTIMIZERS:
        return name
    return "" if mode in _WEIGHT_DECAYS else f"{name} with weight decay {mode}"
