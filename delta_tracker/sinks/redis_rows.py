"""Reader of a row store in Redis, and code shared with the sink; requires the extra ``redis``.

Notation: ``N`` is the number of ids in a call.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from delta_tracker.arguments import is_number
from delta_tracker.errors import NO_VERSION, InvalidArgumentError, MalformedSinkError, SinkError, import_optional
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.sinks.stored_rows import LookedUp, Lookup, current_state, joined, num_value_bytes

MAX_BATCH_ROWS = 1000
MAX_BATCH_BYTES = 1 << 20
_MAX_ATTEMPTS = 20


class RedisRows:
    """Reader of the rows that a :class:`~delta_tracker.sinks.redis.RedisSink` wrote. Thread-safe.

    Rows are read in batches of at most 1,000. One ``MGET`` command reads the rows of a batch, their default rows and
    the state, so each batch is consistent.

    Args:
        url: ``redis://host:port/db``, ``rediss://...`` or ``unix://...``.
        prefix: prefix of all keys; must equal the prefix of the sink.
        timeout_seconds: timeout for connecting, and for each response.

    Raises:
        InvalidArgumentError: for an invalid URL, an empty prefix, or a timeout that is not positive.
        MissingExtraError: if the package ``redis`` is not installed.

    Example:
        >>> rows = RedisRows("redis://127.0.0.1:6379/0", prefix="ads")
        >>> # found = rows.rows("embeddings.user", torch.tensor([3, 7])); found.values, found.version
    """

    def __init__(self, url: str, *, prefix: str = "delta_tracker", timeout_seconds: float = 1) -> None:
        self._server = RedisServer(url, prefix, timeout_seconds)
        self._key, self._keys = self._server.key, self._server.keys
        self._redis = self._server.client()
        self._known: SinkState | None = None  # the last state

    def state(self) -> SinkState:
        """Return the state of the current stream.

        Raises:
            SinkError: if the server cannot be used, or no version is complete yet.
            MalformedSinkError: if stored data is invalid.
        """
        for _ in range(_MAX_ATTEMPTS):
            with self._server.errors():
                current = self._redis.get(self._key("current"))
                if current is None:
                    raise SinkError(self._server.name, *NO_VERSION)
                data = self._redis.get(self._key(current.decode(errors="replace"), "state"))
            if data is not None:
                self._known = current_state(data)
                return self._known
        raise MalformedSinkError("its current stream", "it has no state")

    def rows(self, table: str, ids: Tensor) -> LookedUp:
        """Look up rows by id.

        Args:
            table: FQN of the table.
            ids: ``[N]`` int64 on the CPU: global row ids, or raw ids for a table with raw ids.

        Raises:
            InvalidArgumentError: if the table is unknown, ``ids`` is not ``[N]`` int64 on the CPU, or a global row id
                is outside the table.
            SinkError: if the server cannot be used, or no version is complete yet.
            MalformedSinkError: if stored data is invalid, or a row is missing.
        """
        for _ in range(_MAX_ATTEMPTS):
            found = self._rows(table, ids)
            if found is not None:
                return found
            self._known = None
        reason = f"its stream changed during {_MAX_ATTEMPTS} lookups in a row"
        raise SinkError(self._server.name, reason, "Call rows() again")

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def _rows(self, table: str, ids: Tensor) -> LookedUp | None:
        """Return the result of :meth:`rows`; None if the current stream, its tables or its buckets have changed."""
        state = self._known or self.state()
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
            self._key("current"),
            self._key(state.stream, "state"),
            *self._keys(state.stream, "r", table, ids.tolist()),
            *self._keys(state.stream, "d", table, lookup.defaults),
        ]
        with self._server.errors():
            current, data, *stored = self._redis.mget(names)
        if current != state.stream.encode():
            return None
        newest = self._known = current_state(data)
        if newest.identities != state.identities or newest.tables != state.tables:
            return None  # other default rows may be needed
        return Lookup(newest, table, ids).decode(stored[: len(ids)], stored[len(ids) :])


def _check_prefix(prefix: object) -> None:
    if not isinstance(prefix, str) or not prefix:
        raise InvalidArgumentError("prefix", prefix, "Pass a text that is not empty")


class RedisServer:
    """Connections, keys and error handling shared by the sink and the reader of a row store in Redis.

    The arguments and errors are the same as in :class:`RedisRows`.

    Attributes:
        name: URL and prefix, without the password, for error messages.
    """

    def __init__(self, url: str, prefix: str, timeout_seconds: float) -> None:
        parts = urlsplit(str(url))
        if parts.scheme not in ("redis", "rediss", "unix"):
            # the URL may contain a password, so the error does not show it
            raise InvalidArgumentError("url", "...", "Write it as redis://host:port/db, rediss://... or unix://...")
        _check_prefix(prefix)
        if not (is_number(timeout_seconds) and timeout_seconds > 0):
            raise InvalidArgumentError("timeout_seconds", timeout_seconds, "Pass a positive number of seconds")
        self._redis = import_optional("redis", "redis", "redis")
        self._url = url
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds
        location = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self.name = f"{parts.scheme}://{location}?prefix={prefix}"
        self.client().close()  # checks the URL

    def client(self, *, is_single: bool = False) -> Any:  # noqa: ANN401  the package is optional
        """Return a new client that connects at its first command and does not retry commands.

        If ``is_single`` is True, the client uses a single connection and is not thread-safe.
        """
        try:
            return self._redis.Redis.from_url(
                self._url,
                single_connection_client=is_single,
                socket_timeout=self._timeout_seconds,
                socket_connect_timeout=self._timeout_seconds,
                socket_keepalive=True,
                retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            )
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError("url", "...", "Write it as redis://host:port/db") from error

    def key(self, *parts: str | int) -> str:
        """Return a key: the prefix and ``parts``, joined by colons."""
        return ":".join([self._prefix, *map(str, parts)])

    def keys(self, stream: str, kind: str, table: str, ids: Iterable[int]) -> list[str]:
        """Return the keys of rows (``kind="r"``), default rows (``"d"``), or parts of the map of owners (``"o"``)."""
        begin = self.key(stream, kind, table)
        return [f"{begin}:{each}" for each in ids]

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Return a context manager that converts errors of the package ``redis`` to SinkError."""
        try:
            yield
        except self._redis.RedisError as error:
            raise SinkError(self.name, str(error) or type(error).__name__) from error
