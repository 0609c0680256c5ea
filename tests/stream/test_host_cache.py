"""Predictors of one host that read parts through a cache: rows, damaged files, limits and a directory that fails."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import CorruptPartError, InvalidArgumentError
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import calls, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer


def files(directory: Path) -> list[Path]:
    """Return the complete files, the least recently used first."""
    return sorted((directory / "objects").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def reads_of_parts(storage: WrappedStorage) -> Counter[str]:
    """Return the number of reads of each part."""
    return Counter(
        each.name
        for each in storage.operations
        if each.kind in ("read", "read_range") and each.name.startswith("parts/")
    )


def reader(writer: Writer, cache: HostCache | Path) -> tuple[Predictor, torch.Tensor]:
    model = writer.model()
    return Predictor(model, writer.storage, cache=cache), model[FQN]


def test_each_part_is_fetched_once(tmp_path: Path) -> None:
    writer = Writer(WrappedStorage(Storage("memory://")))
    caches = [HostCache(tmp_path / "cache") for _ in range(3)]
    readers = [reader(writer, cache) for cache in caches]
    writer.snapshot()
    for step in range(4):
        for predictor, table in readers:
            predictor.sync()
            assert torch.equal(table, writer.table)
        writer.delta([step, step + 1])
    assert list(reads_of_parts(writer.storage).values()) == [1] * 4
    assert [cache.counts for cache in caches] == [
        {"hits": 0, "misses": 4, "bypasses": 0},
        {"hits": 4, "misses": 0, "bypasses": 0},
        {"hits": 4, "misses": 0, "bypasses": 0},
    ]


def test_threads_that_read_at_once_fetch_once(tmp_path: Path) -> None:
    writer = Writer(WrappedStorage(Storage("memory://")), num_rows=50_000)
    writer.snapshot()
    readers = [reader(writer, tmp_path / "cache") for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda each: each[0].sync(), readers))
    assert all(torch.equal(table, writer.table) for _, table in readers)
    assert list(reads_of_parts(writer.storage).values()) == [1]


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: str) -> None:
    writer = Writer(WrappedStorage(Storage("memory://")))
    writer.change(list(range(20)))
    writer.snapshot()
    reader(writer, tmp_path)[0].sync()
    (path,) = files(tmp_path)
    before, data = path.stat().st_ino, bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"bit": data, "short": data[:-1], "long": data + b"x", "empty": b""}[damage])
    predictor, table = reader(writer, tmp_path)
    held = path.open("rb")  # keeps the inode, so that no new file has its number
    predictor.sync()
    assert torch.equal(table, writer.table)
    assert predictor.status().resyncs == 0
    assert path.stat().st_ino != before
    held.close()
    assert set(reads_of_parts(writer.storage).values()) == {2}


def test_a_part_that_is_damaged_at_its_origin_is_not_kept(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    manifest = writer.snapshot()
    (part,) = manifest.parts
    right = writer.storage.read(part.name, max_bytes=part.num_bytes).tobytes()
    writer.storage.replace(part.name, right[:-1] + bytes([right[-1] ^ 1]))
    predictor, table = reader(writer, tmp_path)
    with pytest.raises(CorruptPartError):
        predictor.sync()
    assert not any((tmp_path / "objects").iterdir())
    writer.storage.delete(part.name)
    with pytest.raises(CorruptPartError, match="does not exist"):
        predictor.sync()
    assert not any((tmp_path / "objects").iterdir())
    assert not any((tmp_path / "drafts").iterdir())
    writer.storage.replace(part.name, right)
    predictor.sync()
    assert torch.equal(table, writer.table)


def test_the_least_recently_used_parts_are_deleted(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"), num_rows=1000)
    size = writer.snapshot().parts[0].num_bytes
    cache = HostCache(tmp_path, max_bytes=5 * size // 2)
    for _ in range(3):
        predictor, table = reader(writer, cache)
        predictor.sync()
        assert torch.equal(table, writer.table)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 * size // 2
        writer.change(list(range(1000)))
        writer.snapshot()
    assert len(files(tmp_path)) == 2
    assert cache.counts["misses"] == 3


def test_an_evicted_part_can_still_be_read(tmp_path: Path) -> None:
    writer = Writer(WrappedStorage(Storage("memory://")))
    writer.change(list(range(20)))
    manifest = writer.snapshot()
    (part,) = manifest.parts
    through = HostCache(tmp_path).over(writer.storage, manifest)
    first = through.read(part.name, max_bytes=part.num_bytes)
    files(tmp_path)[0].unlink()
    assert first is not None
    for begin, end in ((0, 8), (part.num_bytes - 5, part.num_bytes), (3, 3)):
        found = through.read_range(part.name, begin, end)
        assert found is not None
        assert found.tobytes() == first.tobytes()[begin:end]
    assert through.size(part.name) == part.num_bytes
    assert reads_of_parts(writer.storage)[part.name] == 1
    assert through.read("parts/none.safetensors", max_bytes=1) is None


def test_a_part_above_the_limit_is_read_past_the_cache(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    cache = HostCache(tmp_path, max_bytes=10)
    predictor, table = reader(writer, cache)
    predictor.sync()
    assert torch.equal(table, writer.table)
    assert cache.counts == {"hits": 0, "misses": 0, "bypasses": 1}


def test_a_directory_that_fails_later_does_not_stop_a_predictor(tmp_path: Path, caplog) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor, table = reader(writer, tmp_path / "cache")
    predictor.sync()
    shutil.rmtree(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            writer.delta([step])
            predictor.sync()
            assert torch.equal(table, writer.table)
    assert [record.message.split(":")[0] for record in caplog.records] == ["read past the host cache"]


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidArgumentError, match="Pass a directory on a local file system"):
        HostCache(file)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="others can write to it"):
        HostCache(shared)
    for name, value in (("max_bytes", 0), ("max_bytes", 1.5), ("patience_seconds", 0), ("patience_seconds", math.nan)):
        with pytest.raises(InvalidArgumentError, match=name):
            HostCache(tmp_path, **{name: value})  # type: ignore[arg-type]
    HostCache(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    manifest = writer.snapshot()
    target = tmp_path / "target"
    target.write_text("kept")
    cache = HostCache(tmp_path / "cache")
    part = manifest.parts[0]
    key = f"{part.xxh3}-{part.num_bytes}-{part.body}"
    (tmp_path / "cache" / "drafts" / key).symlink_to(target)
    predictor, table = reader(writer, cache)
    predictor.sync()
    assert torch.equal(table, writer.table)
    assert target.read_text() == "kept"
    assert cache.counts["bypasses"] == 1


def test_files_are_closed_with_the_version(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor, _ = reader(writer, tmp_path)
    predictor.sync()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(20):
        writer.delta([step])
        predictor.sync()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_a_process_that_holds_the_lock_of_the_directory_blocks_nobody(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    cache = HostCache(tmp_path, patience_seconds=0.05)
    with (tmp_path / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a process does that is suspended while it deletes old parts
        with ThreadPoolExecutor(1) as threads:
            try:
                predictor, table = reader(writer, cache)
                threads.submit(predictor.sync).result(20)
                threads.submit(HostCache, tmp_path).result(20)
            finally:
                fcntl.flock(held, fcntl.LOCK_UN)
    assert torch.equal(table, writer.table)
    assert cache.counts == {"hits": 0, "misses": 0, "bypasses": 1}
    assert not any((tmp_path / "drafts").iterdir())


def test_parts_that_are_fetched_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"), num_rows=1000)
    parts = []
    for _ in range(2):
        parts.append(writer.snapshot().parts[0])
        writer.change(list(range(1000)))
    max_bytes = 3 * parts[0].num_bytes // 2
    caches = [HostCache(tmp_path, max_bytes=max_bytes) for _ in parts]
    others: list[int | None] = []
    rule = calls(on("read_range"), before=lambda _: others.append(caches[1].open(writer.storage, parts[1])))
    opened = caches[0].open(WrappedStorage(writer.storage, rule), parts[0])
    assert set(others) == {None}, "opened while the first part is read"
    assert opened is not None
    os.close(opened)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= max_bytes
    assert caches[1].counts == {"hits": 0, "misses": 0, "bypasses": 1}


def test_the_draft_of_a_dead_process_takes_no_room(tmp_path: Path) -> None:
    writer = Writer(Storage("memory://"), num_rows=1000)
    size = writer.snapshot().parts[0].num_bytes
    cache = HostCache(tmp_path, max_bytes=size)
    (tmp_path / "drafts" / f"0123-{size}-0").write_bytes(bytes(size))
    predictor, table = reader(writer, cache)
    predictor.sync()
    assert torch.equal(table, writer.table)
    assert cache.counts == {"hits": 0, "misses": 1, "bypasses": 0}
    assert not any((tmp_path / "drafts").iterdir())
