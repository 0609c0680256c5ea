"""The log: dense, chained, and with exactly one writer for every entry."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import xxhash

from delta_tracker import Predictor
from delta_tracker.errors import (
    AlteredEntryError,
    FencedError,
    LivePublisherError,
    LostEntryError,
    MalformedError,
    NewerFormatError,
    StorageError,
    StreamReplacedError,
    UnknownOutcomeError,
    WriteRefusedError,
)
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest, Merged, entry_name
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableStates
from tests.raised import frames_of_each, has_frames
from tests.stores.rules import after, alters, answers, calls, disconnects, fails, hides, loses_answers, nth, on
from tests.stores.wrapped import Rule, WrappedStorage
from tests.stream.streams import FQN, Writer


def test_versions_are_dense_and_claims_are_versions() -> None:
    writer = Writer(Storage("memory://"))
    assert (writer.claim.head.version, writer.claim.head.generation, writer.claim.head.kind) == (0, 1, "claim")
    assert [writer.snapshot().version, writer.delta([1]).version, writer.delta([2]).version] == [1, 2, 3]
    log = StreamLog(writer.storage)
    assert log.versions() == [0, 1, 2, 3]
    assert log.versions(after=2) == [3]
    assert [log.read(version).kind for version in log.versions()] == ["claim", "snapshot", "delta", "delta"]
    assert log.read(4) is None
    assert log.head() == writer.claim.head
    assert {log.read(version).stream for version in log.versions()} == {writer.claim.head.stream}


def test_every_entry_names_the_one_before_it_and_the_newest_snapshot() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.delta([1])
    writer.snapshot()
    writer = Writer(storage)
    writer.delta([2])
    log = StreamLog(storage)
    entries = [log.read(version) for version in log.versions()]
    assert entries[0].parent is None
    for earlier, later in itertools.pairwise(entries):
        data = storage.read(entry_name(earlier.version), max_bytes=1 << 20).tobytes()
        assert (later.parent.version, later.parent.xxh3) == (earlier.version, xxhash.xxh3_128_hexdigest(data))
    assert [entry.snapshot for entry in entries] == [None, None, 2, 2, 2]


@pytest.mark.promise("fenced")
def test_a_second_claim_fences_the_first() -> None:
    storage = Storage("memory://")
    first = Writer(storage)
    first.snapshot()
    second = Writer(storage)
    assert second.claim.head.generation == 2
    before = StreamLog(storage).versions()
    for _ in range(2):  # permanently, also when it tries again
        with pytest.raises(FencedError) as caught:
            first.delta([1])
        assert (caught.value.generation, caught.value.owner) == (1, 2)
    assert StreamLog(storage).versions() == before
    second.snapshot()
    assert StreamLog(storage).newest_snapshot() == second.claim.head


def test_a_fenced_publisher_that_tries_again_keeps_no_tracebacks() -> None:
    storage = Storage("memory://")
    first = Writer(storage)
    first.snapshot()
    Writer(storage)
    lengths = frames_of_each(lambda: first.delta([1]), FencedError)
    assert len(set(lengths[1:])) == 1, lengths
    assert not has_frames(first.claim._fenced)


def test_a_malformed_entry_is_parsed_once_however_often_it_is_read() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    good = writer.snapshot()
    data = good.to_json()
    storage.replace(entry_name(1), data[:-1])
    log = StreamLog(storage)
    with mock.patch.object(log_module, "parse_manifest", side_effect=log_module.parse_manifest) as parse:
        found = set()
        for _ in range(5):
            with pytest.raises(MalformedError) as caught:
                log.read(1)
            found.add(str(caught.value))
            assert log.read(0) is not None
        assert (len(found), parse.call_count) == (1, 2), "each entry once"
        storage.replace(entry_name(1), data)
        assert log.read(1) == good
        for number in range(20):  # the memory is bounded
            storage.replace(entry_name(1), data[: number + 2])
            with pytest.raises(MalformedError):
                log.read(1)
    assert len(log._refused) < 20


def test_an_entry_of_a_newer_format_is_reported_as_such_every_time() -> None:
    writer = Writer(Storage("memory://"))
    data = writer.snapshot().to_json().replace(b'"format":1', b'"format":3', 1)
    writer.storage.replace(entry_name(1), data)
    log = StreamLog(writer.storage)
    found = []
    for _ in range(3):
        with pytest.raises(NewerFormatError, match="Upgrade") as caught:
            log.read(1)
        found.append(caught.value)
    assert len({str(error) for error in found}) == 1
    assert len({id(error) for error in found}) == 3, "one error that is raised again keeps all tracebacks"


def test_a_publisher_that_is_overtaken_by_format_2_is_fenced() -> None:
    """The claim has format 1, so that a release that knows only format 1 learns that it is fenced."""
    storage = Storage("memory://")
    first = Writer(storage)
    first.snapshot()
    second = Writer(storage, states=TableStates("EXACT_SGD", ((0, 4),), ()))
    second.snapshot()
    log = StreamLog(storage)
    assert [log.read(version).format for version in log.versions()] == [1, 1, 1, 2]
    assert json.loads(storage.read(entry_name(2), max_bytes=1 << 20).tobytes())["format"] == 1
    for _ in range(2):
        with pytest.raises(FencedError):
            first.delta([1])
    third = Writer(storage)
    assert third.claim.head.kind == "claim"
    with pytest.raises(FencedError):
        second.delta([1])


def test_an_entry_of_a_newer_format_is_not_taken_for_an_altered_one() -> None:
    """A commit that finds its name taken by a newer release does not continue after it."""
    storage = WrappedStorage(Storage("memory://"), is_remote=True)
    writer = Writer(storage)
    head = writer.snapshot()
    newer = replace(head, version=2, parent=head.link, kind="delta").to_json()
    storage.create(entry_name(2), newer.replace(b'"format":1', b'"format":3', 1))
    for _ in range(2):
        with pytest.raises(NewerFormatError):
            writer.delta([1])
        assert (writer.claim.head, writer.claim.needs_snapshot) == (head, False)


def test_a_commit_whose_answer_was_lost_succeeds() -> None:
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage)
    storage.rules.append(loses_answers(on("create")))
    assert writer.snapshot().version == 1
    assert writer.delta([3]).version == 2


@contextmanager
def _failing_syncs(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """Let every fsync of ``directory`` fail inside the block."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == directory:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield


