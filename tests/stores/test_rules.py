from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer
from tests.stores.rules import (
    Dated,
    Gate,
    Stale,
    after,
    alters,
    answers,
    calls,
    disconnects,
    fails,
    hides,
    loses_answers,
    nth,
    on,
    reads,
    trickles,
    watches,
)
from tests.stores.wrapped import Operation, WrappedStorage


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> WrappedStorage:
    return WrappedStorage(Storage(tmp_path if request.param == "file" else "memory://"))


def _read(storage: Storage, name: str) -> bytes | None:
    data = storage.read(name, max_bytes=100)
    return None if data is None else data.tobytes()


def _failing(storage: WrappedStorage, number: int) -> list[int]:
    """Read an object several times, and return the numbers of the reads that failed, from 1."""
    failed = []
    for each in range(1, number + 1):
        try:
            storage.size("a")
        except StorageError:
            failed.append(each)
    return failed


def test_a_store_fails_at_the_nth_operation(storage: WrappedStorage) -> None:
    for when, expected in {nth(3): [3], nth({2, 4}): [2, 4], nth(range(2, 4)): [2, 3], after(3): [4, 5]}.items():
        with storage.under(fails(when)):
            assert _failing(storage, 5) == expected
    with storage.under(fails(nth(1, on("create")))):
        assert _failing(storage, 2) == []
        with pytest.raises(StorageError):
            storage.create("a", b"")


def test_a_store_fails_by_rule(storage: WrappedStorage) -> None:
    storage.rules += [
        fails(on("put", "create", name="log/"), "no space"),
        fails(on(name=str.isupper), KeyboardInterrupt),
        fails(lambda operation: operation.number == 6, lambda operation: OSError(f"no route to {operation.name}")),
    ]
    with pytest.raises(StorageError, match="no space"):
        storage.create("log/1", b"")
    assert storage.inner.names("log") == []
    with pytest.raises(KeyboardInterrupt):
        storage.read("A", max_bytes=1)
    assert storage.create("parts/1", b"")
    storage.replace("log/1", b"")
    assert storage.names("log") == ["log/1"]
    with pytest.raises(OSError, match="no route to log/1"):
        storage.size("log/1")


def test_a_store_can_be_written_but_not_read(storage: WrappedStorage) -> None:
    storage.rules.append(fails(reads))
    for call in (lambda: storage.read("a", max_bytes=1), lambda: storage.names("a"), lambda: storage.stat("a")):
        with pytest.raises(StorageError):
            call()
    assert storage.create("a", b"")


def test_a_store_loses_answers(storage: WrappedStorage) -> None:
    with storage.under(loses_answers(nth(1))), pytest.raises(StorageError, match="reset"):
        storage.create("a", b"1")
    assert not storage.create("a", b"2")
    assert _read(storage, "a") == b"1"


def test_a_store_that_disconnects_has_performed_the_last_operation(storage: WrappedStorage) -> None:
    with storage.under(disconnects(on("create"))):
        assert storage.size("a") is None
        for _ in range(2):
            with pytest.raises(StorageError, match="reset"):
                storage.create("a", b"1")
        with pytest.raises(StorageError, match="reset"):
            storage.size("a")
    assert storage.size("a") == 1


def test_functions_are_called_around_an_operation(storage: WrappedStorage) -> None:
    found: list[object] = []

    def look(operation: Operation, *answer: object) -> None:
        found.append((operation.kind, storage.inner.size(operation.name), *answer))

    storage.rules.append(calls(on("create"), before=look, after=look))
    storage.create("a", b"1")
    storage.delete("a")
    assert found == [("create", None), ("create", 1, True)]


def test_a_store_writes_buffer_by_buffer(storage: WrappedStorage) -> None:
    sizes: list[tuple[int, int | None]] = []
    storage.rules.append(trickles(lambda _, number: sizes.append((number, storage.inner.size("a"))), on(name="a")))
    for name in ("a", "b"):
        storage.put(name, (memoryview(each) for each in (b"1", b"2")))
        assert _read(storage, name) == b"12"
    assert sizes == [(0, None), (1, None)]


