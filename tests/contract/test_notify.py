"""Hints: one contract for every engine, then a broker that fails, hangs, restarts or lies."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import torch

from delta_tracker import Predictor
from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.stream.notify import notifier as notify
from delta_tracker.stream.notify.notifier import Hints, Notifier
from delta_tracker.stream.notify.redis_hints import RedisNotifier
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage
from tests.notifiers import LocalNotifier
from tests.servers import free_ports, redis_server
from tests.stream.streams import FQN, Writer

LONG = 60.0  # seconds; a test that waits this long has failed


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server(*free_ports(1)) as url:
        yield url


@pytest.fixture(params=["local", "redis"])
def notifier(request: pytest.FixtureRequest) -> Iterator[Notifier]:
    made: Notifier = LocalNotifier()
    if request.param == "redis":
        made = RedisNotifier(request.getfixturevalue("redis_url"))
    yield made
    made.close()
    made.close()


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> str:
    """Return a stream id that no other test uses."""
    return request.node.name


def heard(notifier: Notifier, stream: str, after: int) -> bool:
    """Wait for a hint, repeating when the engine's wait times out."""
    return any(notifier.wait(stream, after, 1.0) for _ in range(int(LONG)))


def test_a_waiting_reader_gets_a_hint(notifier: Notifier, stream: str) -> None:
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(heard, notifier, stream, after) for after in (-1, 0, 6)]
        notifier.announce(stream, 7)
        assert all(waiter.result(LONG) for waiter in waiting)


def test_a_later_reader_gets_a_hint(notifier: Notifier, stream: str) -> None:
    for version in range(20):
        notifier.announce(stream, version)
        assert notifier.wait(stream, version - 1, LONG)
    assert notifier.wait(stream, -1, LONG)
    assert not notifier.wait(stream, 19, 0.01)
    assert not notifier.wait(stream, 19, 0.0)
    assert not notifier.wait(stream, 30, 0.01)


def test_old_and_repeated_hints_are_fine_and_wake_nobody(notifier: Notifier, stream: str) -> None:
    for version in (5, 5, 3, 0):
        notifier.announce(stream, version)
    assert notifier.wait(stream, 4, LONG)
    assert not notifier.wait(stream, 5, 0.01)


def test_streams_do_not_hear_each_other(notifier: Notifier, stream: str) -> None:
    notifier.announce(stream + "/other", 9)
    notifier.announce(stream, 2)
    assert not notifier.wait(stream, 2, 0.01)


def follow(predictor: Predictor, hints: Hints, poll_seconds: float, version: int, table: torch.Tensor, model) -> None:
    """Run a predictor's loop until it has a version."""
    while predictor.sync() < version:
        hints.wait(predictor.manifest.stream, predictor.version, poll_seconds)
    assert torch.equal(model[FQN], table)


def test_a_predictor_that_polls_never_follows_by_hints(notifier: Notifier) -> None:
    writer = Writer(Storage("memory://"))
    publisher = Hints(notifier)
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    predictor.sync()
    with ThreadPoolExecutor(1) as threads:
        for step in range(5):
            # without hints each of these waits would outlast the test
            goal = writer.claim.head.version + 1
            following = threads.submit(follow, predictor, Hints(notifier), 10 * LONG, goal, writer.table, model)
            manifest = writer.delta([step])
            publisher.announce(manifest.stream, manifest.version)
            following.result(LONG)
    assert publisher.num_lost == 0


class Deaf:
    """An engine that loses every hint."""

    def announce(self, stream: str, version: int) -> None:
        pass

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        threading.Event().wait(timeout_seconds)
        return False

    def close(self) -> None:
        pass


class Broken(Deaf):
    """An engine whose broker is down until it is repaired."""

    away = True
    calls = 0

    def announce(self, stream: str, version: int) -> None:
        self.calls += 1
        if self.away:
            raise ConnectionRefusedError("away")

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        self.announce(stream, after)
        return super().wait(stream, after, timeout_seconds)

    def close(self) -> None:
        raise ConnectionRefusedError("away")


@pytest.mark.parametrize("engine", [None, Deaf(), Broken()], ids=["none", "deaf", "broken"])
def test_losing_every_hint_costs_only_latency(engine: Notifier | None) -> None:
    writer = Writer(Storage("memory://"))
    hints = Hints(engine)
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    for step in range(5):
        manifest = writer.delta([step])
        hints.announce(manifest.stream, manifest.version)
        follow(predictor, hints, 0.01, manifest.version, writer.table, model)
    hints.close()


