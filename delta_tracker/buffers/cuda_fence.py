"""Synchronization of CUDA streams that use the same memory.

Work on one stream runs in the order in which it was queued. Work on different streams may run in any order, unless one
stream waits for the other.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StreamFence:
    """Fence that orders the accesses of several CUDA streams to the same memory.

    Before each use of the memory, call :meth:`enter` while the stream of this use is the current stream. This stream
    then waits for all work queued on the streams of earlier uses. The calling thread and other streams do not wait. On
    devices other than CUDA, the fence does nothing. Callers must serialize the calls.

    For each new stream, the fence also calls ``Tensor.record_stream`` on the tensors in the memory. If one is freed,
    the caching allocator then reuses its memory only after the queued work of that stream is complete.

    Args:
        tensors: function that returns the tensors to call ``record_stream`` on. Called only if the stream changes.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._devices: tuple[torch.device, ...] = ()
        self._used: dict[torch.device, list[Any]] = {}  # streams that the next use must wait for
        self._open: dict[int, dict[torch.device, Any]] = {}  # key of a use to its streams

    def guard(self, devices: Iterable[torch.device]) -> None:
        """Set the devices that contain the memory. Devices other than CUDA are ignored."""
        self._devices = tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))

    def enter(self, key: int | None = None) -> None:
        """Make the current stream of each device wait for the streams of earlier uses.

        Args:
            key: identifier of a use that queues work on the current streams until :meth:`leave` is called with the same
                key. Each use on another stream until then, and the first one afterwards, waits for these streams. None
                for a use that queues all its work before the next :meth:`enter`.
        """
        for device in self._devices:
            stream, used = torch.cuda.current_stream(device), self._used.get(device, [])
            # A captured stream must not wait for work that is not captured: CUDA would invalidate the capture.
            if used != [stream] and not _is_capturing(device):
                others = [each for each in used if each != stream]
                for other in others:
                    stream.wait_stream(other)
                for tensor in self._tensors() if others else ():
                    if tensor.device == device:
                        tensor.record_stream(stream)
                is_open = [streams[device] for streams in self._open.values() if device in streams]
                self._used[device] = [stream, *dict.fromkeys(each for each in is_open if each != stream)]
            if key is not None:
                self._open.setdefault(key, {})[device] = stream

    def last_stream(self, device: torch.device) -> Any:  # noqa: ANN401  torch's stubs have no common type
        """Return the stream of the last use on ``device``; None before the first use and for devices other than CUDA.

        Work queued on this stream runs after that use and before the next one.
        """
        return next(iter(self._used.get(device, ())), None)

    def leave(self, key: int) -> bool:
        """End the use that was started with ``key``. Return False if there is none, as on devices other than CUDA."""
        return self._open.pop(key, None) is not None


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:  # noqa: ANN401  torch's stubs have no common type
    """Context manager that makes ``stream`` the current stream, and its device the current device."""
    # Otherwise, torch sets the former device at exit, which creates a CUDA context there, of hundreds of MB.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
