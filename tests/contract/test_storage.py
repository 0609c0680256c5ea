"""One contract for storage in a directory, in memory and on a real S3 server, and tests of files only."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from delta_tracker.errors import (
    InvalidArgumentError,
    MalformedError,
    StorageError,
    UnsupportedStoreError,
    WriteRefusedError,
)
from delta_tracker.stream.storage.storage import Storage, open_storage
from delta_tracker.stream.storage.store import Repeatable, Transfer
from tests.servers import S3, proxy
from tests.stores.sqlite_store import SqliteStore
from tests.stores.wrapped import WrappedStorage


@pytest.fixture(params=["file", "memory", "s3", "sqlite", "wrapped file", "wrapped memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "sqlite":
        return Storage(SqliteStore(tmp_path / "database"))
    if request.param != "s3":
        is_file = request.param.endswith("file")
        found = Storage(f"file://{tmp_path}/a b", create=True) if is_file else Storage("memory://")
        return WrappedStorage(found) if request.param.startswith("wrapped") else found
    s3 = request.getfixturevalue("s3")
    return Storage(f"{s3.url}/{secrets.token_hex(8)}", options=s3.options)


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


def together(count: int, work) -> list:
    """Run ``work(0) ... work(count - 1)`` concurrently in threads; return their results."""
    start = threading.Barrier(count)

    def run(number: int):
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_of_racing_writers_one_wins(storage: Storage) -> None:
    names = [f"log/{name:03d}" for name in range(200)]
    wins = together(4, lambda writer: [name for name in names if storage.create(name, b"%d" % writer * 50)])
    assert sorted(itertools.chain(*wins)) == names
    for writer, won in enumerate(wins):
        assert all(storage.read(name, max_bytes=50).tobytes() == b"%d" % writer * 50 for name in won)
    assert storage.names("drafts") == []


def test_ranges_are_exact(storage: Storage) -> None:
    data = os.urandom(9_000_001)
    storage.put("parts/x", [memoryview(data)])
    for begin, end in [(0, 1), (0, len(data)), (4, 4_194_310), (len(data) - 1, len(data)), (7, 7), (0, 0)]:
        assert storage.read_range("parts/x", begin, end).tobytes() == data[begin:end]
    for begin, end in [(0, len(data) + 1), (len(data), len(data) + 1), (1 << 40, 1 << 41), (1 << 40, 1 << 40)]:
        with pytest.raises(StorageError, match=r"parts/x|ange"):
            storage.read_range("parts/x", begin, end)
    for begin, end in [(-1, 1), (2, 1)]:
        with pytest.raises(InvalidArgumentError, match="begin"):
            storage.read_range("parts/x", begin, end)
    assert storage.read_range("parts/y", 0, 4) is None
    assert storage.read_range("parts/y", 4, 4) is None
    assert storage.read_range("parts", 0, 1) is None


def test_sizes_deletions_and_what_is_no_object(storage: Storage) -> None:
    storage.put("parts/a/x", [memoryview(b"123"), memoryview(b""), memoryview(b"45")])
    storage.put("parts/a/empty", [])
    sizes = [storage.size(name) for name in ("parts/a/x", "parts/a/empty", "parts/a", "none")]
    assert sizes == [5, 0, None, None]
    assert storage.read("parts/a/empty", max_bytes=0).tobytes() == b""
    assert storage.read("parts/a", max_bytes=9) is None
    if not storage.url.startswith("file:"):  # a directory has no file and no folder of one name
        assert storage.size("parts/a/x/y") is storage.read("parts/a/x/y", max_bytes=9) is None
    for _ in range(2):
        storage.delete("parts/a/x")
        storage.delete("never/there")
        assert storage.size("parts/a/x") is None
    assert storage.names("parts/a") == ["parts/a/empty"]


def test_buffers_of_any_type_and_size_are_concatenated(storage: Storage) -> None:
    numbers = np.arange(3_000_000, dtype=np.float32)  # larger than one part of an upload
    storage.put("x", (memoryview(array) for array in (numbers, numbers[:1], numbers[1:1], numbers)))
    expected = np.concatenate([numbers, numbers[:1], numbers])
    np.testing.assert_array_equal(storage.read("x", max_bytes=1 << 30).view(np.float32), expected)


@pytest.mark.parametrize("num_bytes", [1000, 3 << 20, 9 << 20])
def test_a_buffer_may_be_used_again_once_the_next_is_asked_for(storage: Storage, num_bytes: int) -> None:
    buffer = np.empty(num_bytes, dtype=np.uint8)

    def buffers():
        for turn in range(4):
            buffer[:] = turn
            yield buffer.data

    storage.put("x", buffers())
    found = storage.read("x", max_bytes=1 << 30).reshape(4, num_bytes)
    assert all((found[turn] == turn).all() for turn in range(4))


@pytest.mark.parametrize("num_bytes", [10, 20_000_000])
def test_buffers_that_fail_leave_nothing(storage: Storage, num_bytes: int) -> None:
    def buffers():
        yield memoryview(bytes(num_bytes))
        raise LookupError("the table is gone")

    storage.put("x", [memoryview(b"old")])
    for name in ("x", "y"):
        with pytest.raises(LookupError, match="the table is gone"):
            storage.put(name, buffers())
    assert storage.read("x", max_bytes=3).tobytes() == b"old"
    assert storage.size("y") is None


@pytest.mark.parametrize("is_emptied", [False, True])  # a mount point without its volume is an empty directory
def test_a_directory_that_vanished_is_not_created_again(tmp_path: Path, *, is_emptied: bool) -> None:
    root = tmp_path / "stream"
    storage = Storage(root.as_uri(), create=True)
    storage.replace("predictors/p.json", b"{}")
    storage.create("log/1", b"first")
    shutil.rmtree(root)
    if is_emptied:
        root.mkdir()
    for write in (
        lambda: storage.put("parts/x", [memoryview(b"x")]),
        lambda: storage.create("log/2", b"second"),
        lambda: storage.replace("predictors/p.json", b"{}"),
    ):
        with pytest.raises(StorageError, match="build a new Publisher"):
            write()
    assert list(tmp_path.rglob("*")) == [root] * is_emptied
    # A new publisher may create it: readers of the old one follow, and so do their heartbeats.
    Storage(root.as_uri(), create=True).create("log/1", b"another")
    storage = storage.reopened()
    assert storage.reopened() is storage
    storage.replace("predictors/p.json", b"{}")
    shutil.rmtree(root / "drafts")
    shutil.rmtree(root / "predictors")
    storage.replace("predictors/p.json", b"{}")
    assert storage.names("predictors") == ["predictors/p.json"]


@pytest.mark.parametrize("stray", ["lost+found", "log/2", None])
def test_no_call_writes_to_another_directory_than_the_opened_one(tmp_path: Path, stray: str | None) -> None:
    """The directory is moved away, as by an unmount. Another one may be there, with a file or with the same stream."""
    root, volume = tmp_path / "stream", tmp_path / "volume"
    storage = Storage(root.as_uri(), create=True)
    storage.create("log/1", b"first")
    root.rename(volume)
    if stray is not None:
        (root / stray).parent.mkdir(parents=True)
        (root / stray).write_bytes(b"stray")
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: storage.put("parts/x", [memoryview(b"x")]),
        lambda: storage.create("log/2", b"second"),
        lambda: storage.replace("predictors/p.json", b"{}"),
        lambda: storage.delete("log/2"),
        lambda: storage.delete_draft("log/2"),
        lambda: storage.sync("log"),
    ):
        with pytest.raises(StorageError, match="build a new Publisher"):
            write()
    assert sorted(tmp_path.rglob("*")) == before
    if stray is not None:
        assert storage.read(stray, max_bytes=9).tobytes() == b"stray", "readers may follow another stream"
        shutil.rmtree(root)
    volume.rename(root)
    assert storage.create("log/2", b"second")
    assert storage.names("log") == ["log/1", "log/2"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_replaced_during_a_write_gets_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool
) -> None:
    root = tmp_path / "stream"
    storage = Storage(root.as_uri(), create=True)
    storage.create("log/0", b"first")

    def unmount(_: int) -> None:  # once the bytes are written
        root.rename(tmp_path / "volume")
        for name in ("drafts", "log"):
            (root / name).mkdir(parents=True)
        for draft in (tmp_path / "volume" / "drafts").iterdir():
            shutil.copy(draft, root / "drafts")

    monkeypatch.setattr(os, "fsync", unmount)
    with pytest.raises(StorageError, match="build a new Publisher"):
        (storage.replace if overwrite else storage.create)("log/1", b"x")
    assert not (root / "log" / "1").exists()


def test_objects_say_their_size_and_age(storage: Storage) -> None:
    before = time.time()
    for name, data in {"a/2": b"22", "a/10": b"0", "ab/1": b"", "a/1": b"4444"}.items():
        storage.replace(name, data)
    found = storage.objects("a")
    assert [(stored.name, stored.num_bytes) for stored in found] == [("a/1", 4), ("a/10", 1), ("a/2", 2)]
    assert all(before - 5 <= stored.modified <= time.time() + 5 for stored in found)
    for stored in found:
        response = Transfer()
        storage.read(stored.name, max_bytes=10, transfer=response)
        assert abs(response.modified - stored.modified) <= 1, "a response may have whole seconds"
    assert [stored.name for stored in storage.objects("a", after="a/1")] == ["a/10", "a/2"]
    assert storage.url.startswith("file:") or storage.objects("a/1") == []


def test_a_replaced_object_is_never_half_seen(storage: Storage) -> None:
    storage.replace("alive/p", b"0" * 1000)

    def work(number: int) -> None:
        for turn in range(50):
            if number == 0:
                storage.replace("alive/p", b"%d" % (turn % 10) * 1000)
            else:
                data = storage.read("alive/p", max_bytes=1000).tobytes()
                assert data == data[:1] * 1000

    together(3, work)
    assert storage.read("alive/p", max_bytes=1000).tobytes() == b"9" * 1000
    assert storage.names("drafts") == []


def test_listing_bears_what_vanishes_meanwhile(storage: Storage) -> None:
    storage.create("a/0", b"x")

    def work(number: int) -> None:
        for turn in range(100):
            if number == 0:
                assert storage.names("a")[0] == "a/0"
            else:
                storage.put(f"a/{number}-{turn}", [memoryview(b"x")])
                storage.delete(f"a/{number}-{turn}")

    together(3, work)
    assert storage.names("a") == ["a/0"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        ".",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "a\0b",
        "a\nb",
        "a\x7f",
        "a#1",
        "x" * 1025,
        b"a",
        None,
    ],
    ids=repr,
)
def test_names_that_leave_the_root_are_refused_by_every_call(name: str) -> None:
    storage = Storage("memory://")
    storage._store = None  # which fails if it is called
    calls = [
        lambda: storage.put(name, [memoryview(b"x")]),
        lambda: storage.create(name, b"x"),
        lambda: storage.replace(name, b"x"),
        lambda: storage.read(name, max_bytes=1),
        lambda: storage.read_range(name, 0, 1),
        lambda: storage.size(name),
        lambda: storage.delete(name),
        lambda: storage.objects(name),
        lambda: storage.names(name),
        *([lambda: storage.objects("a", after=name)] if name is not None else []),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"name=|prefix=|after="):
            call()


def test_names_that_are_merely_odd_are_served(storage: Storage) -> None:
    odd = ["a b", "a%20b", "é", "a:b", "..a", "a.", "a+b", "a~", "a=b&c?d*"]
    for name in odd:
        assert storage.create(f"odd/{name}", name.encode())
    assert storage.names("odd") == sorted(f"odd/{name}" for name in odd)
    for name in odd:
        assert storage.read(f"odd/{name}", max_bytes=99).tobytes() == name.encode()
        assert storage.size(f"odd/{name}") == len(name.encode())
        storage.delete(f"odd/{name}")
    assert storage.names("odd") == []


def test_a_safe_store_passes_the_probe_and_stays_clean(storage: Storage) -> None:
    storage.probe()
    assert storage.names("probe") == []


def test_a_store_that_replaces_what_exists_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(name: str, data: bytes) -> bool:
        storage.replace(name, data)
        return True

    monkeypatch.setattr(storage, "create", create)
    with pytest.raises(UnsupportedStoreError, match="If-None-Match") as caught:
        storage.probe()
    assert caught.value.url == storage.url
    assert storage.names("probe") == []


def test_a_store_that_replaces_what_exists_and_denies_it_is_refused(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(name: str, data: bytes) -> bool:
        storage.replace(name, data)
        return data == b"first"

    monkeypatch.setattr(storage, "create", create)
    with pytest.raises(UnsupportedStoreError, match="no atomic create-if-absent"):
        storage.probe()


def test_a_probe_of_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        Storage(f"file://{tmp_path}/missing").probe()


def test_options_are_for_remote_stores_and_never_shown() -> None:
    for url in ("file:///tmp", "memory://"):
        with pytest.raises(InvalidArgumentError, match="options") as caught:
            Storage(url, options={"secret_access_key": "hunter2"})
        assert "hunter2" not in str(caught.value)
    for options in ({"no_such_option": "hunter2"}, {"secret_access_key": 17}, {17: "hunter2"}):
        with pytest.raises(InvalidArgumentError, match="options") as caught:
            Storage("s3://bucket", options=options)
        assert "hunter2" not in str(caught.value)
    for url, options, near in (
        ("s3://bucket", {"aws_acess_key_id": "hunter2"}, "Did you mean access_key_id instead of aws_acess_key_id?"),
        ("gs://bucket", {"service_acount": "hunter2"}, "Did you mean service_account instead of service_acount?"),
        ("http://127.0.0.1:1", {"read_timout": "3s"}, "Did you mean read_timeout instead of read_timout?"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(near)) as caught:
            Storage(url, options=options)
        assert "hunter2" not in str(caught.value)
    for options in (
        {"acess_key_id": "a", "default_region": "b", "token": "c"},  # the other two are valid
        {"acount_nam": "a"},  # resembles an option of Azure only
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            Storage("s3://bucket", options=options)
        assert not re.search("instead of (default_region|token)|account_name", str(caught.value))
    Storage("s3://bucket/a", options={"aws_allow_http": "true", "region": "us-east-1", "timeout": "5s"})
    with pytest.raises(InvalidArgumentError, match="fsync"):
        Storage("memory://", fsync=False)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    storage = Storage(f"file://{tmp_path}")
    with pytest.raises(StorageError, match="not a regular file"):
        storage.read("pipe", max_bytes=10)
    assert storage.size("pipe") is None


def test_everything_is_on_disk_before_a_call_returns_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    storage = Storage(f"file://{tmp_path}/a/b", create=True)
    assert set(synced) == {"..", ".", "a"}
    for write in (
        lambda: storage.put("d/x", [memoryview(b"x")]),
        lambda: storage.create("d/y", b"y"),
        lambda: storage.replace("d/x", b"y"),
    ):
        synced.clear()
        write()
        assert {"a/b", "a/b/d"} <= set(synced)
        assert any(name == "a/b/d/x" or name.startswith("a/b/drafts/") for name in synced)
    synced.clear()
    storage = Storage(f"file://{tmp_path}/c", create=True, fsync=False)
    storage.put("d/x", [memoryview(b"x")])
    storage.create("d/y", b"y")
    storage.replace("d/x", b"y")
    assert synced == []
    assert storage.names("d") == ["d/x", "d/y"]


_PUT_A_LOT = """
import json, re, sys
from pathlib import Path
from delta_tracker.stream.storage.storage import Storage
url, options, piece = sys.argv[1], json.loads(sys.argv[2]), memoryview(bytearray(int(sys.argv[3])))
storage = Storage(url, options=options)
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
storage.put("warm", [piece[:1]])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is held now
before = peak()
storage.put("parts/x", (memoryview(bytes(piece)) for _ in range((1 << 28) // len(piece))))
assert storage.size("parts/x") == 1 << 28
storage.delete("parts/x")
print(peak() - before)
"""


@pytest.mark.parametrize(("kind", "piece_bytes"), [("file", 1 << 20), ("s3", 1 << 25)])
def test_a_large_object_is_streamed(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, piece_bytes: int
) -> None:
    s3 = request.getfixturevalue("s3") if kind == "s3" else S3(f"file://{tmp_path}", None)
    command = [sys.executable, "-W", "ignore", "-c", _PUT_A_LOT, s3.url, json.dumps(s3.options), str(piece_bytes)]
    grown = int(subprocess.run(command, check=True, timeout=240, capture_output=True, text=True).stdout)
    assert grown < 2 * piece_bytes // 1024 + (8 << 10 if kind == "file" else 112 << 10)  # kilobytes


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "file://host/x",
        "file:relative",
        "",
        "file:///a#1",
        "file:///a?b",
        None,
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="url="):
        Storage(url)


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[str | Path], is_relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "a #%"
    storage = Storage(kind("a #%" if is_relative else directory), create=True)
    storage.create("log/1", b"x")
    assert storage.url == directory.as_uri()
    assert (directory / "log" / "1").read_bytes() == b"x"


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
    (tmp_path / "store" / "log").mkdir()
    with pytest.raises(StorageError):
        storage.create("log", b"x")


def test_an_object_larger_than_expected_is_refused_before_it_is_read(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(MalformedError, match="1099511627776 bytes, more than 100"):
        storage.read("huge", max_bytes=100)


def test_an_opened_storage_is_passed_on() -> None:
    storage = Storage("memory://")
    assert open_storage(storage) is storage


@pytest.mark.parametrize("path", ["link/../x", "x ", "x\\y", "deep//x", "x/./y"])
def test_a_directory_is_written_and_listed_at_one_place(tmp_path: Path, path: str) -> None:
    """obstore resolves such a path otherwise than the system does, to one of those that are there, too."""
    for directory in ("x/y", "elsewhere/deep", "deep/x"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/deep")
    storage = Storage(f"file://{tmp_path}/{path}", create=True)
    storage.create("log/1", b"")
    assert storage.names("log") == ["log/1"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_name_that_is_taken_by_no_object_is_an_error(tmp_path: Path, kind: str) -> None:
    storage = Storage(f"file://{tmp_path}")
    storage.create("log/0", b"0")
    path = tmp_path / "log" / "1"
    path.symlink_to(tmp_path / "nothing") if kind == "link" else os.mkfifo(path)
    with pytest.raises(WriteRefusedError, match="log/1") as caught:
        storage.create("log/1", b"1")
    assert caught.value.name == "log/1"
    assert storage.names("drafts") == []
    path.unlink()
    assert storage.create("log/1", b"1")


@pytest.mark.parametrize("kind", ["not UTF-8", "line break", "control character", "loop", "link to itself"])
def test_a_listing_passes_over_names_that_no_writer_creates(tmp_path: Path, kind: str) -> None:
    storage = Storage(tmp_path.as_uri())
    for name in ("log/1", "log/3"):
        storage.create(name, b"x")
    folder = tmp_path / "log"
    if kind == "loop":
        (folder / "loop").symlink_to(folder)
    elif kind == "link to itself":
        (folder / "self").symlink_to("self")
    else:
        name = {"not UTF-8": b"\xff.json", "line break": b"a\nb", "control character": b"a\x7fb"}[kind]
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"x")
    assert storage.names("log") == ["log/1", "log/3"]
    assert [stored.name for stored in storage.objects("log", after="log/1")] == ["log/3"]


def test_a_listing_follows_links_to_files_only(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri())
    storage.create("log/1", b"x")
    storage.create("elsewhere/2", b"22")
    folder = tmp_path / "log"
    (folder / "file").symlink_to("1")
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    (folder / "nothing").symlink_to("missing")
    os.mkfifo(folder / "pipe")
    assert [(each.name, each.num_bytes) for each in storage.objects("log")] == [("log/1", 1), ("log/file", 1)]


_CALLS = {
    "read": lambda storage, name: storage.read(name, max_bytes=9),
    "read_range": lambda storage, name: storage.read_range(name, 0, 1),
    "size": lambda storage, name: storage.size(name),
    "stat": lambda storage, name: storage.stat(name),
    "names": lambda storage, name: storage.names(name.rpartition("/")[0]),
    "objects": lambda storage, name: storage.objects(name.rpartition("/")[0]),
    "has_directory": lambda storage, name: storage.has_directory(name.rpartition("/")[0]),
    "sync": lambda storage, name: storage.sync(name.rpartition("/")[0]),
    "delete": lambda storage, name: storage.delete(name),
    "create": lambda storage, name: storage.create(name, b"x"),
    "replace": lambda storage, name: storage.replace(name, b"x"),
    "put": lambda storage, name: storage.put(name, [memoryview(b"x")]),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["opened", "used"])
@pytest.mark.parametrize("folder", ["log", "control/pins", "control"])
@pytest.mark.parametrize("kind", ["link", "link to nowhere", "link to a file", "link to itself", "file", "pipe"])
@pytest.mark.advice("StorageError: DirectoryStore._has_folder")
@pytest.mark.advice("WriteRefusedError: DirectoryStore._has_folder")
def test_a_folder_that_is_no_directory_is_named(tmp_path: Path, kind: str, folder: str, *, is_first: bool) -> None:
    """It is not an empty folder, and what a link leads to may be missing, on another disk, or another stream's."""
    root = tmp_path / "stream"
    storage = Storage(root, create=True)
    name = "control/pins/1" if "control" in folder else "log/1"
    storage.create(name, b"1")
    assert storage.size(name) == 1  # the folder is known from now on
    storage = Storage(root) if is_first else storage
    path, aside = root / folder, tmp_path / "aside"
    path.rename(aside)
    if kind == "file":
        path.write_bytes(b"<html>")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        targets = {"link": aside, "link to a file": __file__, "link to itself": path.name}
        path.symlink_to(targets.get(kind, tmp_path / "nowhere"))
    found = {"file": "file of 6 bytes", "pipe": "special file"}.get(kind, "link to '")
    reads = {"read", "read_range", "size", "stat", "delete"}
    for called, call in _CALLS.items():
        if kind == "link" and not is_first and called in reads:
            continue  # it was a directory when it was used first, and is not checked again
        with pytest.raises(StorageError, match=f"{folder} is a {found}") as caught:
            call(storage, name)
        is_refused = isinstance(caught.value, WriteRefusedError)
        assert is_refused == (called in ("create", "replace", "put")), "the outcome of a write is certain"
        advice = "Replace it by the directory itself" if "link" in kind else "Move it away and restore the directory"
        assert caught.value.remedy.startswith(advice)
    path.unlink()
    aside.rename(path)
    assert not storage.create(name, b"2")
    assert storage.read(name, max_bytes=9).tobytes() == b"1"
    assert storage.names(name.rpartition("/")[0]) == [name]


class _Entries:
    """A scan of a directory in which the status of one name fails."""

    def __init__(self, entries: Any, name: str, code: int) -> None:
        self._entries, self._name, self._code = entries, name, code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        for entry in self._entries:
            stat = functools.partial(self._fail, entry.path) if entry.name == self._name else entry.stat
            yield SimpleNamespace(name=entry.name, is_file=entry.is_file, is_symlink=entry.is_symlink, stat=stat)

    def _fail(self, path: str) -> None:
        raise OSError(self._code, os.strerror(self._code), path)


@pytest.mark.parametrize(
    ("name", "code", "is_skipped"),
    [
        ("log/3", errno.ENOENT, True),  # deleted meanwhile
        ("log/3", errno.EIO, False),
        ("log/3", errno.ESTALE, False),
        ("log/3", errno.EACCES, False),  # the listed directory may not be searched
        ("log/link", errno.ELOOP, True),
        ("log/link", errno.ENOTDIR, True),
        ("log/link", errno.EACCES, True),  # leads into a directory that may not be searched
        ("log/link", errno.EIO, False),
    ],
)
def test_a_listing_that_may_lack_an_object_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, *, is_skipped: bool
) -> None:
    """A head that is missing from a listing could make a late claim look like part of the log."""
    storage = Storage(tmp_path.as_uri())
    for each in ("log/1", "log/3"):
        storage.create(each, b"x")
    (tmp_path / "log" / "link").symlink_to("1")
    folder, _, last = name.rpartition("/")
    scandir = os.scandir

    def listed() -> list[str]:
        return [each.name for each in storage.objects("log")]  # names() needs no status

    def scan(path: str) -> Any:
        entries = scandir(path)
        return _Entries(entries, last, code) if os.fspath(path).endswith(folder) else entries

    assert (everything := listed()) == ["log/1", "log/3", "log/link"]
    monkeypatch.setattr(os, "scandir", scan)
    if is_skipped:
        assert listed() == [each for each in everything if not each.startswith(name)]
    else:
        with pytest.raises(StorageError, match=re.escape(os.strerror(code))):
            listed()


@pytest.mark.parametrize(("code", "is_empty"), [(errno.ENOENT, True), (errno.EACCES, False), (errno.EIO, False)])
def test_a_listing_of_a_folder_that_cannot_be_read_fails_unless_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, is_empty: bool
) -> None:
    storage = Storage(tmp_path.as_uri())
    storage.create("log/1", b"x")

    def fail(path: str) -> Any:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "scandir", fail)
    if is_empty:
        assert storage.names("log") == []
    else:
        with pytest.raises(StorageError, match=re.escape(os.strerror(code))):
            storage.names("log")


