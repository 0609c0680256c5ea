"""Memory for the parts of a version, which is used again for the next version."""

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
    """The bytes of a part, which are read and checked as they are needed."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)``, which may not be checked before :meth:`finish`."""

    def finish(self) -> None:
        """Read the rest and compare the part with its record. A call after an error resumes."""


class PartBuffer:
    """Memory for the parts of a version, which is reused for the next one: new memory costs more than to read into it.

    It is reused once every array and tensor that refers to it is gone. A version that is still in use keeps its bytes,
    and the next one is read into other memory.

    Memory: see :class:`~delta_tracker.buffers.BufferPool`; at most 320 MiB of it are free.
    """

    def __init__(self) -> None:
        self._begun: tuple[tuple[Part, ...], list[PartSource]] | None = None
        self._pool = BufferPool(_MAX_FREE_BYTES, min_bytes=1)

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for the next version."""
        return self._pool.free_bytes

    def keep(self, parts: Sequence[Part], sources: list[PartSource]) -> None:
        """Keep what was read of the parts of a version when an error interrupted it."""
        self._begun = tuple(parts), sources

    def begun(self, parts: Sequence[Part]) -> list[PartSource] | None:
        """Return what was kept of exactly these parts, None if nothing was. What was kept is dropped here."""
        kept, self._begun = self._begun, None
        return kept[1] if kept is not None and kept[0] == tuple(parts) else None

    def lend(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return an array of each of these sizes in bytes, aligned for every dtype; uninitialised."""
        ends = [0, *itertools.accumulate([size + -size % _ALIGNMENT for size in sizes])]
        memory = self._pool.lend(ends[-1])
        return [memory[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]
