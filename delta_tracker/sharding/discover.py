"""Find the sharded tables of a model: what each rank holds of them, and in which kernel.

A kernel is TorchRec's ``BatchedFusedEmbedding``/``...Bag``: one table-batched embedding (TBE) with one autograd node,
for a group of tables. A table is identified by its position in the kernel, never by a feature's or table's name,
because neither is unique.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import NoShardedModuleError, UnsupportedTableError
from delta_tracker.sharding.versions import Torchrec, load_torchrec, planned_blocks, table_configs
from delta_tracker.types import ShardSpec, TableSpec

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One TBE module of this rank.

    Args:
        module: takes a KeyedJaggedTensor, returns the looked-up rows.
        slots: for each table slot, in order, the table's FQN (None if untracked) and its number of features.
    """

    module: Any
    slots: tuple[tuple[str | None, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """What this rank holds of one table, and where.

    Args:
        spec: the block, with all column ranges that this rank holds.
        places: for each column range of ``spec``, in order, the kernel and the slot in it.
    """

    spec: ShardSpec
    places: tuple[tuple[Kernel, int], ...]
    device: torch.device


@dataclass(slots=True)
class Discovery:
    """The tracked tables of a model, as this rank sees them.

    Args:
        modules: FQN to sharded embedding module.
        features: table FQN to its feature names.
        tables: table FQN to the whole table; the same on every rank.
        shards: table FQN to what this rank holds of it, possibly nothing.
        kernels: the kernels that hold at least one tracked shard.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    features: dict[str, list[str]] = field(default_factory=dict)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    shards: dict[str, LocalShard] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def discover(model: nn.Module, fqns_to_skip: Iterable[str] = ()) -> Discovery:
    """Find every sharded EmbeddingCollection and EmbeddingBagCollection in ``model``.

    Args:
        model: usually a ``DistributedModelParallel``; a module that contains sharded ones will do.
        fqns_to_skip: tables to leave out, each by its FQN, the FQN of a module above it, or one component of it.

    Raises:
        NoShardedModuleError: if there is nothing to track.
        UnsupportedTableError: if a table's kernel is not fused, or its geometry contradicts the sharding plan.
        MissingExtraError: if torchrec is not installed.
    """
    torchrec = load_torchrec()
    found = Discovery()
    unsharded = []
    skips = tuple(fqns_to_skip)
    for fqn, module in _walk(model, "", torchrec, set()):
        if type(module) in torchrec.collections:
            found.modules[fqn] = module
            _add_collection(found, torchrec, fqn, module, skips)
        elif "Embedding" in type(module).__name__:
            unsharded.append(f"{fqn} ({type(module).__name__})")
    if not found.tables and not found.skipped:
        raise NoShardedModuleError(unsharded)
    return found


def _walk(module: nn.Module, fqn: str, torchrec: Torchrec, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with the FQNs that ``state_dict`` uses: wrappers add no name. Stops below a sharded collection."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, torchrec.wrapper):
        yield from _walk(module._dmp_wrapped_module, fqn, torchrec, seen)  # type: ignore[arg-type]  # noqa: SLF001
    elif isinstance(module, DistributedDataParallel):
        yield from _walk(module.module, fqn, torchrec, seen)
    else:
        yield fqn, module
        if type(module) not in torchrec.collections:
            for name, child in module.named_children():
                yield from _walk(child, f"{fqn}.{name}" if fqn else name, torchrec, seen)


def _is_skipped(fqn: str, skips: Iterable[str]) -> bool:
    return any(fqn == skip or fqn.startswith(f"{skip}.") or skip in fqn.split(".") for skip in skips)


def _add_collection(
    found: Discovery, torchrec: Torchrec, module_fqn: str, module: nn.Module, skips: tuple[str, ...]
) -> None:
    holder = torchrec.collections[type(module)]
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
            raise UnsupportedTableError(fqn, f"its data type is {config.data_type.name}, not one of {sorted(_DTYPES)}")
        found.tables[fqn] = TableSpec(fqn, config.num_embeddings, config.embedding_dim, dtype)
    places: dict[str, list[_Place]] = {fqn: [] for fqn in fqn_of.values()}
    for kernel, blocks in _kernels(module, fqn_of, torchrec):
        for fqn, place in blocks:
            places[fqn].append(place)
        if blocks:
            found.kernels.append(kernel)
    for name, fqn in fqn_of.items():
        found.shards[fqn] = _merge(found.tables[fqn], places[fqn], planned_blocks(module, name))


@dataclass(frozen=True, slots=True)
class _Place:
    kernel: Kernel
    slot: int
    block: tuple[int, int, int, int]  # row, column, rows, columns
    device: torch.device


def _kernels(
    module: nn.Module, fqn_of: dict[str, str], torchrec: Torchrec
) -> Iterator[tuple[Kernel, list[tuple[str, _Place]]]]:
    for lookup in module._lookups:  # type: ignore[union-attr]  # noqa: SLF001
        inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for emb_module in inner._emb_modules:  # noqa: SLF001
            configs = emb_module.config.embedding_tables
            tracked = [fqn_of.get(config.name) for config in configs]
            kernel = Kernel(
                emb_module, tuple((fqn, config.num_features()) for fqn, config in zip(tracked, configs, strict=True))
            )
            weights = emb_module.split_embedding_weights()
            blocks = []
            for slot, (fqn, config) in enumerate(zip(tracked, configs, strict=True)):
                if fqn is None:
                    continue
                if config.compute_kernel.value not in torchrec.fused_kernels or config.local_metadata is None:
                    raise UnsupportedTableError(
                        fqn, f"its compute kernel is {config.compute_kernel.value!r}, not fused"
                    )
                block = (*config.local_metadata.shard_offsets, *config.local_metadata.shard_sizes)
                if tuple(weights[slot].shape) != block[2:]:
                    raise UnsupportedTableError(
                        fqn, f"its weight is {tuple(weights[slot].shape)}, its shard {block[2:]}"
                    )
                blocks.append((fqn, _Place(kernel, slot, block, weights[slot].device)))
            yield kernel, blocks


def _merge(table: TableSpec, places: list[_Place], planned: set[tuple[int, int, int, int]] | None) -> LocalShard:
    """One shard of all the blocks of a table on this rank: they share their rows and differ in columns."""
    if not places:
        return LocalShard(ShardSpec(table), (), torch.device("cpu"))
    places = sorted(places, key=lambda place: place.block[1])
    rows = {(place.block[0], place.block[2]) for place in places}
    if len(rows) > 1:
        raise UnsupportedTableError(table.fqn, f"one rank holds different row ranges of it: {sorted(rows)}")
    strangers = {place.block for place in places} - planned if planned is not None else set()
    if strangers:
        raise UnsupportedTableError(table.fqn, f"its shards {sorted(strangers)} are not in the sharding plan")
    ((row_offset, num_rows),) = rows
    columns = tuple((place.block[1], place.block[1] + place.block[3]) for place in places)
    spec = ShardSpec(table, row_offset, num_rows, columns)
    return LocalShard(spec, tuple((place.kernel, place.slot) for place in places), places[0].device)
