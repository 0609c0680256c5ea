"""Import classes of torchrec when they are first needed, and read properties of sharding plans.

The names below exist in torchrec 1.3.0 to 1.9.2. `make test-matrix` checks this. Handle differences between versions
in this file.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import MissingExtraError


def _classes(module: str, *names: str) -> Any:  # noqa: ANN401  the field has its own type
    """Return a dataclass field for classes of a module. The default is empty if the module is not imported yet."""
    return field(default_factory=partial(_imported, module, *names))


def _imported(module: str, *names: str) -> tuple[type, ...]:
    return tuple(found for name in names if (found := getattr(sys.modules.get(module), name, None)) is not None)


def _fsdp() -> tuple[type, ...]:
    return _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def _collections() -> dict[type[nn.Module], str]:
    bags = _imported("torchrec.distributed.embeddingbag", "ShardedEmbeddingBagCollection")
    sequences = _imported("torchrec.distributed.embedding", "ShardedEmbeddingCollection")
    return {**dict.fromkeys(sequences, "embeddings"), **dict.fromkeys(bags, "embedding_bags")}


def _wrappers() -> dict[type[nn.Module], str]:
    compiled = _imported("torch._dynamo.eval_frame", "OptimizedModule")
    activations = _imported("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper")
    parallel = _imported("torchrec.distributed.model_parallel", "DistributedModelParallel")
    return {
        **dict.fromkeys(parallel, "_dmp_wrapped_module"),
        DistributedDataParallel: "module",
        **dict.fromkeys(activations, "_checkpoint_wrapped_module"),
        **dict.fromkeys(_fsdp(), "_fsdp_wrapped_module"),
        **dict.fromkeys(compiled, "_orig_mod"),
    }


@dataclass(frozen=True, slots=True)
class Torchrec:
    """Classes of torch and torchrec whose instances are searched for in a model.

    Classes in modules that are not imported are left out, because no model can contain them.

    Args:
        collections: name of the attribute that contains the tables, by class of sharded collection. Subclasses match.
        wrappers: name of the attribute that contains the wrapped module, by class of wrapper. FQNs omit this name.
        fsdp: ``FullyShardedDataParallel``.
        sharded: the base class of all sharded modules.
        towers: classes of sharded modules that exist only on the ranks of one host.
        without_rows: classes of sharded modules that contain no embedding rows themselves.
        sharded_tensors: classes of tensors that are split over the ranks.
        replicas: ``DMPCollection``, the wrapper of 2D parallelism.
        replica_env: the sharding environment of 2D parallelism.
        pruning: classes of the modules of in-training pruning.
        sorted_collisions: ``MCHManagedCollisionModule``, which stores the raw ids of its rows in ascending order.
        hashed_collisions: ``HashZchManagedCollisionModule``, which stores the raw id of each row.
        fused_kernels: names of the compute kernels that update rows in the backward pass.
        dense_kernels: names of the compute kernels whose rows are ordinary parameters.
    """

    collections: dict[type[nn.Module], str] = field(default_factory=_collections)
    wrappers: dict[type[nn.Module], str] = field(default_factory=_wrappers)
    fsdp: tuple[type[nn.Module], ...] = field(default_factory=_fsdp)
    sharded: tuple[type[nn.Module], ...] = _classes("torchrec.distributed.types", "ShardedModule")
    towers: tuple[type[nn.Module], ...] = _classes(
        "torchrec.distributed.embedding_tower_sharding", "ShardedEmbeddingTower", "ShardedEmbeddingTowerCollection"
    )
    without_rows: tuple[type[nn.Module], ...] = _classes(
        "torchrec.distributed.mc_modules", "ShardedManagedCollisionCollection"
    )
    sharded_tensors: tuple[type[Tensor], ...] = field(
        default_factory=lambda: (*_imported("torchrec.distributed.types", "ShardedTensor"), DTensor)
    )
    replicas: tuple[type[nn.Module], ...] = _classes("torchrec.distributed.model_parallel", "DMPCollection")
    replica_env: tuple[type, ...] = _classes("torchrec.distributed.types", "ShardingEnv2D")
    pruning: tuple[type[nn.Module], ...] = _classes("torchrec.modules.itep_modules", "GenericITEPModule")
    sorted_collisions: tuple[type[nn.Module], ...] = _classes(
        "torchrec.modules.mc_modules", "MCHManagedCollisionModule"
    )
    hashed_collisions: tuple[type[nn.Module], ...] = _classes(
        "torchrec.modules.hash_mc_modules", "HashZchManagedCollisionModule"
    )
    fused_kernels: frozenset[str] = frozenset({"fused", "fused_uvm", "fused_uvm_caching"})
    dense_kernels: frozenset[str] = frozenset({"dense"})

    def holder(self, module: nn.Module) -> str | None:
        """Return the name of the attribute that contains a sharded collection's tables; None for other modules."""
        return holder_of(module, self.collections)

    def walk(
        self, module: nn.Module, is_leaf: Callable[[nn.Module], bool], seen: set[nn.Module] | None, fqn: str = ""
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield ``(FQN, module)`` for ``module`` and its submodules, except wrappers.

        FQNs omit the attribute names of wrappers. They also omit ``_orig_mod`` of ``torch.compile``, unlike the keys
        of ``state_dict``.

        The submodules of a module are skipped if ``is_leaf`` returns True for the module. Modules in ``seen`` are
        skipped, and visited modules are added to it. If ``seen`` is None, a module is yielded once for each FQN.
        """
        if seen is not None:
            if module in seen:
                return
            seen.add(module)
        wrapper = holder_of(module, self.wrappers)
        if wrapper is not None:
            yield from self.walk(getattr(module, wrapper), is_leaf, seen, fqn)
            return
        yield fqn, module
        if not is_leaf(module):
            for name, child in module._modules.items():  # noqa: SLF001  named_children() omits repeated modules
                if child is not None:
                    yield from self.walk(child, is_leaf, seen, f"{fqn}.{name}" if fqn else name)


def holder_of(module: nn.Module, attributes: Mapping[type[nn.Module], str]) -> str | None:
    """Return the attribute name of the first class in ``attributes`` that matches ``module``; None if none matches."""
    return next((attribute for kind, attribute in attributes.items() if isinstance(module, kind)), None)


def load_torchrec() -> Torchrec:
    """Import torchrec and return a :class:`Torchrec`. Raise MissingExtraError if torchrec is not installed."""
    try:
        for name in ("embedding", "embeddingbag", "model_parallel", "types"):
            import_module(f"torchrec.distributed.{name}")
    except ModuleNotFoundError as missing:
        raise MissingExtraError(missing.name or "torchrec", "torchrec") from missing
    return Torchrec()


def is_fsdp2(module: nn.Module) -> bool:
    """Return True if a module was passed to ``fully_shard`` (FSDP2)."""
    return isinstance(module, _imported("torch.distributed.fsdp", "FSDPModule"))


def managed_by_fsdp(model: nn.Module, torchrec: Torchrec) -> set[int]:
    """Return the ``id()`` of each parameter of ``model`` that FSDP manages and may therefore shard."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torchrec.fsdp)
        for parameter in module.parameters()
        if parameter not in module._ignored_params  # type: ignore[operator]  # noqa: SLF001  no public equivalent
    }


