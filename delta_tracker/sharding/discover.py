"""Find the tables of a model, this rank's shards of the tables, and the kernels that contain the shards.

In a model without sharded collections, the tables are torch's embedding modules; see ``plain_tables.py``.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.plain_tables import PlainModule, PlainTable, plain_shards
from delta_tracker.sharding.torchrec_api import (
    Torchrec,
    kernels_of,
    planned_blocks,
    planned_kernel,
    replica_of,
    table_configs,
)
from delta_tracker.types import ShardSpec, TableSpec

_logger = logging.getLogger(__name__)
_Area = tuple[int, int, int, int]  # first row, first column, number of rows, number of columns

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class Discovery:
    """Result of :func:`discover`: the tracked tables of a model and this rank's shards of them.

    Args:
        modules: sharded collections by FQN.
        features: feature names of each table by table FQN.
        tables: specs of the whole tables by table FQN. They are the same on every rank.
        shards: this rank's shards by table FQN. A shard may have no rows.
        kernels: kernels of this rank that contain at least one tracked shard.
        skipped: FQNs of the tables, and of the unsupported sharded modules and tensors, that ``fqns_to_skip`` excludes.
        plain: tables of ``nn.Embedding`` and ``nn.EmbeddingBag`` modules.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    features: dict[str, list[str]] = field(default_factory=dict)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    shards: dict[str, LocalShard] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    plain: list[PlainTable] = field(default_factory=list)

    def tables_of(self, module_fqn: str) -> list[str]:
        """Return the FQNs of the tracked tables of the collection with the FQN ``module_fqn``."""
        prefix = f"{module_fqn}." if module_fqn else ""
        return [fqn for fqn in self.tables if fqn.startswith(prefix)]


def discover(model: nn.Module, fqns_to_skip: Sequence[str] = ()) -> Discovery:
    """Find the tables of every sharded EmbeddingCollection and EmbeddingBagCollection in ``model``.

    Subclasses of these collections are included. If there is no sharded collection, find the tables of every
    ``nn.Embedding`` and ``nn.EmbeddingBag``; see :func:`~delta_tracker.sharding.plain_tables.plain_shards`.

    Args:
        model: a ``DistributedModelParallel``, or any module that contains tables.
        fqns_to_skip: names of tables, and of unsupported sharded modules and tensors, to exclude. An item is excluded
            if a name is its FQN, the FQN of a module that contains it, or one component of its FQN. A warning is issued
            for a name that matches nothing.

    Raises:
        InvalidArgumentError: if ``fqns_to_skip`` is a string.
        UnsupportedModelError: if the model has no table and nothing is skipped, if an unsupported sharded module or
            tensor is not skipped, or if the kernel, data type or geometry of a table is not supported.
    """
    torchrec = Torchrec()
    found = Discovery()
    plain: dict[str, PlainModule] = {}
    others: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    for fqn, module in walk(model, torchrec):
        if holder := torchrec.holder(module):
            found.modules[fqn] = module
            _add_collection(found, torchrec, fqn, module, holder, fqns_to_skip)
            continue
        unknown = dict(_unknown(fqn, module, torchrec))
        found.skipped += [name for name in unknown if _is_skipped(name, fqns_to_skip)]
        unsupported |= {name: kind for name, kind in unknown.items() if name not in found.skipped}
        if isinstance(module, PlainModule):
            plain[fqn] = module
        elif "Embedding" in type(module).__name__:
            others[fqn] = type(module).__name__
    if unsupported:
        raise UnsupportedModelError(
            unsupported,
            "Shard their tables as an EmbeddingCollection or EmbeddingBagCollection, "
            "or name them in fqns_to_skip to train them untracked",
        )
    if found.modules and plain:
        text = "not tracked, because the model has sharded collections: %s; publish these tables with dense=..."
        _logger.warning(text, ", ".join(sorted(fqn for fqn in plain if not _is_skipped(fqn, fqns_to_skip))))
    elif plain:
        found.skipped += [fqn for fqn in plain if _is_skipped(fqn, fqns_to_skip)]
        kept = {fqn: module for fqn, module in plain.items() if not _is_skipped(fqn, fqns_to_skip)}
        found.shards = plain_shards(model, kept, torchrec)
        found.tables = {fqn: shard.spec.table for fqn, shard in found.shards.items()}
        holders = (holder for shard in found.shards.values() for holder, _ in shard.holders)
        found.plain = [holder for holder in holders if isinstance(holder, PlainTable)]
    if not found.tables and not found.skipped:
        remedy = "Pass a model with nn.Embedding, nn.EmbeddingBag or TorchRec's (sharded) collections"
        raise UnsupportedModelError(others, remedy, problem="no table to track; other embedding modules found")
    _warn_of_skips(fqns_to_skip, found)
    return found


