"""Asynchronous copies of device tensors to pinned host memory."""

from typing import Any

import torch
from torch import Tensor

from delta_tracker.buffers.cuda_fence import on_stream


class HostCopy:
    """Asynchronous copy of a device tensor to host memory.

    On CUDA, the constructor starts the copy and does not wait for the device, unless torch has to allocate pinned
    memory. On other devices, :meth:`result` makes the copy. This class has not been tested on a GPU.

    Args:
        source: tensor to copy. Until the copy is complete, only later work on the stream of the copy may write to it.
        stream: CUDA stream for the copy, usually a :func:`side_stream`; None for the current stream. The copy waits for
            the work that is already queued on the current stream. Later work on that stream does not wait for the copy.
            The memory of ``source`` must come from torch's caching allocator.
        into: CPU tensor with the size and dtype of ``source``, pinned if ``source`` is on CUDA; None to allocate one.

    Attributes:
        copied: CUDA event that is recorded after the copy; None on other devices.
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
        """True if the copy is complete. Does not wait. Without CUDA, it is False until :meth:`result` is called."""
        return self._source is None if self.copied is None else bool(self.copied.query())

    @property
    def is_running(self) -> bool:
        """True if the copy has started but is not complete. Does not wait. Always False on devices other than CUDA."""
        return self.copied is not None and not self.copied.query()

    @property
    def num_bytes(self) -> int:
        """Size of the copy in bytes; 0 if its memory is not allocated yet."""
        return 0 if self._host is None else self._host.nbytes

    def result(self) -> Tensor:
        """Wait until the copy is complete, and return it as a CPU tensor. Releases the source tensor."""
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
        with on_stream(current if stream is None else stream):
            if self._host is None:
                # A tensor created in inference mode cannot be written in place outside it.
                with torch.inference_mode(mode=False):
                    self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True, device="cpu")
            self._host.copy_(source, non_blocking=True)
            # A thread that waits for this event does not run a busy loop.
            self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.copied.record()


def side_stream(device: torch.device) -> Any:  # noqa: ANN401  torch's stubs have no common type
    """Return a CUDA stream for a :class:`HostCopy` that runs concurrently with other work; None for other devices."""
    if device.type != "cuda":
        return None
    # Torch returns 32 streams of each priority in turn. Training could wait for copies on those of TorchRec (0 and -1)
    # and NCCL (-3). A device with two priorities takes -1 instead.
    return torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call]
