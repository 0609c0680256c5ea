"""Choose the engine: the subclass of ``RowSet`` that records which rows of a shard changed."""

from __future__ import annotations

import torch

from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.tracker.row_sets.numba import NumbaRows, load_loops
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.row_sets.triton import TritonRows

_BY_NAME: dict[str, type[RowSet]] = {"torch": TorchRows, "numba": NumbaRows, "triton": TritonRows}

ENGINES = tuple(_BY_NAME)


def choose_engine(name: str | None, device: torch.device) -> type[RowSet]:
    """Return the engine for a device.

    Args:
        name: one of :data:`ENGINES`: ``"torch"`` (any device), ``"numba"`` (CPU) or ``"triton"`` (CUDA). None chooses
            numba on the CPU if it is installed, otherwise torch.
        device: device of the shard.

    Returns:
        A subclass of :class:`RowSet`. Call it with ``(num_rows, device)`` to create an empty set. If the engine was
        selected by name and its package is not installed, this call raises :class:`MissingExtraError`.

    Raises:
        InvalidArgumentError: if the name is unknown or the engine does not support the device.

    Example:
        >>> choose_engine("torch", torch.device("cpu")).__name__
        'TorchRows'
    """
    if name is None:
        return NumbaRows if NumbaRows.serves(device) and _has_numba() else TorchRows
    serving = [known for known, engine in _BY_NAME.items() if engine.serves(device)]
    if name not in serving:
        raise InvalidArgumentError("engine", name, f"On {device} use one of {serving}, or None to have one chosen")
    return _BY_NAME[name]


def _has_numba() -> bool:
    try:
        load_loops()
    except MissingExtraError:
        return False
    return True
