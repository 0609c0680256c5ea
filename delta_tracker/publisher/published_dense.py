"""Choice of the dense tensors that a publisher sends with each version."""

import logging
from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sharding.dense import DenseChoice, dense_parameters, dense_tensors
from delta_tracker.stream.format.manifest import DTYPE_NAMES, MAX_DIMS
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.types import dtype_name

_logger = logging.getLogger(__name__)

_MAX_NAMES = 5


def chosen_dense(dense: DenseChoice | Literal[True], live: LiveTables) -> DenseChoice:
    """Return ``dense`` in a form that can be iterated repeatedly, or the whole model if ``dense`` is True."""
    if dense is True:
        return live.model
    if isinstance(dense, Mapping):
        return dict(dense)
    return dense if isinstance(dense, nn.Module | str) else tuple(dense)


def warn_of_dense(live: LiveTables) -> None:
    """Log a warning if the model has trainable dense parameters. Call this if no dense tensors are published."""
    if names := dense_parameters(live.model, live.tables):
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else "")
        _logger.warning(
            "these parameters of the model are not published, so that predictors keep their own values: %s. Pass "
            "dense=True to publish all dense parameters, or dense=False if they are sent in another way",
            shown,
        )


def published_dense(live: LiveTables, choice: DenseChoice) -> dict[str, Tensor]:
    """Return the chosen dense tensors by name, without copying them.

    Raises InvalidArgumentError if a tensor is not in the model, or its dtype or number of dimensions is unsupported.
    """
    found = dense_tensors(live.model, choice, tables=live.tables)
    for name, tensor in found.items():
        if dtype_name(tensor.dtype) not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
            remedy = f"Leave it out: streams do not support {tensor.dim()}-d {tensor.dtype}"
            raise InvalidArgumentError("dense", name, remedy)
    return found
