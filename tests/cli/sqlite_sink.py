"""Row store in an SQLite file, as a user of the library may write one. Each call is a transaction."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import SinkError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sinks.row_sink import RowSink, SinkState
from tests.stream.streams import FQN, Writer

_TABLES = """
CREATE TABLE IF NOT EXISTS states (stream TEXT PRIMARY KEY, state BLOB);
CREATE TABLE IF NOT EXISTS current (one INTEGER PRIMARY KEY CHECK (one = 0), stream TEXT);
CREATE TABLE IF NOT EXISTS rows (stream TEXT, fqn TEXT, kind TEXT, key INTEGER, version INTEGER, value BLOB,
                                 PRIMARY KEY (stream, fqn, kind, key));
CREATE TABLE IF NOT EXISTS owners (stream TEXT, fqn TEXT, slot INTEGER, owner INTEGER,
                                   PRIMARY KEY (stream, fqn, slot));
CREATE TABLE IF NOT EXISTS log (stream TEXT, fqn TEXT, slot INTEGER, owner INTEGER);
"""


def sink() -> SqliteSink:
    """Return the sink of the file that the environment names."""
    return SqliteSink(Path(os.environ["SINK_FILE"]))


def not_a_sink() -> str:
    return "text"


class SqliteSink(RowSink):
    """Sink to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._connection.executescript(_TABLES)

    def _all(self, query: str, *values: object) -> list[tuple]:
        if self._connection is None:
            raise SinkError(str(self._path), "it is not open")
        return self._connection.execute(query, values).fetchall()

    def _many(self, query: str, rows: list[tuple]) -> None:
        if self._connection is None:
            raise SinkError(str(self._path), "it is not open")
        self._connection.execute("BEGIN")
        self._connection.executemany(query, rows)
        self._connection.execute("COMMIT")

    def states(self) -> list[SinkState]:
        return [SinkState.from_json(state) for (state,) in self._all("SELECT state FROM states")]

    def current(self) -> str | None:
        found = self._all("SELECT stream FROM current")
        return found[0][0] if found else None

    def begin(self, state: SinkState) -> None:
        self._all("INSERT OR REPLACE INTO states VALUES (?, ?)", state.stream, state.to_json())

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        self._write(stream, table, "row", keys, values, version)

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        self._write(stream, table, "default", slots, values, version)

    def _write(self, stream: str, table: str, kind: str, keys: Tensor, values: Tensor, version: int) -> None:
        rows = values.contiguous().view(torch.uint8).numpy()
        self._many(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)",
            [(stream, table, kind, key, version, row.tobytes()) for key, row in zip(keys.tolist(), rows, strict=True)],
        )

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        self._delete(stream, table, "row", keys)

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        self._delete(stream, table, "default", slots)

    def _delete(self, stream: str, table: str, kind: str, keys: Tensor) -> None:
        self._many(
            "DELETE FROM rows WHERE stream = ? AND fqn = ? AND kind = ? AND key = ?",
            [(stream, table, kind, key) for key in keys.tolist()],
        )

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        held = dict(self._all("SELECT slot, owner FROM owners WHERE stream = ? AND fqn = ?", stream, table))
        return torch.tensor([held.get(slot, NO_OWNER) for slot in slots.tolist()], dtype=torch.int64)

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        pairs = zip(slots.tolist(), owners.tolist(), strict=True)
        self._many("INSERT OR REPLACE INTO owners VALUES (?, ?, ?, ?)", [(stream, table, *pair) for pair in pairs])

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        pairs = zip(slots.tolist(), owners.tolist(), strict=True)
        self._many("INSERT INTO log VALUES (?, ?, ?, ?)", [(stream, table, *pair) for pair in pairs])

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        query = "SELECT slot, owner FROM log WHERE stream = ? AND fqn = ? ORDER BY rowid"
        for slot, owner in self._all(query, stream, table):
            yield torch.tensor([slot]), torch.tensor([owner])

    def finish(self, state: SinkState) -> None:
        self._all("BEGIN")
        self.begin(state)
        self._all("INSERT OR REPLACE INTO current VALUES (0, ?)", state.stream)
        self._all("COMMIT")

    def clear_owner_log(self, state: SinkState) -> None:
        self._all("DELETE FROM log WHERE stream = ?", state.stream)
        self.begin(state)

    def remove(self, stream: str) -> None:
        for name in ("rows", "owners", "log", "states"):
            self._all(f"DELETE FROM {name} WHERE stream = ?", stream)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def stored_rows(path: Path, table: str, num_columns: int) -> tuple[int | None, dict[int, np.ndarray]]:
    """Return the stored version and the float32 rows of a table by key."""
    connection = sqlite3.connect(path)
    with connection:
        (state,) = connection.execute("SELECT state FROM states JOIN current USING (stream)").fetchone()
        found = connection.execute("SELECT key, value FROM rows WHERE fqn = ? AND kind = 'row'", (table,)).fetchall()
    connection.close()
    rows = {key: np.frombuffer(value, np.float32).reshape(num_columns) for key, value in found}
    return SinkState.from_json(state).version, rows


def assert_holds(path: Path, writer: Writer, version: int) -> None:
    """Check that a file holds all rows of a table as of a version."""
    stored, rows = stored_rows(path, FQN, writer.spec.dim)
    assert stored == version
    assert sorted(rows) == list(range(writer.spec.num_rows))
    for key, row in rows.items():
        np.testing.assert_array_equal(row, writer.table[key].numpy())
