"""Entries that lead to a version, with and without merged ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, MalformedError, NotRecoverableError
from delta_tracker.recovery.recovery_path import recovery_path, rows_after
from delta_tracker.stream.format.manifest import Manifest, Merged, entry_name
from delta_tracker.stream.format.shard_rows import local_rows
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, ShardSpec, StateSpec, TableStates
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_STATES = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))


class Stream:
    """Versions 0 claim, 1 snapshot, 2..5 deltas of the row of their number, 6 snapshot, 7..12 deltas."""

    def __init__(self) -> None:
        self.storage = Storage("memory://")
        self.writer = self.claim()
        self.log = StreamLog(self.storage)
        self.writer.snapshot()
        for version in range(2, 13):
            if version == 6:
                self.writer.snapshot()
            else:
                self.writer.delta([version])

    def claim(self, states: TableStates | None = _STATES, identity: Identity | None = None) -> Writer:
        writer = Writer(self.storage, states=states, identity=identity)
        writer.training = [pack({}, "state")]
        return writer

    def merge(self, first: int, last: int, kind: str = "delta") -> Manifest:
        """Create a merged entry. It has the part of its last version only, which is enough to find a path."""
        ends = self.log.read(last)
        assert ends is not None
        parent = None if kind == "snapshot" else self.log.read(first).parent
        entry = replace(ends, kind=kind, parent=parent, merges=ends.link)
        if kind == "snapshot":
            entry = replace(entry, snapshot=last, parts=self.log.read(6).parts)
        assert self.log.create_merged(entry)
        found = self.log.read_merged(Merged.of(entry))
        assert found is not None
        return found


def found(stream: Stream, version: int | None = None) -> list[tuple[str, int]]:
    path = recovery_path(StreamLog(stream.storage), version)
    return [("merged" if each.merges else each.kind, each.version) for each in path]


def chain(first: int, *rest: int) -> list[tuple[str, int]]:
    return [("snapshot", first), *(("delta", version) for version in rest)]


def test_the_path_begins_at_the_newest_snapshot() -> None:
    stream = Stream()
    assert found(stream) == chain(6, *range(7, 13))
    assert found(stream, 12) == found(stream)
    assert found(stream, 6) == chain(6)
    assert found(stream, 5) == chain(1, 2, 3, 4, 5)
    assert found(stream, 1) == chain(1)


def test_a_claim_stands_for_the_version_before_it() -> None:
    stream = Stream()
    writer = stream.claim()
    assert found(stream, 13) == found(stream, 12) == found(stream)
    writer.delta([3])
    assert found(stream) == chain(6, *range(7, 13), 14)


def test_the_longest_merged_entries_up_to_the_version_are_used() -> None:
    stream = Stream()
    stream.merge(7, 8)
    stream.merge(7, 10)
    stream.merge(9, 12)
    assert found(stream) == [*chain(6), ("merged", 8), ("merged", 12)]
    assert found(stream, 11) == [*chain(6), ("merged", 10), ("delta", 11)]
    assert found(stream, 9) == [*chain(6), ("merged", 8), ("delta", 9)]
    stream.merge(0, 9, "snapshot")
    stream.merge(10, 11)
    assert found(stream) == [("merged", 9), ("merged", 11), ("delta", 12)]
    assert found(stream, 8) == [*chain(6), ("merged", 8)]
    assert recovery_path(stream.log, 9)[-1].training


def test_an_unreadable_merged_entry_is_not_needed(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream()
    entry = stream.merge(7, 10)
    stream.storage.delete(Merged.of(entry).name)
    stream.storage.create(Merged.of(entry).name, b"{}")
    assert found(stream) == chain(6, *range(7, 13))
    assert "a merged entry is unreadable" in caplog.text


def test_a_merged_entry_of_another_history_is_not_used() -> None:
    stream = Stream()
    entry = stream.merge(7, 10)
    stream.storage.delete(Merged.of(entry).name)
    parent = replace(entry.parent, xxh3="0" * 32)
    stream.storage.create(Merged.of(entry).name, replace(entry, parent=parent).to_json())
    assert found(stream) == chain(6, *range(7, 13))


def test_a_version_whose_log_entry_is_gone_is_found_as_a_merged_one() -> None:
    stream = Stream()
    stream.merge(0, 9, "snapshot")
    for version in range(1, 10):
        stream.storage.delete(entry_name(version))
    assert found(stream, 9) == [("merged", 9)]
    assert found(stream, 10) == [("merged", 9), ("delta", 10)]
    with pytest.raises(NotRecoverableError, match=r"version 8 of memory:// cannot be restored: version 8 is missing"):
        recovery_path(stream.log, 8)


def test_a_missing_version_is_passed_with_a_merged_delta() -> None:
    stream = Stream()
    stream.merge(7, 10)
    stream.merge(10, 12)
    stream.storage.delete(entry_name(9))
    assert found(stream) == [*chain(6), ("merged", 10), ("delta", 11), ("delta", 12)]
    assert [each.version for each in path_to(stream.log, 12)] == [6, 10, 11, 12]


@pytest.mark.parametrize("version", [6, 8])
def test_a_missing_snapshot_is_named(version: int) -> None:
    stream = Stream()
    stream.storage.delete(entry_name(6))
    with pytest.raises(NotRecoverableError, match="version 6 is missing"):
        recovery_path(stream.log, version)


def test_a_missing_delta_is_named() -> None:
    stream = Stream()
    stream.storage.delete(entry_name(8))
    with pytest.raises(NotRecoverableError, match="version 8 is missing"):
        recovery_path(stream.log)
    stream.merge(7, 7)
    with pytest.raises(NotRecoverableError, match="version 8 is missing"):
        recovery_path(stream.log)


@pytest.mark.parametrize("version", [-1, 13, 1.0, True])
def test_an_invalid_version_is_refused(version: object) -> None:
    with pytest.raises(InvalidArgumentError, match="up to 12"):
        recovery_path(Stream().log, version)  # type: ignore[arg-type]


def test_a_stream_without_versions_is_refused() -> None:
    storage = Storage("memory://")
    with pytest.raises(
        NotRecoverableError, match=r"nothing to restore: the stream is empty\. Check the URL, or start without restore"
    ) as caught:
        recovery_path(StreamLog(storage))
    assert caught.value.version is None
    Writer(storage)
    with pytest.raises(NotRecoverableError, match="start without restore: no version") as caught:
        recovery_path(StreamLog(storage))
    assert caught.value.version is None


def test_a_version_without_states_is_refused() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.snapshot()
    with pytest.raises(NotRecoverableError, match="version 1 was published without states"):
        recovery_path(StreamLog(storage))


def test_a_version_without_training_states_is_refused() -> None:
    stream = Stream()
    stream.writer.training = []
    stream.writer.delta([1])
    with pytest.raises(NotRecoverableError, match="no training states"):
        recovery_path(stream.log)
    assert found(stream, 12)


def test_a_delta_with_other_buckets_of_raw_ids_is_refused() -> None:
    stream = Stream()
    stream.claim(identity=Identity(100, (Bucket((0, 20), 19),))).delta([1])
    with pytest.raises(NotRecoverableError, match=r"version 14 has other .* buckets of raw ids .* than the snapshot"):
        recovery_path(stream.log)


@pytest.mark.parametrize(
    "states", [None, replace(_STATES, optimizer="EXACT_OTHER"), replace(_STATES, states=()), "columns"], ids=str
)
def test_a_delta_after_other_tables_or_states_is_refused(states: TableStates | str | None) -> None:
    stream = Stream()
    if states == "columns":
        states = replace(_STATES, columns=((0, 2), (2, 4)))
    assert not isinstance(states, str)
    stream.claim(states).delta([1])  # no publisher writes it without a snapshot
    stream.claim().delta([2])
    with pytest.raises(
        NotRecoverableError, match="version 14 has other tables, states, buckets of raw ids or another format"
    ):
        recovery_path(stream.log)


@pytest.mark.parametrize("damaged", [b"", b"{}"], ids=["missing", "malformed"])
def test_a_search_that_fails_reads_each_object_once(damaged: bytes) -> None:
    stream = Stream()
    stream.merge(7, 9)
    stream.storage.delete(entry_name(11))
    if damaged:
        stream.storage.create(entry_name(11), damaged)
    store = WrappedStorage(stream.storage)
    with pytest.raises((NotRecoverableError, MalformedError)):
        recovery_path(StreamLog(store), applied=stream.log.read(10))
    reads = Counter(each.name for each in store.take() if each.kind == "read")
    assert reads[entry_name(12)] == reads[entry_name(11)] == 1
    assert max(reads.values()) == 1, reads


def test_an_unreadable_entry_is_an_error() -> None:
    stream = Stream()
    stream.storage.delete(entry_name(9))
    stream.storage.create(entry_name(9), b"{}")
    with pytest.raises(MalformedError):
        recovery_path(stream.log)


def after(stream: Stream, applied: Manifest, version: int | None = None) -> list[tuple[str, int]]:
    path = recovery_path(StreamLog(stream.storage), version, applied=applied)
    return [("merged" if each.merges else each.kind, each.version) for each in path]


def test_a_path_from_a_place_has_the_later_deltas() -> None:
    stream = Stream()
    entries = {version: stream.log.read(version) for version in range(13)}
    assert after(stream, entries[9]) == [("delta", version) for version in range(9, 13)]
    assert after(stream, entries[6]) == chain(6, *range(7, 13))
    assert after(stream, entries[9], 9) == [("delta", 9)]
    stream.claim().delta([1])
    assert after(stream, entries[11]) == [("delta", 11), ("delta", 12), ("delta", 14)]
    assert after(stream, entries[12], 13) == [("delta", 12)]


def test_a_path_from_a_place_behind_the_version_or_a_snapshot_has_all_rows() -> None:
    stream = Stream()
    entries = {version: stream.log.read(version) for version in range(13)}
    assert after(stream, entries[9], 8) == chain(6, 7, 8)
    assert after(stream, entries[5]) == found(stream)
    assert after(stream, entries[5], 6) == chain(6)


def test_a_path_from_a_place_uses_the_merged_deltas_after_it() -> None:
    stream = Stream()
    entry = stream.log.read(8)
    stream.merge(7, 10)  # it could belong to another history than the rows at version 8
    assert after(stream, entry) == [("delta", version) for version in range(8, 13)]
    stream.merge(9, 11)
    assert after(stream, entry) == [("delta", 8), ("merged", 11), ("delta", 12)]
    merged = stream.merge(7, 8)
    assert after(stream, merged) == [("merged", 8), ("merged", 11), ("delta", 12)]
    assert recovery_path(StreamLog(stream.storage), 8, applied=merged) == [entry]


def test_a_path_from_a_place_that_the_log_does_not_continue_has_all_rows(caplog: pytest.LogCaptureFixture) -> None:
    stream, other = Stream(), Stream()
    for version in (8, 12):
        entry = stream.log.read(version)
        foreign = other.log.read(version)
        replaced = replace(entry, xxh3="0" * 32)
        assert after(stream, foreign) == after(stream, replaced) == found(stream)
    entry = stream.log.read(8)
    stream.merge(0, 10, "snapshot")
    stream.storage.delete(entry_name(9))
    caplog.set_level("INFO")
    assert after(stream, entry) == found(stream) == [("merged", 10), ("delta", 11), ("delta", 12)]
    assert "version 12 is restored from a snapshot: " in caplog.text


def test_a_path_from_a_place_before_other_states_has_all_rows() -> None:
    stream = Stream()
    entry = stream.log.read(12)
    writer = stream.claim(replace(_STATES, optimizer="EXACT_OTHER"))
    writer.snapshot()
    assert after(stream, entry) == chain(14)


def shard(writer: Writer, first: int = 0, end: int = 20) -> dict[str, ShardSpec]:
    return {FQN: ShardSpec(writer.spec, first, end - first, ((0, 4),))}


def ids(rows: dict[str, Tensor] | None) -> list[int] | None:
    return None if rows is None else rows[FQN].tolist() if FQN in rows else []


def test_the_rows_after_a_version_are_those_of_the_later_deltas() -> None:
    stream = Stream()
    last = recovery_path(stream.log)[-1]
    assert ids(rows_after(stream.log, last, 8, shard(stream.writer))) == [9, 10, 11, 12]
    assert ids(rows_after(stream.log, last, 8, shard(stream.writer, 10, 12))) == [0, 1]
    assert ids(rows_after(stream.log, last, 12, shard(stream.writer))) == []
    assert ids(rows_after(stream.log, last, 6, shard(stream.writer))) == [7, 8, 9, 10, 11, 12]
    assert rows_after(stream.log, last, 8, {}) == {}


def test_the_rows_after_a_version_are_unknown_across_a_snapshot_or_a_gap() -> None:
    stream = Stream()
    last = recovery_path(stream.log)[-1]
    assert rows_after(stream.log, last, 5, shard(stream.writer)) is None
    stream.storage.delete(entry_name(9))
    assert rows_after(stream.log, last, 8, shard(stream.writer)) is None
    assert ids(rows_after(stream.log, last, 9, shard(stream.writer))) == [10, 11, 12]


@pytest.mark.parametrize("is_entry", [False, True])
def test_the_rows_after_a_version_are_unknown_if_one_is_damaged(
    is_entry: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream()
    last = recovery_path(stream.log)[-1]
    name = entry_name(10) if is_entry else stream.log.read(10).parts[0].name
    stream.storage.delete(name)
    stream.storage.create(name, b"{}")
    log = StreamLog(stream.storage)
    assert rows_after(log, last, 8, shard(stream.writer)) is None
    assert "all rows are pending" in caplog.text
    assert ids(rows_after(log, last, 10, shard(stream.writer))) == [11, 12]


def test_local_rows_are_those_of_the_shard() -> None:
    table = Stream().writer.spec
    assert local_rows(torch.tensor([1, 4, 5, 9]), ShardSpec(table, 4, 5, ((0, 4),))).tolist() == [0, 1]
