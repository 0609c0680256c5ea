"""Advice to those who keep rows in Redis or LMDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from delta_tracker import Predictor
from delta_tracker.errors import MalformedSinkError, SinkError
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.sinks.lmdb_rows import LmdbRows
from delta_tracker.sinks.redis import RedisSink
from delta_tracker.sinks.redis_rows import RedisRows
from delta_tracker.sinks.row_sink import RowSink
from tests.advice.jobs import Job, refused
from tests.servers import free_ports, redis_server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with redis_server(free_ports(1)[0]) as url:
        yield url


@pytest.fixture(params=["redis", "lmdb"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "lmdb":
        return str(tmp_path / "rows")
    url: str = request.getfixturevalue("server")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


def _sink(target: str) -> RowSink:
    return RedisSink(target) if target.startswith("redis") else LmdbSink(target)


def _rows(target: str) -> Any:
    return RedisRows(target) if target.startswith("redis") else LmdbRows(target)


def _has_all_rows(target: str, job: Job) -> bool:
    reader = _rows(target)
    try:
        return torch.equal(reader.rows("0", torch.arange(20)).values, job.tracker.read_rows("0"))
    finally:
        reader.close()


@pytest.mark.advice("SinkError: LmdbStore.environment")
@pytest.mark.parametrize("way", ["reader first", "sink first"])
def test_rows_of_lmdb_are_read_in_the_process_of_the_sink_once_it_is_closed(tmp_path: Path, way: str) -> None:
    job, rows = Job(tmp_path), str(tmp_path / "rows")
    with Predictor(sink := LmdbSink(rows), job.url) as predictor:
        predictor.sync()
        if way == "sink first":
            refused(SinkError, lambda: LmdbRows(rows), "in another process, or close its LmdbSink")
            sink.close()
            assert _has_all_rows(rows, job)
            job.publish(7)
            refused(SinkError, predictor.sync, "Call open() first")
            sink.open()
            predictor.sync()
        sink.close()
        if way == "reader first":
            reader = LmdbRows(rows)
            refused(SinkError, sink.open, "or close its LmdbSink or LmdbRows in this process first")
            reader.close()
            sink.open()
        sink.close()
    assert _has_all_rows(rows, job)


@pytest.mark.advice("SinkError: LmdbRows._state RedisRows.state")
def test_a_reader_waits_for_the_first_version(tmp_path: Path, target: str) -> None:
    job, sink = Job(tmp_path), _sink(target)
    sink.open()
    sink.close()
    reader = _rows(target)
    refused(SinkError, lambda: reader.rows("0", torch.arange(20)), "Wait until the predictor")
    reader.close()
    with Predictor(sink, job.url) as predictor:
        predictor.sync()
        sink.close()
    assert _has_all_rows(target, job)


@pytest.mark.advice("SinkError: LmdbSink._opened RedisSink._client")
def test_a_closed_sink_is_opened_again(target: str) -> None:
    sink = _sink(target)
    refused(SinkError, sink.current, "Call open() first")
    sink.open()
    assert sink.current() is None
    sink.close()


@pytest.mark.advice("SinkError: RedisSink._run")
@pytest.mark.parametrize("is_emptied", [False, True], ids=["writer key", "all keys"])
def test_a_row_store_that_lost_keys_is_completed_by_the_next_sync(
    tmp_path: Path, server: str, is_emptied: bool
) -> None:
    job, prefix = Job(tmp_path), f"lost {is_emptied}"
    sink = RedisSink(server, prefix=prefix)
    with redis.Redis.from_url(server) as client, Predictor(sink, job.url) as predictor:
        predictor.sync()
        job.publish(3)
        client.delete(*(client.keys(f"{prefix}:*") if is_emptied else [f"{prefix}:writer"]))
        refused(SinkError, predictor.sync, "maxmemory-policy noeviction", "The next sync()", "delete the keys")
        predictor.sync()
        predictor.sync()
        sink.close()
        reader = RedisRows(server, prefix=prefix)
        assert torch.equal(reader.rows("0", torch.arange(20)).values, job.tracker.read_rows("0"))
        reader.close()


@pytest.mark.advice("SinkError: RedisSink._check_server")
def test_a_server_that_may_evict_rows_is_configured_not_to(server: str) -> None:
    with redis.Redis.from_url(server) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        sink = RedisSink(server)
        refused(SinkError, sink.open, "Set maxmemory-policy noeviction")
        client.config_set("maxmemory-policy", "noeviction")
        sink.open()
        sink.close()


@pytest.mark.advice("SinkError: _WriterLock.__init__ RedisSink._connect RedisSink._check_writer RedisSink._run")
def test_one_of_two_writers_is_stopped(tmp_path: Path, target: str) -> None:
    job, other = Job(tmp_path), _sink(target)
    other.open()
    sink = _sink(target)
    refused(SinkError, lambda: Predictor(sink, job.url), "Stop the other writer")
    other.close()
    with Predictor(sink, job.url) as predictor:
        assert predictor.sync() == 1
        if isinstance(sink, RedisSink):
            job.publish(4)
            with redis.Redis.from_url(target) as client:
                client.set("delta_tracker:writer", b'{"token":"","host":"h","pid":1,"client":0}')
                refused(SinkError, predictor.sync, "Stop one of the two writers")
                client.delete("delta_tracker:writer")  # as when the other one ends
            assert predictor.sync() == 2
        sink.close()
    assert _has_all_rows(target, job)


@pytest.mark.advice("SinkError: LmdbStore.errors RedisServer.errors")
def test_the_next_sync_completes_a_version_once_the_row_store_can_be_used(tmp_path: Path) -> None:
    job, rows = Job(tmp_path), tmp_path / "rows"
    rows.write_text("no directory")
    refused(SinkError, lambda: Predictor(LmdbSink(str(rows)), job.url), "Check the row store and its free space")
    rows.unlink()
    (port,) = free_ports(1)
    sinks: list[tuple[RowSink, str]] = [(LmdbSink(str(rows)), str(rows))]
    with redis_server(port) as url:
        sinks.append((sink := RedisSink(url), url))
        predictor = Predictor(sink, job.url)
    refused(SinkError, predictor.sync, "The next sync() or follow() completes the version")
    with redis_server(port):
        predictor.sync()
        sink.close()
        assert _has_all_rows(url, job)
    with Predictor(sinks[0][0], job.url) as predictor:
        predictor.sync()
        sinks[0][0].close()
    assert _has_all_rows(str(rows), job)


@pytest.mark.advice(
    "MalformedSinkError: SinkWriter.restore SinkState.from_json LmdbSink.states current_state Lookup.__init__ "
    "Lookup.decode RedisSink.states RedisSink._check_writer RedisRows.state "
    "decode_rows decode_owners decode_log"
)
@pytest.mark.parametrize("key", ["writer", "current", "state", "row"])
def test_the_keys_of_a_garbled_prefix_are_deleted_and_written_again(tmp_path: Path, server: str, key: str) -> None:
    job, sink = Job(tmp_path), RedisSink(server, prefix="garbled")
    with redis.Redis.from_url(server) as client:
        client.flushall()
        predictor = Predictor(sink, job.url)
        predictor.sync()
        sink.close()
        if key == "writer":
            client.set("garbled:writer", b"{")
        elif key == "current":
            client.set("garbled:current", "0" * 32)
        else:
            (stream,) = client.smembers("garbled:streams")
            names = [
                name for name in client.keys("*") if stream in name and (name.endswith(b":state") == (key == "state"))
            ]
            client.set(names[0], b"{")
        if key == "row":
            reader = RedisRows(server, prefix="garbled")
            refused(MalformedSinkError, lambda: reader.rows("0", torch.arange(20)), "Delete the keys of the prefix")
            reader.close()
        else:
            again = RedisSink(server, prefix="garbled")
            refused(MalformedSinkError, lambda: Predictor(again, job.url), "Delete the keys of the prefix")
        client.delete(*client.keys("garbled:*"))
        with Predictor(RedisSink(server, prefix="garbled"), job.url) as other:
            assert other.sync() == 1
        reader = RedisRows(server, prefix="garbled")
        assert torch.equal(reader.rows("0", torch.arange(20)).values, job.tracker.read_rows("0"))
        reader.close()


@pytest.mark.advice("SinkError: RedisRows.rows")
def test_a_lookup_is_repeated_when_streams_have_stopped_changing(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, sink = Job(tmp_path), RedisSink(server, prefix="changing")
    with Predictor(sink, job.url) as predictor:
        predictor.sync()
        sink.close()
    reader = RedisRows(server, prefix="changing")
    with monkeypatch.context() as changing:
        changing.setattr(reader, "_rows", lambda *_: None)
        refused(SinkError, lambda: reader.rows("0", torch.arange(20)), "Call rows() again")
    assert torch.equal(reader.rows("0", torch.arange(20)).values, job.tracker.read_rows("0"))
    reader.close()


def _in_a_fork(sink: RowSink) -> None:
    sink._pid += 1


@pytest.mark.advice("SinkError: LmdbSink._check_process RedisSink._check_process LmdbRows._check_process")
def test_a_forked_process_builds_its_own(tmp_path: Path, target: str) -> None:
    job, sink = Job(tmp_path), _sink(target)
    _in_a_fork(sink)
    refused(SinkError, sink.open, "Build a sink in this process")
    with Predictor(own := _sink(target), job.url) as predictor:
        predictor.sync()
        own.close()
    assert _has_all_rows(target, job)