def table_configs(module: nn.Module) -> dict[str, Any]:
    """Return the configs (``num_embeddings``, ``embedding_dim``, ``feature_names``) of a collection by table name."""
    return dict(module._table_name_to_config)  # type: ignore[arg-type]  # noqa: SLF001


def is_stashed(module: nn.Module, table: str) -> bool:
    """Return True if torchrec frees the rows of ``table`` between the forward and the backward pass (stashing)."""
    chosen = None
    for manager in _imported("torchrec.distributed.memory_stashing", "MemoryStashingManager"):
        chosen = getattr(manager, "get_stashed_tables", lambda: None)()  # of the planner; from torchrec 1.9 on
    return getattr(table_configs(module)[table], "stash_weights", False) if chosen is None else table in chosen


def await_stashes() -> None:
    """Wait until TorchRec has completed all copies of optimizer states to host memory."""
    for manager in cast(Any, _imported("torchrec.distributed.memory_stashing", "MemoryStashingManager")):
        if manager.is_enabled():
            manager.thread_submit(lambda: None).result()  # the thread moves one optimizer after the other
            manager.d2h_stream().synchronize()


def tbe_of(kernel: Any) -> Any:  # noqa: ANN401  classes of torchrec and FBGEMM
    """Return the FBGEMM module (TBE) of a kernel, without the wrapper of ``torch.compile``."""
    module = kernel.emb_module
    return getattr(module, "_orig_mod", module)


def weight_slots(kernel: Any) -> list[tuple[Mapping[str, Tensor | None], str]]:  # noqa: ANN401  a torchrec class
    """Return a ``(mapping, key)`` pair for each weight tensor of a fused kernel; ``mapping[key]`` is the tensor."""
    return [slot for slot in tensor_slots(kernel) if slot[1] in ("weights_dev", "weights_host", "weights_uvm")]


def kernels_of(collection: Any) -> Iterator[Any]:  # noqa: ANN401  torchrec classes
    """Yield the kernels of a sharded collection on this rank."""
    for lookup in collection._lookups:  # noqa: SLF001
        yield from unwrapped(lookup)._emb_modules  # noqa: SLF001


