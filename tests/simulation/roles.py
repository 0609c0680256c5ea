"""Roles of a world: each actor may send only the requests that the guide's table of permissions grants.

A store refuses any other request as a bucket does, and records it. An actor whose role is too small is refused what the
lesser role lacks; any other refusal is a finding.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_tracker import Storage
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer
from tests.permissions import Permissions, documented, folder_of
from tests.simulation.values import LESSER

PUBLISHER, UPKEEP = "publisher", "publisher with `Upkeep(retention=, compact_every=)`"
RECOVERY, RESTORE, STANDBY = "publisher with `recovery=`", "`restore`", "standby"
PREDICTOR, NAMED = "predictor", "predictor with a `name`"
COMMANDS = {
    "mirror": ("`mirror`, source", "`mirror`, destination"),
    "compact": ("`compact`",),
    "rollback": ("`rollback`, `release`",),
    "release": ("`rollback`, `release`",),
}
"""Roles of a command at each of its urls."""
KEEPING_MIRROR = "`mirror`, source", "`mirror --keep-versions`, destination"


class Denial(NamedTuple):
    """A request that was refused.

    Args:
        roles: roles of the actor.
        verb: permission that it lacks.
        name: name of the object, or prefix of a listing.
    """

    roles: tuple[str, ...]
    verb: str
    name: str


class Roles:
    """Permissions of the actors of a world.

    Args:
        lesser: name in :data:`~tests.simulation.values.LESSER` of the actor whose role is too small; None for none.

    Attributes:
        denials: refused requests since the last :meth:`wrong`.
    """

    def __init__(self, lesser: str | None) -> None:
        self._lesser = dict(LESSER[lesser]) if lesser is not None else {}
        self.denials: list[Denial] = []

    def grant(self) -> bool:
        """Give the actor its whole role. Return False if it has it."""
        is_granted = bool(self._lesser)
        self._lesser.clear()
        return is_granted

    def has(self, roles: Iterable[str], verb: str, name: str) -> bool:
        """Return True if one of these roles has a permission."""
        return any(folder_of(name) in table()[self._lesser.get(role, role)].get(verb, ()) for role in roles)

    def wrong(self) -> Denial | None:
        """Return a refused request that a whole role does not explain, and forget all. None if there is none."""
        denials, self.denials = self.denials, []
        return next((each for each in denials if self._lesser.keys().isdisjoint(each.roles)), None)


@cache
def table() -> dict[str, Permissions]:
    """Return the folders of each permission of each role, by the guide."""
    return documented()


class LimitedStore(Store):
    """Store that refuses what roles do not grant."""

    def __init__(self, store: Store, roles: Roles, *names: str) -> None:
        self.url = store.url
        self._store, self._roles, self._names = store, roles, names

    def _check(self, verb: str, name: str) -> None:
        if not self._roles.has(self._names, verb, name):
            self._roles.denials.append(Denial(self._names, verb, name))
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{verb} {name}")

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        self._check("read", span.name)
        return self._store.read(span, transfer)

    def stat(self, name: str) -> StoredObject | None:
        self._check("read", name)
        return self._store.stat(name)

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        self._check("create", name)
        self._store.put(name, buffers)

    def create(self, name: str, data: bytes) -> bool:
        self._check("create", name)
        return self._store.create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self._check("replace", name)
        self._store.replace(name, data)

    def delete(self, name: str) -> None:
        self._check("delete", name)
        self._store.delete(name)

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        self._check("list", prefix)
        return self._store.objects(prefix, after)


@contextmanager
def opening(stores: Mapping[str, Store]) -> Iterator[None]:
    """Context manager in which a command that opens one of these urls gets its store."""
    original: Any = Storage.__init__

    def open_url(self: Storage, url: Any, **options: Any) -> None:
        found = stores.get(url) if isinstance(url, str) else None
        original(self, url, **options) if found is None else original(self, found)

    Storage.__init__ = open_url  # type: ignore[method-assign]
    try:
        yield
    finally:
        Storage.__init__ = original  # type: ignore[method-assign]
