"""Tensors of the simulated devices, and what an operation on them appends to the queue of the current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor

from tests.fake_streams.cuda import FakeDevices, FakeStream
from tests.fake_streams.order import Use
from tests.fake_streams.queues import Queue, Scheduler

# torch checks this device type like a real one but has no kernels for it; see tests/syncs.py.
_INNER = "lazy"
_GARBAGE = 0xA5  # in memory that was not written, or was freed
_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}

Function = Callable[..., Any]

EMULATED: dict[str, Function] = {}
"""Function for an operator that has no kernel for the CPU or for the meta device, by qualified name."""


class _Block:
    """Memory on a device, which is freed when the last tensor that uses it is gone.

    As in torch's allocator, the memory may be used again at once by later operations of the stream that allocated it.
    Other streams must have called ``record_stream``.
    """

    def __init__(self, devices: FakeDevices, stream: FakeStream, held: Tensor) -> None:
        self.devices = devices
        self.stream = stream
        self.others: set[FakeStream] = set()
        self.storage = held.untyped_storage()
        self.is_freed = False

    def __del__(self) -> None:
        if not self.is_freed:
            self.free()

    def free(self) -> None:
        self.is_freed, storage = True, self.storage
        others = [other.queue for other in self.others]
        self.devices.scheduler.free(self.stream.queue, storage, partial(_spoil, storage), others)

    def allocate(self, num_bytes: int) -> None:
        """Allocate other memory on the current stream, with which :meth:`DeviceTensor.set_` makes new tensors."""
        self.storage, self.is_freed = torch.UntypedStorage(num_bytes), False
        _spoil(self.storage)
        self.stream = self.devices.current_stream(self.stream.device_index)
        self.others = set()


class _Storage:
    """Storage of a tensor on a device, as :meth:`DeviceTensor.untyped_storage` returns it."""

    def __init__(self, block: _Block) -> None:
        self.block = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block.storage, name)

    def size(self) -> int:
        return 0 if self.block.is_freed else self.block.storage.nbytes()

    nbytes = size

    def data_ptr(self) -> int:
        return 0 if self.block.is_freed else self.block.storage.data_ptr()

    def resize_(self, num_bytes: int) -> None:
        if not num_bytes:
            self.block.free()
        else:
            self.block.allocate(num_bytes)


class DeviceTensor(Tensor):
    """Tensor whose ``device`` is a simulated CUDA device. ``held`` is a CPU tensor with the data.

    ``host`` is the host tensor that was assigned to ``data``, which moves the tensor to the host; None on the device.
    """

    held: Tensor
    block: _Block
    host: Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, block: _Block) -> Self:
        result = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{_INNER}:{block.stream.device_index}",
        )
        result.held = held
        result.block = block
        result.host = None
        return result

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, DeviceTensor):
            self.held, self.block, self.host = value.held, value.block, value.host
        else:
            self.host = value

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.block.stream.device_index) if self.is_cuda else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.host is None

    def set_(self, source: Any, storage_offset: int, size: Any, stride: Any) -> Self:  # type: ignore[override]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.held = torch.empty(0, dtype=self.dtype).set_(source.block.storage, storage_offset, size, stride)
        self.block = source.block
        return self

    def numel(self) -> int:
        return self.held.numel()

    def get_device(self) -> int:
        return self.block.stream.device_index

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return _Storage(self.block) if self.host is None else self.host.untyped_storage()

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.Tensor' only dense CPU tensors can be pinned")

    def record_stream(self, stream: FakeStream) -> None:
        if stream != self.block.stream:
            self.block.others.add(stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self.cpu().numpy()

    def __repr__(self) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(each for each in _leaves((args, kwargs or {})) if isinstance(each, DeviceTensor))
        return run(found.block.devices, func, args, kwargs or {})


def on_device(devices: FakeDevices, held: Tensor, index: int | None = None) -> DeviceTensor:
    """Return a tensor on a simulated device that has the data of ``held``, a CPU tensor, at once."""
    stream = devices.current_stream(index)
    return DeviceTensor(held, _Block(devices, stream, held))


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts."""
    if isinstance(tree, (tuple, list)):
        return [leaf for each in tree for leaf in _leaves(each)]
    if isinstance(tree, dict):
        return [leaf for each in tree.values() for leaf in _leaves(each)]
    return [tree]


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested tuples, lists and dicts with ``function`` applied to each leaf."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(function, each) for each in tree])
    if isinstance(tree, dict):
        return {name: _mapped(function, each) for name, each in tree.items()}
    return function(tree)


