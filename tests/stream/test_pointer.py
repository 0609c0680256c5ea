"""The pointer object: what a reader believes of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from delta_tracker.stream.pointer import POINTER_NAME, HeadPointer, PointedSnapshot, PointerView, read_pointer
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.stream.streams import Writer
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
    pointer = replace(pointer, oldest=1, snapshot=PointedSnapshot(version=1, merged=True), merged=((0, 1), (1, 1)))
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


def test_unknown_fields_are_ignored(writer: Writer) -> None:
    pointer = point_at_the_head(writer.storage)
    writer.storage.replace(POINTER_NAME, json.dumps(json.loads(pointer.to_json()) | {"later": 1}).encode())
    assert read_pointer(writer.storage) == pointer


def test_a_view_reads_at_most_once_in_its_interval(writer: Writer) -> None:
    view, held = PointerView(writer.storage, seconds=3600.0), PointerView(writer.storage, seconds=0.0)
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


@pytest.mark.sweep("short")
def test_late_writers_never_move_a_reader_back(writer: Writer) -> None:
    base = point_at_the_head(writer.storage)
    for seed in range(500 if SWEEPS_ARE_WHOLE else 50):
        random_ = random.Random(seed)
        pointers = [base]
        for _ in range(8):
            last = pointers[-1]
            version = last.version + random_.randrange(3)
            oldest = min(version, last.oldest + random_.randrange(2))
            assert last.snapshot is not None
            snapshot = PointedSnapshot(version=random_.randint(last.snapshot.version, version), merged=False)
            generation = last.generation + random_.randrange(2) * (version > last.version)
            pointers.append(
                replace(base, generation=generation, version=version, oldest=oldest, snapshot=snapshot, time=1.0)
            )
        view, read = PointerView(writer.storage, seconds=0.0), list[HeadPointer]()
        for pointer in random_.choices(pointers, k=12):
            _written(writer.storage, pointer)
            found = view.newest()
            read.append(pointer)
            assert found is not None
            assert found.snapshot is not None
            newest = max(read, key=lambda each: (each.generation, each.version))
            assert (found.generation, found.version) == (newest.generation, newest.version)
            assert found.oldest == max(each.oldest for each in read)
            assert found.snapshot.version == max(each.snapshot.version for each in read if each.snapshot is not None)
            assert found.problem is None


def test_a_late_pointer_from_before_a_restore_changes_nothing(writer: Writer) -> None:
    view = PointerView(writer.storage, seconds=0.0)
    for _ in range(6):
        writer.snapshot()
    before = point_at_the_head(writer.storage, oldest=5)
    assert view.newest() == before
    snapshot = PointedSnapshot(version=2, merged=False)
    restored = replace(before, generation=before.generation + 1, version=3, oldest=1, snapshot=snapshot)
    for pointer in (restored, before, restored, before):
        _written(writer.storage, pointer)
        assert view.newest() == restored


def test_a_malformed_or_missing_pointer_keeps_the_one_before(writer: Writer) -> None:
    view = PointerView(writer.storage, seconds=0.0)
    pointer = point_at_the_head(writer.storage)
    assert view.newest() == pointer
    writer.storage.replace(POINTER_NAME, b"{")
    assert view.newest() == pointer
    writer.storage.delete(POINTER_NAME)
    assert view.newest() == pointer


def test_an_entry_that_was_read_raises_the_version(writer: Writer) -> None:
    view = PointerView(writer.storage, seconds=3600.0)
    view.saw(writer.claim.head)  # no pointer yet
    pointer = point_at_the_head(writer.storage)
    view.newest()
    entry = writer.delta([1])
    view.saw(entry)
    found = view.newest()
    assert found == replace(pointer, version=entry.version, xxh3=entry.xxh3)
    snapshot = writer.snapshot()
    view.saw(snapshot)
    view.saw(entry)
    found = view.newest()
    assert found is not None
    assert found.version == snapshot.version
    assert found.snapshot == PointedSnapshot(version=snapshot.version, merged=False)
    view.saw(replace(snapshot, stream="0" * 32, version=99))
    assert view.newest() == found


def _another_stream(replaced: Storage) -> HeadPointer:
    for name in (*replaced.names("log"), *replaced.names("parts")):
        replaced.delete(name)
    Writer(replaced).snapshot()
    return point_at_the_head(replaced)


@pytest.mark.parametrize(
    ("another", "is_believed"),
    [
        (_another_stream, True),
        (lambda storage: point_at_the_head(storage, stream="0" * 32, xxh3="0" * 32), False),  # its entry is missing
        (lambda storage: point_at_the_head(storage, stream="0" * 32, generation=9, xxh3="0" * 32), False),
        (lambda storage: point_at_the_head(storage, stream="0" * 32, generation=9), True),  # a fork of this stream
        (lambda storage: point_at_the_head(storage, stream="0" * 32, generation=0), False),  # of a fenced publisher
    ],
    ids=["replaced", "forged", "forged fork", "fork", "late"],
)
def test_another_stream_is_believed_once_its_entry_is_there(
    writer: Writer, another: Callable[[Storage], HeadPointer], *, is_believed: bool
) -> None:
    view = PointerView(writer.storage, seconds=0.0)
    before = point_at_the_head(writer.storage)
    assert view.newest() == before
    pointer = another(writer.storage)
    assert view.newest() == (pointer if is_believed else before)
