"""The pointer object: what a reader believes of it."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_tracker import Predictor
from delta_tracker.errors import StaleCacheError, StreamError, UnreadablePointerError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import promote
from delta_tracker.stream.pointer import POINTER_NAME, HeadPointer, PointedSnapshot, PointerReader, read_pointer
from delta_tracker.stream.reading.fault_delay import FaultDelay
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


def _written(storage: Storage, pointer: HeadPointer) -> None:
    storage.replace(POINTER_NAME, pointer.to_json())


@pytest.fixture
def writer() -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    return writer


def test_a_pointer_is_read_as_it_was_written(writer: Writer) -> None:
    assert read_pointer(writer.storage) is None
    pointer = point_at_the_head(writer.storage)
    assert read_pointer(writer.storage) == pointer
    pointer = replace(pointer, oldest=1, older=(0,), snapshots=(0, 1), merged=((0, 1), (1, 1)))
    pointer = replace(pointer, snapshot=PointedSnapshot(version=1, merged=True))
    _written(writer.storage, pointer)
    assert read_pointer(writer.storage) == pointer


@pytest.mark.parametrize(
    "damage",
    [
        {"version": -1},
        {"version": 2**63},
        {"version": True},
        {"version": 1.0},
        {"xxh3": "../secret"},
        {"stream": None},
        {"oldest": 2},
        {"snapshot": {"version": 2, "merged": False}},
        {"snapshot": {"version": 1}},
        {"merged": [[1, 0]]},
        {"merged": [[0, 2]]},
        {"merged": [[0, 1], [0, 0]]},
        {"merged": [[0, 1, 2]]},
        {"merged": [[0, 1]] * 65},
        {"oldest": 1, "older": [1]},
        {"oldest": 1, "older": [0, 0]},
        {"version": 9, "oldest": 9, "older": [3, 2]},
        {"version": 99, "oldest": 99, "older": [*range(65)]},
        {"older": None},
        {"snapshots": [2]},
        {"snapshots": [0, 0]},
        {"version": 99, "snapshots": [*range(65)]},
        {"time": float("nan")},
        {"time": float("inf")},
        {"padding": "x" * (64 << 10)},
    ],
    ids=str,
)
def test_a_malformed_pointer_is_none_and_logged_once(
    writer: Writer, damage: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_tracker.stream.pointer._reported", set())
    fields = json.loads(point_at_the_head(writer.storage).to_json())
    writer.storage.replace(POINTER_NAME, json.dumps(fields | damage).encode())
    assert read_pointer(writer.storage) is None
    assert read_pointer(writer.storage) is None
    assert len([each for each in caplog.records if "malformed pointer" in each.message]) == 1


@pytest.mark.parametrize("data", [b"", b"\xff", b"[", b"[]", b"[" * 60_000, b'{"version":1,"version":2}'])
def test_bytes_that_are_no_pointer_are_none(writer: Writer, data: bytes) -> None:
    writer.storage.replace(POINTER_NAME, data)
    assert read_pointer(writer.storage) is None


def test_older_versions_and_merged_snapshots_may_be_missing(writer: Writer) -> None:
    fields = json.loads(point_at_the_head(writer.storage).to_json())
    del fields["older"], fields["snapshots"]
    writer.storage.replace(POINTER_NAME, json.dumps(fields).encode())
    found = read_pointer(writer.storage)
    assert found is not None
    assert (found.older, found.snapshots) == ((), ())


def test_unknown_fields_are_ignored(writer: Writer) -> None:
    pointer = point_at_the_head(writer.storage)
    writer.storage.replace(POINTER_NAME, json.dumps(json.loads(pointer.to_json()) | {"later": 1}).encode())
    assert read_pointer(writer.storage) == pointer


def test_a_view_reads_at_most_once_in_its_interval(writer: Writer) -> None:
    view, held = PointerReader(writer.storage, seconds=3600.0), PointerReader(writer.storage, seconds=0.0)
    first = point_at_the_head(writer.storage)
    assert view.newest(is_due=False) is None
    assert view.newest() == held.newest() == first
    writer.delta([1])
    second = point_at_the_head(writer.storage)
    num_reads = writer.storage.requests["read"]
    assert [view.newest() for _ in range(10)] == [first] * 10
    assert held.newest(is_due=False) == first
    assert writer.storage.requests["read"] == num_reads
    assert held.newest() == view.newest(past_cache=True) == second


def _served(storage: Storage) -> Storage:
    """Return a view of a store in memory that can neither list nor write, like the view through a web server."""
    view = Storage("memory://")
    vars(view).update(_store=storage._store, is_read_only=True, lists=False, lists_from=False, _uncached=view)
    return view


class Clock:
    """Monotonic time of the pointer and the log, which only tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    @property
    def runtime(self) -> Runtime:
        """Runtime with this clock, whose waits take no time."""
        return Runtime(monotonic=lambda: self.now, sleep=lambda _: None)


