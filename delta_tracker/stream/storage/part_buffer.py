"""Memory that one version after the other is read into."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from delta_tracker.stream.format.manifest import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 64
_SPARE = 4  # how many times the last version's bytes are kept at most


class PartSource(Protocol):
    """The bytes of a part, which are read and checked as they are needed."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes ``[begin, end)``, which may not be checked before :meth:`finish`."""

    def finish(self) -> None:
        """Read the rest and compare the part with its record. A call after an error resumes."""


class PartBuffer:
    """Memory for the parts of a version, used again for the next one: fresh memory costs more than to read into it.

    It is used again only when nothing refers to it any more, neither an array nor a tensor. So whoever keeps a view of
    it, by intention or not, keeps what he has, and the next version is read into new memory.

    Memory: what the largest version took and a quarter more, and at most four times what the last one with rows took.
    """

    def __init__(self) -> None:
        self._begun: tuple[tuple[Part, ...], list[PartSource]] | None = None
        self._renew(0)

    def keep(self, parts: Sequence[Part], sources: list[PartSource]) -> None:
        """Keep what was read of the parts of a version when an error interrupted it."""
        self._begun = tuple(parts), sources

    def begun(self, parts: Sequence[Part]) -> list[PartSource] | None:
        """Take back what was kept of exactly these parts, None if nothing was; what was kept of others is dropped."""
        kept, self._begun = self._begun, None
        return kept[1] if kept is not None and kept[0] == tuple(parts) else None

    def lend(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """An array of each of these sizes in bytes, at addresses that suit every dtype."""
        if not any(sizes):
            return [np.empty(0, dtype=np.uint8) for _ in sizes]
        ends = [0, *itertools.accumulate(size + -size % _ALIGNMENT for size in sizes)]
        fits = ends[-1] <= len(self._memory) <= _SPARE * ends[-1]
        if not fits or sys.getrefcount(self._memory) > self._references:
            self._renew(ends[-1] + ends[-1] // _SPARE)  # a version that is a little larger fits too
        return [self._memory[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]

    def _renew(self, num_bytes: int) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)  # first let go of what there is
        self._memory = np.empty(num_bytes, dtype=np.uint8)
        self._references = sys.getrefcount(self._memory)  # our own
