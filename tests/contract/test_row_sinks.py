"""Sinks of Redis and LMDB: what every row store promises, on real stores."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import redis
import torch

from delta_tracker import Encoding, Predictor, Storage
from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedSinkError,
    SinkError,
    StreamError,
)
from delta_tracker.predictor import sink_writer
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.sinks.lmdb_rows import LmdbRows
from delta_tracker.sinks.redis import RedisSink
from delta_tracker.sinks.redis_rows import RedisRows
from delta_tracker.sinks.row_sink import RowSink, SinkState
from delta_tracker.types import TableSpec
from tests import forked
from tests.predictor.identity_histories import Follower, History, Schedule
from tests.row_stores import RowStoreReader, reader_of, rows_at, sink_at
from tests.servers import free_ports, redis_server
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN as TABLE
from tests.stream.streams import Writer, a_second_later
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.waiting import eventually

_STREAM = "0" * 32


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with mock.patch.object(sink_writer, "CHUNK_ROWS", 3):
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with redis_server(free_ports(1)[0]) as url:
        yield url


@pytest.fixture(params=["redis", "lmdb"])
def target(request, tmp_path) -> str:
    if request.param == "lmdb":
        return str(tmp_path / "rows")
    url = cast("str", request.getfixturevalue("server"))
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


class FailingSink:
    """Sink whose calls take effect and then fail: ``fails_after`` is the number of calls before that."""

    def __init__(self, sink: RowSink, reader: RowStoreReader) -> None:
        self._sink, self._reader = sink, reader
        self.fails_after: int | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sink, name)
        if name in ("open", "close", "states", "current", "owners", "logged_owners"):
            return found

        def call(*arguments: Any) -> Any:
            result = found(*arguments)
            self._reader.check()
            if self.fails_after is not None:
                self.fails_after -= 1
                if self.fails_after < 0:
                    self.fails_after = None
                    raise SinkError("store", "the connection was lost")
            return result

        return call


class StoreFollower:
    """Predictor of a row store, for a :class:`Schedule`."""

    def __init__(self, history: History, sink: RowSink, reader: RowStoreReader) -> None:
        self.history, self.storage = history, WrappedStorage(history.storage)
        self.real, self.reader = sink, reader
        self.sink = FailingSink(sink, reader)
        self.predictor = Predictor(cast("RowSink", _as_sink(self.sink)), self.storage)

    def sync(self, limit: int | None = None) -> bool:
        return self._succeeds(lambda: self.predictor.sync(limit))

    def rollback(self, version: int) -> bool:
        return self._succeeds(lambda: self.predictor.rollback(version))

    def _succeeds(self, call: Any) -> bool:
        try:
            call()
        except StreamError:
            return False
        finally:
            self.reader.check()
        return True

    def break_at(self, count: int) -> None:
        self.sink.fails_after = count or None

    def restarted(self) -> StoreFollower:
        self.real.close()
        return StoreFollower(self.history, self.real, self.reader)


def _as_sink(failing: FailingSink) -> Any:
    names = [name for name in RowSink.__dict__ if not name.startswith("_")]
    delegates = {name: staticmethod(getattr(failing, name)) for name in names}
    return type("Delegate", (RowSink,), delegates)()


@pytest.mark.sweep("short")
@pytest.mark.parametrize("seed", range(20 if SWEEPS_ARE_WHOLE else 2))
def test_no_reader_of_a_random_history_finds_a_stale_or_missing_row(target, seed) -> None:
    history = History(seed)
    sink = sink_at(target)
    with reader_of(target, history) as reader:

        def newcomer(history: History) -> Follower:
            sink.close()
            return cast("Follower", StoreFollower(history, sink, reader))

        Schedule(history, newcomer).run(40)
        reader.assert_is(history.version)
        assert reader.num_checks > 20
    sink.close()


def _state(**changes: Any) -> SinkState:
    tables = {"t": TableSpec("t", 3000, 4, torch.float32)}
    begun = SinkState(stream=_STREAM, applying=1, applying_xxh3="1" * 32, tables=tables)
    return replace(begun, **changes)


def _finished(version: int = 1, **changes: Any) -> SinkState:
    return _state(version=version, xxh3="1" * 32, applying=None, applying_xxh3=None, **changes)


def test_an_interrupted_write_leaves_whole_rows_and_the_former_version(target) -> None:
    sink = sink_at(target)
    sink.open()
    sink.begin(_state())
    sink.write(_STREAM, "t", torch.arange(3000), torch.zeros(3000, 4), 1)
    sink.finish(_finished())
    sink.begin(replace(_finished(), applying=2, applying_xxh3="2" * 32))
    sink.write(_STREAM, "t", torch.arange(2000), torch.ones(2000, 4), 2)
    sink.close()
    reader: Any = RedisRows(target) if target.startswith("redis") else LmdbRows(target)
    found = reader.rows("t", torch.arange(3000))
    assert found.version == 1
    assert (found.values == (found.versions - 1)[:, None]).all()
    reader.close()


def test_a_second_writer_is_refused_until_the_first_one_ends(target) -> None:
    first, second = sink_at(target), sink_at(target)
    first.open()
    with pytest.raises(SinkError, match=f"process {os.getpid()}"):
        second.open()
    first.close()
    second.open()
    with pytest.raises(SinkError, match="closed"):
        first.begin(_state())
    second.close()


def _hold(target: str, ready: Any) -> None:
    sink = sink_at(target)
    sink.open()
    sink.begin(_state())
    ready.set()
    signal.pause()


def _is_opened(sink: Any) -> bool:
    with suppress(SinkError):
        sink.open()
        return True
    return False


def test_the_store_of_a_killed_writer_can_be_opened(target) -> None:
    ready = multiprocessing.get_context("forkserver").Event()
    process = forked.start(_hold, target, ready)
    assert ready.wait(120)
    sink = sink_at(target)
    with pytest.raises(SinkError, match="is its writer"):
        sink.open()
    process.kill()
    process.join()
    eventually(lambda: _is_opened(sink))
    assert sink.current() is None
    sink.close()


def test_a_forked_process_cannot_use_the_sink(target) -> None:
    sink = sink_at(target)
    sink.open()
    sink._pid += 1
    for call in (sink.open, sink.states, lambda: sink.begin(_state())):
        with pytest.raises(SinkError, match="forked"):
            call()
    sink._pid -= 1
    sink.close()


def test_invalid_lookups_and_stored_rows_are_refused(target) -> None:
    sink = sink_at(target)
    sink.open()
    sink.begin(_state())
    sink.write(_STREAM, "t", torch.arange(2999), torch.zeros(2999, 4), 1)
    sink.write(_STREAM, "t", torch.tensor([2998]), torch.zeros(1, 3), 1)
    sink.finish(_finished())
    with pytest.raises(InvalidArgumentError, match="readers read this one"):
        sink.remove(_STREAM)
    sink.close()
    reader: Any = RedisRows(target) if target.startswith("redis") else LmdbRows(target)
    with pytest.raises(InvalidArgumentError, match="one of the tables"):
        reader.rows("u", torch.tensor([1]))
    with pytest.raises(InvalidArgumentError, match="0 to 2999"):
        reader.rows("t", torch.tensor([3000]))
    with pytest.raises(InvalidArgumentError, match="int64"):
        reader.rows("t", torch.tensor([1.0]))
    with pytest.raises(MalformedSinkError, match="row 2999"):
        reader.rows("t", torch.tensor([2999]))
    with pytest.raises(MalformedSinkError, match="20 bytes instead of 24"):
        reader.rows("t", torch.tensor([2998]))
    assert reader.rows("t", torch.empty(0, dtype=torch.int64)).values.shape == (0, 4)
    reader.close()


def test_owners_are_kept_for_sparse_and_dense_rows(target) -> None:
    sink = sink_at(target)
    sink.open()
    held = torch.full((300_000,), NO_OWNER)
    draw = torch.Generator().manual_seed(1)
    for count in (1, 5, 3000):
        slots = torch.randperm(300_000, generator=draw)[:count].sort().values
        slots = torch.cat([slots, torch.arange(65_500, 65_600)]).unique()
        owners = torch.randint(-(1 << 62), 1 << 62, (len(slots),), generator=draw)
        owners[::3] = NO_OWNER
        sink.set_owners(_STREAM, "t", slots, owners)
        held[slots] = owners
    for slots in (torch.arange(60_000, 70_000), torch.randperm(300_000, generator=draw)[:5000].sort().values):
        assert torch.equal(sink.owners(_STREAM, "t", slots), held[slots])
    sink.close()


def test_a_paused_writer_of_redis_changes_nothing_after_another_took_over(server) -> None:
    paused, newer = RedisSink(server, prefix="fence"), RedisSink(server, prefix="fence")
    paused.open()
    paused._redis.connection._sock.shutdown(2)  # as after a partition: the server has closed the connection
    with redis.Redis.from_url(server) as client:
        client.client_kill_filter(_id=_client_of(client, "fence"))
        newer.open()
        newer.begin(_state())
        before = client.get(f"fence:{_STREAM}:state")
        paused._redis.connection.disconnect()  # it connects again with its next command
        with pytest.raises(SinkError, match="another process, which became it meanwhile, is its writer"):
            paused.finish(_finished())
        assert client.get(f"fence:{_STREAM}:state") == before
        assert client.get("fence:current") is None
    with pytest.raises(SinkError) as caught:
        paused.open()
    assert caught.value.writer == f"process {os.getpid()} of host {socket.gethostname()}"
    newer.close()


def _client_of(client: Any, prefix: str) -> str:
    return str(json.loads(client.get(f"{prefix}:writer"))["client"])


def test_redis_that_may_evict_rows_is_refused(server) -> None:
    with redis.Redis.from_url(server) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(SinkError, match="Set maxmemory-policy noeviction"):
                RedisSink(server).open()
            client.config_set("maxmemory-policy", "volatile-lru")
            sink = RedisSink(server)
            sink.open()
            sink.close()
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_a_cluster_of_redis_is_refused() -> None:
    port, bus = free_ports(2)
    with (
        redis_server(port, "--cluster-enabled", "yes", "--cluster-port", str(bus)) as url,
        pytest.raises(SinkError, match="it is a cluster"),
    ):
        RedisSink(url).open()


@pytest.mark.parametrize("encoding", Encoding)
def test_rows_of_an_encoded_stream_are_those_of_a_model(target, encoding) -> None:
    writer, held = Writer(Storage("memory://"), encoding=encoding), torch.zeros(20, 4)
    sink = sink_at(target)
    predictors = [Predictor(sink, writer.storage), Predictor({TABLE: held}, writer.storage)]
    for number in range(3):
        writer.table[number] = torch.rand(4) * 100 - 50
        (writer.delta if number else lambda _: writer.snapshot())([number])
        for predictor in predictors:
            predictor.sync()
        sink.close()  # a process opens the files of LMDB once
        reader = rows_at(target)
        found = reader.rows(TABLE, torch.arange(20))
        reader.close()
        assert torch.equal(found.values.view(torch.int32), held.view(torch.int32))
        sink.open()
    sink.close()


def test_a_replaced_stream_leaves_no_row_of_the_former_one(target) -> None:
    writer, sink = Writer(Storage("memory://")), sink_at(target)
    writer.snapshot()
    Predictor(sink, writer.storage).sync()
    for prefix in ("log", "parts"):
        for name in writer.storage.names(prefix):
            writer.storage.delete(name)
    with a_second_later():
        other = Writer(writer.storage, num_rows=30)
        other.table[:] = 7
        other.snapshot()
    Predictor(sink, writer.storage).sync()
    assert [state.stream for state in sink.states()] == [other.claim.head.stream]
    sink.close()
    reader = rows_at(target)
    assert torch.equal(reader.rows(TABLE, torch.arange(30)).values, other.table)
    reader.close()


def test_the_error_of_a_url_shows_no_password() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        RedisSink("http://user:secret@host/0")
    assert "secret" not in str(refused.value)
    with pytest.raises(SinkError) as failed:
        RedisSink("redis://user:secret@127.0.0.1:1/0").open()
    assert "secret" not in str(failed.value)


def test_lmdb_readers_follow_the_growth_of_the_file(tmp_path) -> None:
    target = str(tmp_path / "rows")
    sink = LmdbSink(target, max_bytes=8 << 20)
    sink.open()
    sink.begin(_state())
    sink.write(_STREAM, "t", torch.arange(3000), torch.zeros(3000, 4), 1)
    sink.finish(_finished())
    ours, theirs = multiprocessing.Pipe()
    process = forked.start(_read_twice, target, theirs)
    theirs.close()  # so that the end of the process is an error here
    assert ours.recv() == 1
    wide = {"w": TableSpec("w", 17_000, 1024, torch.float32)}
    sink.begin(replace(_finished(), tables={**_state().tables, **wide}))
    for begin in range(0, 17_000, 1000):
        sink.write(_STREAM, "w", torch.arange(begin, begin + 1000), torch.full((1000, 1024), 2.0), 2)
    sink.finish(_finished(2, tables={**_state().tables, **wide}))
    assert sink._env.info()["map_size"] > 64 << 20
    ours.send(True)
    assert ours.recv() == 2
    process.join()
    sink.close()


def _read_twice(target: str, pipe: Any) -> None:
    reader = LmdbRows(target)
    pipe.send(reader.rows("t", torch.arange(3000)).version)
    pipe.recv()
    found = reader.rows("w", torch.arange(17_000))
    assert (found.values == 2).all()
    pipe.send(found.version)


def test_a_name_that_lmdb_cannot_store_is_refused(tmp_path) -> None:
    sink = LmdbSink(str(tmp_path / "rows"))
    sink.open()
    long = "t" * 470
    with pytest.raises(InvalidArgumentError, match="469 bytes"):
        sink.begin(_state(tables={long: TableSpec(long, 1, 1, torch.float32)}))
    sink.close()
