"""Names that are in use, so that two objects of one process never share one."""

from __future__ import annotations

import itertools


class LabelNames:
    """The names of the objects that record, each at most once for a role. Any thread may call any method.

    No lock is taken, so a forked child can go on using it.

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
        """Take a name until :meth:`release`.

        Args:
            role: names of different roles do not exclude each other.
            wanted: the name.

        Returns:
            The name; followed by ``-2``, ``-3``, ... where it is in use.
        """
        token = object()
        numbered = (f"{wanted}-{number}" for number in itertools.count(2))
        for name in itertools.chain([wanted], numbered):
            if self._taken.setdefault((role, name), token) is token:  # atomic
                return name
        raise AssertionError("count() does not end")

    def release(self, role: str, name: str) -> None:
        """Free a name; one that is free is no error."""
        self._taken.pop((role, name), None)
