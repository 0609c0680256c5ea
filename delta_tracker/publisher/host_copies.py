"""Copy tensors from any device to host memory without waiting for the device.

Notation: ``N`` is the number of rows to copy, and ``R`` is the number of rows of the source tensor.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from delta_tracker.buffers import BufferPool
from delta_tracker.buffers.cuda_fence import on_stream
from delta_tracker.buffers.host_copy import HostCopy, side_stream
from delta_tracker.stream.format.block_rows import CHUNK_BYTES

MAX_BUFFER_BYTES = 256 << 20
"""Largest size of a buffer on a CUDA device, in bytes. At most two buffers exist at a time."""

_ALIGNMENT = 16  # of each tensor in a buffer: enough for every dtype


class SelectedRows:
    """Rows to copy to the host, and the resulting copy.

    Args:
        rows: ``[R, ...]`` tensor on any device.
        ids: ``[N]`` int64 indices of the rows to copy, on the device of ``rows``; None for all rows.
        offset: number that is added to each copied value. It must be 0 if ``ids`` is given.

    Attributes:
        num_rows: ``N``.
        row_bytes: size of a row in bytes.
        copied: copy of the rows, ``[N, ...]``, set by :meth:`HostCopier.copy`.
    """

    __slots__ = ("copied", "ids", "num_rows", "offset", "row_bytes", "rows")

    copied: Tensor

    def __init__(self, rows: Tensor, ids: Tensor | None = None, offset: int = 0) -> None:
        # Instead of no_grad(), which stays on after a KeyboardInterrupt at its start.
        self.rows = rows.detach() if rows.requires_grad else rows
        self.ids = ids
        self.offset = offset
        # Not len(), which takes longer. Small versions of many tables have little else to do.
        self.num_rows = rows.shape[0] if ids is None else ids.shape[0]
        self.row_bytes = math.prod(rows.shape[1:]) * rows.element_size()

    def copy(self, begin: int, end: int, out: Tensor) -> None:
        """Copy the selected rows ``[begin, end)`` to ``out``, a tensor on the device of ``rows``."""
        rows, ids = self.rows, self.ids
        if end - begin < self.num_rows:  # avoids the time of a view
            rows, ids = (rows[begin:end], None) if ids is None else (rows, ids[begin:end])
        if ids is not None:
            torch.index_select(rows, 0, ids, out=out)
        elif self.offset:
            torch.add(rows, self.offset, out=out)
        else:
            out.copy_(rows)

    def copy_chunks(self) -> None:
        """Copy the selected rows to :attr:`copied` in chunks that fit in the CPU cache. The rows must be on the CPU."""
        step, out = CHUNK_BYTES // max(1, self.row_bytes), self.copied
        if self.num_rows <= step:
            self.copy(0, self.num_rows, out)
            return
        step = max(1, step)
        for begin in range(0, self.num_rows, step):
            end = min(begin + step, self.num_rows)
            self.copy(begin, end, out[begin:end])


class HostCopier:
    """Copier of rows from any device to host memory. All methods must be called from the same thread.

    On a CUDA device, the current stream copies the rows to a buffer, and a side stream copies the buffer to pinned
    memory. If the rows exceed 256 MiB, they are copied in chunks through two buffers of this size, which delays later
    work on the current stream. If device memory is low, smaller buffers are used.

    On devices other than CUDA and the CPU, all rows are copied to one buffer. This buffer is copied to the host when
    ``result()`` of the returned copy is called.

    Until a copy is complete, its buffers use as much device memory as the rows, but at most 512 MiB on CUDA. The copy
    uses as much host memory as the rows. This memory is reused after the copy has been garbage-collected. Torch rounds
    the size of pinned memory up to a power of two and never frees it. The CUDA path has not been tested on a GPU.
    """

    def __init__(self) -> None:
        self._pool = BufferPool(sys.maxsize)
        self._streams: dict[torch.device, Any] = {}

    def copy(self, selections: Sequence[SelectedRows]) -> list[HostCopy]:
        """Start copying rows without waiting. The copies include all writes that are queued on the current streams.

        Sets :attr:`SelectedRows.copied` of each selection. Wait for all returned copies before you read this attribute.
        """
        started: list[HostCopy] = []
        groups: dict[torch.device, list[SelectedRows]] = {}
        for selection in selections:
            groups.setdefault(selection.rows.device, []).append(selection)
        for device, group in groups.items():
            layout = _Layout(group)
            if device.type == "cuda" or not layout.num_bytes:  # the strides of an empty array do not suit all dtypes
                host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=layout.num_bytes > 0, device="cpu")
            else:
                host = torch.from_numpy(self._pool.allocate(layout.num_bytes))
            layout.assign(host)
            if device.type == "cpu":
                for selection in group:
                    selection.copy_chunks()
            elif layout.num_bytes:
                started.append(self._start(layout, host, device))
        return started

    def reader(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor from ``device`` to the host and waits for the copy.

        Any thread may call the function. The copy includes all writes that were queued on the current stream before
        this method was called. It may include later writes.
        """
        if device.type != "cuda":
            return partial(Tensor.to, device="cpu", copy=True)
        stream, ready = self._stream(device), torch.cuda.current_stream(device).record_event()

        def read(tensor: Tensor) -> Tensor:
            with on_stream(stream):
                stream.wait_event(ready)
                return HostCopy(tensor).result()

        return read

    def _start(self, layout: "_Layout", host: Tensor, device: torch.device) -> HostCopy:
        """Start the copies on a device. Return the last copy, which completes after all others."""
        chunks, buffers = _buffers(layout, device)
        copies: list[HostCopy] = []
        for number, chunk in enumerate(chunks):
            buffer = buffers[number % len(buffers)]
            if number >= len(buffers):
                torch.cuda.current_stream(device).wait_event(copies[-len(buffers)].copied)
            base, begin, end = _base(chunk), chunk[0].begin, chunk[-1].end
            for span in chunk:
                span.copy(buffer, base)
            copied = buffer[begin - base : end - base]
            copies.append(HostCopy(copied, stream=self._stream(device), into=host[begin:end]))
        return copies[-1]

    def _stream(self, device: torch.device) -> Any:  # noqa: ANN401  torch's stubs have no common type
        if device not in self._streams:
            self._streams[device] = side_stream(device)
        return self._streams[device]


