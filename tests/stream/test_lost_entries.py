"""Publishers, readers and maintenance of a log whose newest entries another program has deleted."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import (
    FencedError,
    LostEntryError,
    MirrorDivergedError,
    MissingVersionError,
    StorageError,
    UnknownOutcomeError,
)
from delta_tracker.stream.format.manifest import Kind, entry_name
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pointer import read_pointer
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.stream.interleavings import Killed, TrueStorage, _draft
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
    assert_served(mirror._to.storage, writer)


def test_a_mirror_below_a_lost_version_needs_a_snapshot_and_an_empty_destination(writer: Writer) -> None:
    behind = Mirror(writer.storage, Storage("memory://"))
    assert behind.step()
    assert behind.step()
    lose_the_newest(writer)
    for _ in range(2):
        with pytest.raises(MissingVersionError, match=r"Publish a snapshot to .* then mirror to an empty destination"):
            behind.step()
    writer.snapshot()
    writer.delta([3])
    with pytest.raises(MirrorDivergedError, match="Mirror to an empty destination"):
        behind.step()
    again = Mirror(writer.storage, Storage("memory://"))
    while again.step():
        pass
    assert_served(again._to.storage, writer)


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
    writer.snapshot()
    assert predictor.sync() == 2
    monkeypatch.setattr(predictor._reader.source, "_listed_at", float("-inf"))
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


def commit(publisher: Claim, kind: Kind) -> int:
    """Commit a version, or a snapshot if the newest entry was lost. Return its version."""
    with suppress(LostEntryError):
        return publisher.commit(_draft("snapshot" if publisher.needs_snapshot else kind)).version
    return publisher.commit(_draft("snapshot")).version


def true_stream(*, is_directory: bool) -> tuple[TrueStorage, Claim]:
    """Return a store, and the publisher of its versions 0 claim, 1 snapshot, 2 and 3 deltas."""
    storage = TrueStorage(lists_from=not is_directory)
    claim = StreamLog(storage).claim()
    for kind in ("snapshot", "delta", "delta"):
        claim.commit(_draft(kind))
    return storage, claim


@pytest.mark.parametrize("is_directory", [False, True])
@pytest.mark.parametrize(("num_lost", "is_published"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("dies", [False, True])
def test_an_entry_of_a_superseded_publisher_does_not_fence_its_successor(
    num_lost: int, is_published: bool, dies: bool, is_directory: bool
) -> None:
    """The publisher has seen its newest entry, sleeps while it is lost, and then creates an entry after it."""
    storage, sleeper = true_stream(is_directory=is_directory)
    successors: list[Claim] = []
    versions: list[int] = []
    create = storage._create_once

    def sleep(name: str, data: bytes) -> bool:
        storage._create_once = create  # type: ignore[method-assign]
        for version in StreamLog(storage).versions()[-num_lost:]:
            storage.delete(entry_name(version))
        successors.append(StreamLog(storage).claim())
        if is_published:
            versions.append(commit(successors[0], "snapshot"))
        created = create(name, data)
        if dies:
            raise Killed
        versions.append(commit(successors[0], "delta"))
        return created

    storage._create_once = sleep  # type: ignore[method-assign]
    with pytest.raises(Killed if dies else FencedError):
        sleeper.commit(_draft("delta"))
    versions += [commit(successors[0], "delta") for _ in range(2)]
    assert versions == sorted(set(versions))
    assert StreamLog(storage).versions()[-1] == versions[-1]
    if not dies:
        with pytest.raises(FencedError):
            sleeper.commit(_draft("delta"))


@pytest.mark.advice("UnknownOutcomeError: Claim.commit")
@pytest.mark.parametrize("is_directory", [False, True])
@pytest.mark.parametrize("kind", ["delta", "snapshot"])
def test_an_entry_that_was_created_after_a_lost_one_may_be_found(kind: Kind, is_directory: bool) -> None:
    """It stays in the log, so the outcome is unknown if the store then fails, at any operation."""
    outcomes: set[type | None] = set()
    for number in range(60):
        storage, publisher = true_stream(is_directory=is_directory)
        create, num_left = storage._create_once, [0]

        def lose(name: str, data: bytes) -> bool:
            storage._create_once = create  # type: ignore[method-assign]  # noqa: B023  called at once
            created = create(name, data)  # noqa: B023
            del storage.data[entry_name(3)]  # noqa: B023
            num_left[0] = number + 1  # noqa: B023
            return created

        def fail() -> None:
            num_left[0] -= 1  # noqa: B023
            if not num_left[0]:  # noqa: B023
                raise StorageError("memory://", "503")

        storage._create_once = lose  # type: ignore[method-assign]
        storage.before_each = fail
        outcome: type | None = None
        try:
            publisher.commit(_draft(kind))
        except StorageError as error:
            outcome = type(error)
        storage.before_each = lambda: None
        outcomes.add(outcome)
        head = commit(publisher, "delta")
        assert StreamLog(storage).versions() == [0, 1, 2, *range(4, head + 1)]
    assert outcomes == {UnknownOutcomeError, LostEntryError if kind == "delta" else None}


def test_a_name_is_not_used_again_if_the_entries_above_it_are_lost_while_it_is_checked() -> None:
    storage, publisher = true_stream(is_directory=False)
    create, read = storage._create_once, storage.read
    used: dict[str, bytes] = {}

    def created(name: str, data: bytes) -> bool:
        assert used.setdefault(name, data) == data
        return create(name, data)

    def sleep(name: str, data: bytes) -> bool:
        storage._create_once = create  # type: ignore[method-assign]
        created(name, data)
        StreamLog(storage).claim()
        storage._create_once, storage.read = created, lost  # type: ignore[method-assign]
        return True

    def lost(name: str, **options: Any) -> Any:
        if name == entry_name(5) and storage.data.pop(name, None) is not None:
            storage.read = read  # type: ignore[method-assign]
        return read(name, **options)

    storage._create_once = sleep  # type: ignore[method-assign]
    head = commit(publisher, "delta")
    assert head == 6
    assert StreamLog(storage).versions() == [0, 1, 2, 3, 5, 6]


@pytest.mark.parametrize("field", ["writer", "stream", "generation", "snapshot", "version", "created"])
def test_a_claim_that_is_altered_on_the_way_is_followed_by_another(field: str) -> None:
    storage, publisher = true_stream(is_directory=False)
    storage.is_remote = True
    storage.delete(entry_name(3))
    create = storage._create_once
    stream = publisher.head.stream

    def alter(name: str, data: bytes) -> bool:
        storage._create_once = create  # type: ignore[method-assign]
        begin = re.search(rb'"%s":"?' % field.encode(), data)
        assert begin is not None
        digit = b"7" if data[begin.end() : begin.end() + 1] != b"7" else b"6"
        return create(name, data[: begin.end()] + digit + data[begin.end() + 1 :])

    storage._create_once = alter  # type: ignore[method-assign]
    assert [commit(publisher, "delta") for _ in range(2)] == [6, 7]
    assert (publisher.head.stream, publisher.head.generation, publisher.head.snapshot) == (stream, 3, 6)
    assert StreamLog(storage).versions() == [0, 1, 2, 4, 5, 6, 7]
