"""A caching web server on loopback in front of a store, whose copies tests can damage, keep or delay."""

from __future__ import annotations

import email.utils
import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from delta_tracker.stream.storage.storage import Storage

_HOST = "127.0.0.1"
_MAX_BYTES = 1 << 30
_Copy = tuple[bytes | None, float]  # bytes, None for a 404, and the time until which they are served


@dataclass
class CacheServer:
    """The objects of ``origin``, served over HTTP with a cache in between.

    A copy of an object is served for ever; those below ``control/``, and 404 responses, are not kept. A request with
    ``Cache-Control: no-cache`` gets the object of the origin, and replaces the copy if ``refreshes`` is True. With
    ``passes_heads``, all HEAD requests go to the origin.

    Attributes:
        plain: number of requests answered from the cache or through it, by name.
        uncached: number of requests past the cache, by name.
        sent_by_origin: bytes that the origin sent, by name.
        others: methods of requests that only read-write clients send; must stay empty.
    """

    origin: Storage
    refreshes: bool = True
    passes_heads: bool = False
    port: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    uncached: Counter[str] = field(default_factory=Counter)
    sent_by_origin: Counter[str] = field(default_factory=Counter)
    others: list[str] = field(default_factory=list)
    _copies: dict[str, _Copy] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def url(self) -> str:
        """URL of the stream."""
        return f"http://{_HOST}:{self.port}"

    def hold(self, name: str, *, seconds: float = 1e9) -> None:
        """Answer 404 for an object, as if it was requested before it existed."""
        with self._lock:
            self._copies[name] = None, time.monotonic() + seconds

    def truncate(self, name: str) -> None:
        """Serve the first half of an object, with a matching length."""
        data = self.fetch(name)
        assert data is not None
        with self._lock:
            self._copies[name] = data[: len(data) // 2], float("inf")

    def flip(self, name: str) -> None:
        """Serve an object with one bit changed."""
        data = self.fetch(name)
        assert data is not None
        middle = len(data) // 2
        with self._lock:
            self._copies[name] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], float("inf")

    def forget(self, name: str) -> None:
        """Remove the copy of an object."""
        with self._lock:
            self._copies.pop(name, None)

    def answer(self, name: str, *, is_uncached: bool) -> bytes | None:
        """Return the bytes to send for a request, None for a 404."""
        with self._lock:
            (self.uncached if is_uncached else self.plain)[name] += 1
            copy = self._copies.get(name)
            if not is_uncached and copy is not None and time.monotonic() < copy[1]:
                return copy[0]
            data = self.fetch(name)
            self.sent_by_origin[name] += len(data or b"")
            if not is_uncached or self.refreshes:
                is_kept = data is not None and not name.startswith("control/")
                self._copies[name] = data, float("inf") if is_kept else 0.0
            return data

    def fetch(self, name: str) -> bytes | None:
        """Return the bytes of an object of the origin."""
        data = self.origin.read(name, max_bytes=_MAX_BYTES)
        return None if data is None else data.tobytes()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one segment: otherwise each response takes 40 ms
    cache: CacheServer

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        name = unquote(urlsplit(self.path).path).lstrip("/")
        if self.cache.passes_heads and not has_body:
            data = self.cache.fetch(name)
        else:
            data = self.cache.answer(name, is_uncached="no-cache" in self.headers.get("Cache-Control", ""))
        if data is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        begin, end, code = 0, len(data), 200
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, code = int(first), min(len(data), int(last) + 1 if last else len(data)), 206
            if begin >= len(data):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(code)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Last-Modified", email.utils.formatdate(usegmt=True))
        if code == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if has_body:
            self.wfile.write(data[begin:end])

    def __getattr__(self, name: str) -> object:
        if name.startswith("do_"):
            self.cache.others.append(name)
        raise AttributeError(name)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def cache_server(origin: Storage, **options: float) -> Iterator[CacheServer]:
    """Serve the objects of ``origin`` over HTTP through a cache."""
    cache = CacheServer(origin, **options)  # type: ignore[arg-type]
    handler = type("Handler", (_Handler,), {"cache": cache})
    server = http.server.ThreadingHTTPServer((_HOST, 0), handler)
    server.daemon_threads = True
    cache.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield cache
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert cache.others == [], "a reader over http sends only GET and HEAD"
