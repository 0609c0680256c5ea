"""Where a predictor puts rows: the tables of its model, by fully qualified name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, TableMismatchError
from delta_tracker.stream.manifest import Manifest

_MATRIX_DIMS = 2


def find_targets(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tables that a model could receive, each the memory that its lookups read at this moment.

    Args:
        model: a module whose tables are ``<fqn>.weight`` parameters or buffers, such as ``nn.Embedding``,
            ``nn.EmbeddingBag`` and unsharded TorchRec collections; or a mapping of FQN (or ``<fqn>.weight``) to a
            ``[rows, columns]`` tensor.

    Returns:
        FQN to ``[rows, columns]`` tensor, detached.

    Raises:
        InvalidArgumentError: if it is neither, has no matrix in it, or names one table twice.
    """
    named: Iterable[tuple[str, Tensor]]
    if isinstance(model, nn.Module):
        named = itertools.chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        )
    else:
        named = _items(model)
    targets: dict[str, Tensor] = {}
    for name, tensor in named:
        fqn = str(name).removesuffix(".weight")
        if tensor.dim() == _MATRIX_DIMS:
            if fqn in targets:
                raise InvalidArgumentError("model", fqn, f"Give one of {fqn!r} and {fqn + '.weight'!r}, not both")
            targets[fqn] = tensor.detach()
    if not targets:
        raise InvalidArgumentError("model", type(model).__name__, "Pass a module or mapping with embedding tables")
    return targets


def _items(model: object) -> Iterable[tuple[str, Tensor]]:
    """The items of what should be a mapping of tensors."""
    if not isinstance(model, Mapping) or not all(isinstance(table, Tensor) for table in model.values()):
        raise InvalidArgumentError("model", type(model).__name__, "Pass a module, or a mapping of FQN to tensor")
    return model.items()


def check_targets(manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Refuse a version whose tables the model cannot receive.

    Raises:
        TableMismatchError: for the first table that is missing, has another shape or dtype, cannot be written in
            place, or shares its memory with another table of the stream.
    """
    for fqn, table in manifest.tables.items():
        target = targets.get(fqn)
        if target is None:
            raise TableMismatchError(fqn, str(table), "missing", sorted(targets))
        if target.shape != (table.num_rows, table.dim) or target.dtype != table.dtype:
            found = f"{target.shape[0]} x {target.shape[1]} {str(target.dtype).removeprefix('torch.')}"
            raise TableMismatchError(fqn, str(table), found)
        obstacle = _obstacle(target)
        if obstacle:
            raise TableMismatchError(fqn, str(table), obstacle)
    _refuse_shared_memory(manifest, targets)


def _obstacle(target: Tensor) -> str:
    """Why rows cannot be written into a tensor; nothing if they can."""
    if target.layout is not torch.strided or target.is_meta:
        return f"a {target.layout} tensor on {target.device}"
    if target.is_inference():
        return "a tensor made in inference mode, which nothing may write to"
    if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
        return "an expanded tensor, whose rows share memory"
    return ""


def _refuse_shared_memory(manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    spans = sorted((*_span(targets[fqn]), fqn) for fqn in manifest.tables if targets[fqn].numel())
    for (_, _, end, fqn), (device, begin, _, other) in itertools.pairwise(spans):
        if begin < end and device == str(targets[fqn].device):
            shared = f"in memory that {fqn!r} has too (tied weights)"
            raise TableMismatchError(other, str(manifest.tables[other]), shared)


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, and address of the first byte and after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