def test_a_version_whose_name_cannot_be_synced_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path.as_uri())
    writer = Writer(storage)
    writer.snapshot()
    rows = [writer.rows([3])]
    writer.write("delta", rows)
    for _ in range(2):
        with (
            _failing_syncs(monkeypatch, tmp_path / "log"),
            pytest.raises(StorageError, match=r"log/0{19}[34].json is not on disk") as caught,
        ):
            writer.write("delta", rows)
        assert isinstance(caught.value, UnknownOutcomeError)
    assert StreamLog(storage).versions() == [0, 1, 2, 3, 4], "readers see what is not acknowledged"
    assert writer.claim.head.version == 3, "the version before the last attempt"
    assert writer.write("delta", rows).version == 5, "after both attempts"
    assert StreamLog(storage).read(5).parent == StreamLog(storage).read(4).link


def test_a_claim_whose_name_cannot_be_synced_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path.as_uri())
    with _failing_syncs(monkeypatch, tmp_path / "log"), pytest.raises(StorageError, match="not on disk"):
        StreamLog(storage).claim()
    claim = StreamLog(storage).claim()
    assert (claim.head.version, claim.head.generation) == (1, 2)


def test_an_own_entry_that_is_found_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merged entry of the same bytes may be from an attempt whose sync failed."""
    storage = Storage(tmp_path.as_uri())
    writer = Writer(storage)
    writer.snapshot()
    writer.delta([1])
    log = StreamLog(storage)
    merged = _merge(log, "delta", 2, 2)
    for _ in range(2):
        with _failing_syncs(monkeypatch, tmp_path / "merged"), pytest.raises(StorageError, match="not on disk"):
            log.create_merged(merged)
    assert log.create_merged(merged)


def test_a_claim_with_another_parent_creates_nothing() -> None:
    storage = Storage("memory://")
    log, writer = StreamLog(storage), Writer(storage)
    expected = writer.snapshot()
    head = writer.delta([1])
    with pytest.raises(LivePublisherError, match=r"generation 1: version 2, committed during the call") as caught:
        log.claim(after=expected.link)
    assert (caught.value.generation, caught.value.version, caught.value.seconds) == (1, 2, None)
    assert log.head() == head
    assert log.claim(after=head.link).head.parent == head.link
    with pytest.raises(StreamReplacedError):
        StreamLog(Storage("memory://")).claim(after=head.link)


def test_a_claim_that_loses_a_race_for_its_parent_creates_nothing() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    head = writer.snapshot()
    raced = WrappedStorage(storage, calls(nth(1, on("create")), before=lambda _: writer.delta([1])))
    with pytest.raises(LivePublisherError):
        StreamLog(raced).claim(after=head.link)
    assert StreamLog(storage).versions() == [0, 1, 2]
    writer.delta([2])


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_a_claim_whose_answer_was_lost_is_adopted(is_overtaken: bool) -> None:
    storage, own = WrappedStorage(Storage("memory://")), "a" * 32
    log, head = StreamLog(storage), Writer(storage).snapshot()
    with storage.under(disconnects(on("create"))), pytest.raises(StorageError):
        log.claim(after=head.link, writer=own)
    if is_overtaken:
        Writer(storage)
        with pytest.raises(LivePublisherError):
            log.claim(after=head.link, writer=own)
        assert log.head().generation == 3
        return
    claim = log.claim(after=head.link, writer=own)
    assert (claim.head, claim.head.version, claim.head.writer) == (log.head(), 2, own)
    assert StreamLog(storage).claim(writer=own).data == claim.data
    before = claim.head
    assert claim.commit(replace(head, kind="delta", parts=())).parent == before.link
    assert log.versions() == [0, 1, 2, 3]
    assert log.claim(writer=own).head.version == 4, "a version is not adopted"


def test_an_altered_claim_is_not_adopted() -> None:
    storage, own = Storage("memory://"), "a" * 32
    log = StreamLog(storage)
    Writer(storage).snapshot()
    claim = log.claim(writer=own)
    storage.delete(entry_name(2))
    storage.create(entry_name(2), claim.data + b" ")
    assert log.claim(writer=own).head.version == 3


@pytest.mark.advice("UnknownOutcomeError: _append _read_back")
def test_a_commit_of_unknown_outcome_is_followed_by_the_next_one() -> None:
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage)
    writer.snapshot()
    with storage.under(disconnects(on("create"))), pytest.raises(UnknownOutcomeError, match=entry_name(2)):
        writer.delta([3])
    assert writer.delta([3]).version == 3
    assert StreamLog(storage).versions() == [0, 1, 2, 3]


@pytest.mark.promise("fenced")
def test_a_publisher_that_slept_past_retention_is_fenced_and_leaves_no_entry() -> None:
    """The name that it finds free was used and then removed: the log continued without this publisher."""
    storage = Storage("memory://")
    sleeper = Writer(storage)
    sleeper.snapshot()
    second = Writer(storage)
    newest = second.snapshot()
    for version in range(newest.version):
        storage.delete(entry_name(version))
    for _ in range(2):
        with pytest.raises(FencedError) as caught:
            sleeper.delta([1])
        assert (caught.value.generation, caught.value.owner, caught.value.version) == (1, 2, newest.version)
    assert StreamLog(storage).versions() == [newest.version]
    third = Writer(storage)
    assert (third.claim.head.version, third.claim.head.parent) == (newest.version + 1, newest.link)


def test_a_publisher_whose_check_failed_is_fenced_later() -> None:
    """The name is free, so the entry is created; the check of its parent fails; no entry may follow it."""
    storage = WrappedStorage(Storage("memory://"))
    sleeper = Writer(storage)
    sleeper.snapshot()
    second = Writer(storage)
    newest = second.snapshot()
    for version in range(newest.version):
        storage.delete(entry_name(version))
    with storage.under(fails(on("read"))), pytest.raises(StorageError):
        sleeper.delta([1])
    with pytest.raises(FencedError) as caught:
        sleeper.delta([1])
    assert (caught.value.owner, caught.value.version) == (2, newest.version)
    assert StreamLog(storage).versions() == [newest.version]


def test_a_claim_whose_head_is_overtaken_restarts() -> None:
    """Another publisher claims between the read of the head and the claim, twice."""
    storage = Storage("memory://")
    overtaken = WrappedStorage(storage, calls(nth({1, 2}, on("create", name="log/")), before=lambda _: Writer(storage)))
    entry = Writer(overtaken).claim.head
    assert (entry.version, entry.generation) == (2, 3)
    assert len({StreamLog(storage).read(version).writer for version in range(3)}) == 3


def test_unknown_objects_are_skipped() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.snapshot()
    for name in ("log/hello.json", "log/.DS_Store", "log/1.json", f"log/{'9' * 21}.json", "merged/x.json"):
        storage.create(name, b"{}")
    log = StreamLog(storage)
    assert log.versions() == [0, 1]
    assert log.merged() == []
    assert log.newest_snapshot() == writer.claim.head
    assert Writer(storage).claim.head.version == 2


def test_an_entry_with_a_wrong_version_is_refused() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    storage.create(entry_name(1), writer.claim.head.to_json())
    with pytest.raises(MalformedError, match="version 0"):
        StreamLog(storage).read(1)


def _merge(log: StreamLog, kind: str, first: int, last: int) -> Manifest:
    """Make a merged entry with the last version's rows only; its rows do not matter here."""
    entry, before = log.read(last), log.read(first - 1)
    return replace(
        entry, kind=kind, parent=before.link, merges=entry.link, snapshot=last if kind == "snapshot" else entry.snapshot
    )