def run(devices: FakeDevices, func: Any, args: Any, kwargs: Any) -> Any:
    """Append an operation to the queue of the current stream, and return its results, which have no data yet.

    Operations without a tensor or result on a device run at once.
    """
    with devices.scheduler.lock:
        return _Call(devices, func, *_mapped(_on_host, (args, kwargs))).result()


class _Call:
    """Call of an operator."""

    def __init__(self, devices: FakeDevices, func: Any, args: Any, kwargs: Any) -> None:
        self._devices = devices
        self._func = func
        self._name = func.overloadpacket.__name__
        self._args, self._kwargs = args, kwargs
        flat = _leaves((args, kwargs))
        self._tensors = [each for each in flat if isinstance(each, Tensor)]
        self._on_device = [each for each in self._tensors if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        self._target = None if target is None else torch.device(target)
        if (
            self._target is not None and self._target.type == "cuda"
        ):  # in hooks of autograd no mode of functions applies
            self._target = torch.device(_INNER, devices.index(self._target))
        if self._on_device:
            self._index = self._on_device[0].get_device()
        elif self._target is not None and self._target.type == _INNER:
            self._index = devices.index(self._target.index)

    def result(self) -> Any:  # noqa: PLR0911  one for each kind of operation
        goes_to_device = self._target is not None and self._target.type == _INNER
        if not self._on_device and not goes_to_device:
            self._used_by_host()
            return self._func(*self._args, **self._kwargs)
        if self._name == "_to_copy" and self._on_device and self._target is not None and not goes_to_device:
            return self._to_host()
        if self._name == "copy_" and not isinstance(self._tensors[0], DeviceTensor):
            return self._copy_to_host()
        if (self._name in ("_to_copy", "copy_")) and not isinstance(self._tensors[-1], DeviceTensor):
            return self._to_device()
        if _returns_views(self._func):
            return self._wrap(self._func(*self._held(self._args), **self._held(self._kwargs)), self._on_device[0].block)
        self._check_devices()
        if self._waits():
            self._devices.wait(self._stream().queue.last)
            self._used_by_host()
            result = self._func(*self._held(self._args), **self._held(self._kwargs))
            written = {id(each.held): each for each in self._on_device}
            return _mapped(lambda each: written.get(id(each)) or self._new(each), result)
        if self._name.removeprefix("new_").startswith("empty"):
            return self._results(*self._called(self._args, self._kwargs))
        return self._append(*self._called(self._args, self._kwargs))

    # Copies between host and device

    def _to_host(self) -> Tensor:
        (source,) = self._tensors
        is_async = bool(self._kwargs.get("non_blocking"))
        dtype = self._kwargs.get("dtype") or source.dtype
        host = _garbage(torch.empty(source.shape, dtype=dtype))
        if is_async:  # torch then allocates pinned memory
            self._devices.pinned.add(host)
        return self._enqueue_copy(host, source, is_async=is_async)

    def _copy_to_host(self) -> Tensor:
        host, source = self._tensors
        is_pinned = host in self._devices.pinned
        self._devices.num_pageable += not is_pinned
        return self._enqueue_copy(host, source, is_async=self._is_non_blocking() and is_pinned)

    def _enqueue_copy(self, host: Tensor, source: DeviceTensor, *, is_async: bool) -> Tensor:
        self._devices.num_operations += 1
        copy, use = partial(host.copy_, source.held), self._use([source], [host])
        operation = self._devices.scheduler.append(self._stream().queue, copy, use=use)
        if not is_async:
            self._devices.wait(operation)
        return host

    def _to_device(self) -> Any:
        source = self._tensors[-1]
        is_pinned = source in self._devices.pinned
        is_async = self._is_non_blocking()
        if source.dim() and not is_pinned:
            self._devices.num_pageable += 1
        # CUDA has read pageable memory when the call returns; pinned memory is read when the copy runs.
        read = source if is_pinned and is_async else source.clone()
        args, kwargs = _mapped(lambda each: read if each is source else each, (self._args, self._kwargs))
        result = self._append(*self._called(args, kwargs))
        if not is_async and source.dim() and source.numel():
            self._devices.wait(self._stream().queue.last)
        return result

    def _is_non_blocking(self) -> bool:
        return bool(self._kwargs.get("non_blocking") or (self._name == "copy_" and self._args[2:] == (True,)))

    # Operations on the device

    def _called(self, args: Any, kwargs: Any) -> tuple[Function, Any, Any]:
        """Return the function that runs on the CPU, with its arguments."""
        kwargs = {name: each for name, each in kwargs.items() if name not in ("pin_memory", "non_blocking")}
        if self._target is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs = kwargs if self._name != "copy_" else {}
        args = args[:2] if self._name == "copy_" else args
        return EMULATED.get(self._func._schema.name, self._func), args, kwargs

    def _append(self, func: Function, args: Any, kwargs: Any) -> Any:
        written = self._written()
        outs = None if written else self._results(func, args, kwargs)
        fresh = [each.held for each in _leaves(outs) if isinstance(each, DeviceTensor)]
        launch = _Launch(func, self._held(args), self._held(kwargs), [each.held for each in written], fresh)
        self._devices.num_operations += 1
        use = self._use([] if self._is_factory() else (args, kwargs), [written, outs])
        launch.append(self._devices.scheduler, self._stream().queue, use)
        if not written:
            return outs
        num_returns = len(self._func._schema.returns)
        assert num_returns in (0, len(written)), f"{self._func} returns more than the tensors that it writes"
        return None if not num_returns else written[0] if num_returns == 1 else tuple(written)

    def _results(self, func: Function, args: Any, kwargs: Any) -> Any:
        """Return tensors for the results of a call; they have no data yet."""
        key = self._func, _key(args), _key(kwargs)
        if key not in _SHAPES:
            args, kwargs = _mapped(_to_meta, (self._held(args), self._held(kwargs)))
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
            _SHAPES[key] = func(*args, **kwargs)
        return _mapped(lambda each: self._allocated(each) if isinstance(each, Tensor) else each, _SHAPES[key])

    def _stream(self) -> FakeStream:
        return self._devices.current_stream(self._index)

    def _written(self) -> list[Tensor]:
        """Return the arguments that the operator writes."""
        found = []
        for number, name in _written_arguments(self._func):
            value = self._args[number] if number < len(self._args) else self._kwargs.get(name)
            found += [each for each in _leaves(value) if isinstance(each, Tensor)]
        return found

    def _use(self, read: Any, written: Any) -> Use:
        return Use(str(self._func), self._devices.storages(_leaves(read)), self._devices.storages(_leaves(written)))

    def _used_by_host(self) -> None:
        if not _returns_views(self._func) and not self._is_factory():
            self._devices.use_on_host(self._use(self._tensors, self._written()))

    def _is_factory(self) -> bool:
        return self._name.startswith("new_") or self._name.endswith("_like")

    def _waits(self) -> bool:
        if self._name in _BY_INDEX:
            indices = [each for each in self._args[1] if each is not None]
            is_elsewhere = any(not isinstance(each, DeviceTensor) and each.dim() for each in indices)
            return is_elsewhere or any(each.dtype in (torch.bool, torch.uint8) for each in indices)
        return bool(_DYNAMIC.intersection(self._func.tags))

    def _check_devices(self) -> None:
        """Raise as a real device does if a tensor is on the host or on another device."""
        if self._target is not None and self._on_device and self._devices.index(self._target.index) != self._index:
            raise NotImplementedError(f"{self._name} from one device to another")
        for each in self._tensors if self._name not in _BY_INDEX else self._on_device:
            is_there = isinstance(each, DeviceTensor) and each.get_device() == self._index
            if not is_there and (each.dim() or isinstance(each, DeviceTensor)):
                raise RuntimeError(f"{self._name}: expected all tensors to be on the same device")

    def _held(self, tree: Any) -> Any:
        """Replace tensors on a device by their data, and 0-dimensional host tensors by their present value."""
        return _mapped(_held, tree)

    def _new(self, each: Any) -> Any:
        return on_device(self._devices, each, self._index) if isinstance(each, Tensor) else each

    def _allocated(self, shape: Tensor) -> DeviceTensor:
        held = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        return self._new(_garbage(held))

    def _wrap(self, tree: Any, block: _Block) -> Any:
        return _mapped(lambda each: DeviceTensor(each, block) if isinstance(each, Tensor) else each, tree)


class _Launch:
    """Append an operation to a queue, in one part or in two.

    Two parts write different halves of each row, so that operations of other streams can run in between, as they can
    while a kernel runs. No tensor on a device is kept, because the host may free it before the operation runs.
    """

    def __init__(self, func: Function, args: Any, kwargs: Any, written: list[Tensor], fresh: list[Tensor]) -> None:
        self._func = func
        self._args, self._kwargs = args, kwargs
        self._written = written
        self._fresh = fresh

    def append(self, scheduler: Scheduler, queue: Queue, use: Use) -> None:
        if scheduler.random.random() < 0.5:
            scheduler.append(queue, self._whole, use=use)
            return
        share, final = scheduler.random.random(), []

        def first() -> None:
            final.extend(self._computed())
            for memory, value in zip([*self._written, *self._fresh], final, strict=True):
                _copy_part(memory, value, share, is_first=True)

        def second() -> None:
            # A kernel that only reads its inputs may read some of them late. Inputs that it writes were read.
            values = final if self._written else self._computed()
            for memory, value in zip([*self._written, *self._fresh], values, strict=True):
                _copy_part(memory, value, share, is_first=False)

        scheduler.append(queue, first, use=use)
        scheduler.append(queue, second)

    def _whole(self) -> None:
        for memory, value in zip([*self._written, *self._fresh], self._computed(), strict=True):
            memory.copy_(value)

    def _computed(self) -> list[Tensor]:
        """Return what the operation writes, without writing it."""
        copies = {id(each): _cloned(each) for each in self._written}
        args, kwargs = _mapped(lambda each: copies.get(id(each), each), (self._args, self._kwargs))
        result = self._func(*args, **kwargs)
        fresh = [each for each in _leaves(result) if isinstance(each, Tensor)] if self._fresh else []
        return [*copies.values(), *fresh]


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the numbers and names of the arguments that an operator may write."""
    arguments = enumerate(func._schema.arguments)
    return [(number, each.name) for number, each in arguments if each.alias_info and each.alias_info.is_write]


@cache
def _returns_views(func: Any) -> bool:
    """Return True if an operator returns views of its arguments and does not write them."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


_SHAPES: dict[Any, Any] = {}  # call without its data to its results on the meta device


def _key(tree: Any) -> Any:
    """Return the shapes, dtypes and numbers of a call."""
    if isinstance(tree, (tuple, list)):
        return tuple(_key(each) for each in tree)
    if isinstance(tree, dict):
        return tuple((name, _key(each)) for name, each in tree.items())
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    return type(tree), tree


def _on_host(each: Any) -> Any:
    """Return the host tensor that a tensor was moved to."""
    return each.host if isinstance(each, DeviceTensor) and each.host is not None else each


def _held(each: Any) -> Any:
    if isinstance(each, DeviceTensor):
        return each.held
    return each.clone() if isinstance(each, Tensor) and not each.dim() else each


def _cloned(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def _copy_part(memory: Tensor, value: Tensor, share: float, *, is_first: bool) -> None:
    """Copy the left or the right columns of a tensor."""
    if not memory.dim():
        memory = memory if is_first else memory.new_empty(0)
        value = value if is_first else value.new_empty(0)
    else:
        columns = round(memory.shape[-1] * share)
        part = slice(columns) if is_first else slice(columns, None)
        memory, value = memory[..., part], value[..., part]
    memory.copy_(value)


def _to_meta(each: Any) -> Any:
    if isinstance(each, Tensor):
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta") if each.dim() else each
    return each


def _garbage(tensor: Tensor) -> Tensor:
    _spoil(tensor.untyped_storage())
    return tensor


def _spoil(storage: torch.UntypedStorage) -> None:
    """Fill memory with garbage."""
    ctypes.memset(storage.data_ptr(), _GARBAGE, storage.nbytes())
