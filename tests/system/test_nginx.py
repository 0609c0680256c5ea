"""The example configuration of nginx, in front of a server of files, with one and with two tiers of caches."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from delta_tracker.predictor.predictor import Predictor
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.servers import cache_conf, free_ports, nginx
from tests.stream.streams import FQN, Writer

_PART_BYTES = 9 << 20  # three slices
_PREFIX = "bucket/stream"


@dataclass(frozen=True)
class Tiers:
    """A server of the files in ``origin``, and two caches: ``urls[1]`` is in front of ``urls[0]``."""

    origin: Storage
    urls: tuple[str, str]
    ports: tuple[int, int]
    access_log: Path

    def requests(self) -> list[list[str]]:
        """Return method, path, status and number of bytes of each request that the origin got."""
        return [line.split() for line in self.access_log.read_text().splitlines()]

    def num_bytes(self, name: str) -> int:
        """Return the number of bytes of an object that the origin sent."""
        return sum(int(size) for _, path, _, size in self.requests() if path == f"/{_PREFIX}/{name}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    directory = tmp_path_factory.mktemp("nginx")
    files, run = directory / "files", directory / "run"
    run.mkdir()
    origin, first, second = free_ports(3)
    conf = f"""
        log_format short '$request_method $uri $status $body_bytes_sent';
        server {{
            listen 127.0.0.1:{origin};
            root {files};
            access_log {directory}/access.log short;
            location ~ /denied {{ return 403; }}
            location ~ /slow {{ limit_rate 16m; }}
        }}
        {cache_conf("first", first, origin, directory)}
        {cache_conf("second", second, first, directory)}
    """
    with nginx(conf, second, run):
        urls = (f"http://127.0.0.1:{first}/{_PREFIX}", f"http://127.0.0.1:{second}/{_PREFIX}")
        store = Storage(f"{files.as_uri()}/{_PREFIX}", create=True, fsync=False)
        yield Tiers(store, urls, (first, second), directory / "access.log")


@pytest.fixture(params=[0, 1], ids=["one tier", "two tiers"])
def reader(request: pytest.FixtureRequest, server: Tiers) -> Storage:
    return Storage(server.urls[request.param])


def _name(prefix: str = "parts") -> str:
    return f"{prefix}/{os.urandom(8).hex()}.safetensors"


def _read(storage: Storage, name: str) -> bytes | None:
    data = storage.read(name, max_bytes=1 << 30)
    return None if data is None else data.tobytes()


@pytest.mark.parametrize("prefix", ["parts", "control"])
def test_a_cached_404_is_repaired_past_the_cache_for_all_readers(server: Tiers, reader: Storage, prefix: str) -> None:
    name = _name(prefix)
    assert _read(reader, name) is None
    server.origin.replace(name, b"data")
    assert _read(reader.uncached, name) == b"data"
    assert _read(reader, name) == b"data"


def test_a_short_object_in_the_caches_is_repaired_past_them(server: Tiers, reader: Storage) -> None:
    name, data = _name(), os.urandom(_PART_BYTES)
    server.origin.replace(name, data[:1000])
    assert _read(reader, name) == data[:1000]
    server.origin.replace(name, data)
    assert _read(reader, name) == data[:1000]
    assert _read(reader.uncached, name) == data
    assert _read(reader, name) == data


def test_pointers_and_404s_are_old_for_seconds_only(server: Tiers, reader: Storage) -> None:
    missing, pointer = _name(), _name("control")
    server.origin.replace(pointer, b"1")
    assert _read(reader, pointer) == b"1"
    server.origin.replace(pointer, b"2")
    assert _read(reader.uncached, pointer) == b"2"
    server.origin.replace(pointer, b"3")
    assert _read(reader, missing) is None
    server.origin.replace(missing, b"data")
    deadline = time.monotonic() + 30
    while (_read(reader, pointer), _read(reader, missing)) != (b"3", b"data"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranges_are_cached_as_slices(server: Tiers, reader: Storage) -> None:
    name, data = _name(), os.urandom(_PART_BYTES)
    server.origin.replace(name, data)
    begin, end = 5 << 20, _PART_BYTES - 10
    for _ in range(2):
        found = reader.read_range(name, begin, end)
        assert found is not None
        assert found.tobytes() == data[begin:end]
    assert server.num_bytes(name) == _PART_BYTES - (4 << 20)
    assert reader.size(name) == _PART_BYTES
    assert _read(reader, name) == data
    assert server.num_bytes(name) == _PART_BYTES


def test_the_origin_sends_an_object_once_to_many_readers(server: Tiers, reader: Storage) -> None:
    # Slow, so that all readers ask before the first slice has arrived.
    name, data = f"parts/slow-{os.urandom(8).hex()}", os.urandom(_PART_BYTES)
    server.origin.replace(name, data)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: _read(Storage(reader.url), name), range(8)))
    assert found == [data] * 8
    assert server.num_bytes(name) == _PART_BYTES


def test_a_403_for_a_missing_object_becomes_a_404(reader: Storage) -> None:
    assert _read(reader, "parts/denied") is None
    assert _read(reader, "control/denied") is None
    assert reader.size("log/denied") is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PROPFIND"])
def test_requests_that_write_or_list_do_not_reach_the_origin(server: Tiers, method: str) -> None:
    for port in server.ports:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(method, f"/{_PREFIX}/parts/x")
        assert connection.getresponse().status == 405
        connection.close()
    assert not [request for request in server.requests() if request[0] == method]


def test_a_predictor_reads_a_stream_through_two_tiers(server: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_SPREAD_SECONDS", 0.01)
    path = f"s{os.urandom(4).hex()}"
    writer = Writer(Storage(f"{server.origin.url}/{path}", create=True, fsync=False))
    writer.snapshot()
    url = f"{server.urls[1]}/{path}"
    ahead = entry_name(writer.claim.head.version + 1)
    assert _read(Storage(url), ahead) is None  # cached
    writer.delta([1, 5])
    point_at_the_head(writer.storage)
    head = StreamLog(Storage(url)).head()
    assert head is not None
    assert head.version == writer.claim.head.version
    model = writer.model()
    predictor = Predictor(model, url)
    predictor.sync()
    assert predictor.status().version == writer.claim.head.version
    assert predictor.status().resyncs == 0
    assert torch.equal(model[FQN], writer.table)