def test_merged_entries_are_found_by_a_readers_version() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.snapshot()
    for row in range(4):
        writer.delta([row])
    newest = writer.snapshot()
    writer.delta([1])
    log = StreamLog(storage)
    merged = [_merge(log, "delta", first, last) for first, last in ((2, 3), (2, 5), (4, 5))]
    assert [log.create_merged(each) for each in merged] == [True] * 3
    assert [log.create_merged(each) for each in merged] == [True] * 3, "the same bytes: it had won"
    assert not log.create_merged(replace(merged[0], created=1.0))
    assert log.merged() == [Merged(3, 2, "delta"), Merged(5, 2, "delta"), Merged(5, 4, "delta")]
    assert log.merged(after=3) == log.merged()[1:]
    assert [log.longest_merged(version) for version in range(6)] == [
        None, merged[1], merged[1], merged[2], merged[2], None
    ]  # fmt: skip
    assert log.newest_snapshot() == newest
    whole = replace(_merge(log, "snapshot", 1, 6), kind="snapshot", snapshot=6)
    assert log.create_merged(whole)
    assert log.newest_snapshot() == newest, "no newer than the log's"


def test_a_merged_entry_under_another_name_or_in_the_log_is_refused() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.snapshot()
    writer.delta([1])
    writer.delta([2])
    log = StreamLog(storage)
    data = _merge(log, "delta", 2, 3).to_json()
    other = Merged(3, 1, "delta")
    storage.create(other.name, data)
    with pytest.raises(MalformedError, match="replaces versions"):
        log.read_merged(other)
    storage.delete(entry_name(3))
    storage.create(entry_name(3), data)
    with pytest.raises(MalformedError, match="merged"):
        log.read(3)


