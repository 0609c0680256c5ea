"""Unique names of the objects that record metrics, for use as label values."""

from __future__ import annotations

import itertools


class LabelNames:
    """Set of the reserved names. A role is a kind of object. Each name can be reserved once per role.

    The set is thread-safe. It can also be used in a forked child process, because it has no locks.

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
        """Reserve a name until :meth:`release`, and return it.

        Args:
            role: kind of the object, such as ``"tracker"``. Names are unique within a role.
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
        """Release a name. No-op if it is not reserved."""
        self._taken.pop((role, name), None)
