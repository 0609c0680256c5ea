"""The newest entry is found from a known version on, without a listing of the log, and is never a wrong one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from delta_tracker.stream.format.manifest import Manifest, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pin import announce_deletions
from delta_tracker.stream.pointer import POINTER_NAME, read_pointer
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.reading.path import next_entry
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.source import Source
from delta_tracker.stream.storage.storage import Storage
from tests.stores.wrapped import READS, WrappedStorage
from tests.stream.streams import Writer


def _point_at(storage: Storage, entry: Manifest) -> None:
    """Write the pointer as the publisher of ``entry`` does."""
    PointerWriter(storage).write_now(entry)


def _without_old_versions(storage: Storage) -> tuple[Manifest, Manifest]:
    """Write versions of two publishers, of which retention keeps only the newest, and the entries around claims.

    Returns:
        The last entry of the first publisher, which retention keeps, and the head.
    """
    old = Writer(storage)
    old.snapshot()
    last = old.delta([1])
    new = Writer(storage)
    new.snapshot()
    new.delta([2])
    new.snapshot()
    head = new.delta([3])
    retain(storage, Retention(versions=2, grace_seconds=0), now=lambda: time.time() + 1e6)
    return last, head


@pytest.mark.parametrize("num_versions", [10, 200])
@pytest.mark.parametrize("is_claim", [False, True], ids=["version", "claim"])
def test_no_operation_lists_a_log_with_a_pointer_whatever_its_length(
    tmp_path: Path, num_versions: int, is_claim: bool
) -> None:
    storage = WrappedStorage(Storage(tmp_path, fsync=False))
    writer = Writer(storage)
    head = writer.snapshot()
    for _ in range(num_versions):
        head = writer.delta([1])
    _point_at(storage, head)
    if is_claim:
        head = Writer(storage).claim.head
    storage.take()
    assert StreamLog(storage).head() == head
    assert StreamLog(storage).newest_snapshot().version == 1
    position = Position.after(head)
    assert Source(0, storage).next(position, looks_for_gap=True) is None
    claim = StreamLog(storage).claim()
    assert claim.head.parent == head.link
    source = Source(0, storage)
    assert next_entry(source.log, position, source.next(position, looks_for_gap=True)) == claim.head
    assert storage.count("names", "objects", name="log") == 0
    assert storage.count(*READS) < 200


def test_a_log_without_a_pointer_is_listed(tmp_path: Path) -> None:
    storage = WrappedStorage(Storage(tmp_path, fsync=False))
    head = Writer(storage).snapshot()
    storage.take()
    assert StreamLog(storage).head() == head
    assert storage.count("names", "objects", name="log") == 1


@pytest.mark.parametrize("url", ["directory", "memory://"])
@pytest.mark.parametrize("is_claim", [False, True], ids=["before a claim", "claim"])
def test_an_entry_that_retention_keeps_below_a_gap_is_not_the_newest(tmp_path: Path, url: str, is_claim: bool) -> None:
    """A fenced publisher may write its pointer late."""
    storage = Storage(tmp_path if url == "directory" else url, create=True)
    last, head = _without_old_versions(storage)
    claim = StreamLog(storage).read(last.version + 1)
    assert StreamLog(storage).versions() == [0, last.version, claim.version, head.version - 1, head.version]
    _point_at(storage, head)
    pointer, kept = read_pointer(storage), claim if is_claim else last
    late = replace(pointer, generation=kept.generation, version=kept.version, xxh3=kept.xxh3, oldest=0, older=())
    late = replace(late, snapshot=None, snapshots=())
    storage.replace(POINTER_NAME, late.to_json())
    assert StreamLog(storage).pointer.newest() == late
    assert StreamLog(storage).head() == head
    assert StreamLog(storage).is_committed(claim) is False
    assert StreamLog(storage).claim().head.parent == head.link


def test_entries_whose_deletion_a_power_loss_has_undone_are_not_the_newest(tmp_path: Path) -> None:
    storage = Storage(tmp_path, create=True)
    writer = Writer(storage)
    entries = [writer.snapshot(), writer.delta([1]), writer.delta([2])]
    _point_at(storage, entries[-1])
    names = [POINTER_NAME, *(entry_name(entry.version) for entry in entries)]
    data = {name: storage.read(name, max_bytes=1 << 20).tobytes() for name in names}
    before = writer.delta([3]).version + 1
    head = [writer.snapshot() for _ in range(2)][-1]
    retain(storage, Retention(versions=2, grace_seconds=0), now=lambda: time.time() + 1e6)
    announce_deletions(storage, head.stream, before)  # of the pass that was interrupted
    for name, content in data.items():
        storage.replace(name, content)
    assert StreamLog(storage).read(before - 1) is None
    assert StreamLog(storage).pointer.newest().version == entries[-1].version
    assert StreamLog(storage).head() == head


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_anew(tmp_path: Path) -> None:
    storage = Storage(tmp_path, create=True)
    writer = Writer(storage)
    entries = [writer.snapshot(), *(writer.delta([1]) for _ in range(5))]
    log = StreamLog(storage)
    assert log.head() == entries[-1]
    for entry in entries[3:]:
        storage.delete(entry_name(entry.version))
    assert log.head() == entries[2]
