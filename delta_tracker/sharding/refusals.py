"""Reject models that write rows without calling the tracker's hooks, or whose training state cannot be published.

Hooks report evictions, ``load_state_dict`` and the backward passes of lookups. This file rejects modules and optimizers
that write other rows of fused tables, or write at other times. Tables without a fused optimizer are compared with a
copy, which detects all writes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.sharding.collision_states import collision_obstacle
from delta_tracker.sharding.discover import Discovery, walk
from delta_tracker.sharding.torchrec_api import (
    Torchrec,
    is_fully_sharded,
    is_stashed,
    kernel_arguments,
    planned_kernel,
    tbe_of,
    unwrapped,
)

# Names of fbgemm's EmbOptimType and WeightDecayMode that write a row only in the backward pass of a lookup of the row.
_OPTIMIZERS = {
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
    "LARS_SGD",
}
_WEIGHT_DECAYS = frozenset({"NONE", "L2", "DECOUPLE", "COUNTER", "COWCLIP"})
# Those without further states or counters.
_STATELESS_DECAYS = frozenset({"NONE", "L2", "DECOUPLE"})


def refuse_unseen_writes(model: nn.Module, found: Discovery) -> None:
    """Raise UnsupportedModelError if rows of a tracked table may be written without calling a hook.

    This function rejects unknown fused optimizers, fused optimizers that write rows outside the backward pass, pruning
    of fused tables, tables whose memory is stashed, and a ``DMPCollection`` whose writes cannot be reported.
    """
    if not found.modules:  # tables of plain modules
        return
    torchrec = Torchrec()
    _refuse_stashing(found)
    _refuse_replicas(model, found, torchrec)
    _refuse_pruning(model, found, torchrec)
    _refuse_optimizers(found)


def _refuse_stashing(found: Discovery) -> None:
    # a publisher may copy rows in a thread meanwhile
    tables = [(fqn, module) for module_fqn, module in found.modules.items() for fqn in found.tables_of(module_fqn)]
    stashed = [fqn for fqn, module in tables if is_stashed(module, fqn.rpartition(".")[2])]
    if stashed:
        raise UnsupportedModelError(
            dict.fromkeys(stashed, "stash_weights=True, which frees its rows between forward and backward pass"),
            "Set stash_weights=False in their configs, or name them in fqns_to_skip to train them untracked",
        )


def _refuse_replicas(model: nn.Module, found: Discovery, torchrec: Torchrec) -> None:
    """Reject tables of a ``DMPCollection`` whose writes the hook on ``sync`` cannot report.

    A collection with a 2D sharding environment belongs to a ``DMPCollection``, which may be outside ``model``.
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
        for fqn in found.tables_of(module_fqn) if is_2d or module in wrapped else []:
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
    """Reject in-training pruning of fused tables, which resets rows in the forward pass without calling a hook."""
    lookups = {
        id(unwrapped(lookup)): [fqn for fqn in found.tables_of(module_fqn) if found.shards[fqn].is_fused]
        for module_fqn, module in found.modules.items()
        for lookup in module._lookups  # type: ignore[union-attr]  # noqa: SLF001
    }
    pruned: dict[str, str] = {}
    for fqn, module in walk(model, torchrec):
        if isinstance(module, torchrec.pruning):
            pruners = map(unwrapped, module.lookups)  # type: ignore[arg-type]
            tables = sorted({fqn for lookup in pruners for fqn in lookups.get(id(lookup), [])})
            if tables:
                pruned[fqn] = f"a GenericITEPModule, which resets rows of {', '.join(tables)}"
    if pruned:
        remedy = "Train these tables without pruning, or name them in fqns_to_skip to train them untracked"
        raise UnsupportedModelError(pruned, remedy)


