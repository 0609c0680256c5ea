"""Store that passes each operation of another store through rules, which fail, delay, alter or record it."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

from delta_tracker.stream.storage.storage import Storage

# Methods that call others of the same store, or return another view of it.
_COMPOSED = {"has_any", "is_same", "probe", "read_span", "reopened"}

OPERATIONS = frozenset(
    kind
    for kind, value in vars(Storage).items()
    if isinstance(value, FunctionType) and not kind.startswith("_") and kind not in _COMPOSED
)
"""Names of the methods of a store that are operations."""

WRITES = frozenset({"create", "delete", "delete_draft", "put", "replace", "sync"})
"""Operations that change a store."""

READS = OPERATIONS - WRITES
"""Operations that read from a store or list it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store.

    Args:
        kind: name of the method, such as ``"read"``.
        name: name of the object, or the prefix of a listing.
        number: number of the operation, from 1 for the first one in :attr:`WrappedStorage.operations`.
        url: URL of the store.
        arguments: the other arguments by their names.
    """

    kind: str
    name: str
    number: int
    url: str
    arguments: Mapping[str, Any]

    def having(self, **arguments: Any) -> Operation:
        """Return the same operation with other arguments."""
        return replace(self, arguments={**self.arguments, **arguments})


Perform: TypeAlias = Callable[[Operation], Any]
"""Function that performs an operation and returns the store's answer."""

Rule: TypeAlias = Callable[[Operation, Perform], Any]
"""Function that answers an operation, usually by performing it."""


def _delegated(kind: str) -> FunctionType:
    signature = inspect.signature(getattr(Storage, kind))

    def method(self: WrappedStorage, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        (_, (_, name), *others) = arguments.items()
        return self._operate(kind, name, dict(others))

    method.__name__ = kind
    return method


class WrappedStorage(Storage):
    """Store that passes each operation of ``inner`` through rules. Calls of ``inner`` itself bypass them.

    Without rules it behaves as ``inner`` does. Rules may be added and removed at any time.

    Args:
        inner: store that performs the operations.
        rules: rules around each operation, the outermost first.
        is_remote: whether it is accessed over a network; None for the same as ``inner``.

    Attributes:
        inner: the store.
        rules: list of the rules.
        operations: operations so far, also failed ones, without the bytes that they write.
    """

    def __init__(self, inner: Storage, *rules: Rule, is_remote: bool | None = None) -> None:
        vars(self).update(vars(inner))  # for views that copy the attributes of a store
        self.inner = inner
        self.rules = list(rules)
        self.operations: list[Operation] = []
        self.is_remote = inner.is_remote if is_remote is None else is_remote
        self._numbering = threading.Lock()

    locals().update({kind: _delegated(kind) for kind in OPERATIONS})

    def has_any(self, names: Sequence[str]) -> bool:
        return any(map(self.stat, names))

    @contextmanager
    def under(self, *rules: Rule) -> Iterator[None]:
        """Context manager in which more rules apply, outside the others."""
        before = list(self.rules)
        self.rules[:0] = rules
        try:
            yield
        finally:
            self.rules[:] = before

    def count(self, *kinds: str, name: str = "") -> int:
        """Return the number of operations so far, of some kinds and on names that begin with ``name``."""
        return sum(each.kind in (kinds or OPERATIONS) and each.name.startswith(name) for each in self.operations)

    def take(self) -> list[Operation]:
        """Return the operations since the last call; the next one has the number 1."""
        with self._numbering:
            taken, self.operations[:] = list(self.operations), []
        return taken

    @property
    def uncached(self) -> Storage:
        return self._around(self.inner.uncached)

    def reopened(self) -> Storage:
        return self._around(self.inner.reopened())

    def is_same(self, other: Storage) -> bool:
        return self.inner.is_same(other.inner if isinstance(other, WrappedStorage) else other)

    def _around(self, inner: Storage) -> WrappedStorage:
        """Return a store with the same rules and operations around another view of the store."""
        if inner is self.inner:
            return self
        other = copy.copy(self)
        other.inner = inner
        return other

    def _operate(self, kind: str, name: str, arguments: dict[str, Any]) -> Any:
        kept = {key: value for key, value in arguments.items() if isinstance(value, int | str)}
        with self._numbering:
            operation = Operation(kind, name, len(self.operations) + 1, self.url, arguments)
            self.operations.append(replace(operation, arguments=kept))
        perform: Perform = self._perform
        for rule in reversed(self.rules):
            perform = partial(rule, perform=perform)
        return perform(operation)

    def _perform(self, operation: Operation) -> Any:
        return getattr(self.inner, operation.kind)(operation.name, **operation.arguments)
