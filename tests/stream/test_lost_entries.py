"""Publishers, readers and maintenance of a log whose newest entries another program has deleted."""

from __future__ import annotations

import time

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import LostEntryError, MirrorDivergedError, SourceGapError
from delta_tracker.stream import cursor
from delta_tracker.stream.format.manifest import Kind
from delta_tracker.stream.log import StreamLog, entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirror import Mirror
from delta_tracker.stream.pointer import read_pointer
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.stream.lost_entries import BEFORE, explore
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.parametrize(
    ("kind", "is_directory"),
    [
        ("delta", False),
        *(
            pytest.param(*case, marks=pytest.mark.sweep("long", only=True))  # up to a minute
            for case in (("snapshot", False), ("delta", True), ("snapshot", True))
        ),
    ],
)
def test_one_publisher_continues_whatever_a_person_deletes(kind: Kind, is_directory: bool) -> None:
    befores = BEFORE if SWEEPS_ARE_WHOLE else ("", "x")
    assert explore(kind, is_directory=is_directory, befores=befores) > 500


@pytest.fixture
def writer() -> Writer:
    """0 claim, 1 snapshot, 2 and 3 deltas."""
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    writer.delta([1])
    writer.delta([2])
    return writer


def lose_the_newest(writer: Writer) -> None:
    """Delete version 3, so that the next commit claims the stream at version 4."""
    writer.storage.delete(entry_name(3))
    with pytest.raises(LostEntryError):
        writer.delta([3])
    assert StreamLog(writer.storage).versions() == [0, 1, 2, 4]


def assert_served(storage: Storage, writer: Writer) -> None:
    model = writer.model()
    assert Predictor(model, storage).sync() == writer.claim.head.version
    assert torch.equal(model[FQN], writer.table)


def test_retention_keeps_the_only_snapshot_while_it_is_below_a_gap(writer: Writer) -> None:
    lose_the_newest(writer)
    every = Retention(versions=1, grace_seconds=0.0)
    retain(writer.storage, every)
    assert StreamLog(writer.storage).versions() == [0, 1, 2, 4]
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    assert predictor.sync(limit=2) == 2
    writer.snapshot()
    retain(writer.storage, Retention(versions=1, grace_seconds=1e6))
    assert StreamLog(writer.storage).versions() == [0, 1, 2, 4, 5], "a reader may be below the gap"
    retain(writer.storage, every)
    assert StreamLog(writer.storage).versions() == [0, 4, 5]
    assert predictor.sync() == 5
    assert torch.equal(model[FQN], writer.table)


def test_versions_on_both_sides_of_a_gap_are_not_merged(writer: Writer) -> None:
    lose_the_newest(writer)
    compact(writer.storage, fold=1e6)
    assert [(each.first, each.last) for each in StreamLog(writer.storage).merged()] in ([], [(2, 2)])
    writer.snapshot()
    for row in (5, 6):
        writer.delta([row])
    compact(writer.storage, fold=1e6)
    assert [(each.first, each.last) for each in StreamLog(writer.storage).merged()][-1] == (6, 7)
    assert_served(writer.storage, writer)


def test_a_mirror_that_has_the_lost_version_continues(writer: Writer) -> None:
    mirror = Mirror(writer.storage, Storage("memory://"))
    while mirror.step():
        pass
    lose_the_newest(writer)
    writer.snapshot()
    writer.delta([3])
    while mirror.step():
        pass
    assert mirror.head is not None
    assert mirror.head.version == 6
    assert_served(mirror._destination, writer)


def test_a_mirror_below_a_lost_version_needs_a_snapshot_and_an_empty_destination(writer: Writer) -> None:
    behind = Mirror(writer.storage, Storage("memory://"))
    assert behind.step()
    assert behind.step()
    lose_the_newest(writer)
    for _ in range(2):
        with pytest.raises(SourceGapError, match="Publish a snapshot there, then mirror to an empty destination"):
            behind.step()
    writer.snapshot()
    writer.delta([3])
    with pytest.raises(MirrorDivergedError, match="Mirror to an empty destination"):
        behind.step()
    again = Mirror(writer.storage, Storage("memory://"))
    while again.step():
        pass
    assert_served(again._destination, writer)


def test_the_pointer_does_not_lead_below_a_gap(writer: Writer) -> None:
    pointer = PointerWriter(writer.storage)
    try:
        pointer.write_now(writer.claim.head)
        lose_the_newest(writer)
        pointer.after(writer.snapshot())
        pointer.write_now()
    finally:
        pointer.close()
    found = read_pointer(writer.storage)
    assert found is not None
    assert (found.version, found.oldest, found.generation) == (5, 4, 2)


def test_a_reader_below_a_gap_finds_it_although_the_pointer_is_old(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later publisher may write no pointer. No error would be seen, and the reader would never resync."""
    point_at_the_head(writer.storage, version=2, xxh3=StreamLog(writer.storage).read(2).xxh3)
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    predictor.sync(limit=2)
    assert predictor.version == 2
    lose_the_newest(writer)
    now = time.monotonic()
    writer.snapshot()
    assert predictor.sync() == 2
    monkeypatch.setattr(cursor.time, "monotonic", lambda: now + 61)
    assert predictor.sync() == 5
    assert torch.equal(model[FQN], writer.table)


def test_a_publisher_with_a_lower_generation_does_not_fence_the_owner(writer: Writer) -> None:
    """The owner's claim was deleted, so a publisher that it has fenced can create an entry at its name."""
    owner = Writer(writer.storage)
    owner.table = writer.table.clone()
    writer.storage.delete(entry_name(4))
    writer.delta([5])  # it cannot know
    owner.snapshot()
    assert_served(writer.storage, owner)
    with pytest.raises(Exception, match="is fenced"):
        writer.delta([6])
    owner.delta([7])
    assert_served(writer.storage, owner)
