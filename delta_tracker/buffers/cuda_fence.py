"""Order the work that several CUDA streams queue on shared memory.

Work on one stream runs in the order in which it was queued. Work on different streams may run in any order, unless one
stream waits for the other.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class StreamFence:
    """Fence that orders the use of shared memory by different CUDA streams.

    Call :meth:`enter` before each use, on the stream that will run the work. This stream then waits for the streams of
    earlier uses, including all work that was queued on them so far. Neither the calling thread nor any other stream
    waits. Devices other than CUDA devices need no fence and are ignored.

    The fence also registers the memory with each new stream, so that the caching allocator does not reuse it before
    that stream has finished its work. Callers must serialize the calls.

    Args:
        tensors: function that returns all tensors of the shared memory that may be freed. It is called only if the
            stream changes.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._devices: tuple[torch.device, ...] = ()
        self._used: dict[torch.device, list[Any]] = {}  # streams that the next use must wait for
        self._open: dict[int, dict[torch.device, Any]] = {}  # key of a use to its streams

    def guard(self, devices: Iterable[torch.device]) -> None:
        """Set the devices of the shared memory."""
        self._devices = tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))

    def enter(self, key: int | None = None) -> None:
        """Make the current stream of each device wait for the streams of earlier uses.

        Args:
            key: key of this use, if more work will be queued on the stream until :meth:`leave`. Until then, each use on
                another stream waits for this stream, and so does the first use after :meth:`leave`.
        """
        for device in self._devices:
            stream, used = torch.cuda.current_stream(device), self._used.get(device, [])
            if used != [stream]:
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
        """Return the stream of the last use on ``device``; None if there was none, or if no fence is needed.

        Work that is queued on this stream is ordered after this use and before the next one, and makes no stream wait.
        """
        return next(iter(self._used.get(device, ())), None)

    def leave(self, key: int) -> bool:
        """End the use ``key``. Return False if there is no such use, which is always the case without CUDA devices."""
        return self._open.pop(key, None) is not None
