"""Count updates of tensors that could be taken for the tracked tables, such as those of a copy of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


class OtherUpdates:
    """Updates of other tensors since the tracked tables were last updated or written.

    Args:
        versions: function without arguments that returns a value that changes with each in-place write to the tables.
    """

    def __init__(self, versions: Callable[[], object]) -> None:
        self.versions = versions
        self._since: object = None
        self._counts: Counter[str] = Counter()

    def count(self, fqns: Iterable[str]) -> None:
        """Count an update of other tensors, which could be taken for the tables ``fqns``."""
        now = self.versions()
        if now != self._since:
            self._counts.clear()
            self._since = now
        self._counts.update(fqns)

    def clear(self) -> None:
        """Forget the updates, because a table was updated."""
        self._counts.clear()

    def counts(self) -> Counter[str]:
        """Return the number of such updates by table FQN; empty if a table was written since the first of them."""
        return self._counts if self._counts and self.versions() == self._since else Counter()
