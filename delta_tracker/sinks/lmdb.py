"""Row store in LMDB; requires the extra ``lmdb``.

Notation: ``N`` is the number of rows in a call, ``D`` the number of columns of the table.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from delta_tracker.arguments import check_count
from delta_tracker.errors import SINK_CLOSED, SINK_FORKED, InvalidArgumentError, MalformedSinkError, SinkError
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.sinks.lmdb_rows import CURRENT, STATES, LmdbStore, keys_of, state_key, stream_prefix
from delta_tracker.sinks.row_sink import RowSink, SinkState
from delta_tracker.sinks.stored_rows import (
    OWNER_BYTES,
    decode_log,
    decode_owners,
    encode_log,
    encode_owners,
    encode_rows,
)

_FIRST_MAP_BYTES = 64 << 20
_SLOTS_PER_KEY = 128  # owners of one key, so that it fits into a page
_KEYS_PER_REMOVAL = 1 << 14
_OVERHEAD: Final = 192  # bytes of a key, and of the objects of a row, about


class LmdbSink(RowSink):
    """Sink that writes a stream to LMDB in a local directory. Pass it to :class:`~delta_tracker.Predictor`.

    The rows of a version are buffered in memory and written in one transaction at the end of the version, so that
    readers in other processes see the whole version at once. If a version exceeds ``max_bytes``, it is written in
    several transactions, and readers may see a part of the version. Each transaction is durable when it ends, and uses
    up to 512 MiB of additional memory for modified pages.

    The database file grows as needed and never shrinks. A lock on the file ``writer.lock`` ensures that the row store
    has only one writer. The directory must not be on a network file system.

    Args:
        directory: directory of the row store. It is created if it does not exist.
        max_bytes: maximum size of the buffered rows, including 192 bytes of overhead per row.

    Raises:
        InvalidArgumentError: if ``directory`` is empty, is a URL or begins with ``~``, or if ``max_bytes`` is
            not positive.
        MissingExtraError: if the package ``lmdb`` is not installed.

    Example:
        >>> sink = LmdbSink("/var/lib/rows")
        >>> # Predictor(sink, "s3://bucket/stream").follow()
    """

    def __init__(self, directory: str, *, max_bytes: int = 64 << 20) -> None:
        self._store = LmdbStore(directory)
        check_count("max_bytes", max_bytes)
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._lock: _WriterLock | None = None
        self._env: Any = None
        self._pending: dict[bytes, bytes | None] = {}  # key to value in the next transaction; None to delete it
        self._pending_bytes = 0
        self._num_logged: dict[tuple[str, str], int] = {}  # stream and table to known entries of the log of owners

    def open(self) -> None:
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
        states = []
        for key, data in self._stored(STATES):
            states.append(SinkState.from_json(data))
            if state_key(states[-1].stream) != key:
                raise MalformedSinkError("a state", "it is that of another stream")
        return states

    def current(self) -> str | None:
        (data,) = self._read([CURRENT])
        return None if data is None else data.decode("ascii", "replace")

    def begin(self, state: SinkState) -> None:
        """Store the state; see :meth:`RowSink.begin`. Raise InvalidArgumentError for an FQN longer than 469 bytes."""
        for table in state.tables:
            self._store.check_table(table)
        with self._store.errors():
            self._opened().reader_check()
        self._change({state_key(state.stream): state.to_json()})

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        self._write(stream, b"r", table, keys, values, version)

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        self._write(stream, b"d", table, slots, values, version)

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        self._change(dict.fromkeys(keys_of(stream, b"r", table, keys)))

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        self._change(dict.fromkeys(keys_of(stream, b"d", table, slots)))

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        if not len(slots):
            return torch.empty(0, dtype=torch.int64, device="cpu")
        parts, of_part = (slots // _SLOTS_PER_KEY).unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
        stored = self._read(keys_of(stream, b"o", table, parts))
        held = torch.stack([decode_owners(data or b"", _SLOTS_PER_KEY) for data in stored])
        return held[of_part, slots % _SLOTS_PER_KEY]

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        parts, counts = (slots // _SLOTS_PER_KEY).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        keys, begin = keys_of(stream, b"o", table, parts), 0
        changes: dict[bytes, bytes | None] = {}
        for key, data, size in zip(keys, self._read(keys), counts.tolist(), strict=True):
            held, end = decode_owners(data or b"", _SLOTS_PER_KEY), begin + size
            held[slots[begin:end] % _SLOTS_PER_KEY] = owners[begin:end]
            changes[key], begin = encode_owners(held), end
        self._change(changes, value_bytes=_SLOTS_PER_KEY * OWNER_BYTES)

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        entry = encode_log(slots, owners)
        self._change({_log_key(stream, table, self._log_end(stream, table)): entry}, value_bytes=len(entry))

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        for number in count():
            (entry,) = self._read([_log_key(stream, table, number)])
            if entry is None:
                return
            yield decode_log(entry, table)

    def finish(self, state: SinkState) -> None:
        self._change({state_key(state.stream): state.to_json(), CURRENT: state.stream.encode()})
        self._commit()

    def clear_owner_log(self, state: SinkState) -> None:
        for table in state.identities:
            end = self._log_end(state.stream, table)
            self._change({_log_key(state.stream, table, number): None for number in range(end)})
        self._change({state_key(state.stream): state.to_json()})
        self._commit()

    def remove(self, stream: str) -> None:
        if stream == self.current():
            raise InvalidArgumentError("stream", stream, "Call finish() of another stream first: readers read this one")
        while stored := self._stored(stream_prefix(stream), _KEYS_PER_REMOVAL):
            self._change({key: None for key, _ in stored})
            self._commit()
        self._change({state_key(stream): None})
        self._commit()

    def close(self) -> None:
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
        value_bytes = values.shape[1] * values.dtype.itemsize
        num_rows = max(1, self._max_bytes // (value_bytes + _OVERHEAD))
        for begin in range(0, len(ids), num_rows):
            keys = keys_of(stream, kind, table, ids[begin : begin + num_rows])
            rows = encode_rows(values[begin : begin + num_rows], version)  # a copy: values are valid until the return
            self._change(dict(zip(keys, rows, strict=True)), value_bytes=value_bytes)

    def _log_end(self, stream: str, table: str) -> int:
        number = self._num_logged.get((stream, table), 0)
        while self._read([_log_key(stream, table, number)]) != [None]:
            number += 1
        self._num_logged[stream, table] = number
        return number

    def _read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, including pending changes; None for a missing key."""
        env, pending = self._opened(), self._pending
        with self._store.errors(), env.begin() as transaction:
            return [pending[key] if key in pending else transaction.get(key) for key in keys]

    def _stored(self, prefix: bytes, max_keys: int | None = None) -> list[tuple[bytes, bytes]]:
        """Return the first ``max_keys`` keys that start with ``prefix``, with their values. Ignores pending changes."""
        env = self._opened()
        with self._store.errors(), env.begin() as transaction:
            cursor = transaction.cursor()
            found = cursor.iternext() if cursor.set_range(prefix) else ()
            return list(islice(takewhile(lambda pair: pair[0].startswith(prefix), found), max_keys))

    def _change(self, changes: Mapping[bytes, bytes | None], value_bytes: int = 0) -> None:
        """Buffer new values of keys; None deletes a key. First commits the buffer if it would exceed ``max_bytes``."""
        self._opened()
        num_bytes = len(changes) * (value_bytes + _OVERHEAD)
        if self._pending and self._pending_bytes + num_bytes > self._max_bytes:
            self._commit()
        self._pending.update(changes)
        self._pending_bytes += num_bytes

    def _commit(self) -> None:
        """Write the pending changes in one durable transaction. Enlarge the file if necessary."""
        env = self._opened()
        try:
            with self._store.errors():
                while not self._is_written(env):
                    env.set_mapsize(2 * env.info()["map_size"])  # readers adopt it at their next lookup
        finally:
            self._discard()

    def _is_written(self, env: Any) -> bool:  # noqa: ANN401  the package is optional
        """Try to write the pending changes in one transaction. Return False if the file is too small."""
        try:
            with env.begin(write=True) as transaction:
                for key in sorted(self._pending):  # neighbors share pages
                    value = self._pending[key]
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)
        except self._store.package.MapFullError:
            return False
        return True

    def _discard(self) -> None:
        self._pending, self._pending_bytes, self._num_logged = {}, 0, {}

    def _opened(self) -> Any:  # noqa: ANN401
        self._check_process()
        if self._env is None:
            raise SinkError(self._store.name, *SINK_CLOSED)
        return self._env

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SinkError(self._store.name, *SINK_FORKED)


class _WriterLock(Forkable):
    """Lock on the file ``writer.lock``, held by one process only. Raises SinkError if the lock is already held."""

    def __init__(self, store: LmdbStore) -> None:
        path: Path = store.path / "writer.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = os.read(self._file, 1000).decode("utf-8", "replace") or "another process"
            self.release()
            raise SinkError.busy(store.name, writer) from error
        protect(self)
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} of host {socket.gethostname()}".encode())

    def release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def after_fork_in_child(self) -> None:
        """Close the inherited file, which would otherwise keep the lock after the parent process ends."""
        self.release()


def _log_key(stream: str, table: str, number: int) -> bytes:
    return keys_of(stream, b"l", table, torch.tensor([number], device="cpu"))[0]
