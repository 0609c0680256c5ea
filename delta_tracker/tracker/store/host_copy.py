"""Copies of device tensors to pinned host memory that do not block the thread that starts them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copy of a device tensor in host memory.

    On CUDA, the constructor starts the copy and does not wait for the device, except that torch may have to allocate
    pinned memory. On other devices, :meth:`result` makes the copy. The class was not run on a GPU.

    Args:
        source: the tensor. It must not be written between this call and the completion of the copy, except by later
            work on the current stream if ``aside`` is False.
        aside: True to copy on another CUDA stream, so that later work on the current stream does not wait for the copy.
    """

    __slots__ = ("_event", "_host", "_source")

    def __init__(self, source: Tensor, *, aside: bool = False) -> None:
        self._source: Tensor | None = source  # keeps the memory from being reused before the copy is complete
        self._host: Tensor | None = None
        self._event: Any = None
        if source.device.type == "cuda":
            self._start(source, aside=aside)

    @property
    def is_done(self) -> bool:
        """True if the copy is complete. Does not wait. On devices other than CUDA, False until :meth:`result`."""
        return self._source is None or (self._event is not None and self._event.query())

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the copy in host memory; 0 if it was not started."""
        return 0 if self._host is None else self._host.nbytes

    def result(self) -> Tensor:
        """Return the copy, a CPU tensor. Waits until it is complete. Releases the source."""
        if self._source is not None:
            if self._event is None:
                self._host = self._source.cpu()
            elif not self._event.query():
                self._event.synchronize()
            self._source = None
        assert self._host is not None, "the copy is complete"
        return self._host

    def _start(self, source: Tensor, *, aside: bool) -> None:
        current = torch.cuda.current_stream(source.device)
        stream = torch.cuda.Stream(source.device) if aside else current  # type: ignore[no-untyped-call]
        with torch.cuda.device(source.device), torch.cuda.stream(stream):
            if aside:
                stream.wait_stream(current)
            # A tensor created in inference mode cannot be written in place outside it.
            with torch.inference_mode(mode=False):
                self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)
