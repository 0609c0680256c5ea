"""Context manager that replaces CUDA by simulated devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_streams.cuda import FakeDevices
from tests.fake_streams.order import Race, Use, described
from tests.fake_streams.queues import Scheduler
from tests.fake_streams.tensors import _INNER, DeviceTensor, _mapped, run

_HOST_READS = {"numpy", "tolist", "__array__"}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}


@contextmanager
def fake_streams(
    seed: int,
    *,
    num_devices: int = 1,
    may_race: Callable[[Race], bool] = lambda _: False,
    pool: tuple[int, int] = (32, 4),
) -> Iterator[FakeDevices]:
    """Context manager in which ``torch.cuda`` is simulated. At its end all operations run.

    It also fails at its end if two uses of the same memory were launched that nothing orders, whether or not the order
    in which they ran did harm.

    Args:
        seed: chooses the order of operations, among the orders that a GPU allows.
        num_devices: number of devices.
        may_race: returns True for a race that is no fault.
        pool: see :class:`FakeDevices`. ``(1, 1)``: all streams other than the default stream are the same.

    Yields:
        The devices, which count the waits of the host and the operations.
    """
    devices = FakeDevices(Scheduler(seed), num_devices, pool)
    cuda = {
        "_sleep": devices.sleep,
        "Stream": devices.stream,
        "Event": devices.event,
        "current_device": devices.current_device,
        "current_stream": devices.current_stream,
        "default_stream": devices.default_stream,
        "device": devices.on,
        "device_count": lambda: devices.count,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "set_device": devices.set_device,
        "set_stream": devices.set_stream,
        "stream": devices.entered,
        "synchronize": devices.synchronize,
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(threading.Thread, "run", _in_modes(devices, threading.Thread.run)),
        _Functions(devices),
        _Operations(devices),
    ):
        yield devices
        devices.scheduler.drain()
        races = [each for each in devices.races if not may_race(each)]
        assert not races, f"{len(races)} races: " + "; ".join(map(described, races[:3]))


def _in_modes(devices: FakeDevices, run_thread: Any) -> Any:
    """Return a method ``run`` of threads that simulates in the new thread too; modes are per thread."""

    def simulated(thread: threading.Thread) -> None:
        with _Functions(devices), _Operations(devices):
            run_thread(thread)

    return simulated


class _Operations(TorchDispatchMode):
    """Mode in which tensors can be created on the devices."""

    def __init__(self, devices: FakeDevices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(self._devices, func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Mode in which torch's functions accept CUDA devices and pinned memory."""

    def __init__(self, devices: FakeDevices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        is_on_host = bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], DeviceTensor)
        if is_on_host and name == "pin_memory":
            return args[0] if args[0] in self._devices.pinned else self._devices.pinned.add(args[0].clone())
        if is_on_host and name == "is_pinned":
            return args[0] in self._devices.pinned
        if name == "cuda" and args and isinstance(args[0], Tensor):
            return args[0].to(torch.device("cuda", self._devices.index(None)))
        if func is torch.device:
            return func(*args, **kwargs)
        if name in _HOST_READS and args and isinstance(args[0], Tensor):
            self._devices.use_on_host(Use(name, self._devices.storages(args[:1])))
        is_pinned = bool(kwargs.pop("pin_memory", False))
        args, kwargs = _mapped(self._inner, (args, kwargs))
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = f"cuda:{kwargs['device']}"
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = self._inner(torch.device(kwargs["device"]))
        if func in _FROM_HOST and getattr(kwargs.get("device"), "type", None) == _INNER:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if name == "to":
            args = tuple(self._inner(torch.device(each)) if isinstance(each, str) else each for each in args)
        result = func(*args, **kwargs)
        return self._devices.pinned.add(result) if is_pinned else result

    def _inner(self, each: Any) -> Any:
        """Return the device type that torch sees instead of CUDA."""
        if isinstance(each, torch.device) and each.type == "cuda":
            return torch.device(_INNER, self._devices.index(each))
        return each
