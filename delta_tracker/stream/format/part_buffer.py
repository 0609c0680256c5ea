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
    """Protocol for objects that read and check the bytes of one part lazily."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)``. The bytes are unchecked until :meth:`finish` has returned."""

    def finish(self) -> None:
        """Read the remaining bytes and compare the part with its record.

        After a :class:`StorageError`, the method can be called again. An interrupted download is then continued.
        """


class PartBuffer:
    """Memory for the parts of successive versions, because allocation takes longer than reading into it.

    The memory is reusable once every array and tensor that refers to it has been garbage-collected. While a version is
    in use, the next one is read into other memory. At most 320 MiB of free memory are kept.
    """

    def __init__(self) -> None:
        self._begun: tuple[tuple[Part, ...], list[PartSource]] | None = None
        self._pool = BufferPool(_MAX_FREE_BYTES, min_bytes=1)

    @property
    def free_bytes(self) -> int:
        """Size in bytes of the free memory that is kept for the next version."""
        return self._pool.free_bytes

    def keep(self, parts: Sequence[Part], sources: list[PartSource]) -> None:
        """Store the partly read sources of ``parts``, so that the next attempt to read these parts can resume."""
        self._begun = tuple(parts), sources

    def begun(self, parts: Sequence[Part]) -> list[PartSource] | None:
        """Return the sources that :meth:`keep` stored for ``parts``, or None. Drops all stored sources."""
        kept, self._begun = self._begun, None
        return kept[1] if kept is not None and kept[0] == tuple(parts) else None

    def lend(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return one uninitialized uint8 array per size in ``sizes``. Each array is aligned for every dtype."""
        ends = [0, *itertools.accumulate([size + -size % _ALIGNMENT for size in sizes])]
        memory = self._pool.lend(ends[-1])
        return [memory[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]