def test_a_failing_broker_is_logged_once_and_tried_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    engine = Broken()
    hints = Hints(engine, runtime=Runtime(monotonic=lambda: now))
    tried = []
    for now in range(100):
        calls = engine.calls
        hints.announce("s", now)
        if engine.calls > calls:
            tried.append(now)
    assert tried == [0, 1, 3, 7, 15, 31, 61, 91]
    assert hints.num_lost == 100
    assert hints.num_failures == len(tried)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "ConnectionRefusedError: away" in caplog.text
    engine.away = False
    now = 200
    hints.announce("s", 1)
    hints.announce("s", 2)
    assert [record.getMessage() for record in caplog.records][1:] == ["hints of new versions recovered"]
    assert hints.num_lost == 100


@pytest.mark.parametrize("engine", [None, Deaf(), Broken(), LocalNotifier()], ids=lambda engine: type(engine).__name__)
def test_a_wait_ends_when_told_to(engine: Notifier | None) -> None:
    stop = threading.Event()
    hints = Hints(engine, stop)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(hints.wait, "s", 3, 10 * LONG)
        stop.set()
        waiting.result(LONG)
        threads.submit(hints.wait, "s", 3, 10 * LONG).result(LONG)
        threads.submit(hints.wait, None, -1, 10 * LONG).result(LONG)


def test_a_hint_without_a_version_causes_no_busy_loop(notifier: Notifier, stream: str) -> None:
    notifier.announce(stream, 1 << 62)
    slept: list[float] = []

    def wait(_: threading.Event, seconds: float) -> bool:
        slept.append(seconds)
        return False

    hints = Hints(notifier, runtime=Runtime(wait=wait))
    for _ in range(10):
        hints.wait(stream, 4, LONG)
    assert len(slept) == 9
    assert all(seconds > LONG / 2 for seconds in slept)
    hints.wait(stream, 5, LONG)
    assert len(slept) == 9


def test_unrelated_redis_keys_are_ignored(redis_url: str, stream: str) -> None:
    notifier = RedisNotifier(redis_url, key="k")
    server = redis.Redis.from_url(redis_url)
    server.xadd(f"k:{stream}", {b"\xff\x00": b"\xfe" * 1000, "v": "-17"}, id="4-99")
    assert notifier.wait(stream, 3, LONG)
    notifier.announce(stream, 5)
    assert notifier.wait(stream, 4, LONG)
    server.set("k:other", "a string")
    hints = Hints(notifier)
    hints.announce("other", 1)
    assert hints.num_lost == 1
    server.close()
    notifier.close()


def test_redis_keeps_one_hint_of_a_stream(redis_url: str, stream: str) -> None:
    notifier = RedisNotifier(redis_url)
    for version in range(500):
        notifier.announce(stream, version)
    with redis.Redis.from_url(redis_url) as server:
        assert server.xlen(f"delta_tracker:{stream}") == 1
    notifier.close()


def test_a_broker_is_killed_and_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(notify, "_LONGEST_PAUSE_SECONDS", 0.01)
    (port,) = free_ports(1)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    notifiers = [RedisNotifier(f"redis://127.0.0.1:{port}", timeout_seconds=2.0) for _ in range(2)]
    publisher, hints = map(Hints, notifiers)

    def publish(poll_seconds: float) -> None:
        manifest = writer.delta([1, 2])
        publisher.announce(manifest.stream, manifest.version)
        follow(predictor, hints, poll_seconds, manifest.version, writer.table, model)

    with redis_server(port):
        publish(LONG)
        assert publisher.num_lost == 0
    for _ in range(3):
        publish(0.02)
    assert publisher.num_lost == 3
    hints.wait(predictor.manifest.stream, predictor.version, 0.05)
    assert sum("polling continues" in record.getMessage() for record in caplog.records) == 2
    with redis_server(port):
        # it has forgotten everything, and is believed again
        threading.Event().wait(0.05)
        publish(LONG)
        hints.wait(predictor.manifest.stream, predictor.version - 2, LONG)  # a version for which it believed none yet
        assert publisher.num_lost == 3
    assert sum("versions recovered" in record.getMessage() for record in caplog.records) == 2
    for notifier in notifiers:
        notifier.close()


def test_a_hanging_broker_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections are accepted, nothing is ever answered
        notifier = RedisNotifier(f"redis://127.0.0.1:{server.getsockname()[1]}", timeout_seconds=0.02)
        hints = Hints(notifier)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(hints.announce, "s", 1).result(LONG)
            assert (hints.num_lost, hints.num_failures) == (1, 1)
            threads.submit(hints.wait, "s", 1, 0.05).result(LONG)
        notifier.close()


def test_wrong_arguments_are_refused_without_showing_a_password() -> None:
    for url in ("http://user:hunter2@host", "", None, "redis://user:hunter2@host:port/0"):
        with pytest.raises(InvalidArgumentError, match="url=") as caught:
            RedisNotifier(url)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="timeout_seconds"):
        RedisNotifier("redis://127.0.0.1", timeout_seconds=0)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"\[redis\]'"):
        RedisNotifier("redis://127.0.0.1")