def test_an_entry_that_no_reader_would_accept_is_never_committed() -> None:
    writer = Writer(Storage("memory://"))
    block = Block(FQN, (0, 20), (0, 4), 2, "list", Encoding.F32)
    rows = BlockRows.of(block, torch.tensor([1, 2]), torch.zeros(2, 4))
    with pytest.raises(MalformedError, match="overlap"):
        writer.write("delta", [rows, rows])
    with pytest.raises(MalformedError, match="does not hold all"):
        writer.write("snapshot", [rows])
    assert StreamLog(writer.storage).versions() == [0]
    assert writer.snapshot().version == 1


@pytest.mark.parametrize("kind", ["dangling link", "pipe", "hidden"])
def test_a_claim_whose_name_is_unavailable_fails(tmp_path: Path, kind: str) -> None:
    storage = WrappedStorage(Storage(tmp_path, fsync=False))
    writer = Writer(storage)
    writer.snapshot()
    path = tmp_path / entry_name(2)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nothing")
    else:
        writer.delta([1])
        storage.rules.append(hides(entry_name(2).__eq__, on("names", "objects")))
    storage.rules.append(fails(after(300, on("names", "objects")), lambda _: AssertionError("it does not end")))
    with pytest.raises(WriteRefusedError, match="00000000000000000002") as caught:
        StreamLog(storage).claim()
    assert caught.value.name == entry_name(2)
    path.unlink()
    assert Writer(storage.inner).claim.head.version == 2


def _altering(numbers: int | Container[int]) -> Rule:
    return alters(lambda data: data + b" ", nth(numbers, on("create")))


