"""Functions that find synchronizations with a device on machines without a device.

The ``device`` of a tensor returned by :func:`on_device` is a simulated device, but the data is on the CPU. The context
manager :func:`find_syncs` records each operation on these tensors that would wait for a real device: reading a number
on the host, computing a result whose shape depends on data, creating a tensor from host data, and copying between host
and device without ``non_blocking``, also inside an operation that has a zero-dimensional CPU tensor among its operands,
such as :func:`torch.where`. An empty record is strong evidence, but no proof, that the code does not wait for
the device. On a GPU, use ``torch.cuda.set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# torch checks this device type like a real one but has no kernels for it. The simulation runs operations on the CPU.
SIMULATED = torch.device("lazy", 0)
"""Device reported by simulated tensors."""

_WAITING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_COPIES = frozenset({"_to_copy", "copy_", "_copy_from"})
# torch copies a zero-dimensional CPU tensor among the operands of these to the device. Arithmetic reads it on the host.
_COPIES_NUMBERS = frozenset({"where", "index_put", "index_put_", "_index_put_impl_"})
# torch reads a tensor that is the value to fill with on the host.
_FILLS = frozenset({"masked_fill", "masked_fill_", "index_fill", "index_fill_"})
_BY_INDEX = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
# Methods that read data on the host. On CPU tensors they dispatch no operation, so only _Calls detects them.
_READS = frozenset({"tolist", "numpy", "cpu", "__array__"})
_FROM_HOST = frozenset({torch.tensor, torch.as_tensor, torch.from_numpy})


class SyncError(AssertionError):
    """Error for an operation that would wait for the device if the device were real.

    Args:
        call: name of the operation.
        place: file, line and function from which the operation was called.
    """

    def __init__(self, call: str, place: str) -> None:
        super().__init__(f"{call} would wait for the device, at {place}")
        self.call = call
        self.place = place


def on_device(tensor: Tensor) -> Tensor:
    """Return a tensor on the device :data:`SIMULATED` that shares the data of ``tensor``, a CPU tensor."""
    return _Claiming(tensor.detach())


def held(tensor: Tensor) -> Tensor:
    """Return the CPU data of a simulated tensor without recording a synchronization. Return other tensors unchanged."""
    return tensor.held if isinstance(tensor, _Claiming) else tensor


@contextmanager
def find_syncs(*, everywhere: bool = False) -> Iterator[list[SyncError]]:
    """Context manager that records, without raising, each operation that would wait for a real device.

    Args:
        everywhere: True to treat all CPU tensors as if they were on the device, to check code that only runs on the
            CPU. By default, only operations on simulated tensors are checked.

    Yields:
        List to which each synchronization is appended.

    Example:
        >>> loss = on_device(torch.tensor([1.0, 2.0]))
        >>> with find_syncs() as found:
        ...     if loss.sum() > 2:
        ...         pass
        >>> [sync.call for sync in found]
        ['aten._local_scalar_dense']
    """
    found: list[SyncError] = []
    with _Calls(found, everywhere=everywhere), _Simulation(found, everywhere=everywhere):
        yield found


@contextmanager
def assert_no_sync(*, everywhere: bool = False) -> Iterator[None]:
    """Context manager that raises the first :class:`SyncError` found, at the end of the ``with`` statement.

    Args:
        everywhere: True to treat all CPU tensors as if they were on the device, see :func:`find_syncs`.
    """
    with find_syncs(everywhere=everywhere) as found:
        yield
    if found:
        raise found[0]


class _Claiming(Tensor):
    """Tensor whose ``device`` is the simulated device. ``held`` is a CPU tensor with the data."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[Self], numbers: Tensor) -> Self:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=SIMULATED,
        )
        result.held = numbers
        return result

    def __repr__(self) -> str:  # type: ignore[override]  # the default reads the data
        return f"on_device({self.held!r})"

    def tolist(self) -> Any:
        """Return the data as a nested list. The copy to the host counts as a synchronization."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types
        return _run([], func, args, kwargs or {}, everywhere=False)


class _Simulation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs operations on simulated tensors and records synchronizations.

    Args:
        found: list to which synchronizations are appended.
        everywhere: True to treat all CPU tensors as if they were on the device.
    """

    def __init__(self, found: list[SyncError], *, everywhere: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._everywhere = everywhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _run(self._found, func, args, kwargs or {}, everywhere=self._everywhere)


class _Calls(TorchFunctionMode):
    """Torch function mode that records calls that synchronize with the device but dispatch no operation.

    These calls create tensors on a device from host data or, if ``everywhere`` is True, read CPU tensors on the host.

    Args:
        found: list to which synchronizations are appended.
        everywhere: True to treat all CPU tensors as if they were on the device.
    """

    def __init__(self, found: list[SyncError], *, everywhere: bool) -> None:
        super().__init__()
        self._found = found
        self._everywhere = everywhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = kwargs.get("device")
        if func in _FROM_HOST and target is not None and not isinstance(args[0], _Claiming):
            if _is_simulated(target):
                self._found.append(SyncError(name, _place()))
                return _Claiming(func(*args, **{**kwargs, "device": "cpu"}))
            if self._everywhere:
                self._found.append(SyncError(name, _place()))
        if self._everywhere:
            is_moved_home = name == "to" and any(str(each) == "cpu" for each in (*args[1:], target))
            if name in _READS or is_moved_home:
                self._found.append(SyncError(name, _place()))
        return func(*args, **kwargs)


def _is_simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == SIMULATED.type


def _run(found: list[SyncError], func: Any, args: Any, kwargs: Any, *, everywhere: bool) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    claiming = [each for each in tensors if isinstance(each, _Claiming)]
    target = kwargs.get("device")
    is_there = bool(claiming) or _is_simulated(target)
    name = func.overloadpacket.__name__
    if (is_there or (everywhere and tensors)) and _waits(func, name, args, kwargs, tensors, everywhere=everywhere):
        found.append(SyncError(f"aten.{name}", _place()))
    if not is_there:
        return func(*args, **kwargs)
    if name not in _COPIES | _BY_INDEX:
        _check_same_device(name, tensors)
    wrappers = {id(each.held): each for each in claiming}
    args, kwargs = tree_map(lambda each: each.held if isinstance(each, _Claiming) else each, (args, kwargs))
    goes_home = target is not None and torch.device(target).type == "cpu"
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "copy_":
        goes_home = not isinstance(tensors[0], _Claiming)
    result = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
    if goes_home:
        return result

    def claim(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return wrappers[id(each)] if id(each) in wrappers else _Claiming(each)

    return tree_map(claim, result)


def _waits(func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], *, everywhere: bool) -> bool:
    if name in _COPIES_NUMBERS | _BY_INDEX and not everywhere and not all(isinstance(e, _Claiming) for e in tensors):
        return True
    if name in _BY_INDEX:
        return any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)
    if name in _FILLS:
        return isinstance(args[-1], Tensor) and (everywhere or isinstance(args[-1], _Claiming))
    if name in _COPIES:
        target = kwargs.get("device")
        sides = {isinstance(each, _Claiming) for each in tensors}
        if name == "_to_copy" and target is not None:
            sides.add(_is_simulated(target))
        is_non_blocking = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        return len(sides) > 1 and not is_non_blocking
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return bool(_WAITING_TAGS.intersection(func.tags))


def _check_same_device(name: str, tensors: Sequence[Tensor]) -> None:
    """Check that all operands of the operation ``name`` are simulated or zero-dimensional, as real devices require.

    Raises:
        RuntimeError: if an operand is on the CPU and not zero-dimensional.
    """
    if any(not isinstance(each, _Claiming) and each.dim() for each in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {SIMULATED} and cpu")


def _place() -> str:
    """Return the file, line and function of the innermost stack frame that is neither in torch nor in this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown place"
