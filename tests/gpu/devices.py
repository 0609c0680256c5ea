"""Device on which the tests of this folder run: ``cuda``, ``simulated`` (on any machine), or ``cpu``.

The variable ``DELTA_TRACKER_DEVICE`` has its name, by default ``cuda`` on a machine with a GPU and otherwise
``simulated``. Tensors of the simulated device are those of :mod:`tests.syncs`. It can hold no module and runs no kernel
of FBGEMM or Triton: cases that need one run on the CPU instead, and cases that need something in :data:`MISSING` are
skipped. No file outside ``tests/gpu/fbgemm/`` imports torchrec or fbgemm.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.syncs import SIMULATED, assert_no_sync, find_syncs, held, on_device

KIND = os.environ.get("DELTA_TRACKER_DEVICE") or ("cuda" if torch.cuda.is_available() else "simulated")
if KIND not in ("cuda", "simulated", "cpu"):
    raise ValueError(f"unknown device: DELTA_TRACKER_DEVICE={KIND}. Pass DEVICE=cuda or DEVICE=simulated")

IS_CUDA = KIND == "cuda"
IS_TINY = not IS_CUDA
"""True if sizes are as small as the case allows."""

IS_SHORT = KIND == "simulated"
"""True if only a few of many similar cases run."""

MISSING = {
    "streams": "CUDA streams, events and the caching allocator: no work runs later than its launch, so no race shows",
    "graphs": "CUDA graphs",
    "memory": "device memory of gigabytes",
    "uvm": "unified memory, with or without a cache: FBGEMM has it on CUDA only",
    "optimizers": "FBGEMM's Adam, partial row-wise Adam, LAMB and LARS: they exist on CUDA only",
    "bfloat16": "FBGEMM's tables of bfloat16 rows: its CPU kernels have no lookup of them",
    "fbgemm": "FBGEMM's kernels on a device; its CPU kernels run instead",
    "nccl": "NCCL; gloo runs instead",
    "triton": "Triton's compiled kernels; its interpreter runs in tests/system/test_triton_interpreter.py",
}
"""Name to description of what only a CUDA device has."""

OF_MODULES = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
"""Device of modules and kernels."""

ENGINES = ["torch", *(["triton"] if IS_CUDA and find_spec("triton") else [])]
"""Engines of row sets on the device."""


def needs(*features: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test except on CUDA. ``features`` are keys of :data:`MISSING`."""
    reason = "; ".join(MISSING[feature].partition(":")[0] for feature in features)
    return pytest.mark.skipif(not IS_CUDA, reason=f"needs {reason}")


def put(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor on the device."""
    if KIND == "simulated":
        return on_device(tensor.clone())
    return tensor.to(OF_MODULES, copy=True)


def take(tensor: Tensor) -> Tensor:
    """Return the data of a tensor on the CPU. Not counted as a synchronization."""
    return held(tensor) if KIND == "simulated" else tensor.cpu()


def device() -> torch.device:
    """Return the device of the tensors that :func:`put` returns."""
    return SIMULATED if KIND == "simulated" else OF_MODULES


def simulation() -> AbstractContextManager[object]:
    """Return a context manager in which torch's functions create tensors on the simulated device."""
    return find_syncs() if KIND == "simulated" else nullcontext()


def no_sync() -> AbstractContextManager[None]:
    """Return a context manager that raises if the host waits for the device. No-op on the CPU."""
    if IS_CUDA:
        return _no_sync()
    return assert_no_sync() if KIND == "simulated" else nullcontext()


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Side:
    """A CUDA stream of its own. Elsewhere, work runs where it is launched."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if IS_CUDA else None

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """The stream; empty if there is none."""
        return [] if self._stream is None else [self._stream]

    def __call__(self) -> AbstractContextManager[object]:
        """Return a context manager in which work is launched on the stream, without waiting for other streams."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def catch_up(self) -> None:
        """Make later work on the stream wait for the work launched so far on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        """Wait on the host until all work on the stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def wait() -> None:
    """Wait on the host until all work on the device is done."""
    if IS_CUDA:
        torch.cuda.synchronize()


def slow_down(milliseconds: float = 20) -> None:
    """Delay the work that is launched next on the current CUDA stream. No-op elsewhere."""
    if IS_CUDA:
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles, at 1.5 GHz
