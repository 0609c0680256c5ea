"""Where a predictor puts rows: the tables of its model, by fully qualified name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, TableMismatchError
from delta_tracker.stream.manifest import Manifest

_MATRIX_DIMS = 2


def find_targets(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tables that a model could receive, each the memory that lookups read.

    Args:
        model: a module whose tables are ``<fqn>.weight`` parameters or buffers, such as ``nn.Embedding``,
            ``nn.EmbeddingBag`` and unsharded TorchRec collections; or a mapping of FQN (or ``<fqn>.weight``) to a
            ``[rows, columns]`` tensor.

    Returns:
        FQN to ``[rows, columns]`` tensor, detached.

    Raises:
        InvalidArgumentError: if there is no matrix in it.
    """
    named = (
        itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        if isinstance(model, nn.Module)
        else model.items()
    )
    targets = {name.removesuffix(".weight"): tensor.detach() for name, tensor in named if tensor.dim() == _MATRIX_DIMS}
    if not targets:
        raise InvalidArgumentError("model", type(model).__name__, "Pass a module or mapping with embedding tables")
    return targets


def check_targets(manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Refuse a version whose tables are not the model's.

    Raises:
        TableMismatchError: for the first table that is missing or has another shape or dtype.
    """
    for fqn, table in manifest.tables.items():
        target = targets.get(fqn)
        if target is None:
            raise TableMismatchError(fqn, str(table), "missing", sorted(targets))
        if target.shape != (table.num_rows, table.dim) or target.dtype != table.dtype:
            found = f"{target.shape[0]} x {target.shape[1]} {str(target.dtype).removeprefix('torch.')}"
            raise TableMismatchError(fqn, str(table), found)
