"""Reader of a row store in LMDB, and the format of its keys; requires the extra ``lmdb``.

Notation: ``N`` is the number of ids in a call.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from delta_tracker.arguments import check_path
from delta_tracker.errors import NO_VERSION, InvalidArgumentError, SinkError, import_optional
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.sinks.stored_rows import LookedUp, Lookup, current_state

CURRENT = b"current"
STATES = b"s"  # beginning of the keys of states
MAX_READERS = 1024
_MAX_KEY_BYTES = 511
_STREAM_HEX = 32
_ID_BYTES = 8
_SIGN = np.uint64(1 << 63)  # inverted, so that keys are in the order of signed ids


class LmdbRows:
    """Reader of the rows that an :class:`~delta_tracker.sinks.lmdb.LmdbSink` wrote in another process.

    A lookup is one read transaction, so its result is consistent. Thread-safe; lookups run one at a time.

    Args:
        directory: directory of the row store, as passed to the sink.

    Raises:
        InvalidArgumentError: if ``directory`` is empty, is a URL or begins with ``~``.
        MissingExtraError: if the package ``lmdb`` is not installed.
        SinkError: if the directory cannot be read, or is already open in this process.

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
        self._env: Any = self._store.environment(readonly=True, create=False, map_size=0)

    def state(self) -> SinkState:
        """Return the state of the current stream. Raises the same errors as :meth:`rows`."""
        self._check_process()
        with self._lock, self._store.errors(), self._begin() as transaction:
            return self._state(transaction)

    def rows(self, table: str, ids: Tensor) -> LookedUp:
        """Look up rows by id.

        Args:
            table: FQN of the table.
            ids: ``[N]`` int64 on the CPU: global row ids, or raw ids for a table with raw ids.

        Raises:
            InvalidArgumentError: if the table is unknown, ``ids`` is not ``[N]`` int64 on the CPU, or a global row id
                is outside the table.
            SinkError: if the files cannot be read, no version is complete yet, or this process was forked.
            MalformedSinkError: if stored data is invalid, or a row is missing.
        """
        self._check_process()
        with self._lock, self._store.errors(), self._begin() as transaction:
            state = self._state(transaction)
            lookup = Lookup(state, table, ids)
            stored = [transaction.get(key) for key in keys_of(state.stream, b"r", table, ids)]
            slots = torch.tensor(lookup.defaults, dtype=torch.int64, device="cpu")
            return lookup.decode(stored, [transaction.get(key) for key in keys_of(state.stream, b"d", table, slots)])

    def close(self) -> None:
        """Close the files. No-op in a forked process."""
        if os.getpid() == self._pid:
            with self._lock:
                self._env.close()

    def _begin(self) -> Any:  # noqa: ANN401  the package is optional
        """Begin a read transaction. If the sink enlarged the file, adopt the new size. Callers must hold the lock."""
        try:
            return self._env.begin()
        except self._store.package.MapResizedError:
            self._env.set_mapsize(0)
            return self._env.begin()

    def _state(self, transaction: Any) -> SinkState:  # noqa: ANN401
        current = transaction.get(CURRENT)
        if current is None:
            raise SinkError(self._store.name, *NO_VERSION)
        return current_state(transaction.get(state_key(current.decode("ascii", "replace"))))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SinkError(self._store.name, "this process was forked", "Build an LmdbRows in this process")


class LmdbStore:
    """Directory and error handling shared by the sink and the reader of a row store in LMDB.

    Raises:
        InvalidArgumentError: if the directory is empty, is a URL, begins with ``~`` or contains a null character.
        MissingExtraError: if the package ``lmdb`` is not installed.

    Attributes:
        path: absolute path of the directory.
        name: ``lmdb://`` and the path, for error messages.
        package: the imported package ``lmdb``.
    """

    def __init__(self, directory: str) -> None:
        path = check_path("directory", directory)
        self.package = import_optional("lmdb", "lmdb", "lmdb")
        self.path = path.absolute()
        self.name = f"lmdb://{self.path}"

    def environment(self, **options: Any) -> Any:  # noqa: ANN401  the package is optional
        """Return an LMDB environment for the directory, opened with ``options``. Raise SinkError on failure."""
        with self.errors():
            try:
                return self.package.open(str(self.path), max_readers=MAX_READERS, readahead=False, **options)
            except self.package.Error as error:
                if "already open in this process" not in str(error):
                    raise
                remedy = "Use it in another process, or close its LmdbSink or LmdbRows in this process first"
                raise SinkError(self.name, "LMDB opens a directory only once in a process", remedy) from error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Return a context manager that converts errors of LMDB and the file system to SinkError."""
        try:
            yield
        except SinkError:
            raise
        except (self.package.Error, OSError) as error:
            raise SinkError(self.name, str(error) or type(error).__name__) from error

    def check_table(self, table: str) -> None:
        """Raise InvalidArgumentError if the table's FQN is too long for the keys of LMDB."""
        limit = _MAX_KEY_BYTES - len(b"k") - _STREAM_HEX - len(b"r") - _ID_BYTES
        if len(table.encode()) > limit:
            remedy = f"Pass a name of up to {limit} bytes in UTF-8, the limit of LMDB"
            raise InvalidArgumentError("table", table, remedy)


def state_key(stream: str) -> bytes:
    """Return the key that stores the state of a stream."""
    return STATES + stream.encode()


def stream_prefix(stream: str) -> bytes:
    """Return the prefix of all keys of a stream, except the key of its state."""
    return b"k" + stream.encode()


def keys_of(stream: str, kind: bytes, table: str, ids: Tensor) -> list[bytes]:
    r"""Return a key for each id: ``k``, the stream id, the kind, the FQN in UTF-8 and the id in 8 bytes, concatenated.

    Args:
        stream: id of the stream.
        kind: ``r`` for rows, ``d`` for default rows, ``o`` for the map of owners, ``l`` for the log of owners.
        table: FQN of the table.
        ids: ``[N]`` int64: raw ids, global row ids, indices of parts of the map, or indices of log entries.

    Example:
        >>> import torch
        >>> keys_of("0123", b"r", "user", torch.tensor([1]))
        [b'k0123ruser\x80\x00\x00\x00\x00\x00\x00\x01']
    """
    begin = stream_prefix(stream) + kind + table.encode()
    tails = (ids.numpy().astype(np.int64).view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
    return [begin + tails[at : at + _ID_BYTES] for at in range(0, len(tails), _ID_BYTES)]