def test_a_claim_in_a_store_that_alters_every_write_ends_after_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each altered claim stays in the log, so they must be few; the error says what happened."""
    pauses: list[int] = []
    monkeypatch.setattr(log_module, "back_off", pauses.append)
    storage = WrappedStorage(Storage("memory://"), _altering(range(1000)), is_remote=True)
    with pytest.raises(AlteredEntryError, match=r"log/0{19}2.json has other bytes"):
        StreamLog(storage).claim()
    assert storage.count("create") == len(storage.names("log")) == 3
    assert pauses == [1, 2]


@pytest.mark.parametrize(("altered", "refused", "pauses"), [([1, 2], [], [1, 2]), ([1, 2, 4, 5], [3], [1, 2, 1, 1, 2])])
def test_a_claim_continues_after_two_altered_ones(
    monkeypatch: pytest.MonkeyPatch, altered: list[int], refused: list[int], pauses: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setattr(log_module, "back_off", found.append)
    refuses = answers(False, nth(refused, on("create")))
    storage = WrappedStorage(Storage("memory://"), _altering(altered), refuses, is_remote=True)
    claim = StreamLog(storage).claim()
    assert claim.needs_snapshot
    assert claim.head.version == len(altered)
    assert found == pauses


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data.replace(b'rows":0', b'rows":1', 1)]
)
def test_versions_continue_after_a_damaged_entry(damage: Callable[[bytes], bytes]) -> None:
    """A commit compares its parent's hash only. Readers that need the entry wait for the next snapshot."""
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    parent = writer.delta([1])
    held, late = writer.model(), writer.model()
    at_parent, at_start = Predictor(held, writer.storage), Predictor(late, writer.storage)
    assert at_parent.sync() == 2
    name = entry_name(2)
    whole = writer.storage.read(name, max_bytes=1 << 20).tobytes()
    assert damage(whole) != whole
    writer.storage.replace(name, damage(whole))

    after = writer.delta([2])
    assert (after.version, after.parent) == (3, parent.link)
    assert at_parent.sync() == 3
    assert torch.equal(held[FQN], writer.table)
    for _ in range(2):
        with pytest.raises((MalformedError, StreamReplacedError)):
            at_start.sync()
    assert writer.snapshot().version == 4
    assert at_start.sync() == at_parent.sync() == 4
    assert torch.equal(late[FQN], writer.table)


def test_a_damaged_head_refuses_a_claim_by_name() -> None:
    writer = Writer(Storage("memory://"))
    head = writer.snapshot()
    writer.storage.replace(entry_name(1), b"{}")
    with pytest.raises(MalformedError, match=entry_name(1)):
        StreamLog(writer.storage).claim()
    assert StreamLog(writer.storage).versions() == [0, 1]
    assert writer.delta([1]).parent == head.link


@pytest.mark.parametrize(
    "kind", ["snapshot", pytest.param("delta", marks=pytest.mark.advice("LostEntryError: Claim._claim_again"))]
)
@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_a_log_that_lost_its_newest_entries_continues_with_a_claim_and_a_snapshot(kind: str, num_lost: int) -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.snapshot()
    lost = writer.delta([1])
    for version in range(3 - num_lost, 3):
        storage.delete(entry_name(version))
    if kind == "delta":
        with pytest.raises(LostEntryError, match=r"log/00000000000000000002\.json") as caught:
            writer.delta([1])
        storage.delete(entry_name(3))  # this claim, too
        lost = writer.claim.head
        assert parse_manifest(entry_name(lost.version), caught.value.claim.encode()) == lost
    snapshot = writer.snapshot()
    claim = StreamLog(storage).read(snapshot.version - 1)
    assert (claim.kind, claim.parent, snapshot.parent) == ("claim", lost.link, claim.link)
    assert claim.version == lost.version + 1
    assert snapshot.generation == claim.generation == lost.generation + 1
    assert writer.delta([2]).version == snapshot.version + 1
    assert Writer(storage).claim.head.generation == snapshot.generation + 1


def test_the_name_of_a_version_of_unknown_outcome_is_not_used_for_a_claim() -> None:
    """It may have been created, read and deleted."""
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage)
    writer.snapshot()
    with storage.under(disconnects(on("create"))), pytest.raises(UnknownOutcomeError, match=entry_name(2)):
        writer.delta([3])
    unknown = StreamLog(storage).read(2)
    for version in (1, 2):
        storage.delete(entry_name(version))
    assert writer.snapshot().version == 4
    assert StreamLog(storage).read(3).parent == unknown.link


def test_a_publisher_and_a_reader_survive_an_unmount(tmp_path: Path) -> None:
    root, volume = tmp_path / "stream", tmp_path / "volume"
    writer = Writer(Storage(root.as_uri(), create=True))
    writer.snapshot()
    table = writer.model()
    reader = Predictor(table, root.as_uri())
    reader.sync()
    root.rename(volume)
    (root / "lost+found").mkdir(parents=True)
    with pytest.raises(StorageError, match="unmounted"):
        writer.delta([1])
    with pytest.raises(StorageError, match="unmounted"):
        reader.sync()
    assert [each.name for each in root.rglob("*")] == ["lost+found"]
    shutil.rmtree(root)
    volume.rename(root)
    assert writer.delta([1, 2]).version == 2
    late = writer.model()
    for model, each in ((table, reader), (late, Predictor(late, root.as_uri()))):
        assert each.sync() == 2
        assert torch.equal(model[FQN], writer.table)
