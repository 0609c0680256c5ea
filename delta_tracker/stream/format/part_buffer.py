"""Reusable memory for the parts of successive versions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from delta_tracker.buffers import BufferPool
from delta_tracker.stream.format.manifest import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 64
_MAX_FREE_BYTES = 320 << 20


class PartSource(Protocol):
    """Bytes of a part, read and checked lazily."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)``. They may be unchecked before :meth:`finish`."""

    def finish(self) -> None:
        """Read the remaining bytes and compare the part with its record. A call after an error resumes."""


class PartBuffer:
    """Memory for the parts of a version, reused for the next version. Allocating it costs more than reading into it.

    The memory is reusable once every array and tensor that refers to it has been garbage-collected. While a version is
    in use, the next one is read into other memory.

    Memory: see :class:`~delta_tracker.buffers.BufferPool`; at most 320 MiB of it are free.
    """

    def __init__(self) -> None:
        self._begun: tuple[tuple[Part, ...], list[PartSource]] | None = None
        self._pool = BufferPool(_MAX_FREE_BYTES, min_bytes=1)

    @property
    def free_bytes(self) -> int:
        """Number of bytes kept for the next version."""
        return self._pool.free_bytes

    def keep(self, parts: Sequence[Part], sources: list[PartSource]) -> None:
        """Keep the partly read sources of a version after an error."""
        self._begun = tuple(parts), sources

    def begun(self, parts: Sequence[Part]) -> list[PartSource] | None:
        """Return the kept sources of these parts, None if there are none. Drops the kept sources in any case."""
        kept, self._begun = self._begun, None
        return kept[1] if kept is not None and kept[0] == tuple(parts) else None

    def lend(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return one uninitialised array per size in bytes, each aligned for every dtype."""
        ends = [0, *itertools.accumulate([size + -size % _ALIGNMENT for size in sizes])]
        memory = self._pool.lend(ends[-1])
        return [memory[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]