def _warn_of_skips(skips: Sequence[str], found: Discovery) -> None:
    """Warn if all tables are skipped, and warn about each name in ``skips`` that matches nothing."""
    known = [*found.tables, *found.skipped]
    if not found.tables:
        warnings.warn(f"fqns_to_skip={list(skips)} leaves no table to track; it skips {sorted(known)}", stacklevel=4)
    for skip in skips:
        if not any(_is_skipped(fqn, [skip]) for fqn in known):
            warnings.warn(f"fqns_to_skip: {skip!r} matches no table; known tables: {sorted(known)}", stacklevel=4)


def walk(model: nn.Module, torchrec: Torchrec) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(FQN, module)`` once for each module of a model; see :meth:`Torchrec.walk`.

    Submodules of sharded collections, and of modules for which :func:`has_unknown_rows` returns True, are left out.
    """

    def is_leaf(module: nn.Module) -> bool:
        return torchrec.holder(module) is not None or has_unknown_rows(module, torchrec)

    return torchrec.walk(model, is_leaf, set())


def has_unknown_rows(module: nn.Module, torchrec: Torchrec) -> bool:
    """Return True if ``module`` is a sharded module whose rows cannot be tracked.

    Such modules are embedding towers, which exist only on the ranks of one host, and sharded modules that contain no
    supported collection. The result is the same on every rank, including ranks that have no rows of the module.
    """
    if isinstance(module, torchrec.towers):
        return True
    if not isinstance(module, torchrec.sharded) or isinstance(module, torchrec.without_rows):
        return False
    return all(torchrec.holder(part) is None for part in module.modules())


def _unknown(fqn: str, module: nn.Module, torchrec: Torchrec) -> Iterator[tuple[str, str]]:
    """Yield ``(FQN, class name)`` of ``module`` or of its direct sharded tensors if their rows cannot be tracked.

    If :func:`has_unknown_rows` returns True for the module, only the module is yielded.
    """
    if has_unknown_rows(module, torchrec):
        yield fqn, type(module).__name__
        return
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if isinstance(tensor, torchrec.sharded_tensors):
            yield f"{fqn}.{name}" if fqn else name, type(tensor).__name__


def _is_skipped(fqn: str, skips: Iterable[str]) -> bool:
    return any(fqn == skip or fqn.startswith(f"{skip}.") or skip in fqn.split(".") for skip in skips)


def _add_collection(
    found: Discovery, torchrec: Torchrec, module_fqn: str, module: nn.Module, holder: str, skips: Sequence[str]
) -> None:
    fqn_of = {}
    for name, config in table_configs(module).items():
        fqn = ".".join(part for part in (module_fqn, holder, name) if part)
        if _is_skipped(fqn, skips):
            found.skipped.append(fqn)
            continue
        fqn_of[name] = fqn
        found.features[fqn] = list(config.feature_names)
        dtype = _DTYPES.get(config.data_type.name)
        if dtype is None:
            reason = f"its data type is {config.data_type.name}"
            remedy = f"Give it a data type of {sorted(_DTYPES)}, or name it in fqns_to_skip to train it untracked"
            raise UnsupportedModelError({fqn: reason}, remedy)
        found.tables[fqn] = TableSpec(fqn, config.num_embeddings, config.embedding_dim, dtype)
    kernels, blocks = _kernels(module, fqn_of, torchrec)
    found.kernels += kernels
    for name, fqn in fqn_of.items():
        is_fused = planned_kernel(module, name) in torchrec.fused_kernels
        planned = planned_blocks(module, name)
        found.shards[fqn] = _merge(
            found.tables[fqn], blocks[fqn], planned, is_fused=is_fused, replica=replica_of(module, torchrec)
        )


@dataclass(frozen=True, slots=True)
class _HeldBlock:
    kernel: Kernel
    slot: int
    block: _Area
    device: torch.device
    is_replicated: bool


def _kernels(
    module: nn.Module, fqn_of: dict[str, str], torchrec: Torchrec
) -> tuple[list[Kernel], dict[str, list[_HeldBlock]]]:
    """Return the kernels of a collection that contain a tracked shard, and the blocks of each table on this rank."""
    kernels: list[Kernel] = []
    blocks: dict[str, list[_HeldBlock]] = {fqn: [] for fqn in fqn_of.values()}
    for emb_module in kernels_of(module):
        configs = emb_module.config.embedding_tables
        tracked = [fqn_of.get(config.name) for config in configs]
        compute_kernels = {config.compute_kernel.value for config in configs}
        slots = tuple((fqn, config.num_features()) for fqn, config in zip(tracked, configs, strict=True))
        kernel = Kernel(emb_module, slots, is_fused=compute_kernels <= torchrec.fused_kernels)
        strange = compute_kernels - torchrec.fused_kernels - torchrec.dense_kernels
        first = next((fqn for fqn in tracked if fqn is not None), None)
        if first is None:
            continue
        if strange:
            raise UnsupportedModelError({first: f"its kernel is {sorted(strange)}, neither fused nor dense"})
        weights = emb_module.split_embedding_weights()  # once per kernel, because it returns all tables
        for slot, (fqn, config, weight) in enumerate(zip(tracked, configs, weights, strict=True)):
            if fqn is not None:
                blocks[fqn].append(_held_block(kernel, slot, fqn, config, weight))
        kernels.append(kernel)
    return kernels, blocks


def _held_block(kernel: Kernel, slot: int, fqn: str, config: Any, weight: Tensor) -> _HeldBlock:  # noqa: ANN401  of torchrec
    """Return the block of a table in ``slot`` of ``kernel``. A table without shard metadata is replicated."""
    metadata = config.local_metadata
    block = (
        (0, 0, config.num_embeddings, config.embedding_dim)
        if metadata is None
        else (*metadata.shard_offsets, *metadata.shard_sizes)
    )
    if tuple(weight.shape) != block[2:]:
        raise UnsupportedModelError({fqn: f"its weight has shape {tuple(weight.shape)}, but its shard {block[2:]}"})
    return _HeldBlock(kernel, slot, block, weight.device, is_replicated=metadata is None)


def _merge(
    table: TableSpec, blocks: list[_HeldBlock], planned: set[_Area] | None, *, is_fused: bool, replica: tuple[int, int]
) -> LocalShard:
    """Merge this rank's ``blocks`` of a table into one shard. They have the same rows and different columns.

    ``blocks`` is empty if the rank has no rows of the table. ``planned`` are the blocks in the sharding plan; None if
    the plan lists none. ``is_fused`` is used only if ``blocks`` is empty. ``replica`` is the result of
    :func:`~delta_tracker.sharding.torchrec_api.replica_of` for the table's collection.
    """
    if not blocks:
        return LocalShard(ShardSpec(table), (), torch.device("cpu"), is_fused, replica[1])
    blocks = sorted(blocks, key=lambda each: each.block[1])
    rows = {(each.block[0], each.block[2]) for each in blocks}
    if len(rows) > 1:
        raise UnsupportedModelError({table.fqn: f"one rank has several row ranges of it: {sorted(rows)}"})
    strangers = {each.block for each in blocks} - planned if planned is not None else set()
    if strangers:
        raise UnsupportedModelError({table.fqn: f"its shards {sorted(strangers)} are not in the sharding plan"})
    ((row_offset, num_rows),) = rows
    columns = tuple((each.block[1], each.block[1] + each.block[3]) for each in blocks)
    is_replicated = any(each.is_replicated for each in blocks)
    index, num_replicas = (0, 1) if is_replicated else replica  # all ranks hold a DATA_PARALLEL table
    spec = ShardSpec(table, row_offset, num_rows, columns, is_replicated, index)
    is_fused = all(each.kernel.is_fused for each in blocks)
    kernels = tuple((each.kernel, each.slot) for each in blocks)
    return LocalShard(spec, kernels, blocks[0].device, is_fused, num_replicas)
