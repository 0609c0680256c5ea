"""Choice of the tables of a stream that a predictor applies: :class:`TableChoice`."""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from delta_tracker.errors import InvalidArgumentError, MissingTableError
from delta_tracker.stream.format.manifest import Manifest

T = TypeVar("T")


class TableChoice:
    """Choice of the tables and dense tensors of a stream that a predictor applies.

    Args:
        tables: names of tables and dense tensors of the stream, or patterns with ``*``, ``?`` and ``[...]``: a string
            or a sequence of strings. None chooses all.

    Attributes:
        patterns: the names and patterns, sorted; empty if all tables are chosen.

    Raises:
        InvalidArgumentError: if ``tables`` is empty or has an item that is not a nonempty string.

    Example:
        >>> choice = TableChoice(["item", "user.*"])
        >>> choice.takes("user.country"), choice.takes("items")
        (True, False)
    """

    def __init__(self, tables: str | Sequence[str] | None) -> None:
        given: object = [tables] if isinstance(tables, str) else tables
        patterns = tuple(given) if isinstance(given, Sequence) else ()
        if given is not None and not (patterns and all(isinstance(each, str) and each for each in patterns)):
            remedy = "Pass names or patterns of the stream's tables, such as ['item', 'user.*'], or None for all"
            raise InvalidArgumentError("tables", tables, remedy)
        self.patterns = tuple(sorted(set(patterns)))
        self._taken: dict[str, bool] = {}

    def takes(self, name: str) -> bool:
        """Return True if the table or dense tensor ``name`` is chosen."""
        if name not in self._taken:
            self._taken[name] = not self.patterns or any(_matches(each, name) for each in self.patterns)
        return self._taken[name]

    def narrowed(self, entry: Manifest) -> Manifest:
        """Return a copy of ``entry`` with only the chosen tables and dense tensors; ``entry`` itself if all are chosen.

        Raises MissingTableError if ``entry`` is a snapshot and a name or pattern matches nothing in it.
        """
        if not self.patterns or entry.kind == "claim":
            return entry
        names = (*entry.tables, *entry.dense)
        for pattern in self.patterns if entry.kind == "snapshot" else ():
            if not any(_matches(pattern, name) for name in names):
                raise MissingTableError("tables", pattern, f"Pass names of the stream, which has {sorted(names)}")
        return entry.having(self.takes)

    def saved(self) -> dict[str, str]:
        """Return the choice as a dict to add to a predictor's saved state; empty if all tables are chosen."""
        return {"tables": json.dumps(self.patterns)} if self.patterns else {}

    def position_in(self, state: Mapping[str, T]) -> Mapping[str, T]:
        """Return ``state`` without its choice of tables. Raise InvalidArgumentError unless this is the same choice."""
        given: object = state
        saved = given.get("tables") if isinstance(given, Mapping) else None
        if saved != self.saved().get("tables"):
            text = "Omit it, so that the predictor begins with a snapshot: it was saved with another choice of tables"
            raise InvalidArgumentError("state", {"tables": saved}, text)
        if saved is None:
            return state
        return {key: value for key, value in state.items() if key != "tables"}


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)
