"""Row stores that a predictor writes: readers after every operation, and crashes after every operation."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import cast
from unittest import mock

import pytest
import torch

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedSinkError,
    ModelMismatchError,
    PartialRowsError,
    SinkError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.predictor import sink_writer
from delta_tracker.raw_ids import NO_OWNER, defaults_of
from delta_tracker.sinks.row_sink import SinkState
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec, TableStates
from tests.predictor.identity_histories import FQN, Follower, History, Schedule
from tests.predictor.memory_sink import MemorySink, Stored
from tests.predictor.serving import eventually
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN as FQN_OF_WRITER
from tests.stream.streams import Writer, a_second_later
from tests.sweeps import SWEEPS_ARE_WHOLE

_NUM_STEPS = 40


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with mock.patch.object(sink_writer, "CHUNK_ROWS", 2):
        yield


class SinkReader:
    """Reader that looks up every raw id of a history, and knows which answers are right.

    Args:
        stored: the row store.
        histories: trainers by the id of their stream.
    """

    def __init__(self, stored: Stored, *histories: History) -> None:
        self.stored = stored
        self.histories = {history.claim.head.stream: history for history in histories}
        self.highest: dict[str, int] = {}  # stream to the highest version of which a row may be stored
        self.num_checks = 0
        stored.on_operation = self.check

    def check(self) -> None:
        """Check that each raw id reads its own row or a default row, as of the stored version or a later one."""
        for stream, data in self.stored.states.items():
            begun = SinkState.from_json(data)
            versions = [each for each in (self.highest.get(stream), begun.version, begun.applying) if each is not None]
            self.highest[stream] = max(versions)
        state = self.stored.state()
        if state is None:
            return
        self.num_checks += 1
        history = self.histories[state.stream]
        assert state.version is not None
        newest = self.highest[state.stream] if state.is_mixed else max(state.version, state.applying or 0)
        served = [history.states[each] for each in range(state.version, newest + 1) if each in history.states]
        identity = state.identities[FQN]
        defaults = defaults_of(identity, history.raw_ids).tolist()
        slots = [dict(zip(each.owners.tolist(), range(history.num_rows), strict=True)) for each in served]
        for raw_id, default in zip(history.raw_ids.tolist(), defaults, strict=True):
            found = self.stored.rows.get((state.stream, FQN, raw_id))
            own = [
                each.rows[of_state[raw_id]] for each, of_state in zip(served, slots, strict=True) if raw_id in of_state
            ]
            if found is not None:
                version, row = found
                assert any(torch.equal(row, each) for each in own), (raw_id, row, own, state)
                written = history.states[version]
                assert torch.equal(row, written.rows[written.owners.tolist().index(raw_id)]), (raw_id, version)
                continue
            assert len(own) < len(served), (raw_id, "is missing", state)
            if default != -1:
                version, row = self.stored.defaults[state.stream, FQN, default]
                assert any(torch.equal(row, each.rows[default]) for each in served), (raw_id, row, state)

    def assert_is(self, version: int) -> None:
        """Check the whole content of the row store, which holds a complete version."""
        state = self.stored.state()
        assert state is not None
        assert (state.version, state.applying, state.is_mixed, state.is_settling) == (version, None, False, False)
        expected = self.histories[state.stream].states[version]
        owners = expected.owners.tolist()
        slots = {raw_id: slot for slot, raw_id in enumerate(owners) if raw_id != NO_OWNER}
        assert list(self.stored.states) == [state.stream]
        assert {raw_id for _, _, raw_id in self.stored.rows} == slots.keys()
        for (stream, _, raw_id), (_, row) in self.stored.rows.items():
            assert stream == state.stream
            assert torch.equal(row, expected.rows[slots[raw_id]])
        defaults = [bucket.default for bucket in expected.identity.buckets if bucket.default is not None]
        assert sorted(slot for _, _, slot in self.stored.defaults) == defaults
        for (_, _, slot), (_, row) in self.stored.defaults.items():
            assert torch.equal(row, expected.rows[slot])
        held = {slot: owner for (_, _, slot), owner in self.stored.owners.items() if owner != NO_OWNER}
        assert held == {slot: raw_id for raw_id, slot in slots.items()}
        assert not any(self.stored.log.values())


class SinkFollower:
    """Predictor of a row store, for a :class:`Schedule`."""

    def __init__(self, history: History, stored: Stored | None = None, reader: SinkReader | None = None) -> None:
        self.history, self.storage = history, WrappedStorage(history.storage)
        self.stored = Stored() if stored is None else stored
        self.reader = SinkReader(self.stored, history) if reader is None else reader
        self.sink = MemorySink(self.stored)
        self.predictor = Predictor(self.sink, self.storage)

    def sync(self, limit: int | None = None) -> bool:
        """Return True if the call succeeds."""
        return self._succeeds(lambda: self.predictor.sync(limit))

    def rollback(self, version: int) -> bool:
        """Return True if the call succeeds."""
        return self._succeeds(lambda: self.predictor.rollback(version))

    def _succeeds(self, call: object) -> bool:
        try:
            call()  # type: ignore[operator]
        except StreamError:
            return False
        finally:
            self.reader.check()
        state = self.stored.state()
        if state is not None and state.applying is None:
            assert state.version == self.predictor.version
            self.reader.assert_is(cast("int", state.version))
        return True

    def break_at(self, count: int) -> None:
        """Make the ``count``-th next operation fail once, after it took effect; 0 for none."""
        self.sink.fails_after = 2 * count if count else None

    def restarted(self) -> SinkFollower:
        """Return a new predictor of the same row store."""
        return SinkFollower(self.history, self.stored, self.reader)


@pytest.mark.sweep("long")
@pytest.mark.parametrize("part", range(10 if SWEEPS_ARE_WHOLE else 1))
def test_no_reader_of_a_random_history_finds_a_stale_a_missing_or_another_row(part: int) -> None:
    num_histories = 100 if SWEEPS_ARE_WHOLE else 6
    num_checks = 0
    for seed in range(part * num_histories, (part + 1) * num_histories):
        schedule = Schedule(History(seed), lambda history: cast("Follower", SinkFollower(history)))
        schedule.run(_NUM_STEPS)
        follower = cast("SinkFollower", schedule.follower)
        follower.reader.assert_is(schedule.history.version)
        num_checks += follower.reader.num_checks
    assert num_checks > 100 * num_histories


def _trained(seed: int, num_versions: int) -> History:
    num_buckets = 2 - seed % 2
    history = History(seed, num_buckets, num_rows=6, is_small=True, hash_size=1000, has_defaults=seed % 3 < 2)
    for _ in range(num_versions):
        for _ in range(4):
            history.train()
        history.delta()
    return history


def _replaced(history: History, seed: int) -> History:
    """Put another stream in place of the one of ``history``, and return its trainer."""
    with a_second_later():
        other = _trained(seed, 2)
    for folder in ("log", "parts"):
        for name in history.storage.names(folder):
            history.storage.delete(name)
    for folder in ("log", "parts"):
        for name in other.storage.names(folder):
            data = other.storage.read(name, max_bytes=1 << 30)
            assert data is not None
            history.storage.put(name, [memoryview(data.tobytes())])
    return other


def _changed(history: History, change: str, seed: int) -> History:
    """Publish another version, and return the trainer of the stream that the store then has."""
    if change == "delta":
        for _ in range(6):
            history.train()
        history.delta()
    elif change == "snapshot":
        history.snapshot()
        history.snapshot()
        lost = f"{history.version - 1:020}"
        for name in history.storage.names("log"):
            if lost in name:  # so that the predictor resyncs
                history.storage.delete(name)
    elif change == "buckets":
        history.restart(3 - len(history.identity.buckets))
    elif change == "stream":
        return _replaced(history, seed + 1000)
    return history


def _crashes(stored: Stored, reader: SinkReader, storage: Storage, crash: int, change: str) -> bool:
    """Apply the next version with a crash, perhaps another one, and then completely. Return True if it crashed."""
    sink, draw = MemorySink(stored), random.Random(crash)
    predictor = Predictor(sink, storage)
    assert predictor.version is not None
    before, has_crashed = predictor.version, False
    sink.fails_after = crash
    try:
        if change == "rollback":
            predictor.rollback(before - 1)
        else:
            predictor.sync()
    except SinkError:
        has_crashed = True
    sink.fails_after = None
    if has_crashed and draw.random() < 0.5:
        again = MemorySink(stored)
        again.fails_after = draw.randrange(10)
        with contextlib.suppress(SinkError):
            predictor = Predictor(again, storage)
            predictor.sync()
    if draw.random() < 0.5 or predictor.version is None:
        predictor = Predictor(MemorySink(stored), storage)
    predictor.release()
    reader.assert_is(predictor.sync())
    return has_crashed


@pytest.mark.sweep("long")
@pytest.mark.parametrize("change", ["delta", "snapshot", "buckets", "rollback", "stream"])
def test_a_crash_after_any_operation_is_repaired_by_the_next_version(change: str) -> None:
    for seed in range(20 if SWEEPS_ARE_WHOLE else 1):
        history = _trained(seed, 3)
        stored = Stored()
        Predictor(MemorySink(stored), history.storage).sync()
        newest = _changed(history, change, seed)
        for crash in itertools.count(0, 1 if SWEEPS_ARE_WHOLE else 2):
            crashed = stored.copy()
            reader = SinkReader(crashed, history, newest)
            reader.check()
            if not _crashes(crashed, reader, history.storage, crash, change):
                break
            state = crashed.state()
            assert state is not None
            assert (state.stream, state.version) == (newest.claim.head.stream, newest.version)
        assert crash > 5


def _without_entry(history: History) -> None:
    """Evict all raw ids, publish snapshots, and delete the entry before them, so that predictors resync."""
    lost = f"{history.version:020}"
    history.owners = [NO_OWNER] * history.num_rows
    for _ in range(2):
        for slot in range(history.num_rows):
            history._write(slot)
        history.snapshot()
    for name in history.storage.names("log"):
        if lost in name:
            history.storage.delete(name)


@pytest.mark.sweep("short")
@pytest.mark.parametrize("crash", range(0, 20, 1 if SWEEPS_ARE_WHOLE else 2))
def test_raw_ids_that_only_an_interrupted_version_had_are_deleted(crash: int) -> None:
    history = _trained(3, 3)
    stored = Stored()
    Predictor(MemorySink(stored), history.storage).sync()
    reader = SinkReader(stored, history)
    for _ in range(8):
        history.train()
    history.delta()
    sink = MemorySink(stored)
    predictor = Predictor(sink, history.storage)
    sink.fails_after = crash
    with contextlib.suppress(SinkError):
        predictor.sync()
    sink.fails_after = None
    _without_entry(history)
    reader.assert_is(predictor.sync())
    assert predictor.version == history.version


def test_a_newer_version_that_was_interrupted_stays_recorded() -> None:
    history = _trained(2, 3)
    stored = Stored()
    Predictor(MemorySink(stored), history.storage).sync()
    reader = SinkReader(stored, history)
    for _ in range(2):
        history.train()
        history.delta()
    history.snapshot()
    name = f"log/{history.version - 2:020}.json"
    entry = history.storage.read(name, max_bytes=1 << 20)
    assert entry is not None
    history.storage.delete(name)
    sink = MemorySink(stored)
    predictor = Predictor(sink, history.storage)
    sink.fails_after = 5
    with pytest.raises(SinkError):
        predictor.sync()  # the snapshot
    history.storage.put(name, [memoryview(entry.tobytes())])
    again = Predictor(MemorySink(stored), history.storage)
    for version in (history.version - 2, history.version - 1):
        assert again.sync(1) == version
        state = stored.state()
        assert state is not None
        assert (state.version, state.applying) == (version, history.version)
    reader.assert_is(again.sync())


@pytest.mark.parametrize("restarts", [False, True])
def test_rows_of_a_lost_version_do_not_stay_under_those_of_the_next_publisher(restarts: bool) -> None:
    storage, stored = Storage("memory://"), Stored()
    lost = Writer(storage)
    lost.snapshot()
    Predictor(MemorySink(stored), storage).sync()
    for row in (1, 2):
        lost.delta([row])
    common = lost.table.clone()
    for _ in range(8):
        lost.delta(list(range(20)))
    newest = lost.snapshot().version
    sink = MemorySink(stored)
    predictor = Predictor(sink, storage)
    sink.fails_after = 5
    with pytest.raises(SinkError):
        predictor.sync()  # the snapshot, which replaces many versions
    state = stored.state()
    assert state is not None
    assert (state.version, state.applying) == (1, newest)
    for version in range(4, newest + 1):
        storage.delete(f"log/{version:020}.json")
    writer = Writer(storage)  # claims version 4
    writer.table.copy_(common)
    for row in (18, 19):
        writer.delta([row])
    if restarts:
        predictor = Predictor(MemorySink(stored), storage)
    for _ in range(3):
        with pytest.raises(StreamReplacedError):
            predictor.sync()
    for publish in (writer.snapshot, lambda: writer.delta([3])):
        publish()
        assert predictor.sync() == writer.claim.head.version
        rows = {key: row for (_, _, key), (_, row) in stored.rows.items()}
        assert torch.equal(torch.stack([rows[key] for key in range(20)]), writer.table)


def test_the_position_is_that_of_the_row_store() -> None:
    history = _trained(1, 2)
    stored = Stored()
    assert Predictor(MemorySink(stored), history.storage).sync() == history.version
    assert Predictor(MemorySink(stored), history.storage).version == history.version
    before = stored.num_operations
    Predictor(MemorySink(stored), history.storage).sync()
    assert stored.num_operations == before


def test_arguments_that_a_row_store_cannot_use_are_refused() -> None:
    storage = _trained(1, 1).storage
    with pytest.raises(InvalidArgumentError, match=r"model=.*Pass it to the Predictor itself"):
        ModelTarget(MemorySink(Stored()))  # type: ignore[arg-type]
    predictor = Predictor(MemorySink(Stored()), storage)
    with pytest.raises(InvalidArgumentError, match="reader of the row store"):
        predictor.reading()
    with pytest.raises(InvalidArgumentError, match="keeps the position"):
        predictor.state_dict()
    with pytest.raises(InvalidArgumentError, match="keeps the position"):
        predictor.load_state_dict({})


@pytest.mark.parametrize("encoding", Encoding)
def test_rows_are_those_of_a_predictor_after_every_version(encoding: Encoding) -> None:
    torch.manual_seed(0)
    writer = Writer(Storage("memory://"), encoding=encoding)
    writer.dense = {"w": torch.ones(2)}
    stored, model = Stored(), writer.model()
    sink = Predictor(MemorySink(stored), writer.storage)
    other = Predictor(ModelTarget(model, dense=False), writer.storage)
    for number in range(8):
        if number % 5 == 0:
            writer.snapshot()
        else:
            writer.delta([number, number + 7])
        assert sink.sync() == other.sync() == writer.claim.head.version
        rows = {key: row for (_, _, key), (_, row) in stored.rows.items()}
        assert torch.equal(torch.stack([rows[key] for key in range(writer.spec.num_rows)]), model[FQN_OF_WRITER])
        assert sorted(rows) == list(range(writer.spec.num_rows))
    changed = [version for (_, _, key), (version, _) in stored.rows.items() if key in (7, 14)]
    assert changed == [writer.claim.head.version] * 2


def test_columns_of_rows_are_joined_or_refused() -> None:
    torch.manual_seed(0)
    writer = Writer(Storage("memory://"), states=TableStates("NONE", ((0, 1), (1, 4)), ()))
    writer.snapshot()
    stored = Stored()
    predictor = Predictor(MemorySink(stored), writer.storage)
    predictor.sync()
    assert all(torch.equal(row, writer.table[key]) for (_, _, key), (_, row) in stored.rows.items())
    writer.change([3])
    before = stored.copy()
    writer.write("delta", writer.blocks([3])[:1])
    with pytest.raises(PartialRowsError, match="must write the columns"):
        predictor.sync()
    assert (stored.states, stored.rows) == (before.states, before.rows)


def test_a_table_that_changes_within_a_stream_is_refused() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    stored = Stored()
    Predictor(MemorySink(stored), writer.storage).sync()
    operations = stored.num_operations
    state = stored.state()
    assert state is not None
    for tables in (
        {FQN_OF_WRITER: TableSpec(FQN_OF_WRITER, 21, state.tables[FQN_OF_WRITER].dim, torch.float32)},
        {**state.tables, "other": TableSpec("other", 3, 4, torch.float32)},
    ):
        stored.states[state.stream] = replace(state, tables=tables).to_json()
        writer.snapshot()
        with pytest.raises(ModelMismatchError, match="in the stream but"):
            Predictor(MemorySink(stored), writer.storage).sync()
    assert stored.num_operations == operations


def test_a_current_stream_without_a_state_is_refused() -> None:
    stored = Stored(current="0" * 32)
    with pytest.raises(MalformedSinkError, match="has no state"):
        Predictor(MemorySink(stored), Storage("memory://"))


def test_follow_completes_a_version_after_the_row_store_failed() -> None:
    history = _trained(1, 2)
    stored = Stored()
    sink = MemorySink(stored)
    with Predictor(sink, history.storage) as predictor:
        sink.fails_after = 5
        predictor.follow(0.01)
        eventually(lambda: predictor.version == history.version and predictor.error is None)
        history.train()
        history.delta()
        eventually(lambda: predictor.version == history.version)
        # The version counts before the log of its owners is emptied.
        eventually(lambda: not any(SinkState.from_json(each).is_settling for each in stored.states.values()))
        assert predictor.status().counts.rows > 0
    SinkReader(stored, history).assert_is(history.version)
