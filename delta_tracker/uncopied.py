"""Base class of objects that can neither be pickled nor copied."""

from __future__ import annotations

from typing import ClassVar, Never, SupportsIndex

from delta_tracker.errors import UncopyableError


class Uncopied:
    """Base class of objects with hooks, locks or threads. Their class says what to save or build instead.

    ``pickle``, ``torch.save``, ``copy.copy`` and ``copy.deepcopy`` raise
    :class:`~delta_tracker.errors.UncopyableError`.
    """

    _remedy: ClassVar[str]

    def __init_subclass__(cls, *, remedy: str = "") -> None:
        super().__init_subclass__()
        if remedy:
            cls._remedy = remedy

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        raise UncopyableError(type(self).__name__, self._remedy)
