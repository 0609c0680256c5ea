"""Sinks of Redis and LMDB that are killed at each call and at random times, while readers look rows up."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import SinkError
from delta_tracker.predictor import sink_writer
from delta_tracker.sinks.redis import RedisSink
from delta_tracker.sinks.redis_rows import RedisRows
from delta_tracker.sinks.row_sink import RowSink
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests import forked
from tests.contract.test_row_sinks import _finished, _state
from tests.predictor.identity_histories import History
from tests.row_stores import RowStoreReader, copy_stream, reader_of, sink_at
from tests.servers import _process, free_ports, installed, redis_server
from tests.sweeps import SWEEPS_ARE_WHOLE

_PATIENCE_SECONDS = 120
_NUM_READERS = 3


@mock.patch.object(sink_writer, "CHUNK_ROWS", 3)
def write_until_killed(target: str, url: str, num_calls: int, rolls_back: bool) -> None:
    """Apply all versions; kill this process after ``num_calls`` calls of the sink, or never if it is negative."""
    sink = sink_at(target)
    left = [num_calls]

    def counted(call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            result = call(*arguments)
            left[0] -= 1
            if left[0] == -1 and num_calls >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return staticmethod(run)

    names = [name for name in RowSink.__dict__ if not name.startswith("_")]
    delegate = type("Delegate", (RowSink,), {name: counted(getattr(sink, name)) for name in names})()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:  # Redis may not have noticed the end of the former writer
        try:
            predictor = Predictor(delegate, url)
            break
        except SinkError as error:
            if error.writer is None:
                raise
            assert time.monotonic() < deadline
            time.sleep(0.01)
    if rolls_back and predictor.version:
        predictor.rollback(1)
    predictor.release()
    predictor.sync()


@contextlib.contextmanager
def _store(kind: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        if kind == "lmdb":
            yield f"{directory}/rows"
            return
        with redis_server(free_ports(1)[0]) as url:
            yield url


def _check(readers: list[RowStoreReader]) -> None:
    """Let all readers look rows up at the same time, and check their answers."""
    for reader in readers:
        reader.ask()
    for reader in readers:
        reader.check_answer()


@pytest.mark.sweep("long")
@pytest.mark.parametrize("kind", ["redis", "lmdb"])
@pytest.mark.parametrize("at", ["each call", "random times"])
def test_no_reader_finds_a_wrong_row_while_sinks_are_killed(kind, at, tmp_path) -> None:
    draw = random.Random(1)
    num_kills = 30 if SWEEPS_ARE_WHOLE else 2
    history = History(3, num_rows=8, has_defaults=True)
    url = f"file://{tmp_path}/stream"
    Path(tmp_path / "stream").mkdir()
    killed = 0
    with _store(kind) as target, contextlib.ExitStack() as stack:
        readers = [stack.enter_context(reader_of(target, history)) for _ in range(_NUM_READERS)]
        for number in range(num_kills):
            for _ in range(6):
                history.train()
            history.restart() if number % 5 == 4 else history.delta()
            copy_stream(history.storage, Storage(url))
            calls = (number if SWEEPS_ARE_WHOLE else 5 + 3 * number) if at == "each call" else -1
            process = forked.start(write_until_killed, target, url, calls, number % 3 == 2)
            deadline = time.monotonic() + draw.random() * 0.3 if at == "random times" else None
            while process.is_alive():
                _check(readers)
                if deadline is not None and time.monotonic() > deadline:
                    process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            _check(readers)
            assert process.exitcode in (0, -signal.SIGKILL)
        process = forked.start(write_until_killed, target, url, -1, False)
        while process.is_alive():
            _check(readers)
        for reader in readers:
            reader.assert_is(history.version)
    assert killed or not SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
def test_a_redis_server_that_is_killed_loses_rows_and_version_in_order(tmp_path) -> None:
    port = free_ports(1)[0]
    arguments = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--dir", str(tmp_path)]
    command = [installed("redis-server"), "--port", str(port), "--bind", "127.0.0.1", *arguments]
    url = f"redis://127.0.0.1:{port}/0"
    tables = {"t": TableSpec("t", 3000, 4, torch.float32)}
    with _process(command, tmp_path, port):
        sink = RedisSink(url)
        sink.open()
        sink.begin(_state(tables=tables))
        sink.write("0" * 32, "t", torch.arange(3000), torch.ones(3000, 4), 1)
        sink.finish(_finished(tables=tables))
        for version in range(2, 40):
            sink.write("0" * 32, "t", torch.arange(3000), torch.full((3000, 4), float(version)), version)
            sink.finish(_finished(version, tables=tables))
    # Drop the end of the file, as if the crash had lost what was not synchronized: at any byte.
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    data = file.read_bytes()
    draw = random.Random(2)
    for _ in range(20 if SWEEPS_ARE_WHOLE else 3):
        file.write_bytes(data[: draw.randrange(len(data) // 2, len(data))])
        with _process(command, tmp_path, port):
            sink = RedisSink(url)
            sink.open()
            state = sink.states()[0]
            found = RedisRows(url).rows("t", torch.arange(3000))
            assert state.version is not None
            assert state.version >= 10
            assert (found.versions >= state.version).all()
            assert (found.values == found.versions[:, None]).all()
            sink.close()
