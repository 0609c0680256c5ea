"""Detect models whose dense gradients would be summed in another order after a restore than before it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import InvalidArgumentError


def check_warm(model: nn.Module) -> None:
    """Check that the model has trained the batches that ``DistributedDataParallel`` needs to order the gradients.

    The module groups gradients into buckets, whose order it changes once, after the first backward pass, or with
    ``static_graph`` after the second one. With three ranks or more, another order gives other sums. A job that
    continues from a restore must therefore have passed this change before the restore.

    Raises:
        InvalidArgumentError: if the order may still change.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and _may_reorder(module):
            remedy = "Train two batches before restore(), which overwrites their effect"
            raise InvalidArgumentError("model", f"{name or type(module).__name__} without two trained batches", remedy)


def _may_reorder(module: DistributedDataParallel) -> bool:
    if module.find_unused_parameters and not module.static_graph:
        return False  # torch keeps the first order
    logged: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001
    return int(logged.get("iteration", 0)) < 1  # number of the last forward pass, counted from 0
