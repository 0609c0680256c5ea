"""Storage at an http URL: it reads single objects, and refuses everything else before a request is sent."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from delta_tracker.errors import InvalidArgumentError, StorageError, UnsupportedStoreError
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer


@dataclass
class WebServer:
    """A web server that answers each request with ``answer(method, name, begin)``, and records the requests.

    The answer is a status, headers and a body. A body that is shorter than its Content-Length cuts the connection.
    """

    answer: Callable[[str, str, int | None], tuple[int, dict[str, str], bytes]]
    port: int = 0
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def storage(self) -> Storage:
        return Storage(f"http://127.0.0.1:{self.port}/bucket")


@contextmanager
def web_server(answer: Callable[[str, str, int | None], tuple[int, dict[str, str], bytes]]) -> Iterator[WebServer]:
    state = WebServer(answer)

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            wanted = self.headers.get("Range")
            begin = None if wanted is None else int(wanted.removeprefix("bytes=").partition("-")[0])
            name = self.path.removeprefix("/bucket/")
            state.requests.append((self.command, name, self.headers.get("Cache-Control", "")))
            status, headers, body = state.answer(self.command, name, begin)
            self.send_response_only(status)
            for key, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = True

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_DATE = {"Last-Modified": "Tue, 01 Sep 2026 10:00:00 GMT"}


def _serve(objects: dict[str, bytes]) -> Callable[[str, str, int | None], tuple[int, dict[str, str], bytes]]:
    def answer(method: str, name: str, begin: int | None) -> tuple[int, dict[str, str], bytes]:
        assert method in ("GET", "HEAD")
        data = objects.get(name)
        if data is None:
            return 404, {}, b""
        if begin is None:
            return 200, _DATE, data
        return 206, _DATE | {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}, data[begin:]

    return answer


def _read(storage: Storage, name: str) -> bytes | None:
    data = storage.read(name, max_bytes=1 << 30)
    return None if data is None else data.tobytes()


def test_objects_are_read_over_http() -> None:
    data = os.urandom(3 << 20)
    with web_server(_serve({"parts/x": data, "parts/empty": b""})) as server:
        storage = server.storage
        assert _read(storage, "parts/x") == data
        assert _read(storage, "parts/empty") == b""
        assert _read(storage, "parts/y") is None
        assert storage.size("parts/x") == len(data)
        assert storage.size("parts/y") is None
        found = storage.stat("parts/x")
        assert found is not None
        assert (found.num_bytes, found.modified) == (len(data), 1788256800.0)
        tail = storage.read_range("parts/x", 2 << 20, 3 << 20)
        assert tail is not None
        assert tail.tobytes() == data[2 << 20 :]
        assert storage.requests == {"read": 4, "size": 3, "list": 0, "write": 0, "delete": 0}


_REFUSED: list[Callable[[Storage], object]] = [
    lambda storage: storage.put("parts/x", [memoryview(b"x")]),
    lambda storage: storage.create("log/x", b"x"),
    lambda storage: storage.replace("control/x", b"x"),
    lambda storage: storage.delete("parts/x"),
    lambda storage: storage.delete_draft("drafts/x"),
    lambda storage: storage.sync("log"),
    lambda storage: storage.probe(),
    lambda storage: storage.objects("log"),
    lambda storage: storage.names("log"),
]


@pytest.mark.parametrize("operation", range(len(_REFUSED)))
def test_http_stores_refuse_to_write_and_to_list_before_a_request(operation: int) -> None:
    with web_server(_serve({})) as server:
        for storage in (server.storage, server.storage.uncached):
            assert storage.is_read_only
            assert not storage.lists
            with pytest.raises(UnsupportedStoreError, match="bucket or directory"):
                _REFUSED[operation](storage)
            assert sum(storage.requests.values()) == 0
        assert server.requests == []


def test_reads_past_the_caches_say_so_and_count_as_the_stores() -> None:
    with web_server(_serve({"parts/x": b"x"})) as server:
        storage = Storage(server.storage.url)
        assert _read(storage, "parts/x") == b"x"
        assert _read(storage.uncached, "parts/x") == b"x"
        assert storage.uncached is storage.uncached.uncached
        assert storage.requests["read"] == 2
        assert server.requests == [("GET", "parts/x", ""), ("GET", "parts/x", "no-cache")]
    assert (local := Storage("memory://")).uncached is local


def test_a_download_continues_at_a_cache_with_another_etag_and_date() -> None:
    data = os.urandom(3 << 20)
    answers = iter(range(100))

    def answer(_: str, __: str, begin: int | None) -> tuple[int, dict[str, str], bytes]:
        number = next(answers)
        headers = {"ETag": f'"{number}"', "Last-Modified": f"Tue, 01 Sep 2026 10:00:{number:02d} GMT"}
        at = begin or 0
        headers["Content-Length"] = str(len(data) - at)
        if begin is not None:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return 200 if begin is None else 206, headers, data[at : at + (1 << 20)]  # cut off after 1 MiB

    with web_server(answer) as server:
        assert _read(server.storage, "parts/x") == data
        assert len(server.requests) > 1


def test_an_object_of_another_size_after_an_interruption_is_not_appended() -> None:
    def answer(_: str, __: str, begin: int | None) -> tuple[int, dict[str, str], bytes]:
        if begin is None:
            return 200, {"Content-Length": str(2 << 20)}, bytes(1 << 20)
        return 206, {"Content-Range": f"bytes {begin}-{(3 << 20) - 1}/{3 << 20}"}, bytes((3 << 20) - begin)

    with web_server(answer) as server, pytest.raises(StorageError, match="changed while it was read"):
        _read(server.storage, "parts/x")


def test_a_missing_modification_time_is_unknown() -> None:
    with web_server(lambda *_: (200, {}, b"x")) as server:
        transfer = Transfer()
        assert server.storage.read("log/x", max_bytes=10, transfer=transfer) is not None
        assert transfer.modified is None


def test_a_server_that_ignores_ranges_is_named() -> None:
    with web_server(lambda *_: (200, _DATE, b"0123456789")) as server, pytest.raises(StorageError, match="slice"):
        server.storage.read_range("parts/x", 3, 5)


@pytest.mark.parametrize("status", [401, 403, 410])
def test_other_answers_than_404_are_errors(status: int) -> None:
    with web_server(lambda *_: (status, {}, b"")) as server, pytest.raises(StorageError):
        _read(server.storage, "log/x")


@pytest.mark.parametrize(
    "url", ["http://user:secret@host/x", "https://user@host/x", "http:///x", "http://host/x?y=1", "http://host/x#y"]
)
def test_http_urls_with_other_parts_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Storage(url)
    assert "secret" not in str(caught.value)


def test_http_stores_have_options_of_the_client_only() -> None:
    with web_server(_serve({"log/x": b"x"})) as server:
        storage = Storage(server.storage.url, options={"read_timeout": "5s", "user_agent": "test"})
        assert _read(storage, "log/x") == b"x"
        with pytest.raises(InvalidArgumentError, match="region") as caught:
            Storage(server.storage.url, options={"region": "secret"})
        assert "secret" not in str(caught.value)
