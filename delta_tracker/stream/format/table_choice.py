"""Choice of the tables of a stream that a predictor applies, or a mirror copies: :class:`TableChoice`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from msgspec import Struct
from msgspec.json import decode, encode

from delta_tracker.errors import InvalidArgumentError, LeftOutPartError, MalformedError, MissingTableError
from delta_tracker.stream.format.manifest import Manifest, Part, Stored
from delta_tracker.stream.storage.storage import Storage

T = TypeVar("T")
TABLES_NAME = "log/tables.json"  # not below control/: readers depend on it, and each role may read log/
_MAX_BYTES = 1 << 20


class TableChoice:
    """Choice of the tables and dense tensors of a stream that a predictor applies, or a mirror copies.

    Args:
        tables: name of a table or dense tensor, pattern with ``*``, ``?`` and ``[...]``, or sequence of names and
            patterns. None chooses all.

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
        return entry.narrowed(self.takes)

    def has(self, stored: Part | Stored) -> bool:
        """Return True if a mirror copies ``stored``: all tables are chosen, or the part contains a chosen one."""
        if not self.patterns:
            return True
        names = () if isinstance(stored, Stored) else (*(each.table for each in stored.blocks), *stored.dense)
        return any(map(self.takes, names))

    def copied(self, entry: Manifest) -> Manifest:
        """Return ``entry`` without the objects that a mirror of this choice does not copy."""
        if not self.patterns:
            return entry
        parts = tuple([replace(part, states=None) for part in entry.parts if self.has(part)])
        return replace(entry, parts=parts, training=())

    def saved(self) -> dict[str, str]:
        """Return the choice as a dict to add to a predictor's saved state; empty if all tables are chosen."""
        return {"tables": json.dumps(self.patterns)} if self.patterns else {}

    def position_in(self, state: Mapping[str, T]) -> Mapping[str, T]:
        """Return ``state`` without its saved choice of tables. Raise InvalidArgumentError if that choice differs."""
        given: object = state
        saved = given.get("tables") if isinstance(given, Mapping) else None
        if saved != self.saved().get("tables"):
            text = "Omit it, so that the predictor begins with a snapshot: it was saved with another choice of tables"
            raise InvalidArgumentError("state", {"tables": saved}, text)
        if saved is None:
            return state
        return {key: value for key, value in state.items() if key != "tables"}


class _Tables(Struct):
    tables: list[str]


def mirrored_tables(storage: Storage) -> TableChoice:
    """Return the choice that a mirror recorded in ``storage``, or all tables. Raises MalformedError if invalid."""
    data = storage.uncached.read(TABLES_NAME, max_bytes=_MAX_BYTES)  # a cache may have an old 404
    if data is None:
        return TableChoice(None)
    try:
        return TableChoice(decode(data.tobytes(), type=_Tables).tables)
    except ValueError as error:
        remedy = f"Mirror to an empty destination: {storage.url} no longer says which parts it lacks"
        raise MalformedError(TABLES_NAME, str(error)).with_remedy(remedy) from error


def check_mirrored(storage: Storage, choice: TableChoice, *, is_empty: bool) -> None:
    """Raise InvalidArgumentError unless the mirror in ``storage`` has recorded ``choice``.

    If ``is_empty`` is True, also accepts a mirror that has not recorded a choice yet.
    """
    stated = mirrored_tables(storage).patterns
    if stated != choice.patterns and (stated or not is_empty):
        remedy = f"Pass tables={list(stated)}, with which {storage.url} began, or an empty destination"
        if not stated:
            remedy = f"Pass tables=None if {storage.url} began without a choice, or else an empty destination"
        raise InvalidArgumentError("tables", list(choice.patterns) or None, remedy)


def write_mirrored_tables(storage: Storage, choice: TableChoice) -> None:
    """Record the choice of tables of a new mirror. Raises InvalidArgumentError if another choice is recorded."""
    if choice.patterns:
        storage.create(TABLES_NAME, encode(_Tables(list(choice.patterns))))
    check_mirrored(storage, choice, is_empty=False)


def check_has_all(storage: Storage) -> None:
    """Raise InvalidArgumentError if the store contains a mirror of only some tables."""
    if stated := mirrored_tables(storage).patterns:
        remedy = f"Pass the url of its source, or a mirror of all tables: this is a mirror of {list(stated)} only"
        raise InvalidArgumentError("url", storage.url, remedy)


def check_not_left_out(storage: Storage, stored: Part | Stored) -> None:
    """Raise LeftOutPartError if ``storage`` contains a mirror that does not copy the object ``stored``."""
    if not (choice := mirrored_tables(storage)).has(stored):
        raise LeftOutPartError(storage.url, stored.name, choice.patterns)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)
