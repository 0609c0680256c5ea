"""Reader of a row store in Redis; requires the extra ``redis``.

Notation: ``N`` is the number of ids of a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from delta_tracker.errors import NO_VERSION, MalformedSinkError, SinkError
from delta_tracker.sinks.lookup import LookedUp, Lookup, joined
from delta_tracker.sinks.redis_server import MAX_BATCH_BYTES, MAX_BATCH_ROWS, RedisKeys, RedisServer
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.sinks.stored_values import num_value_bytes

_MAX_ATTEMPTS = 20


class RedisRows:
    """Reader of the rows that :class:`~delta_tracker.sinks.redis.RedisSink` wrote.

    Each batch of at most 1,000 rows is one ``MGET``, which also reads the state: the rows of a batch, their version and
    the default rows are of one moment. Safe for use by several threads.

    Args:
        url: ``redis://host:port/db``, ``rediss://...`` or ``unix://...``.
        prefix: beginning of all keys, that of the sink.
        timeout_seconds: timeout of a connection, and of each response.

    Raises:
        InvalidArgumentError: for an invalid URL, an empty prefix, or a timeout that is not positive.
        MissingExtraError: if the package ``redis`` is not installed.

    Example:
        >>> rows = RedisRows("redis://127.0.0.1:6379/0", prefix="ads")
        >>> # found = rows.rows("embeddings.user", torch.tensor([3, 7])); found.values, found.version
    """

    def __init__(self, url: str, *, prefix: str = "delta_tracker", timeout_seconds: float = 1) -> None:
        self._server = RedisServer(url, prefix, timeout_seconds)
        self._keys = RedisKeys(prefix)
        self._redis = self._server.client()
        self._read: tuple[bytes, SinkState] | None = None  # the last state and its JSON

    def state(self) -> SinkState:
        """Return the state of the stream that readers read.

        Raises:
            SinkError: if the server cannot be used, or no version is complete yet.
            MalformedSinkError: if stored data is invalid.
        """
        for _ in range(_MAX_ATTEMPTS):
            with self._server.errors():
                current = self._redis.get(self._keys.current)
                if current is None:
                    raise SinkError(self._server.name, *NO_VERSION)
                data = self._redis.get(self._keys.state(_stream(current)))
            if data is not None:
                return self._parsed(data)
        raise MalformedSinkError("its current stream", "it has no state")

    def rows(self, table: str, ids: Tensor) -> LookedUp:
        """Return rows.

        Args:
            table: FQN of the table.
            ids: ``[N]`` int64 on the CPU: global row ids, or raw ids for a table with raw ids.

        Raises:
            InvalidArgumentError: if the table is unknown, ``ids`` has another shape or dtype, or a global row id is
                outside the table.
            SinkError: if the server cannot be used, or no version is complete yet.
            MalformedSinkError: if stored data is invalid, or a row is missing.
        """
        for _ in range(_MAX_ATTEMPTS):
            found = self._rows(table, ids)
            if found is not None:
                return found
            self._read = None
        reason = f"its stream changed during {_MAX_ATTEMPTS} lookups in a row"
        raise SinkError(self._server.name, reason, "Call rows() again")

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _rows(self, table: str, ids: Tensor) -> LookedUp | None:
        """Return rows; None if the stream or its buckets changed meanwhile."""
        read = self._read
        state = self.state() if read is None else read[1]
        Lookup(state, table, ids)  # checks all ids before the first batch
        count = max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // num_value_bytes(state.tables[table])))
        parts: list[LookedUp] = []
        for some in torch.split(ids, count) if len(ids) else [ids]:
            part = self._batch(state, table, some)
            if part is None:
                return None
            parts.append(part)
        return joined(parts)

    def _batch(self, state: SinkState, table: str, ids: Tensor) -> LookedUp | None:
        lookup = Lookup(state, table, ids)
        names = [
            self._keys.current,
            self._keys.state(state.stream),
            *self._keys.rows(state.stream, table, ids.tolist()),
            *self._keys.defaults(state.stream, table, lookup.defaults),
        ]
        with self._server.errors():
            current, data, *stored = self._redis.mget(names)
        if current is None or _stream(current) != state.stream:
            return None
        if data is None:
            raise MalformedSinkError("its current stream", "it has no state")
        newest = self._parsed(data)
        if newest.identities != state.identities or newest.tables != state.tables:
            return None  # other default rows may be needed
        defaults = dict(zip(lookup.defaults, stored[len(ids) :], strict=True))
        return Lookup(newest, table, ids).decode(stored[: len(ids)], defaults.get)

    def _parsed(self, data: bytes) -> SinkState:
        """Return a state, which is parsed only if it differs from the last one."""
        read = self._read
        if read is not None and read[0] == data:
            return read[1]
        state = SinkState.from_json(data)
        self._read = data, state
        return state


def _stream(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MalformedSinkError("its current stream", str(error)) from error
