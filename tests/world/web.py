"""A caching web server in front of all stores of a world, on loopback."""

from __future__ import annotations

import email.utils
import http.server
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import unquote, urlsplit

from tests.world.stores import Store

_HOST = "127.0.0.1"
_CONTROL_SECONDS, _MISSING_SECONDS = 1.0, 5.0  # for which a copy of a control object and a 404 are served


@dataclass
class Web:
    """The stores as ``{url}/{name of the store}``. Copies of other objects are served for ever.

    Attributes:
        stores: name of a store to the store.
        port: port of the server.
    """

    stores: dict[str, Store] = field(default_factory=dict)
    port: int = 0
    _copies: dict[str, tuple[int, bytes, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, stores: list[Store]) -> None:
        """Serve other stores, without the copies of the former ones."""
        with self._lock:
            self.stores = {store.path.name: store for store in stores}
            self._copies.clear()

    def forget(self) -> None:
        """Delete all copies, as an operator does after damage at the origin was repaired."""
        with self._lock:
            self._copies.clear()

    def url_of(self, store: Store) -> str:
        return f"http://{_HOST}:{self.port}/{store.path.name}"

    def answer(self, path: str, *, is_uncached: bool) -> tuple[int, bytes]:
        """Return the status and the bytes for a request."""
        with self._lock:
            copy = self._copies.get(path)
            if copy is not None and not is_uncached and time.monotonic() < copy[2]:
                return copy[:2]
            code, data = self._fetch(path)
            if code != 403:
                seconds = _MISSING_SECONDS if code == 404 else float("inf")
                seconds = min(seconds, _CONTROL_SECONDS) if "/control/" in path else seconds
                self._copies[path] = code, data, time.monotonic() + seconds
            return code, data

    def _fetch(self, path: str) -> tuple[int, bytes]:
        first, _, name = path.lstrip("/").partition("/")
        store = self.stores.get(first)
        if store is None or store.is_failing:
            return 403, b""
        file = store.path / name
        try:
            return (200, file.read_bytes()) if file.is_file() else (404, b"")
        except OSError:  # a fault in the middle of a call
            return 403, b""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one segment
    web: Web

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        is_uncached = "no-cache" in self.headers.get("Cache-Control", "")
        code, data = self.web.answer(unquote(urlsplit(self.path).path), is_uncached=is_uncached)
        begin, end = 0, len(data)
        wanted = self.headers.get("Range")
        if code == 200 and wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, code = int(first), min(len(data), int(last) + 1 if last else len(data)), 206
            if begin >= len(data):
                begin, end, code = 0, 0, 416
        self.send_response(code)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Last-Modified", email.utils.formatdate(usegmt=True))
        if code == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if has_body:
            self.wfile.write(data[begin:end])

    def log_message(self, *_: object) -> None:
        pass


@cache
def web() -> Web:
    """Return the server of this process, which ends with it."""
    found = Web()
    server = http.server.ThreadingHTTPServer((_HOST, 0), type("Handler", (_Handler,), {"web": found}))
    server.daemon_threads = True
    found.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return found
