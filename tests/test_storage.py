"""Storage on a real directory and in memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.storage import Storage, open_storage


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage("memory://") if request.param == "memory" else Storage(f"file://{tmp_path}/a b", create=True)


def test_what_is_put_is_read(storage: Storage) -> None:
    data = os.urandom(10_000_000)
    storage.put("parts/x", [memoryview(data[:8]), memoryview(data[8:])])
    read = storage.read("parts/x", max_bytes=1 << 30)
    assert read is not None
    assert read.tobytes() == data
    storage.put("parts/x", [memoryview(b"new")])
    assert storage.read("parts/x", max_bytes=1 << 30).tobytes() == b"new"
    assert storage.read("parts/y", max_bytes=1 << 30) is None


def test_a_name_is_created_once(storage: Storage) -> None:
    assert storage.create("log/1", b"first")
    assert not storage.create("log/1", b"second")
    assert storage.read("log/1", max_bytes=1 << 30).tobytes() == b"first"
    assert storage.create("log/2", b"")
    assert storage.read("log/2", max_bytes=1 << 30).tobytes() == b""


def test_names_are_listed_in_order_and_from_a_place(storage: Storage) -> None:
    for name in ("log/3", "log/1", "parts/9", "log/2"):
        storage.create(name, b"x")
    assert storage.names("log") == ["log/1", "log/2", "log/3"]
    assert storage.names("log", after="log/2") == ["log/3"]
    assert storage.names("nothing") == []


def test_of_racing_writers_one_wins(storage: Storage) -> None:
    wins: list[int] = []
    start = threading.Barrier(4)

    def write(writer: int) -> None:
        start.wait()
        wins.extend(name for name in range(50) if storage.create(f"log/{name}", str(writer).encode()))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(wins) == list(range(50))


@pytest.mark.parametrize(
    "url",
    [
        "/plain/path",
        "ftp://host/x",
        "file://host/x",
        "file:relative",
        "",
        "file:///a#1",
        "file:///a?b",
        Path("/a"),
        None,
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="url="):
        Storage(url)


def test_a_directory_that_cannot_be_made_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        Storage(f"file://{tmp_path}/file")
    with pytest.raises(StorageError, match="file/below") as caught:
        Storage(f"file://{tmp_path}/file/below", create=True)
    assert caught.value.url == f"file://{tmp_path}/file/below"
    missing = Storage(f"file://{tmp_path}/missing")
    with pytest.raises(StorageError, match="missing"):
        missing.create("log/1", b"x")
    with pytest.raises(StorageError, match="missing"):
        missing.put("log/1", [memoryview(b"x")])
    storage = Storage(f"file://{tmp_path}/store", create=True)
    (tmp_path / "store" / "parts").write_text("in the way")
    with pytest.raises(StorageError):
        storage.put("parts/x", [memoryview(b"x")])
    with pytest.raises(StorageError):
        storage.create("parts/x", b"x")


def test_an_object_larger_than_expected_is_refused_before_it_is_read(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(MalformedError, match="1099511627776 bytes, more than 100"):
        storage.read("huge", max_bytes=100)


def test_an_opened_storage_is_passed_on() -> None:
    storage = Storage("memory://")
    assert open_storage(storage) is storage
