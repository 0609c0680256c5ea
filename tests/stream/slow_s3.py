"""A read-only S3 server on loopback whose bodies tests can delay, cut off or stop."""

from __future__ import annotations

import email.utils
import http.server
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import xxhash
from obstore.store import from_url

from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer
from delta_tracker.stream.storage.url import connection

_HOST = "127.0.0.1"
_SEND_BYTES = 16 << 10

Fault = tuple[Literal["cut", "silent"], int]
"""Fault of a body and the number of bytes before it: the connection is closed, or nothing more is sent."""


@dataclass
class SlowS3:
    """The objects of ``source``, served over HTTP.

    Args:
        source: the storage that has them.
        faults: returns the fault of each GET of a part by its name, or None.
        bytes_per_second: speed of each body, None for no limit.
        is_hanging: accept requests and answer none.
        trickles: beginning of the names of objects whose bodies arrive byte by byte, five per second; that of a
            listing is ``"?"``.
        max_retries: number of retries by the client, None for its default.

    Attributes:
        sent: bytes of bodies sent, by name.
        num_faults: bodies that were cut or went silent, by name.
        num_broken: those of them after at least one byte was sent.
        asked: ``METHOD name`` of each request.
    """

    source: Storage
    faults: Callable[[str], Fault | None] = lambda _: None
    bytes_per_second: float | None = None
    is_hanging: bool = False
    trickles: str | None = None
    max_retries: int | None = None
    port: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    num_faults: Counter[str] = field(default_factory=Counter)
    num_broken: Counter[str] = field(default_factory=Counter)
    asked: list[str] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    def web(self, **options: str) -> Storage:
        """Return a storage that reads through the server as at an http URL."""
        return Storage(f"http://{_HOST}:{self.port}/bucket", options=options)

    def storage(self, **options: str) -> Storage:
        """Return a storage that reads through the server."""
        settings = {
            "endpoint": f"http://{_HOST}:{self.port}",
            "region": "us-east-1",
            "allow_http": "true",
            "skip_signature": "true",
        }
        storage = Storage("s3://bucket", options=settings | options)
        if self.max_retries is not None:
            retry = {"retry_config": {"max_retries": self.max_retries}}
            store = from_url(storage.url, **(connection(storage.url, settings | options) | retry))
            vars(storage._store).update(_store=store)
        return storage

    def limit(self, name: str, length: int) -> tuple[int, str]:
        """Return how many bytes of a body are sent, and what follows."""
        fault = self.faults(name) if name.startswith("parts/") else None
        return (length, "end") if fault is None or fault[1] >= length else (fault[1], fault[0])


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms after its headers
    state: SlowS3

    def setup(self) -> None:
        # A small buffer, so that bytes count as sent about when they arrive.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        super().setup()

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket").strip("/")

    def _hang(self) -> None:
        self.close_connection = True
        self.state.closed.wait()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, state = self._name(), self.state
        state.asked.append(f"{self.command} {name}")
        if state.is_hanging:
            self._hang()
        elif not name:
            self._list({key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()})
        else:
            self._object(name)

    def _list(self, query: dict[str, str]) -> None:
        prefix = query.get("prefix", "")
        found = self.state.source.objects(prefix.rstrip("/"), after=query.get("start-after"))
        entries = "".join(
            f"<Contents><Key>{escape(each.name)}</Key>"
            f"<LastModified>{datetime.fromtimestamp(int(each.modified), UTC):%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{each.num_bytes}</Size></Contents>"
            for each in found
        )
        head = '<?xml version="1.0" encoding="UTF-8"?>'
        body = f"{head}<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._send("?", memoryview(body))

    def _object(self, name: str) -> None:
        response = Transfer()
        read = self.state.source.read(name, max_bytes=1 << 40, transfer=response)
        if read is None:
            self.send_response_only(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, size, begin = read.data, len(read), 0
        wanted = self.headers.get("Range")
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(size, int(last) + 1 if last else size)
            data = data[begin:end]
        self.send_response_only(200 if wanted is None else 206)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{xxhash.xxh3_64_hexdigest(read.data)}"')
        self.send_header("Last-Modified", email.utils.formatdate(response.modified or 1.7e9, usegmt=True))
        self.end_headers()
        if self.command == "GET":
            self._send(name, data)

    def _send(self, name: str, data: memoryview) -> None:
        state = self.state
        length, then = state.limit(name, len(data))
        begin = time.monotonic()
        is_slow = state.trickles is not None and name.startswith(state.trickles)
        for start in range(0, length, 1 if is_slow else _SEND_BYTES):
            piece = data[start : min(start + (1 if is_slow else _SEND_BYTES), length)]
            self.wfile.write(piece)
            state.sent[name] += len(piece)
            if is_slow and state.closed.wait(0.2):
                return
            if state.bytes_per_second is not None:
                late = begin + (start + len(piece)) / state.bytes_per_second - time.monotonic()
                if state.closed.wait(max(0.0, late)):
                    return
        if then != "end":
            state.num_faults[name] += 1
            state.num_broken[name] += length > 0
        if then == "silent":
            self._hang()
        elif then == "cut":
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect, which the tests do on purpose."""


@contextmanager
def slow_s3(source: Storage) -> Iterator[SlowS3]:
    """Serve ``source`` until the end of the block."""
    state = SlowS3(source)
    handler = type("Handler", (_Handler,), {"state": state})
    with _Server((_HOST, 0), handler) as server:
        state.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            state.closed.set()
            server.shutdown()
            thread.join()
