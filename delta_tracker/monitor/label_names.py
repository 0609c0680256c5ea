"""Unique names for the objects of a process that record metrics."""

from __future__ import annotations

import itertools


class LabelNames:
    """Names in use, each unique within its role. Thread-safe.

    It uses no lock, so it stays usable in a forked child.

    Example:
        >>> names = LabelNames()
        >>> names.take("tracker", "tracker"), names.take("tracker", "tracker"), names.take("publisher", "tracker")
        ('tracker', 'tracker-2', 'tracker')
        >>> names.release("tracker", "tracker")
        >>> names.take("tracker", "tracker")
        'tracker'
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], object] = {}

    def take(self, role: str, wanted: str) -> str:
        """Reserve a name until :meth:`release`.

        Args:
            role: the role in which the name must be unique.
            wanted: the preferred name.

        Returns:
            ``wanted``, with ``-2``, ``-3``, ... appended if it is in use.
        """
        token = object()
        numbered = (f"{wanted}-{number}" for number in itertools.count(2))
        for name in itertools.chain([wanted], numbered):
            if self._taken.setdefault((role, name), token) is token:  # atomic
                return name
        raise AssertionError("count() does not end")

    def release(self, role: str, name: str) -> None:
        """Release a name, if reserved."""
        self._taken.pop((role, name), None)