@pytest.mark.parametrize(
    ("busy", "is_large"),
    [({"PUT": 3}, False), ({"PUT": 1}, True), ({"POST": 2}, True), ({"PUT": 1, "POST": 1}, True)],
)
@pytest.mark.parametrize("kind", ["list", "repeatable"])
def test_a_write_that_the_store_refuses_as_concurrent_is_repeated(
    s3: S3, busy: dict[str, int], is_large: bool, kind: str
) -> None:
    data = os.urandom((9 << 20) + 3 if is_large else 1000)
    pieces = [memoryview(data[:500]), memoryview(data[500:])]
    with proxy(s3.port) as faults:
        storage = Storage(f"{s3.url}/{secrets.token_hex(8)}", options=s3.through(faults.port))
        faults.busy = dict(busy)
        storage.put("parts/x", pieces if kind == "list" else Repeatable(lambda: iter(pieces)))
        assert not any(faults.busy.values())
        assert storage.read("parts/x", max_bytes=len(data)).tobytes() == data


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the pauses before a write is repeated, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.mark.parametrize("method", ["put", "replace", "create", "delete"])
def test_each_kind_of_write_is_repeated_and_gives_up_after_some_seconds(
    s3: S3, method: str, pauses: list[float]
) -> None:
    with proxy(s3.port) as faults:
        storage = Storage(f"{s3.url}/{secrets.token_hex(8)}", options=s3.through(faults.port))

        def write() -> None:
            match method:
                case "put":
                    storage.put("parts/x", iter([memoryview(b"x")]))
                case "replace":
                    storage.replace("control/head.json", b"x")
                case "create":
                    assert storage.create(f"log/{secrets.token_hex(8)}", b"x")
                case "delete":
                    storage.delete("parts/x")

        faults.busy = {"PUT": 2, "POST": 2}
        write()
        assert 0 in faults.busy.values()
        faults.busy = {"PUT": 100, "POST": 100}
        pauses.clear()
        with pytest.raises(StorageError):
            write()
        assert min(faults.busy.values()) > 80
        assert 0.5 < sum(pauses) < 5


@pytest.mark.parametrize("kind", ["list", "repeatable", "iterator", "large"])
def test_a_put_that_is_always_refused_sends_few_requests(s3: S3, kind: str, pauses: list[float]) -> None:
    pieces = [memoryview(bytes(9 << 20 if kind == "large" else 1))]
    given = {"repeatable": Repeatable(lambda: iter(pieces)), "iterator": iter(pieces)}
    with proxy(s3.port) as faults:
        storage = Storage(f"{s3.url}/{secrets.token_hex(8)}", options=s3.through(faults.port))
        faults.busy = {"PUT": 100, "POST": 100}
        with pytest.raises(StorageError):
            storage.put("parts/x", given.get(kind, pieces))
    assert len(faults.seen) == 8
