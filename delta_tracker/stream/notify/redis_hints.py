"""Hints about new versions through Redis Streams. Requires the extra ``redis``."""

from urllib.parse import urlsplit

from delta_tracker.arguments import is_number
from delta_tracker.errors import InvalidArgumentError, import_optional


class RedisNotifier:
    """:class:`~delta_tracker.stream.notify.notifier.Notifier` that stores a stream's newest hint in a Redis stream.

    The version is the id of the Redis entry, so that Redis rejects old and repeated versions. Raises MissingExtraError
    if the package ``redis`` is not installed.

    Args:
        url: ``redis://host:port/db``, ``rediss://...`` or ``unix://...``.
        key: prefix of the keys. The stream's id follows it, so that a new stream gets a new key.
        timeout_seconds: timeout for opening a connection. The timeout for a response is twice as long. A failed call is
            retried once immediately, on a new connection.
    """

    def __init__(self, url: str, *, key: str = "delta_tracker", timeout_seconds: float = 0.25) -> None:
        if urlsplit(str(url)).scheme not in ("redis", "rediss", "unix"):
            # the URL may contain a password, so the error does not show it
            raise InvalidArgumentError("url", "...", "Write it as redis://host:port/db, rediss://... or unix://...")
        if not (is_number(timeout_seconds) and timeout_seconds > 0):
            raise InvalidArgumentError("timeout_seconds", timeout_seconds, "Pass a positive number of seconds")
        self._key = key
        self._timeout_seconds = timeout_seconds
        redis = import_optional("redis", "redis", "redis")
        self._refused: type[Exception] = redis.ResponseError
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=2 * timeout_seconds,  # a read may block for half of that
                socket_connect_timeout=timeout_seconds,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),
            )
        except ValueError as error:
            raise InvalidArgumentError("url", "...", "Write it as redis://host:port/db") from error

    def announce(self, stream: str, version: int) -> None:
        """Announce that ``version`` of the stream is committed."""
        try:
            self._redis.xadd(self._name(stream), {"v": version}, id=_id(version), maxlen=1, approximate=False)
        except self._refused as error:
            if "equal or smaller" not in str(error):
                raise

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        """Return True once a version above ``after`` is announced, or False after the shorter of the two timeouts."""
        # For Redis, 0 means no timeout. Only the id of an entry is used, so malformed fields are harmless.
        block = max(1, int(1000 * min(timeout_seconds, self._timeout_seconds)))
        begin = "0-0" if after < 0 else _id(after)
        return bool(self._redis.xread({self._name(stream): begin}, count=1, block=block))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _name(self, stream: str) -> str:
        return f"{self._key}:{stream}"


def _id(version: int) -> str:
    return f"{version}-1"  # Redis has no entry 0-0