def unwrapped(lookup: Any) -> Any:  # noqa: ANN401  a torchrec class
    """Return a lookup module of a sharded collection without its ``DistributedDataParallel`` wrappers."""
    while isinstance(lookup, DistributedDataParallel):
        lookup = lookup.module
    return lookup


def share_rows(kernel: Any, other: Any) -> bool:  # noqa: ANN401  torchrec classes
    """Return True if two kernels share the memory of their rows, as after ``DistributedModelParallel.copy(device)``."""
    mine, its = (
        {
            tensor.untyped_storage().data_ptr()
            for owner, name in weight_slots(each)
            if (tensor := owner[name]) is not None and tensor.numel()
        }
        for each in (kernel, other)
    )
    return bool(mine & its)


def tensor_slots(kernel: Any) -> list[tuple[Mapping[str, Tensor | None], str]]:  # noqa: ANN401  a torchrec class
    """Return a ``(mapping, key)`` pair for each tensor of a kernel's TBE module; ``mapping[key]`` is the tensor."""
    module = tbe_of(kernel)
    return [(owner, name) for owner in (module._parameters, module._buffers) for name in owner]  # noqa: SLF001


def planned_kernel(module: nn.Module, table: str) -> str:
    """Return the name of a table's compute kernel in the sharding plan. The table may be on another rank."""
    return str(module.module_sharding_plan[table].compute_kernel)  # type: ignore[index, union-attr]


def kernel_arguments(module: Any) -> dict[str, list[dict[str, Any]]]:  # noqa: ANN401  a sharded collection
    """Return the ``fused_params``, including the optimizer, of each table's kernels on all ranks, by table name."""
    shardings = getattr(module, "_embedding_shardings", None) or module._sharding_type_to_sharding.values()  # noqa: SLF001
    found: dict[str, list[dict[str, Any]]] = {}
    for sharding in shardings:
        for group in itertools.chain.from_iterable(sharding._grouped_embedding_configs_per_rank):  # noqa: SLF001
            for table in group.embedding_tables:
                found.setdefault(table.name, []).append(group.fused_params or {})
    return found


def sync_groups(wrapper: Any) -> list[tuple[dist.ProcessGroup, list[nn.Module]]]:  # noqa: ANN401  a DMPCollection
    """Return the process groups over which ``DMPCollection.sync`` averages, each with its FBGEMM modules (TBEs).

    The groups are in the order in which ``sync`` averages them. All ranks of a group have replicas of the same modules.

    In torchrec 1.3, attributes of the wrapper describe the only group. Later versions have a list of contexts. Since
    1.5, a context lists pairs of a module and its parent.
    """
    contexts = getattr(wrapper, "_ctxs", None)
    found = (
        [(wrapper._replica_pg, wrapper._modules_to_sync)]  # noqa: SLF001
        if contexts is None
        else [(context.replica_pg, context.modules_to_sync) for context in contexts]
    )
    return [(group, [each[0] if isinstance(each, tuple) else each for each in modules]) for group, modules in found]


def averages_itself(wrapper: Any) -> bool:  # noqa: ANN401  a DMPCollection
    """Return True if ``sync`` averages with ``ReduceOp.AVG``, False if it uses a custom function or a relay."""
    return wrapper._custom_all_reduce is None and not getattr(wrapper, "_use_sharded_relay", False)  # noqa: SLF001


def replica_of(module: Any, torchrec: Torchrec) -> tuple[int, int]:  # noqa: ANN401  a sharded collection
    """Return the index of this rank's replica and the number of replicas; ``(0, 1)`` without 2D parallelism."""
    env = getattr(module, "_env", None)
    if not isinstance(env, torchrec.replica_env):
        return 0, 1
    return env.device_mesh.get_local_rank("replicate"), env.num_sharding_groups()  # type: ignore[attr-defined]


def is_fully_sharded(module: Any) -> bool:  # noqa: ANN401  a sharded collection
    """Return True if a collection uses the 2D sharding strategy FULLY_SHARDED (torchrec 1.5 or newer)."""
    strategy = getattr(getattr(module, "_env", None), "sharding_strategy", None)
    return getattr(strategy, "name", "") == "FULLY_SHARDED"


def planned_blocks(module: nn.Module, table: str) -> set[tuple[int, int, int, int]] | None:
    """Return ``(first row, first column, number of rows, number of columns)`` for each planned shard of a table.

    Returns None if the plan does not list the shards of the table.
    """
    spec = getattr(module.module_sharding_plan[table], "sharding_spec", None)  # type: ignore[index]
    if spec is None:
        return None
    return {(*shard.shard_offsets, *shard.shard_sizes) for shard in spec.shards}
