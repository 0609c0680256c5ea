"""Connection to a Redis server, and the names of its keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from delta_tracker.errors import InvalidArgumentError, MissingExtraError, SinkError

MAX_BATCH_ROWS = 1000
MAX_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Names of the keys of a row store in Redis.

    Args:
        prefix: beginning of all keys.

    Example:
        >>> RedisKeys("p").rows("0123", "user", [7])
        ['p:0123:r:user:7']
    """

    prefix: str

    @property
    def current(self) -> str:
        """Key of the stream that readers read."""
        return f"{self.prefix}:current"

    @property
    def streams(self) -> str:
        """Key of the set of streams."""
        return f"{self.prefix}:streams"

    @property
    def writer(self) -> str:
        """Key of the writer."""
        return f"{self.prefix}:writer"

    def state(self, stream: str) -> str:
        """Return the key of the state of a stream."""
        return f"{self.prefix}:{stream}:state"

    def rows(self, stream: str, table: str, ids: list[int]) -> list[str]:
        """Return the keys of rows."""
        begin = f"{self.prefix}:{stream}:r:{table}:"
        return [f"{begin}{each}" for each in ids]

    def defaults(self, stream: str, table: str, slots: list[int]) -> list[str]:
        """Return the keys of default rows."""
        begin = f"{self.prefix}:{stream}:d:{table}:"
        return [f"{begin}{each}" for each in slots]

    def owners(self, stream: str, table: str, number: int) -> str:
        """Return the key of a part of the map of raw ids."""
        return f"{self.prefix}:{stream}:o:{table}:{number}"

    def log(self, stream: str, table: str) -> str:
        """Return the key of the log of owners."""
        return f"{self.prefix}:{stream}:l:{table}"


class RedisServer:
    """Redis server of a row store: builds clients, and translates their errors.

    Args:
        url: ``redis://host:port/db``, ``rediss://...`` or ``unix://...``.
        prefix: beginning of all keys.
        timeout_seconds: timeout of a connection, and of each response.

    Raises:
        InvalidArgumentError: for an invalid URL, an empty prefix, or a timeout that is not positive.
        MissingExtraError: if the package ``redis`` is not installed.

    Attributes:
        name: URL and prefix without the password, for error messages.
    """

    def __init__(self, url: str, prefix: str, timeout_seconds: float) -> None:
        parts = urlsplit(str(url))
        if parts.scheme not in ("redis", "rediss", "unix"):
            # the URL may contain a password, so the error does not show it
            raise InvalidArgumentError("url", "...", "Write it as redis://host:port/db, rediss://... or unix://...")
        if not prefix:
            raise InvalidArgumentError("prefix", prefix, "Pass a text that is not empty")
        if not timeout_seconds > 0:
            raise InvalidArgumentError("timeout_seconds", timeout_seconds, "Pass a positive number of seconds")
        self._redis, self._retry, self._backoff = _imported()
        self._url = url
        self._timeout_seconds = timeout_seconds
        location = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self.name = f"{parts.scheme}://{location}?prefix={prefix}"
        self.client().close()  # checks the URL

    def client(self, *, is_single: bool = False) -> Any:  # noqa: ANN401  the package is optional
        """Return a client, which connects at its first command and does not retry.

        Args:
            is_single: True for one connection, which is not safe for use by several threads.
        """
        try:
            return self._redis.Redis.from_url(
                self._url,
                single_connection_client=is_single,
                socket_timeout=self._timeout_seconds,
                socket_connect_timeout=self._timeout_seconds,
                socket_keepalive=True,
                retry=self._retry.Retry(self._backoff.NoBackoff(), 0),
            )
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError("url", "...", "Write it as redis://host:port/db") from error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of the client and of the server as SinkError."""
        try:
            yield
        except self._redis.RedisError as error:
            raise SinkError(self.name, str(error) or type(error).__name__) from error


def _imported() -> tuple[Any, Any, Any]:
    try:
        return (
            importlib.import_module("redis"),
            importlib.import_module("redis.retry"),
            importlib.import_module("redis.backoff"),
        )
    except ModuleNotFoundError as error:
        raise MissingExtraError("redis", "redis") from error
