"""Choose an engine: the subclass of ``RowSet`` that stores the set of changed rows of a shard."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from traceback import walk_tb
from typing import Concatenate, ParamSpec, TypeVar

import torch

from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.tracker.row_sets.numba import NumbaRows, load_loops
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.row_sets.triton import TritonRows

ENGINES: Mapping[str, type[RowSet]] = {"torch": TorchRows, "numba": NumbaRows, "triton": TritonRows}

_Stores = TypeVar("_Stores")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def choose_engine(name: str | None, device: torch.device) -> type[RowSet]:
    """Return the implementation of :class:`RowSet` to use on a device.

    Args:
        name: one of :data:`ENGINES`: ``"torch"`` (any device), ``"numba"`` (CPU) or ``"triton"`` (CUDA). None chooses
            numba on the CPU if it is installed, otherwise torch.
        device: device of the shard.

    Returns:
        A subclass of :class:`RowSet`. Call it with ``(num_rows, device)`` to create an empty set. If the package of an
        engine selected by name is missing, creating a set and :meth:`RowSet.warm_up` raise :class:`MissingExtraError`.

    Raises:
        InvalidArgumentError: if the name is unknown or the engine does not support the device.

    Example:
        >>> choose_engine("torch", torch.device("cpu")).__name__
        'TorchRows'
    """
    if name is None:
        if NumbaRows.serves(device):
            with suppress(MissingExtraError):
                load_loops()
                return NumbaRows
        return TorchRows
    serving = [known for known, engine in ENGINES.items() if engine.serves(device)]
    if name not in serving:
        raise InvalidArgumentError("engine", name, f"Use one of {serving} on {device}, or None to have one chosen")
    return ENGINES[name]


def is_engine_fault(error: BaseException) -> bool:
    """Return True if a defect of an engine caused ``error``. MemoryError and RuntimeError never count as defects."""
    if isinstance(error, MemoryError | RuntimeError):  # torch raises RuntimeError if host or device memory runs out
        return False
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith(__package__) for frame in frames)


def retried(
    replace: Callable[[_Stores, Exception], bool],
) -> Callable[[Callable[Concatenate[_Stores, _Args], _Result]], Callable[Concatenate[_Stores, _Args], _Result]]:
    """Return a decorator that replaces a failed engine and then calls the decorated function a second time.

    ``replace`` is called with the function's first argument and the error. It must replace the engine that raised the
    error and return True, or return False if no engine raised the error. The error is then raised again.
    """

    def decorate(
        call: Callable[Concatenate[_Stores, _Args], _Result],
    ) -> Callable[Concatenate[_Stores, _Args], _Result]:
        @wraps(call)
        def checked(stores: _Stores, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            try:
                return call(stores, *args, **kwargs)
            except Exception as error:
                if not replace(stores, error):
                    raise
                return call(stores, *args, **kwargs)

        return checked

    return decorate
