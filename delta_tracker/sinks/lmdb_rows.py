"""Reader of a row store in LMDB; requires the extra ``lmdb``.

Notation: ``N`` is the number of ids of a call.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import NO_VERSION, MalformedSinkError, SinkError
from delta_tracker.sinks.lmdb_store import CURRENT, LmdbStore, keys_of, state_key
from delta_tracker.sinks.lookup import LookedUp, Lookup
from delta_tracker.sinks.row_sink import SinkState


class LmdbRows:
    """Reader of the rows that :class:`~delta_tracker.sinks.lmdb.LmdbSink` wrote in another process.

    A lookup is one read transaction: its rows and their version are of one moment. Safe for use by several threads,
    whose lookups follow one another.

    Args:
        directory: directory of the sink.

    Raises:
        InvalidArgumentError: if ``directory`` is empty.
        MissingExtraError: if the package ``lmdb`` is not installed.
        SinkError: if the directory cannot be read, or this process has opened it already.

    Example:
        >>> import tempfile
        >>> LmdbRows(tempfile.mkdtemp() + "/rows")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        delta_tracker.errors.SinkError: the row store lmdb:///... cannot be used: ...
    """

    def __init__(self, directory: str) -> None:
        self._store = LmdbStore(directory)
        self._lock = Lock()
        self._pid = os.getpid()
        self._read: tuple[bytes, SinkState] | None = None  # the last state and its JSON
        self._env: Any = self._store.environment(readonly=True, create=False, map_size=0)

    def state(self) -> SinkState:
        """Return the state of the stream that readers read. The errors are those of :meth:`rows`."""
        self._check_process()
        with self._lock, self._store.errors(), self._begin() as transaction:
            return self._state(transaction)

    def rows(self, table: str, ids: Tensor) -> LookedUp:
        """Return rows.

        Args:
            table: FQN of the table.
            ids: ``[N]`` int64 on the CPU: global row ids, or raw ids for a table with raw ids.

        Raises:
            InvalidArgumentError: if the table is unknown, ``ids`` has another shape or dtype, or a global row id is
                outside the table.
            SinkError: if the files cannot be read, no version is complete yet, or this process was forked.
            MalformedSinkError: if stored data is invalid, or a row is missing.
        """
        self._check_process()
        with self._lock, self._store.errors(), self._begin() as transaction:
            state = self._state(transaction)
            lookup = Lookup(state, table, ids)
            stored = [transaction.get(key) for key in keys_of(state.stream, b"r", table, ids)]
            slots = lookup.defaults
            keys = keys_of(state.stream, b"d", table, torch.tensor(slots, dtype=torch.int64))
            defaults = {slot: transaction.get(key) for slot, key in zip(slots, keys, strict=True)}
            return lookup.decode(stored, defaults.get)

    def close(self) -> None:
        """Close the files."""
        if os.getpid() == self._pid:
            with self._lock:
                self._env.close()

    def _begin(self) -> Any:  # noqa: ANN401  the package is optional
        """Begin a transaction; adopt the new size of a file that grew. The lock is held: no other one is open."""
        try:
            return self._env.begin()
        except self._store.package.MapResizedError:
            self._env.set_mapsize(0)
            return self._env.begin()

    def _state(self, transaction: Any) -> SinkState:  # noqa: ANN401
        current = transaction.get(CURRENT)
        if current is None:
            raise SinkError(self._store.name, *NO_VERSION)
        data = transaction.get(state_key(current.decode("ascii", "replace")))
        if data is None:
            raise MalformedSinkError("its current stream", "it has no state")
        if self._read is None or self._read[0] != data:
            self._read = data, SinkState.from_json(data)
        return self._read[1]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SinkError(self._store.name, "this process was forked", "Build an LmdbRows in this process")
