"""Find the tables of a predictor's model and its mappings of raw ids, by fully qualified name (FQN), and check them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.raw_ids import RawIdMap
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.row_target import RowTarget, TensorTarget
from delta_tracker.sharding.presence import has_collisions, has_fbgemm_tables
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import ShardSpec

_MATRIX_DIMS = 2
_COMPILED = "_orig_mod."
_MODEL = "Pass a module, or a mapping of FQN to tensor or RowTarget"


def find_targets(model: nn.Module | Mapping[str, Tensor | RowTarget]) -> dict[str, RowTarget]:
    """Return the tables of a model by FQN, as targets that write to the memory that lookups read.

    The tables of a module are its two-dimensional parameters and buffers, for example ``<fqn>.weight`` of
    ``nn.Embedding`` and of TorchRec collections, which may be sharded (each rank then holds its own rows and columns),
    quantized or compiled. The keys of a mapping are FQNs, optionally followed by ``.weight``; its values are
    ``[rows, columns]`` tensors or targets.
    """
    given: object = model
    if not isinstance(given, nn.Module | Mapping):
        raise InvalidArgumentError("model", type(model).__name__, _MODEL)
    targets: dict[str, RowTarget] = {}
    for name, table in _modules_tables(given) if isinstance(given, nn.Module) else given.items():
        fqn = str(name).replace(_COMPILED, "").removesuffix(".weight")
        if isinstance(table, Tensor):
            if table.dim() != _MATRIX_DIMS:
                continue
            table = TensorTarget.of(table)  # noqa: PLW2901
        elif not isinstance(table, RowTarget):
            raise InvalidArgumentError("model", type(model).__name__, _MODEL)
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


def find_maps(model: object, names: Mapping[str, str]) -> dict[str, tuple[RawIdMap, ...]]:
    """Return a model's raw-id mappings by table FQN in the stream. ``names`` has the FQN in the model if it differs."""
    if not isinstance(model, nn.Module) or not has_collisions(model):
        return {}
    from delta_tracker.sharding.raw_id_maps import raw_id_maps  # noqa: PLC0415  it needs torchrec

    found = raw_id_maps(model)
    kept = {fqn: maps for fqn, maps in found.items() if fqn not in names and fqn not in names.values()}
    return kept | {name: found[own] for name, own in names.items() if own in found}


def check_hidden(manifest: Manifest, hidden: Collection[str], names: Mapping[str, str]) -> None:
    """Raise ModelMismatchError for a version with raw ids that would not change a mapping in a scripted module."""
    left = sorted(set(hidden) - {names.get(name, name) for name in manifest.dense})
    if left and manifest.identities:
        fqn = next(iter(manifest.identities))
        found = f"with the mapping {left[0]!r} in a module that was scripted or traced"
        remedy = "Pass the model as it was before it was scripted or traced"
        raise ModelMismatchError(fqn, f"{manifest.tables[fqn]} with raw ids", found).advising(remedy)


def check_indexes(indexes: Mapping[str, RawIdIndex], tables: Mapping[str, RowTarget]) -> dict[str, RawIdIndex]:
    """Return the indexes of a predictor by table FQN in the stream. Names in ``indexes`` may end with ``.weight``."""
    found = {str(name).removesuffix(".weight"): index for name, index in indexes.items()}
    for fqn in found:
        if fqn not in tables:
            raise InvalidArgumentError("raw_ids", fqn, f"Pass names of the model's tables: {sorted(tables)}")
    return found


def check_maps(manifest: Manifest, maps: Mapping[str, tuple[RawIdMap, ...]]) -> None:
    """Raise ModelMismatchError for a version whose raw ids cannot be mapped as the trainer maps them.

    A table with raw ids needs mappings that serve its buckets and no other table; one without needs to have none.
    """
    owners: dict[int, str] = {}  # address of a mapping to the first table
    for fqn, table in manifest.tables.items():
        identity = manifest.identities.get(fqn)
        found = maps.get(fqn, ())
        if identity is None:
            if found:
                remedy = "Leave the table out of raw_ids, or build the predictor's model without its collision module"
                raise ModelMismatchError(fqn, f"{table} without raw ids", "with a mapping of raw ids").advising(remedy)
            continue
        expected = f"{table} with raw ids"
        if not found:
            target = f"ModelTarget(model, raw_ids={{{fqn!r}: RawIdIndex({table.num_rows})}})"
            remedy = f"Pass {target}, or build the model as the trainer's"
            raise ModelMismatchError(fqn, expected, "without a mapping of raw ids").advising(remedy)
        for each in found:
            refusal = each.refusal(identity)
            if refusal:
                raise ModelMismatchError(fqn, expected, refusal)
            shared = owners.setdefault(each.memory.data_ptr(), fqn)
            if shared != fqn or sum(each.memory.data_ptr() == other.memory.data_ptr() for other in found) > 1:
                raise ModelMismatchError(fqn, expected, f"with a mapping of raw ids shared with {shared!r}")
