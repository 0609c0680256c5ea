"""Readers of Redis and LMDB in another process, and the check of their answers against a simulated trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from delta_tracker.errors import SinkError
from delta_tracker.raw_ids import defaults_of
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.sinks.lmdb_rows import LmdbRows
from delta_tracker.sinks.redis import RedisSink
from delta_tracker.sinks.redis_rows import RedisRows
from delta_tracker.sinks.row_sink import RowSink, SinkState
from delta_tracker.stream.storage.storage import Storage
from tests import forked
from tests.predictor.identity_histories import FQN, History

# The state's JSON, and of each raw id: its values, version, and whether it owns the row. None without a version.
Answer = tuple[bytes, list[list[float]], list[int], list[bool]] | None


def sink_at(target: str) -> RowSink:
    """Return a sink of a Redis URL or of a directory."""
    return RedisSink(target) if target.startswith("redis") else LmdbSink(target)


def rows_at(target: str) -> RedisRows | LmdbRows:
    """Return a reader of a Redis URL or of a directory."""
    return RedisRows(target) if target.startswith("redis") else LmdbRows(target)


def serve_lookups(target: str, raw_ids: list[int], pipe: Connection) -> None:
    """Look all raw ids up each time the other end of ``pipe`` asks."""
    reader: Any = None
    while pipe.recv():
        try:
            if reader is None:
                reader = rows_at(target)
            while True:
                before = reader.state()
                found = reader.rows(FQN, torch.tensor(raw_ids))
                after = reader.state()
                if before == after and found.version == before.version:  # so that the answer has one state
                    break
        except SinkError as error:
            if "no version is complete yet" not in error.reason and "No such file" not in error.reason:
                raise
            pipe.send(None)
            continue
        pipe.send((after.to_json(), found.values.tolist(), found.versions.tolist(), found.is_own.tolist()))


class RowStoreReader:
    """Reader of a row store that checks each answer.

    Args:
        pipe: pipe to a process that runs :func:`serve_lookups`.
        histories: trainers of the streams, which have the same raw ids.
    """

    def __init__(self, pipe: Connection, *histories: History) -> None:
        self._pipe = pipe
        self._histories = {history.claim.head.stream: history for history in histories}
        self._highest: dict[str, int] = {}
        self.num_checks = 0

    def check(self) -> SinkState | None:
        """Look all raw ids up, and check the answer, see :meth:`check_answer`."""
        self.ask()
        return self.check_answer()

    def ask(self) -> None:
        """Let the process look all raw ids up, at the same time as those of other readers."""
        self._pipe.send(True)

    def check_answer(self) -> SinkState | None:
        """Check that each raw id reads its own row or a default row, as of the stored version or a later one."""
        answer: Answer = self._pipe.recv()
        if answer is None:
            return None
        state = SinkState.from_json(answer[0])
        history = self._histories[state.stream]
        assert state.version is not None
        versions = [
            each for each in (self._highest.get(state.stream), state.version, state.applying) if each is not None
        ]
        self._highest[state.stream] = max(versions)
        newest = self._highest[state.stream] if state.is_mixed else max(state.version, state.applying or 0)
        served = [history.states[each] for each in range(state.version, newest + 1) if each in history.states]
        defaults = defaults_of(state.identities[FQN], history.raw_ids).tolist()
        own = [dict(zip(each.owners.tolist(), each.rows.tolist(), strict=True)) for each in served]
        for raw_id, default, row, version, is_own in zip(history.raw_ids.tolist(), defaults, *answer[1:], strict=True):
            if is_own:
                assert row in [each[raw_id] for each in own if raw_id in each], (raw_id, row, version, state)
                assert version <= newest
                continue
            assert any(raw_id not in each for each in own), (raw_id, "is missing", state)
            expected = [[0.0] * len(row)] if default == -1 else [each.rows[default].tolist() for each in served]
            assert row in expected, (raw_id, row, state)
        self.num_checks += 1
        return state

    def assert_is(self, version: int) -> None:
        """Check that readers get exactly the rows of a version."""
        state = self.check()
        assert state is not None
        assert (state.version, state.applying, state.is_mixed, state.is_settling) == (version, None, False, False)


@contextmanager
def reader_of(target: str, *histories: History) -> Iterator[RowStoreReader]:
    """Run a reader of a row store in another process."""
    ours, theirs = Pipe()
    process = forked.start(serve_lookups, target, histories[0].raw_ids.tolist(), theirs)
    theirs.close()  # so that the end of the process is an error here
    try:
        yield RowStoreReader(ours, *histories)
        ours.send(False)
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def copy_stream(source: Storage, target: Storage) -> None:
    """Copy the objects of a stream that ``target`` lacks, entries last."""
    for folder in ("parts", "log"):
        for name in sorted(set(source.names(folder)) - set(target.names(folder))):
            data = source.read(name, max_bytes=1 << 30)
            assert data is not None
            target.put(name, [memoryview(data.tobytes())])
