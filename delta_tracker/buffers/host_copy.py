"""Copies of device tensors to pinned host memory that do not block the thread that starts them."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copy of a device tensor in host memory.

    On CUDA, the constructor starts the copy and does not wait for the device, unless torch has to allocate pinned
    memory. On other devices, :meth:`result` makes the copy. This class has not been tested on a GPU.

    Args:
        source: the tensor. It must not be written between this call and the completion of the copy, except by later
            work on the CUDA stream that copies.
        stream: CUDA stream that copies, after the work that is queued on the current stream; None for the current
            stream. Pass :func:`side_stream`, so that later work on the current stream does not wait for the copy. The
            memory of ``source`` must then come from torch's allocator.
        into: host memory of the size and dtype of ``source``, which must be pinned for a copy from CUDA; None to
            allocate it.

    Attributes:
        copied: event after the copy on CUDA; None on other devices.
    """

    __slots__ = ("_host", "_source", "copied")

    def __init__(self, source: Tensor, *, stream: Any = None, into: Tensor | None = None) -> None:  # noqa: ANN401
        self._source: Tensor | None = source  # keeps the memory from being reused before the copy is complete
        self._host = into
        self.copied: Any = None
        if source.device.type == "cuda":
            self._start(source, stream)

    @property
    def is_done(self) -> bool:
        """True if the copy is complete. Does not wait. On devices other than CUDA, False until :meth:`result`."""
        return self._source is None if self.copied is None else bool(self.copied.query())

    @property
    def is_running(self) -> bool:
        """True if the copy is started and not complete. Does not wait. Always False on devices other than CUDA."""
        return self.copied is not None and not self.copied.query()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the copy in host memory; 0 if it was not started."""
        return 0 if self._host is None else self._host.nbytes

    def result(self) -> Tensor:
        """Return the copy, a CPU tensor. Waits until it is complete. Releases the source."""
        if self.copied is None and self._source is not None:
            self._host = self._source.cpu() if self._host is None else self._host.copy_(self._source)
        elif self.is_running:
            self.copied.synchronize()
        self._source = None
        assert self._host is not None, "the copy is complete"
        return self._host

    def _start(self, source: Tensor, stream: Any) -> None:  # noqa: ANN401  torch's stubs have no common type
        current = torch.cuda.current_stream(source.device)
        if stream is not None:
            stream.wait_stream(current)
            source.record_stream(stream)  # frees the memory after the copy, even if nothing waits for it
            self._source = None
        with torch.cuda.stream(current if stream is None else stream):
            if self._host is None:
                # A tensor created in inference mode cannot be written in place outside it.
                with torch.inference_mode(mode=False):
                    self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            # A thread that waits for this event does not run a busy loop.
            self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.copied.record()


def side_stream(device: torch.device) -> Any:  # noqa: ANN401  torch's stubs have no common type
    """Return a CUDA stream of a device, other than the current one, for :class:`HostCopy`; None for other devices."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
