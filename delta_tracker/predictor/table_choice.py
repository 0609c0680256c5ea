"""Choice of the tables of a stream that a predictor applies: :class:`TableChoice`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import Manifest

T = TypeVar("T")


class TableChoice:
    """Tables and dense tensors of a stream that are applied, by name or by pattern.

    Args:
        tables: names of tables and dense tensors of the stream, or patterns with ``*``, ``?`` and ``[...]``; a single
            one as a string. None takes all.

    Attributes:
        patterns: the names and patterns, sorted; empty for all.

    Raises:
        InvalidArgumentError: unless ``tables`` has at least one name or pattern.

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
        """Return True if a table or dense tensor is applied."""
        if name not in self._taken:
            self._taken[name] = not self.patterns or any(_matches(each, name) for each in self.patterns)
        return self._taken[name]

    def narrowed(self, entry: Manifest) -> Manifest:
        """Return an entry with what is applied of it: the same object if that is all.

        Raises InvalidArgumentError if a name or pattern matches nothing in a snapshot.
        """
        if not self.patterns or entry.kind == "claim":
            return entry
        names = (*entry.tables, *entry.dense)
        for pattern in self.patterns if entry.kind == "snapshot" else ():
            if not any(_matches(pattern, name) for name in names):
                raise InvalidArgumentError("tables", pattern, f"Pass names of the stream, which has {sorted(names)}")
        return entry.having(self.takes)

    def saved(self) -> dict[str, str]:
        """Return the choice as an item of a predictor's saved state; an empty dict if all tables are applied."""
        return {"tables": json.dumps(self.patterns)} if self.patterns else {}

    def position_in(self, state: Mapping[str, T]) -> Mapping[str, T]:
        """Return a saved state without its choice. Raises InvalidArgumentError if it was saved with another one."""
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
