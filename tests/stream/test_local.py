"""Files are complete, and writeback of synced files starts early."""

from __future__ import annotations

import itertools
import os
import stat
import time
from pathlib import Path

import pytest

from delta_tracker.stream.storage import directory as files
from delta_tracker.stream.storage.directory import make_directory
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import StoreClock


@pytest.mark.parametrize("fsync", [True, False])
def test_writeback_starts_early_for_synced_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 7)
    monkeypatch.setattr(files, "_EARLY_BYTES", 16)
    told: list[tuple[int, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        assert offset + length == os.fstat(descriptor).st_size, "it was not written yet"
        told.append((offset, offset + length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = os.urandom(100)
    Storage(tmp_path, fsync=fsync).put("a/b", [memoryview(data)[:33], memoryview(data)[33:]])
    assert (tmp_path / "a" / "b").read_bytes() == data
    edges = [0, *(end for _, end in told)]
    assert told == list(itertools.pairwise(edges)), "gaps, or bytes told of twice"
    assert all(end - begin >= 16 for begin, end in told)
    assert (edges[-1] > 80) == fsync


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_slow_sync_does_not_date_a_file_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """A reader that looked during the sync did not see the file, so it was modified after that look."""
    store = Storage(tmp_path.as_uri())
    clock = StoreClock()
    store.replace("log/0", b"first")
    fsync = os.fsync

    def look() -> None:
        began = clock.reader_time()
        clock.observe("log", [each.modified for each in store.objects("log")], began=began)

    def slow(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.utime(descriptor, (time.time() - 70, time.time() - 70))  # the bytes were written 70 s ago
            look()

    monkeypatch.setattr(os, "fsync", slow)
    os.utime(tmp_path / "log" / "0", (time.time() - 140, time.time() - 140))
    if overwrite:
        store.replace("log/1", b"x")
    else:
        assert store.create("log/1", b"x")
    look()
    assert clock.offset == 0.0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_directory_whose_name_was_not_synced_is_synced_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """The first call failed, or its process was killed, before the name of the ``depth``-th directory was on disk."""
    synced: list[str] = []

    def record(descriptor: int) -> None:
        synced.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path))
        if len(synced) == fails_at:
            raise OSError(5, "I/O error")

    monkeypatch.setattr(os, "fsync", record)
    names = [".", "a", "a/b"]
    fails_at = depth + 1  # the first sync is that of the directory above
    with pytest.raises(OSError, match="I/O error"):
        make_directory(tmp_path / "a" / "b" / "c", fsync=True)
    fails_at, done = 0, synced[:-1]
    synced.clear()
    make_directory(tmp_path / "a" / "b" / "c", fsync=True)
    assert {*done, *synced} >= set(names), "some names may be lost"
    synced.clear()
    make_directory(tmp_path / "a" / "b" / "c", fsync=True)
    assert synced == ["a/b"]