def _predictor(writer: Writer, clock: Clock) -> tuple[Predictor, dict[str, Tensor]]:
    """Return a predictor that reads the pointer at each call and believes a fault after ten seconds of ``clock``."""
    model = writer.model()
    predictor = Predictor(model, _served(writer.storage))
    source = predictor._reader.source
    source._runtime = source.log._runtime = source.log.pointer._runtime = clock.runtime
    source.log.pointer._seconds = 0.0
    source.fault_delay = FaultDelay(clock=clock.runtime.monotonic)
    return predictor, model


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _unlisted(storage: Storage, clock: Clock) -> StreamLog:
    log = StreamLog(_served(storage), clock.runtime)
    log.pointer._seconds = 0.0
    return log


_PAGE = b"<html><body>Please log in</body></html>"
_Sent = HeadPointer | bytes | None  # a pointer, other bytes, or no object


def _send(storage: Storage, sent: _Sent) -> None:
    if sent is None:
        storage.delete(POINTER_NAME)
    else:
        storage.replace(POINTER_NAME, sent if isinstance(sent, bytes) else sent.to_json())


@pytest.fixture
def sent(writer: Writer) -> dict[str, _Sent]:
    """Pointers to a log with the versions 0 to 6: claim, snapshot, 2 deltas, snapshot, 2 deltas."""
    for kind in ("delta", "delta", "snapshot", "delta", "delta"):
        writer.delta([1]) if kind == "delta" else writer.snapshot()
    right = point_at_the_head(writer.storage)
    assert right.version == 6
    entries = {version: StreamLog(writer.storage).read(version) for version in (3, 5)}
    old, before = (
        replace(right, version=entry.version, xxh3=entry.xxh3, snapshot=PointedSnapshot(version=1, merged=False))
        for entry in entries.values()
        if entry is not None
    )
    return {
        "right": right,
        "old": old,
        "before": before,
        "higher": replace(right, version=11),
        "far": replace(right, version=2**62, oldest=2**62),
        "oldest": replace(right, oldest=6),
        "generation": replace(right, generation=9),
        "hash": replace(right, xxh3="0" * 32),
        "stream": replace(right, stream="0" * 32),
        "page": _PAGE,
        "none": None,
    }


def _trouble(log: StreamLog) -> type[StreamError] | None:
    try:
        log.check_pointer()
    except StreamError as error:
        return type(error)
    return None


@pytest.mark.sweep("short")
@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_reader_believes_the_newest_pointer_whose_entry_is_there(
    writer: Writer, sent: dict[str, _Sent], clock: Clock, seconds: float
) -> None:
    """In all sequences of up to four pointers. The reference knows which of them name an entry of the log."""
    there = {"right", "old", "before", "oldest"}
    for length in range(1, 5 if SWEEPS_ARE_WHOLE else 4):
        for names in itertools.product(sent, repeat=length):
            log, expected = _unlisted(writer.storage, clock), None
            for name in names:
                pointer = sent[name]
                clock.now += seconds
                _send(writer.storage, pointer)
                if name in there and (expected is None or pointer.version >= expected.version):
                    expected = pointer
                assert log.pointed() == expected, names
            if name in {"right", "oldest"}:
                assert _trouble(log) is None, names
            elif name == "page":
                assert _trouble(log) is UnreadablePointerError, names
            elif name in {"higher", "far", "hash"}:
                assert _trouble(log) is StaleCacheError, names
            clock.now += seconds
            _send(writer.storage, sent["right"])
            assert log.pointed() == sent["right"]
            log.check_pointer()


@pytest.mark.sweep("long")
def test_a_predictor_reaches_the_head_once_the_pointer_is_right(
    writer: Writer, sent: dict[str, _Sent], clock: Clock
) -> None:
    right = sent["right"]
    for names in itertools.product(sent, repeat=3 if SWEEPS_ARE_WHOLE else 2):
        predictor, model = _predictor(writer, clock)
        for name in names:
            _send(writer.storage, sent[name])
            for _ in range(4):
                clock.now += 4.0
                with contextlib.suppress(StreamError):
                    predictor.sync()
        _send(writer.storage, right)
        clock.now += 11.0
        assert predictor.sync() == 6, names
        assert torch.equal(model[FQN], writer.table)
        assert predictor.status().lag_versions == 0


@pytest.mark.parametrize("choice", [5, 2**62])
@pytest.mark.parametrize("raises_oldest", [False, True])
def test_a_pointer_that_was_forged_for_four_polls_does_no_harm(
    writer: Writer, clock: Clock, choice: int, raises_oldest: bool
) -> None:
    right = point_at_the_head(writer.storage)
    predictor, model = _predictor(writer, clock)
    assert predictor.sync() == 1
    version = choice if choice > 100 else right.version + choice
    _send(writer.storage, replace(right, version=version, oldest=version if raises_oldest else 0))
    for _ in range(4):
        clock.now += 5.0
        with pytest.raises(StreamError):
            predictor.sync()
    for row in range(3):
        writer.delta([row])
        point_at_the_head(writer.storage)
        clock.now += 1.0
        assert predictor.sync() == 2 + row
        assert torch.equal(model[FQN], writer.table)
    status = predictor.status()
    assert (status.lag_versions, status.resyncs) == (0, 0)


