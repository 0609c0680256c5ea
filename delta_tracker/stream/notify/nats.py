"""Hints of new versions through NATS with JetStream; requires the extra ``nats``."""

from __future__ import annotations

import asyncio
import importlib
import re
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from delta_tracker.arguments import is_number
from delta_tracker.errors import InvalidArgumentError, import_optional
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.stream.format.field_types import MAX_COUNT

T = TypeVar("T")

_JOIN_SECONDS = 5.0
_MAX_DIGITS = 19
_MAX_BYTES = 1 << 20  # of all hints in the server
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+")


class NatsNotifier(Forkable):
    """:class:`~delta_tracker.stream.notify.notifier.Notifier` that publishes a stream's newest hint on a NATS subject.

    The subject is ``{subject}.{stream id}``, and its payload the version in ASCII digits. A JetStream stream with the
    name ``subject`` keeps the last hint of each subject in memory, for readers that connect later. Start the server
    with ``--jetstream``.

    A thread of this object runs the connection from the first call to :meth:`close`. After the connection was lost or a
    call failed, the next call connects again. Raises MissingExtraError without the package ``nats-py``.

    Args:
        url: ``nats://host:port`` or ``tls://host:port``, with a user and a password if the server needs them.
        subject: prefix of the subjects, and name of the JetStream stream: letters, digits, underscores and hyphens.
        timeout_seconds: timeout for a connection. Each call returns within twice this time.
    """

    def __init__(self, url: str, *, subject: str = "delta_tracker", timeout_seconds: float = 0.25) -> None:
        if not _is_url(url):
            # the URL may contain a password, so the error does not show it
            raise InvalidArgumentError("url", "...", "Write it as nats://host:port or tls://host:port")
        if type(subject) is not str or not _SUBJECT.fullmatch(subject):
            raise InvalidArgumentError("subject", subject, "Use letters, digits, underscores and hyphens")
        if not (is_number(timeout_seconds) and timeout_seconds > 0):
            raise InvalidArgumentError("timeout_seconds", timeout_seconds, "Pass a positive number of seconds")
        self._url, self._subject, self._timeout_seconds = url, subject, timeout_seconds
        self._nats = import_optional("nats", "nats-py", "nats")
        self._control = threading.Lock()  # held while the thread is started or ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # The following are used only in the thread.
        self._closing = asyncio.Event()
        self._connecting = asyncio.Lock()  # held while a connection is opened
        self._connection: _Connection | None = None
        protect(self)

    def announce(self, stream: str, version: int) -> None:
        """Announce that ``version`` of the stream is committed."""
        self._run(lambda connection: connection.announce(stream, version))

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        """Wait for a version above ``after``, at most the constructor's timeout. Return False if there was none."""
        seconds = min(timeout_seconds, self._timeout_seconds)
        return self._run(lambda connection: connection.wait(stream, after, seconds))

    def close(self) -> None:
        """Close the connection and end the thread."""
        with self._control:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
                self._thread.join(_JOIN_SECONDS)
            self._loop = self._thread = None

    def after_fork_in_child(self) -> None:
        """Drop the thread and the connection, which belong to the parent process."""
        self._control = threading.Lock()
        self._loop = self._thread = self._connection = None

    def _run(self, call: Callable[[_Connection], Coroutine[Any, Any, T]]) -> T:
        with self._control:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._closing, self._connecting = asyncio.Event(), asyncio.Lock()
                self._thread = threading.Thread(target=self._serve, args=(loop,), name="nats hints", daemon=True)
                self._thread.start()
                self._loop = loop
            running = asyncio.run_coroutine_threadsafe(self._called(call), self._loop)
        try:
            return running.result(2 * self._timeout_seconds)
        finally:
            running.cancel()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        async def serve() -> None:
            await self._closing.wait()
            connection, self._connection = self._connection, None
            # The server may not answer; the connection ends with the thread.
            with suppress(Exception):
                async with asyncio.timeout(2 * self._timeout_seconds):
                    if connection is not None:
                        await connection.client.close()

        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    async def _called(self, call: Callable[[_Connection], Coroutine[Any, Any, T]]) -> T:
        async with self._connecting:
            if self._connection is None or self._connection.client.is_closed:
                self._connection = await self._connected()
            connection = self._connection
        try:
            return await call(connection)
        except BaseException:
            await connection.client.close()
            raise

    async def _connected(self) -> _Connection:
        async def ignore(_: Exception) -> None:
            """The next call raises the error."""

        client = self._nats.NATS()
        try:
            seconds = self._timeout_seconds
            await client.connect(self._url, allow_reconnect=False, connect_timeout=seconds, error_cb=ignore)
            connection = _Connection(client, client.jetstream(timeout=seconds), self._subject)
            await connection.context.add_stream(
                name=self._subject,
                subjects=[f"{self._subject}.*"],
                max_msgs_per_subject=1,
                max_bytes=_MAX_BYTES,
                storage=self._nats.js.api.StorageType.MEMORY,
            )
        except BaseException:
            await client.close()
            raise
        return connection


class _Connection:
    """Connection (a ``nats.aio.client.Client`` and its JetStream context) with the newest hints, used in one thread."""

    def __init__(self, client: Any, context: Any, subject: str) -> None:  # noqa: ANN401
        self.client = client
        self.context = context
        self._subject = subject
        self._newest: dict[str, int] = {}  # stream id to the newest version that was announced
        self._subscribed: set[str] = set()  # streams
        self._changed = asyncio.Condition()
        self._subscribing = asyncio.Lock()

    async def announce(self, stream: str, version: int) -> None:
        await self._subscribe(stream)
        if version > self._newest[stream]:
            await self.context.publish(f"{self._subject}.{stream}", str(version).encode())
            await self._saw(stream, version)

    async def wait(self, stream: str, after: int, seconds: float) -> bool:
        await self._subscribe(stream)
        try:
            async with asyncio.timeout(seconds), self._changed:
                return await self._changed.wait_for(lambda: self._newest.get(stream, -1) > after)
        except TimeoutError:
            return False

    async def _subscribe(self, stream: str) -> None:
        async with self._subscribing:
            if stream in self._subscribed:
                return

            async def hear(message: Any) -> None:  # noqa: ANN401  a nats.aio.msg.Msg
                await self._saw(stream, _version(message.data))

            name = f"{self._subject}.{stream}"
            await self.client.subscribe(name, cb=hear)
            try:
                last = _version((await self.context.get_last_msg(self._subject, name)).data)
            except importlib.import_module("nats.js.errors").NotFoundError:
                last = -1
            await self._saw(stream, last)
            self._subscribed.add(stream)

    async def _saw(self, stream: str, version: int) -> None:
        async with self._changed:
            self._newest[stream] = max(version, self._newest.get(stream, -1))
            self._changed.notify_all()


def _version(data: bytes) -> int:
    version = int(data) if len(data) <= _MAX_DIGITS and data.isdigit() else -1
    return version if version <= MAX_COUNT else -1


def _is_url(url: object) -> bool:
    try:
        parts = urlsplit(url if type(url) is str else "")
        return parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
