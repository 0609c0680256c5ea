"""Row store in LMDB; requires the extra ``lmdb``.

Notation: ``N`` is the number of rows of a call, ``D`` the number of columns of the table.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from delta_tracker.errors import (
    SINK_CLOSED,
    SINK_FORKED,
    InvalidArgumentError,
    MalformedSinkError,
    SinkBusyError,
    SinkError,
)
from delta_tracker.forking import Forkable, protect
from delta_tracker.sinks.lmdb_store import (
    CURRENT,
    STATES,
    LmdbStore,
    keys_of,
    state_key,
    stream_prefix,
)
from delta_tracker.sinks.row_sink import RowSink, SinkState
from delta_tracker.sinks.stored_values import (
    OWNER_BYTES,
    decode_log,
    decode_owners,
    encode_log,
    encode_owners,
    encode_rows,
)

_FIRST_MAP_BYTES = 64 << 20
_LOG_ROWS = 4096  # rows of one entry of the log
_MAX_LOG_ENTRIES = 1 << 40  # no key of another table is between those of entries 0 and this one
_SLOTS_PER_KEY = 128  # owners of one key, so that it fits into a page
_KEYS_PER_REMOVAL = 1 << 14
_ROW_OVERHEAD: Final = 192  # bytes of a key and of the objects of a row, about

_Operation = Callable[[Any], None]  # of a transaction


class LmdbSink(RowSink):
    """Row store in a directory of this host, for :class:`~delta_tracker.Predictor`. Readers are other processes.

    The rows of a version are kept in memory until its end, and then written in one transaction: readers get the version
    as a whole. If they exceed ``max_bytes``, a transaction writes what there is, and readers get a part of the version
    before its end. A transaction also takes at most 512 MiB for pages that it changes. Each transaction is durable at
    its end.

    The file grows as needed, and does not shrink. A lock of the file ``writer.lock`` makes the sink the only writer.
    The directory must not be on a network file system.

    Args:
        directory: directory, which is created if it is missing.
        max_bytes: maximum size of the rows that are kept in memory, with 192 bytes more for each.

    Raises:
        InvalidArgumentError: if ``directory`` is empty or ``max_bytes`` is not positive.
        MissingExtraError: if the package ``lmdb`` is not installed.

    Example:
        >>> sink = LmdbSink("/var/lib/rows")
        >>> # Predictor(sink, "s3://bucket/stream").follow()
    """

    def __init__(self, directory: str, *, max_bytes: int = 64 << 20) -> None:
        self._store = LmdbStore(directory)
        if max_bytes <= 0:
            raise InvalidArgumentError("max_bytes", max_bytes, "Pass a positive number of bytes")
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._lock: _WriterLock | None = None
        self._env: Any = None
        self._waiting: list[_Operation] = []  # of the next transaction
        self._waiting_bytes = 0
        self._waits_for: set[str] = set()  # what reads must not miss: "owners", "log"

    def open(self) -> None:
        """Open the files, and become the only writer in all processes; see :meth:`RowSink.open`."""
        self._check_process()
        self._discard()
        if self._env is not None:
            return
        with self._store.errors():
            self._store.path.mkdir(parents=True, exist_ok=True)
            lock = _WriterLock(self._store)
            try:
                env = self._store.environment(map_size=_FIRST_MAP_BYTES)
                env.reader_check()  # a killed reader keeps pages from being reused
            except BaseException:
                lock.release()
                raise
        self._env, self._lock = env, lock

    def states(self) -> list[SinkState]:
        """Return the states of all streams; see :meth:`RowSink.states`."""
        env = self._written()
        states = []
        with self._store.errors(), env.begin() as transaction:
            cursor = transaction.cursor()
            is_found = cursor.set_range(STATES)
            while is_found and cursor.key().startswith(STATES):
                states.append(SinkState.from_json(cursor.value()))
                if state_key(states[-1].stream) != cursor.key():
                    raise MalformedSinkError("a state", "it is that of another stream")
                is_found = cursor.next()
        return states

    def current(self) -> str | None:
        """Return the id of the stream that readers read; see :meth:`RowSink.current`."""
        env = self._written()
        with self._store.errors(), env.begin() as transaction:
            data: bytes | None = transaction.get(CURRENT)
        return None if data is None else data.decode("ascii", "replace")

    def begin(self, state: SinkState) -> None:
        """Store the state before the first row; see :meth:`RowSink.begin`. Names of tables have at most 469 bytes."""
        for table in state.tables:
            self._store.check_table(table)
        with self._store.errors():
            self._opened().reader_check()
        self._add(_put_one(state_key(state.stream), state.to_json()), 0)

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        """Write rows; see :meth:`RowSink.write`."""
        self._write(stream, b"r", table, keys, values, version)

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        """Write default rows; see :meth:`RowSink.write_defaults`."""
        self._write(stream, b"d", table, slots, values, version)

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        """Delete rows; see :meth:`RowSink.delete`."""
        self._delete(keys_of(stream, b"r", table, keys))

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        """Delete default rows; see :meth:`RowSink.delete_defaults`."""
        self._delete(keys_of(stream, b"d", table, slots))

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        """Return the raw ids of rows; see :meth:`RowSink.owners`."""
        env = self._written("owners")
        parts, of_part = (slots // _SLOTS_PER_KEY).unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
        with self._store.errors(), env.begin() as transaction:
            stored = [transaction.get(key, b"") for key in keys_of(stream, b"o", table, parts)]
        if not stored:
            return torch.empty(0, dtype=torch.int64)
        held = torch.stack([decode_owners(data, _SLOTS_PER_KEY) for data in stored])
        return held[of_part, slots % _SLOTS_PER_KEY]

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        """Set the raw ids of rows; see :meth:`RowSink.set_owners`."""
        parts, counts = (slots // _SLOTS_PER_KEY).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        keys = keys_of(stream, b"o", table, parts)
        places, new = slots % _SLOTS_PER_KEY, owners.clone()

        def write(transaction: Any) -> None:  # noqa: ANN401  the package is optional
            begin = 0
            for key, count in zip(keys, counts.tolist(), strict=True):
                held = decode_owners(transaction.get(key, b""), _SLOTS_PER_KEY)
                held[places[begin : begin + count]] = new[begin : begin + count]
                transaction.put(key, encode_owners(held))
                begin += count

        self._waits_for.add("owners")
        self._add(write, len(slots) * OWNER_BYTES * 2 + len(keys) * _SLOTS_PER_KEY * OWNER_BYTES)

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        """Append changes of owners to the log; see :meth:`RowSink.log_owners`."""
        for begin in range(0, len(slots), _LOG_ROWS):
            entry = encode_log(slots[begin : begin + _LOG_ROWS], owners[begin : begin + _LOG_ROWS])
            self._waits_for.add("log")
            self._add(_append(stream, table, entry), len(entry))

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logged changes of owners; see :meth:`RowSink.logged_owners`."""
        number = 0
        while True:
            env = self._written("log")
            with self._store.errors(), env.begin() as transaction:
                entry: bytes | None = transaction.get(_log_key(stream, table, number))
            if entry is None:
                return
            yield decode_log(entry, table)
            number += 1

    def finish(self, state: SinkState) -> None:
        """Write what is in memory, and the state, and make readers read its stream; see :meth:`RowSink.finish`."""

        def write(transaction: Any) -> None:  # noqa: ANN401
            transaction.put(state_key(state.stream), state.to_json())
            transaction.put(CURRENT, state.stream.encode())

        self._add(write, 0)
        self._commit()

    def settle(self, state: SinkState) -> None:
        """Clear the log of owners, and store the state; see :meth:`RowSink.settle`."""

        def write(transaction: Any) -> None:  # noqa: ANN401
            for table in state.identities:
                number = 0
                while transaction.delete(_log_key(state.stream, table, number)):
                    number += 1
            transaction.put(state_key(state.stream), state.to_json())

        self._add(write, 0)
        self._commit()

    def remove(self, stream: str) -> None:
        """Delete all keys of a stream, which are next to each other in LMDB; see :meth:`RowSink.remove`."""
        if stream == self.current():
            raise InvalidArgumentError("stream", stream, "Call finish() of another stream first: readers read this one")
        is_left = [True]
        begin = stream_prefix(stream)

        def write(transaction: Any) -> None:  # noqa: ANN401
            cursor = transaction.cursor()
            is_found = cursor.set_range(begin)
            for _ in range(_KEYS_PER_REMOVAL):
                if not is_found or not cursor.key().startswith(begin):
                    is_left[0] = False
                    transaction.delete(state_key(stream))
                    return
                is_found = cursor.delete() and bool(cursor.key())  # moves to the next key

        while is_left[0]:
            self._add(write, 0)
            self._commit()

    def close(self) -> None:
        """Discard what is in memory, stop being the writer, and close the files; see :meth:`RowSink.close`."""
        self._discard()
        env, self._env = self._env, None
        lock, self._lock = self._lock, None
        if os.getpid() != self._pid:
            return  # the files belong to the parent process
        if env is not None:
            env.close()
        if lock is not None:
            lock.release()

    def _write(self, stream: str, kind: bytes, table: str, ids: Tensor, values: Tensor, version: int) -> None:
        row_bytes = values.shape[1] * values.dtype.itemsize + _ROW_OVERHEAD
        count = max(1, self._max_bytes // row_bytes)
        for begin in range(0, len(ids), count):
            some, order = ids[begin : begin + count].sort()  # neighbors share pages
            # encode_rows copies: the values are valid until this call returns
            rows = encode_rows(values[begin : begin + count][order], version)
            keys = keys_of(stream, kind, table, some)
            self._add(_put(keys, rows), len(rows) * row_bytes)

    def _delete(self, keys: list[bytes]) -> None:
        self._add(_delete(keys), len(keys) * _ROW_OVERHEAD)

    def _add(self, operation: _Operation, num_bytes: int) -> None:
        """Add an operation to the next transaction; run those before it if both exceed ``max_bytes``."""
        self._opened()
        if self._waiting and self._waiting_bytes + num_bytes > self._max_bytes:
            self._commit()
        self._waiting.append(operation)
        self._waiting_bytes += num_bytes

    def _commit(self) -> None:
        """Write what is in memory in one durable transaction, in a larger file if necessary."""
        env = self._opened()
        try:
            with self._store.errors():
                while True:
                    try:
                        with env.begin(write=True) as transaction:
                            for operation in self._waiting:
                                operation(transaction)
                        break
                    except self._store.package.MapFullError:
                        env.set_mapsize(2 * env.info()["map_size"])  # readers adopt it at their next lookup
        finally:
            self._discard()

    def _written(self, what: str | None = None) -> Any:  # noqa: ANN401
        """Return the environment, in which all changes of ``what`` were written."""
        env = self._opened()
        if what in self._waits_for:
            self._commit()
        return env

    def _discard(self) -> None:
        self._waiting, self._waiting_bytes, self._waits_for = [], 0, set()

    def _opened(self) -> Any:  # noqa: ANN401
        self._check_process()
        if self._env is None:
            raise SinkError(self._store.name, *SINK_CLOSED)
        return self._env

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SinkError(self._store.name, *SINK_FORKED)


class _WriterLock(Forkable):
    """Lock of the file ``writer.lock``, which a forked process does not keep.

    Args:
        store: the row store.

    Raises:
        SinkBusyError: if the lock is taken.
    """

    def __init__(self, store: LmdbStore) -> None:
        path: Path = store.path / "writer.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = os.read(self._file, 1000).decode("utf-8", "replace") or "another process"
            self.release()
            raise SinkBusyError(store.name, writer) from error
        protect(self)
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} of host {socket.gethostname()}".encode())

    def release(self) -> None:
        """Release the lock."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def after_fork_in_child(self) -> None:
        """Close the file, so that the lock ends with the parent process."""
        self.release()


def _put_one(key: bytes, value: bytes) -> _Operation:
    return lambda transaction: transaction.put(key, value)


def _put(keys: list[bytes], values: list[bytes]) -> _Operation:
    return lambda transaction: transaction.cursor().putmulti(zip(keys, values, strict=True))


def _delete(keys: list[bytes]) -> _Operation:
    def delete(transaction: Any) -> None:  # noqa: ANN401
        for key in keys:
            transaction.delete(key)

    return delete


def _append(stream: str, table: str, entry: bytes) -> _Operation:
    def append(transaction: Any) -> None:  # noqa: ANN401
        first, end = _log_key(stream, table, 0), _log_key(stream, table, _MAX_LOG_ENTRIES)
        cursor = transaction.cursor()
        is_found = cursor.prev() if cursor.set_range(end) else cursor.last()
        key = cursor.key() if is_found else b""
        number = int.from_bytes(key[-8:], "big") - int.from_bytes(first[-8:], "big") + 1 if key >= first else 0
        transaction.put(_log_key(stream, table, number), entry)

    return append


def _log_key(stream: str, table: str, number: int) -> bytes:
    return keys_of(stream, b"l", table, torch.tensor([number]))[0]