def test_an_entry_that_appears_after_its_pointer_is_found_within_ten_seconds(writer: Writer, clock: Clock) -> None:
    log = _unlisted(writer.storage, clock)
    before = point_at_the_head(writer.storage)
    assert log.pointed() == before
    name = entry_name(writer.delta([1]).version)
    pointer = point_at_the_head(writer.storage)
    data = writer.storage.read(name, max_bytes=1 << 20)
    assert data is not None
    writer.storage.delete(name)
    assert log.pointed() == before
    writer.storage.replace(name, data.tobytes())
    assert log.pointed() == before, "it is not asked for at each poll"
    clock.now += 10.0
    assert log.pointed() == pointer


def test_a_late_pointer_from_before_a_restore_changes_nothing(writer: Writer, clock: Clock) -> None:
    """The log is replaced by a copy that ends at version 2, and continued with another generation."""
    writer.delta([1])
    copy = Storage("memory://")
    for name in (*writer.storage.names("log"), *writer.storage.names("parts")):
        data = writer.storage.read(name, max_bytes=1 << 20)
        assert data is not None
        copy.replace(name, data.tobytes())
    log = _unlisted(writer.storage, clock)
    for _ in range(4):
        writer.snapshot()
    before = point_at_the_head(writer.storage, oldest=5)
    assert log.pointed() == before
    for name in writer.storage.names("log"):
        writer.storage.delete(name)
        data = copy.read(name, max_bytes=1 << 20)
        if data is not None:
            writer.storage.replace(name, data.tobytes())
    copied = point_at_the_head(writer.storage)
    clock.now += 10.0
    assert log.pointed() == copied
    writer.claim = StreamLog(writer.storage).claim()
    restored = point_at_the_head(writer.storage)
    assert (restored.version, restored.generation) == (3, before.generation + 1)
    for pointer in (restored, before, restored, before):
        _send(writer.storage, pointer)
        clock.now += 20.0
        assert log.pointed() == restored


def test_a_malformed_or_missing_pointer_keeps_the_one_before(writer: Writer) -> None:
    view = PointerReader(writer.storage, seconds=0.0)
    pointer = point_at_the_head(writer.storage)
    assert view.newest() == pointer
    writer.storage.replace(POINTER_NAME, b"{")
    assert view.newest() == pointer
    writer.storage.delete(POINTER_NAME)
    assert view.newest() == pointer


def test_an_entry_that_was_read_raises_the_version(writer: Writer) -> None:
    view = PointerReader(writer.storage, seconds=3600.0)
    view.note_entry(writer.claim.head)  # no pointer yet
    pointer = point_at_the_head(writer.storage)
    view.newest()
    assert view.confirmed is None
    view.note_entry(writer.claim.head)
    assert view.confirmed == pointer
    entry = writer.delta([1])
    view.note_entry(entry)
    found = view.newest()
    assert found == replace(pointer, version=entry.version, xxh3=entry.xxh3)
    snapshot = writer.snapshot()
    view.note_entry(snapshot)
    view.note_entry(entry)
    found = view.newest()
    assert found is not None
    assert found.version == snapshot.version
    assert found.snapshot == PointedSnapshot(version=snapshot.version, merged=False)
    view.note_entry(replace(snapshot, stream="0" * 32, version=99))
    assert view.newest() == found
    unseen = writer.snapshot()
    view.note_entry(writer.delta([1]))
    found = view.newest()
    assert found is not None
    assert found.snapshot == PointedSnapshot(version=unseen.version, merged=False)


def _another_stream(replaced: Storage) -> HeadPointer:
    for name in (*replaced.names("log"), *replaced.names("parts")):
        replaced.delete(name)
    Writer(replaced).snapshot()
    return point_at_the_head(replaced)


def _fork(forked: Storage) -> HeadPointer:
    promote(forked)
    return point_at_the_head(forked)


@pytest.mark.parametrize(
    ("another", "is_believed"),
    [
        (_another_stream, True),
        (lambda storage: point_at_the_head(storage, stream="0" * 32, xxh3="0" * 32), False),  # its entry is missing
        (lambda storage: point_at_the_head(storage, stream="0" * 32, generation=9, xxh3="0" * 32), False),
        (lambda storage: point_at_the_head(storage, stream="0" * 32, generation=9), False),  # its entry is another one
        (_fork, True),
        (lambda storage: point_at_the_head(storage, stream="0" * 32, generation=0), False),  # of a fenced publisher
    ],
    ids=["replaced", "forged", "forged fork", "forged stream", "fork", "late"],
)
def test_another_stream_is_believed_once_its_entry_is_there(
    writer: Writer, another: Callable[[Storage], HeadPointer], clock: Clock, *, is_believed: bool
) -> None:
    log = _unlisted(writer.storage, clock)
    before = point_at_the_head(writer.storage)
    assert log.pointed() == before
    pointer = another(writer.storage)
    assert log.pointed() == (pointer if is_believed else before)
