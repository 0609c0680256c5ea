from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer
from tests.stores.rules import fails, on
from tests.stores.wrapped import OPERATIONS, READS, WRITES, WrappedStorage

_CALLS = {
    "create": lambda storage: storage.create("a/1", b"1"),
    "delete": lambda storage: storage.delete("a/1"),
    "delete_draft": lambda storage: storage.delete_draft("a/1"),
    "has_directory": lambda storage: storage.has_directory("a"),
    "names": lambda storage: storage.names("a", after="a/0"),
    "objects": lambda storage: storage.objects("a"),
    "put": lambda storage: storage.put("a/1", [memoryview(b"1")]),
    "read": lambda storage: storage.read("a/1", max_bytes=9),
    "read_range": lambda storage: storage.read_range("a/1", 0, 1),
    "replace": lambda storage: storage.replace("a/1", b"1"),
    "size": lambda storage: storage.size("a/1"),
    "stat": lambda storage: storage.stat("a/1"),
    "sync": lambda storage: storage.sync("a"),
}


@pytest.fixture
def storage() -> WrappedStorage:
    storage = WrappedStorage(Storage("memory://"))
    storage.inner.create("a/1", b"text")
    return storage


@pytest.mark.parametrize("kind", sorted(OPERATIONS))
def test_each_operation_passes_the_rules_and_is_recorded(storage: WrappedStorage, kind: str) -> None:
    with storage.under(fails(on(kind))), pytest.raises(StorageError, match="503"):
        _CALLS[kind](storage)
    _CALLS[kind](storage)
    assert [(each.kind, each.number) for each in storage.operations] == [(kind, 1), (kind, 2)]


def test_an_operation_reads_or_writes() -> None:
    assert READS | WRITES == OPERATIONS
    assert not READS & WRITES


def test_operations_are_recorded_without_bytes(storage: WrappedStorage) -> None:
    storage.read("a/1", max_bytes=9, transfer=Transfer())
    storage.read_range("a/1", 1, end=3)
    storage.create("b/2", b"data")
    storage.objects("a", after="a/0")
    assert [(each.name, each.arguments) for each in storage.operations] == [
        ("a/1", {"max_bytes": 9}),
        ("a/1", {"begin": 1, "end": 3}),
        ("b/2", {}),
        ("a", {"after": "a/0"}),
    ]
    assert (storage.count(), storage.count("read", "read_range"), storage.count(name="a/")) == (4, 2, 2)
    assert len(storage.take()) == 4
    storage.size("a/1")
    assert [each.number for each in storage.take()] == [1]


def test_rules_apply_in_their_order_and_to_the_wrapper_only(storage: WrappedStorage) -> None:
    storage.rules.append(fails(fault="inner"))
    with storage.under(fails(on("read"), "outer")):
        with pytest.raises(StorageError, match="outer"):
            storage.read("a/1", max_bytes=9)
        with pytest.raises(StorageError, match="inner"):
            storage.size("a/1")
    with pytest.raises(StorageError, match="inner"):
        storage.read("a/1", max_bytes=9)
    assert storage.inner.size("a/1") == 4


def test_a_wrapped_store_of_a_replaced_directory_keeps_its_rules(tmp_path: Path) -> None:
    root = tmp_path / "stream"
    storage = WrappedStorage(Storage(root, create=True))
    storage.create("a/1", b"1")
    assert storage.reopened() is storage
    shutil.rmtree(root)
    Storage(root, create=True).create("a/2", b"2")
    storage.rules.append(fails(on("read")))
    reopened = storage.reopened()
    assert reopened.create("a/3", b"3")
    with pytest.raises(StorageError, match="503"):
        reopened.read("a/3", max_bytes=9)
    assert storage.count() == 3


def test_a_wrapper_is_the_same_store_as_its_store(tmp_path: Path) -> None:
    inner = Storage(tmp_path)
    assert WrappedStorage(inner).is_same(inner)
    assert WrappedStorage(inner).is_same(WrappedStorage(WrappedStorage(inner)))
    assert inner.is_same(WrappedStorage(inner))
    assert not WrappedStorage(inner).is_same(Storage("memory://"))


def test_a_wrapper_may_pretend_to_be_remote() -> None:
    inner = Storage("memory://")
    assert [WrappedStorage(inner, is_remote=each).is_remote for each in (None, False, True)] == [False, False, True]


def test_a_wrapped_http_store_is_wrapped_past_the_caches_too() -> None:
    storage = WrappedStorage(Storage("http://127.0.0.1:9/x"), fails())
    with pytest.raises(StorageError, match="503"):
        storage.uncached.size("a")
    assert storage.count() == 1
    assert storage.uncached.is_read_only
