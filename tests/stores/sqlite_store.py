"""A kind of store that is only in tests: objects in a table of SQLite."""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tracker.stream.interruption import checked
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer


class SqliteStore(Store):
    """Objects in a table of a local database, which is also the lock."""

    is_remote = False

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite://{path}"
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        weakref.finalize(self, self._database.close)  # Python 3.13 warns of a connection that is not closed
        self._ask("CREATE TABLE objects (name TEXT PRIMARY KEY, data BLOB, modified REAL) WITHOUT ROWID")

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        for data, modified in self._ask("SELECT data, modified FROM objects WHERE name = ?", span.name):
            transfer.modified = modified
            return span.of(data)
        return None

    def stat(self, name: str) -> StoredObject | None:
        found = self._ask("SELECT name, length(data), modified FROM objects WHERE name = ?", name)
        return next((StoredObject(*row) for row in found), None)

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        self.replace(name, b"".join(map(bytes, checked(buffers))))

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._ask("INSERT OR IGNORE INTO objects VALUES (?, ?, ?) RETURNING 1", name, data, time.time()))

    def replace(self, name: str, data: bytes) -> None:
        self._ask("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", name, data, time.time())

    def delete(self, name: str) -> None:
        self._ask("DELETE FROM objects WHERE name = ?", name)

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        begin, end = max(after, f"{prefix}/"), f"{prefix}0"  # "0" follows "/"
        text = "SELECT name, length(data), modified FROM objects WHERE name > ? AND name < ?"
        return [StoredObject(*row) for row in self._ask(text, begin, end)]

    def _ask(self, text: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(text, values).fetchall()