class _BufferSpan(NamedTuple):
    """Rows ``[first, stop)`` of a selection, and the bytes ``[begin, end)`` of a buffer to which they are copied."""

    selection: SelectedRows
    first: int
    stop: int
    begin: int
    end: int

    def copy(self, memory: Tensor, base: int) -> None:
        """Copy the rows to ``memory``, the part of the buffer that starts at the byte ``base``, as uint8."""
        rows = self.selection.rows
        typed = memory[self.begin - base : self.end - base].view(rows.dtype)
        self.selection.copy(self.first, self.stop, typed.view(self.stop - self.first, *rows.shape[1:]))


class _Layout:
    """Layout of the copies of several selections in one buffer of ``num_bytes`` bytes."""

    def __init__(self, selections: Sequence[SelectedRows]) -> None:
        self._selections = selections
        self._begins: list[int] = []
        self.num_bytes = 0
        for selection in selections:
            self._begins.append(self.num_bytes)
            num_bytes = selection.num_rows * selection.row_bytes
            self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def assign(self, memory: Tensor) -> None:
        """Set the copy of each selection to a view of the buffer ``memory``."""
        typed: dict[torch.dtype, Tensor] = {}
        for selection, begin in zip(self._selections, self._begins, strict=True):
            dtype, size = selection.rows.dtype, (selection.num_rows, *selection.rows.shape[1:])
            if dtype not in typed:
                typed[dtype] = memory.view(dtype)
            strides = [1]
            for num_items in size[:0:-1]:
                strides.insert(0, strides[0] * num_items)
            # One operation, unlike two views.
            selection.copied = typed[dtype].as_strided(size, strides, begin // dtype.itemsize)

    def chunks(self, max_bytes: int) -> Iterator[list[_BufferSpan]]:
        """Divide the buffer, in order, into chunks of at most ``max_bytes``, or of one row if a row is larger."""
        spans: list[_BufferSpan] = []
        for selection, start in zip(self._selections, self._begins, strict=True):
            first, row_bytes = 0, selection.row_bytes
            while row_bytes and first < selection.num_rows:
                begin = start + first * row_bytes
                base = (spans[0].begin if spans else begin) // _ALIGNMENT * _ALIGNMENT
                num_rows = min(selection.num_rows - first, (base + max_bytes - begin) // row_bytes)
                if num_rows < 1 and spans:
                    yield spans
                    spans = []
                    continue
                stop = first + max(1, num_rows)
                spans.append(_BufferSpan(selection, first, stop, begin, start + stop * row_bytes))
                first = stop
        if spans:
            yield spans


def _base(chunk: Sequence[_BufferSpan]) -> int:
    """Return the offset in the whole buffer at which the memory of a chunk begins, aligned for every dtype."""
    return chunk[0].begin // _ALIGNMENT * _ALIGNMENT


def _buffers(layout: _Layout, device: torch.device) -> tuple[list[list[_BufferSpan]], list[Tensor]]:
    """Return the chunks in which to copy a layout, and one or two buffers on ``device`` that can contain any chunk."""
    has_streams = device.type == "cuda"
    max_bytes = min(MAX_BUFFER_BYTES, layout.num_bytes) if has_streams else layout.num_bytes
    while True:
        chunks = list(layout.chunks(max_bytes))
        num_bytes = max(chunk[-1].end - _base(chunk) for chunk in chunks)
        try:
            return chunks, [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in chunks[:2]]
        except torch.OutOfMemoryError:
            if not has_streams or max_bytes <= CHUNK_BYTES:
                raise
            max_bytes = max(CHUNK_BYTES, max_bytes // 2)