def _refuse_optimizers(found: Discovery) -> None:
    """Reject fused optimizers that are not in ``_OPTIMIZERS``, and weight decays that are not in ``_WEIGHT_DECAYS``."""
    strange: dict[str, list[str]] = {}
    for each in _fused_optimizers(found):
        if each.name not in _OPTIMIZERS or each.decay not in _WEIGHT_DECAYS:
            strange.setdefault(str(each), []).extend(each.tables)
    for name, tables in strange.items():
        raise UnsupportedModelError(
            dict.fromkeys(tables, name),
            "Train them with another fused optimizer, or name them in fqns_to_skip to train them untracked",
            problem="tables whose optimizer is not known to write only rows that a backward pass looked up",
        )


def refuse_unrecoverable(found: Discovery, collisions: Mapping[str, nn.Module]) -> None:
    """Raise UnsupportedModelError if a version of a stream cannot contain the whole training state of the model.

    This function rejects skipped tables, replicas in a ``DMPCollection``, and fused optimizers that have counters per
    row or a global weight decay. It also rejects managed-collision modules in ``collisions`` (by FQN) that have another
    class than ``MCHManagedCollisionModule`` or a custom eviction policy.
    """
    obstacles = {fqn: reason for fqn, module in collisions.items() if (reason := collision_obstacle(module))}
    obstacles |= dict.fromkeys(found.skipped, "in fqns_to_skip, so that its rows are not in a stream")
    obstacles |= {fqn: "a table of a DMPCollection" for fqn, shard in found.shards.items() if shard.num_replicas > 1}
    if obstacles:
        remedy = "Publish without recovery=, and save checkpoints with torch.distributed.checkpoint"
        raise UnsupportedModelError(obstacles, remedy, problem="sharded parts whose training state cannot be published")
    tables: dict[str, list[str]] = {}
    for each in _fused_optimizers(found):
        if getattr(each.tbe, "use_rowwise_bias_correction", False):
            tables.setdefault("ADAM with row-wise bias correction", []).extend(each.tables)
        elif getattr(each.tbe, "_used_rowwise_adagrad_with_global_weight_decay", False):
            tables.setdefault("EXACT_ROWWISE_ADAGRAD with global weight decay", []).extend(each.tables)
        elif each.decay not in _STATELESS_DECAYS:
            tables.setdefault(str(each), []).extend(each.tables)
    for name, fqns in tables.items():
        problem = "tables whose optimizer has counters that cannot be published"
        remedy = "Train them with another fused optimizer, or publish without recovery="
        raise UnsupportedModelError(dict.fromkeys(fqns, name), remedy, problem=problem)


class _Optimizer(NamedTuple):
    """Fused optimizer of ``tables``. ``name`` is its name in FBGEMM, ``tbe`` the module of a kernel that uses it."""

    name: str
    decay: str
    tables: list[str]
    tbe: Any = None

    def __str__(self) -> str:
        return self.name if self.decay == "NONE" else f"{self.name} with weight decay {self.decay}"


def _fused_optimizers(found: Discovery) -> Iterator[_Optimizer]:
    """Yield the optimizers in the sharding plan, which are the same on all ranks, then the optimizers of this rank."""
    for module_fqn, module in found.modules.items():
        arguments = kernel_arguments(module)
        for fqn in found.tables_of(module_fqn):
            for planned in arguments.get(fqn.rpartition(".")[2], []) if found.shards[fqn].is_fused else []:
                optimizer, decay = planned.get("optimizer", "EXACT_SGD"), planned.get("weight_decay_mode")
                yield _Optimizer(getattr(optimizer, "name", str(optimizer)), getattr(decay, "name", "NONE"), [fqn])
    for kernel in found.kernels:
        if kernel.is_fused:
            tbe = tbe_of(kernel.module)
            mode = getattr(getattr(tbe, "weight_decay_mode", None), "name", "NONE")
            yield _Optimizer(tbe.optimizer.name, mode, [fqn for fqn, _ in kernel.slots if fqn is not None], tbe)
