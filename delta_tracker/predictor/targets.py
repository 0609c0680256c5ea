"""Find the tables of a predictor's model by their fully qualified names (FQN)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.row_target import RowTarget, TensorTarget
from delta_tracker.sharding.presence import has_fbgemm_tables
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import ShardSpec

_MATRIX_DIMS = 2
_COMPILED = "_orig_mod."


def find_targets(model: nn.Module | Mapping[str, Tensor | RowTarget]) -> dict[str, RowTarget]:
    """Return the tables of a model by FQN, as targets that write to the memory that lookups read.

    The tables of a module are its two-dimensional parameters and buffers, for example ``<fqn>.weight`` of
    ``nn.Embedding`` and of TorchRec collections, which may be sharded (each rank then holds its own rows and columns),
    quantized or compiled. The keys of a mapping are FQNs, optionally followed by ``.weight``; its values are
    ``[rows, columns]`` tensors or targets.
    """
    targets: dict[str, RowTarget] = {}
    for name, table in _modules_tables(model) if isinstance(model, nn.Module) else _items(model):
        fqn = name.replace(_COMPILED, "").removesuffix(".weight")
        if isinstance(table, Tensor):
            if table.dim() != _MATRIX_DIMS:
                continue
            table = TensorTarget.of(table)  # noqa: PLW2901
        if fqn in targets:
            raise InvalidArgumentError("model", fqn, f"Pass one of {fqn!r} and {fqn + '.weight'!r}, not both")
        targets[fqn] = table
    if not targets:
        raise InvalidArgumentError("model", type(model).__name__, "Pass a module or mapping with embedding tables")
    return targets


def _modules_tables(model: nn.Module) -> Iterable[tuple[str, Tensor | RowTarget]]:
    if has_fbgemm_tables(model):
        from delta_tracker.sharding.inference_tables import model_tables  # noqa: PLC0415  it needs torchrec

        return model_tables(model)
    return itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _items(model: object) -> Iterable[tuple[str, Tensor | RowTarget]]:
    """Return the names and tables of a mapping. Raise InvalidArgumentError for any other object."""
    if not isinstance(model, Mapping) or not all(isinstance(table, Tensor | RowTarget) for table in model.values()):
        text = "Pass a module, or a mapping of FQN to tensor or RowTarget"
        raise InvalidArgumentError("model", type(model).__name__, text)
    return [(str(name), table) for name, table in model.items()]


def table_names(model: nn.Module | Mapping[str, Tensor | RowTarget]) -> set[str]:
    """Return the FQNs of a model's embedding tables, without those of sharded and quantized modules."""
    if not isinstance(model, nn.Module):
        return {str(name).removesuffix(".weight") for name in model}
    tables = nn.Embedding, nn.EmbeddingBag
    return {name.replace(_COMPILED, "") for name, module in model.named_modules() if isinstance(module, tables)}


def renamed(targets: dict[str, RowTarget], names: Mapping[str, str]) -> dict[str, RowTarget]:
    """Return the targets under their names in the stream. ``names`` has those that differ, also of dense tensors."""
    if not names:
        return targets
    own = {fqn: name for fqn, name in names.items() if name in targets}
    if len(set(own.values())) < len(own):
        raise InvalidArgumentError("names", own, "Map each table of the model once")
    kept = {fqn: target for fqn, target in targets.items() if fqn not in own.values()}
    return kept | {fqn: targets[name] for fqn, name in own.items()}


def check_targets(manifest: Manifest, targets: Mapping[str, RowTarget]) -> None:
    """Raise ModelMismatchError for the first table of a version that does not fit the model.

    It is missing, has another shape or dtype, cannot be written in place, or shares its memory with another table of
    the stream. A target whose block lies outside its table raises InvalidArgumentError.
    """
    for fqn, table in manifest.tables.items():
        target = targets.get(fqn)
        if target is None:
            raise ModelMismatchError(fqn, str(table), "missing", sorted(targets))
        dtype = target.dtype or table.dtype
        if (target.num_rows, target.dim, dtype) != (table.num_rows, table.dim, table.dtype):
            found = f"{target.num_rows} x {target.dim} {str(dtype).removeprefix('torch.')}"
            raise ModelMismatchError(fqn, str(table), found)
        ShardSpec(table, target.rows[0], target.rows[1] - target.rows[0], target.columns)
        if isinstance(target, TensorTarget) and target.obstacle:
            raise ModelMismatchError(fqn, str(table), target.obstacle).advising(target.remedy)
    _refuse_shared_memory(manifest, targets)


def _refuse_shared_memory(manifest: Manifest, targets: Mapping[str, RowTarget]) -> None:
    memories = [
        (fqn, region.memory)
        for fqn in manifest.tables
        if isinstance(target := targets[fqn], TensorTarget)
        for region in target.regions
        if region.memory.numel()
    ]
    spans = sorted((*_span(memory), fqn) for fqn, memory in memories) if len(memories) > 1 else []
    for (device, _, end, fqn), (other_device, begin, _, other) in itertools.pairwise(spans):
        if begin < end and device == other_device:
            remedy = f"Name {other!r} or {fqn!r} in fqns_to_skip of the trainer's tracker, or give each its own memory"
            shared = f"in memory shared with {fqn!r} (tied weights)"
            raise ModelMismatchError(other, str(manifest.tables[other]), shared).advising(remedy)


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device of a tensor, the address of its first byte, and the address after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