def test_each_moment_of_an_operation_is_watched(storage: WrappedStorage) -> None:
    found: list[tuple[str, int, str]] = []
    storage.rules.append(watches(lambda operation, when: found.append((operation.kind, operation.number, when))))
    storage.put("a", [memoryview(each) for each in (b"1", b"2")])
    storage.size("a")
    put = [("put", 1, when) for when in ("before", "within", "after")]
    assert found == [*put, ("size", 2, "before"), ("size", 2, "after")]


def test_a_store_alters_what_it_writes(storage: WrappedStorage) -> None:
    with storage.under(alters(lambda data: data + b"!", on(name="a"))):
        for name in ("a/1", "b/1"):
            storage.create(name, b"x")
        storage.put("a/2", [memoryview(b"x"), memoryview(b"y")])
        storage.replace("a/3", b"")
    assert [_read(storage, name) for name in ("a/1", "b/1", "a/2", "a/3")] == [b"x!", b"x", b"xy!", b"!"]


def test_a_store_answers_without_performing(storage: WrappedStorage) -> None:
    with storage.under(answers(True, on("create"))):
        assert storage.create("a", b"")
    assert storage.size("a") is None


def test_a_store_lacks_objects(storage: WrappedStorage) -> None:
    for name in ("a/1", "a/2"):
        storage.create(name, b"x")
    with storage.under(hides("a/2".__eq__)):
        assert storage.names("a") == [each.name for each in storage.objects("a")] == ["a/1"]
        assert [_read(storage, name) for name in ("a/1", "a/2")] == [b"x", None]
        assert storage.size("a/2") is storage.stat("a/2") is None
        assert not storage.create("a/2", b"")
    with storage.under(hides("a/2".__eq__, on("objects"))):
        assert storage.size("a/2") == 1
        assert storage.names("a") == ["a/1", "a/2"]


def test_a_store_is_stale(storage: WrappedStorage) -> None:
    storage.rules.append(stale := Stale(on(name="a")))
    storage.replace("a/1", b"old")
    for name in ("a/1", "b/1"):
        assert _read(storage, name) == (b"old" if name == "a/1" else None)
        storage.replace(name, b"new")
    assert storage.names("a") == ["a/1"]
    storage.create("a/2", b"")
    out = np.zeros(5, np.uint8)
    assert storage.read("a/1", max_bytes=5, out=out).tobytes() == out[:3].tobytes() == b"old"
    out[:] = 0
    assert (_read(storage, "a/1"), _read(storage, "b/1")) == (b"old", b"new")
    assert storage.names("a") == ["a/1"]
    assert storage.names("a", after="a/1") == ["a/2"], "another listing"
    stale.clear()
    assert _read(storage, "a/1") == b"new"
    assert storage.names("a") == ["a/1", "a/2"]


def test_a_store_is_slow(storage: WrappedStorage) -> None:
    gate = Gate(on("create"))
    storage.rules.append(gate)
    created = threading.Thread(target=lambda: storage.create("a", b""))
    created.start()
    assert gate.reached.wait(60)
    assert storage.size("a") is None, "other operations do not wait"
    gate.open()
    created.join(60)
    assert storage.size("a") == 0
    storage.create("b", b"")
    gate.close()
    assert not gate.reached.is_set()


def test_a_store_dates_its_objects_by_a_clock(storage: WrappedStorage) -> None:
    now = [100.5]
    dated = Dated(lambda: now[0])
    storage.rules.append(dated)
    writes = {
        "a/1": lambda: storage.create("a/1", b""),
        "a/2": lambda: storage.replace("a/2", b""),
        "a/3": lambda: storage.put("a/3", []),
    }
    for write in writes.values():
        write()
        now[0] += 1
    assert not storage.create("a/1", b"")
    expected = {"a/1": 100.5, "a/2": 101.5, "a/3": 102.5}
    assert {each.name: each.modified for each in storage.objects("a")} == dated.times == expected
    assert {name: storage.stat(name).modified for name in expected} == expected
    storage.read("a/2", max_bytes=1, transfer=(transfer := Transfer()))
    assert transfer.modified == 101.5
    storage.rules[:] = [Dated(lambda: 7.5, resolution=2.0)]
    storage.replace("a/1", b"")
    assert storage.stat("a/1").modified == 6.0
