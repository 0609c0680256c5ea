"""A caching web server in front of all stores of a world, without a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from delta_tracker import Storage
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer
from tests.simulation import stores
from tests.simulation.disk import disk
from tests.simulation.threads import SCHEDULER

_HOST = "http://web.example"
_CONTROL_SECONDS, _MISSING_SECONDS = 1.0, 5.0  # for which a copy of a control object and a 404 are served
_OLD_SECONDS = 30.0  # for which an old copy of a control object is served
_DAMAGES = ("cut", "empty", "flipped")
_PARTS = "/parts/"  # which alone have a digest, so that a flipped bit is seen at once
_OK, _FORBIDDEN, _MISSING = 200, 403, 404


@dataclass
class Web:
    """The stores as ``{url}/{name of the store}``. Copies of other objects are served for ever.

    Attributes:
        stores: name of a store to the store.
    """

    stores: dict[str, stores.Store] = field(default_factory=dict)
    _copies: dict[str, tuple[int, bytes, float]] = field(default_factory=dict)
    _former: dict[str, bytes] = field(default_factory=dict)  # control objects before they were replaced
    _wrong: set[str] = field(default_factory=set)  # paths of damaged copies
    _choices: list[int] = field(default_factory=list)  # of the damage to the next copies

    def serve(self, served: list[stores.Store]) -> None:
        """Serve other stores, without the copies of the former ones."""
        self.stores = {store.path.name: store for store in served}
        self._copies.clear()

    def forget(self) -> None:
        """Delete the copies, as an operator does after damage at the origin was repaired.

        Those that were damaged here are kept: readers replace them without an operator.
        """
        self._copies = {path: copy for path, copy in self._copies.items() if path in self._wrong}
        self.calm()

    def calm(self) -> None:
        """Damage no further copies."""
        self._choices.clear()

    def spoil(self, choice: int, *, is_next: bool) -> str | None:
        """Damage a copy, or the next one, while the origin is right. A control object may get an old copy instead.

        Args:
            choice: number of the copy and of the damage.
            is_next: True to damage the next copy of an object instead of one that is there.

        Returns:
            Path of the copy, None if there is none.
        """
        if is_next:
            self._choices.append(choice)
            return "next copy"
        paths = [path for path, copy in self._copies.items() if copy[0] == _OK and copy[1] and path not in self._wrong]
        if not paths:
            return None
        choice, place = divmod(choice, len(paths))
        self._damage(paths[place], choice)
        return paths[place]

    def _damage(self, path: str, choice: int) -> None:
        _, data, end = self._copies[path]
        if path in self._former and choice % 2 == 0:
            self._copies[path] = _OK, self._former[path], SCHEDULER.now + _OLD_SECONDS
            return
        choice, how = divmod(choice, len(_DAMAGES) - (_PARTS not in path))
        at = choice % len(data)
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        wrong = {"cut": data[: len(data) // 2], "flipped": flipped, "empty": b""}[_DAMAGES[how]]
        self._copies[path] = _OK, wrong, end
        self._wrong.add(path)

    def store_of(self, store: stores.Store) -> Storage:
        """Return a store as this server shows it."""
        return Storage(_WebStore(self, store.path.name))

    def answer(self, path: str, *, is_uncached: bool) -> tuple[int, bytes]:
        """Return the status and the bytes for a request."""
        SCHEDULER.pause()
        disk().count()
        copy = self._copies.get(path)
        if copy is not None and not is_uncached and copy[2] > SCHEDULER.now:
            return copy[:2]
        code, data = self._fetch(path)
        if code != _FORBIDDEN:
            seconds = _MISSING_SECONDS if code == _MISSING else math.inf
            seconds = min(seconds, _CONTROL_SECONDS) if "/control/" in path else seconds
            self._keep(path, code, data, seconds)
            if code == _OK and data and self._choices and not is_uncached:
                self._damage(path, self._choices.pop())
                return self._copies[path][:2]
        return code, data

    def _keep(self, path: str, code: int, data: bytes, seconds: float) -> None:
        former = self._copies.get(path)
        if former is not None and former[0] == _OK and former[1] != data and path not in self._wrong:
            self._former[path] = former[1]
        self._wrong.discard(path)
        self._copies[path] = code, data, SCHEDULER.now + seconds

    def _fetch(self, path: str) -> tuple[int, bytes]:
        first, _, name = path.partition("/")
        store = self.stores.get(first)
        if store is None or store.is_failing:
            return _FORBIDDEN, b""
        file = store.path / name
        try:
            store.pace.wait_for_all(name)
            return (_OK, file.read_bytes()) if file.is_file() else (_MISSING, b"")
        except OSError:  # a fault in the middle of a call, or a slow response
            return _FORBIDDEN, b""


class _WebStore(Store):
    """Store of a reader over http."""

    is_read_only = True
    lists_from = False

    def __init__(self, web: Web, name: str, *, is_uncached: bool = False) -> None:
        self.url = f"{_HOST}/{name}"
        self._web, self._name, self._is_uncached = web, name, is_uncached

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        data = self._fetch(span.name)
        transfer.modified = float(int(SCHEDULER.now))
        return None if data is None else span.of(data)

    def stat(self, name: str) -> StoredObject | None:
        data = self._fetch(name)
        return None if data is None else StoredObject(name, len(data), float(int(SCHEDULER.now)))

    def past_caches(self) -> Store:
        return self if self._is_uncached else _WebStore(self._web, self._name, is_uncached=True)

    def _fetch(self, name: str) -> bytes | None:
        code, data = self._web.answer(f"{self._name}/{name}", is_uncached=self._is_uncached)
        if code == _FORBIDDEN:
            raise OSError(f"403 for {name}")
        return None if code == _MISSING else data
