"""Detect models whose dense gradients would be summed in another order after a restore than before it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import InvalidArgumentError

_WRAPPER = "_dmp_wrapped_module"  # name of the module in a DistributedModelParallel
_REMEDY = (
    "Train two batches before restore(), which overwrites their effect. If training does not call this "
    "DistributedDataParallel, but modules inside it, build it with find_unused_parameters=True, or pass "
    "init_data_parallel=False to DistributedModelParallel"
)


def check_warm(model: nn.Module) -> None:
    """Raise InvalidArgumentError unless ``DistributedDataParallel`` has trained enough to order the gradients.

    It groups gradients into buckets, whose order it changes once, after the first backward pass, or with
    ``static_graph`` after the second one. With three ranks or more, another order gives other sums. A module that
    training does not call, but only modules inside it, is rejected nevertheless: only the user knows that.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and _may_reorder(module):
            inner = ".".join(part for part in name.split(".") if part != _WRAPPER) or type(module).__name__
            raise InvalidArgumentError("model", f"{inner} without two trained batches", _REMEDY)


def _may_reorder(module: DistributedDataParallel) -> bool:
    if module.find_unused_parameters and not module.static_graph:
        return False  # torch keeps the first order
    logged: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001
    return int(logged.get("iteration", 0)) < 1  # number of the last forward pass, counted from 0
