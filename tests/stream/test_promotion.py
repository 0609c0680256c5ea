"""Promotion of a mirror: the entry that starts the new stream, and what readers and publishers do at it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
import torch

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import (
    InvalidArgumentError,
    LivePublisherError,
    MalformedError,
    MirrorDivergedError,
    MissingVersionError,
    NoSnapshotError,
    NotRecoverableError,
    StreamReplacedError,
)
from delta_tracker.publisher.repair import rows_to_repair
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.stream.format.manifest import Fork, Manifest, entry_name
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec, StateSpec, TableStates
from tests.stores.rules import calls, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_ALL = Retention(versions=1, grace_seconds=0.0)


def mirrored(writer: Writer) -> tuple[Mirror, Storage]:
    destination = Storage("memory://")
    mirror = Mirror(writer.storage, destination)
    while mirror.step():
        pass
    return mirror, destination


def predictor_of(storage: Storage) -> tuple[Predictor, torch.Tensor]:
    table = torch.zeros(20, 4)
    return Predictor(ModelTarget({FQN: table}, dense=False), storage), table


@pytest.fixture
def writer() -> Writer:
    torch.manual_seed(0)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    writer.delta([1])
    return writer


def test_a_promotion_is_a_claim_of_a_new_stream(writer: Writer) -> None:
    _, destination = mirrored(writer)
    head = writer.claim.head
    fork = promote(destination)
    assert (fork.kind, fork.version, fork.generation, fork.snapshot) == ("claim", 3, head.generation + 1, None)
    assert fork.stream != head.stream
    assert fork.parent == head.link
    assert fork.forked_from == Fork(head.stream, head.version, head.xxh3)
    assert StreamLog(destination).read(3) == fork
    assert promote(destination) == fork, "a repeated call finds it"
    assert StreamLog(destination).versions() == [1, 2, 3]

    publisher = StreamLog(destination).claim().head
    assert (publisher.stream, publisher.generation, publisher.forked_from) == (fork.stream, fork.generation + 1, None)
    assert publisher.snapshot is None
    note = Position.after(head).to_dict()
    shards = {FQN: ShardSpec(writer.spec, 0, 20, ((0, 4),))}
    rows = rows_to_repair(StreamLog(destination), note, publisher, (1, {FQN: writer.spec}, {}, {}), shards)
    assert rows is None, "a trainer that was restored from the mirror sends a snapshot"


def test_an_empty_store_is_not_promoted() -> None:
    with pytest.raises(InvalidArgumentError, match="Pass the url of a stream"):
        promote(Storage("memory://"))


def test_a_promotion_loses_against_a_mirror_that_still_runs(writer: Writer) -> None:
    mirror, destination = mirrored(writer)
    writer.delta([2])
    late = WrappedStorage(destination, calls(on("create"), before=lambda _: mirror.step()))
    with pytest.raises(LivePublisherError):
        promote(late)
    assert StreamLog(destination).head() == writer.claim.head


def test_a_mirror_stops_at_the_promotion_of_its_destination(writer: Writer) -> None:
    mirror, destination = mirrored(writer)
    promote(destination)
    assert not mirror.step(), "the source has nothing new"
    writer.delta([2])
    with pytest.raises(MirrorDivergedError, match="another program has appended"):
        mirror.step()
    with pytest.raises(MirrorDivergedError, match="at version 3"):
        Mirror(writer.storage, destination).step()


@pytest.mark.parametrize("has_merged", [False, True])
def test_predictors_keep_their_rows_until_the_first_snapshot(writer: Writer, has_merged: bool) -> None:
    writer.delta([2])
    _, destination = mirrored(writer)
    if has_merged:
        assert compact(destination, fold=1e-9) is not None
    predictor, table = predictor_of(destination)
    predictor.sync()
    before = table.clone()
    promote(destination)
    second = Writer(destination)
    for _ in range(2):
        with pytest.raises(StreamReplacedError):
            predictor.sync()
    assert predictor.version == 3
    assert torch.equal(table, before)
    with pytest.raises(NoSnapshotError):
        predictor_of(destination)[0].sync()
    second.change(list(range(20)))
    second.snapshot()
    second.delta([4])
    started, other = predictor_of(destination)
    for each in (predictor, started):
        each.sync()
        assert each.version == 7
    assert torch.equal(table, second.table)
    assert torch.equal(other, second.table)
    for version in (3, 4):
        with pytest.raises(MissingVersionError):
            path_to(StreamLog(destination), version)


def test_retention_keeps_what_readers_of_either_stream_need(writer: Writer) -> None:
    _, destination = mirrored(writer)
    predictor, table = predictor_of(destination)
    predictor.sync()
    promote(destination)
    second = Writer(destination)
    for _ in range(3):
        retain(destination, _ALL, now=lambda: time.time() + 1)
        with pytest.raises(StreamReplacedError):
            predictor.sync()
        assert predictor.version == 2
    second.snapshot()
    second.delta([1])
    retain(destination, _ALL, now=lambda: time.time() + 1)
    predictor.sync()
    assert torch.equal(table, second.table)
    assert predictor_of(destination)[0].sync() == 6


def test_merged_versions_of_the_former_stream_are_deleted_with_its_versions(writer: Writer) -> None:
    writer.delta([2])
    _, destination = mirrored(writer)
    assert compact(destination, fold=1e-9) is not None
    promote(destination)
    second = Writer(destination)
    retain(destination, _ALL, now=lambda: time.time() + 1)
    assert destination.objects("merged"), "predictors may still need them"
    second.snapshot()
    second.delta([1])
    retain(destination, _ALL, now=lambda: time.time() + 1)
    assert destination.objects("merged") == []
    predictor, table = predictor_of(destination)
    predictor.sync()
    assert torch.equal(table, second.table)


def test_a_fork_can_be_mirrored(writer: Writer) -> None:
    _, destination = mirrored(writer)
    promote(destination)
    second = Writer(destination)
    second.snapshot()
    second.delta([3])
    mirror, copy = mirrored(second)
    assert mirror.head == second.claim.head
    predictor, table = predictor_of(copy)
    predictor.sync()
    assert torch.equal(table, second.table)


@pytest.mark.parametrize("has_late_claim", [False, True])
def test_a_mirror_that_begins_after_promotions_has_their_claims(writer: Writer, has_late_claim: bool) -> None:
    _, destination = mirrored(writer)
    forks = []
    for _ in range(3):
        forks.append(promote(destination))
        last = Writer(destination)
        if len(forks) == 2:
            suspended = Storage("memory://")
            for name in destination.names("log"):
                suspended.create(name, destination.read(name, max_bytes=1 << 20).tobytes())
            late = StreamLog(suspended).claim().head
        last.snapshot()
        last.delta([1])
    for _ in range(4):
        last.snapshot()
    retain(destination, _ALL, now=lambda: time.time() + 1)
    if has_late_claim:  # of a publisher that was suspended, under a name that retention has made free
        assert destination.create(entry_name(late.version), late.to_json())
    copy = Storage("memory://")
    Mirror(destination, copy).run(stop=threading.Event(), poll_seconds=0.001, once=True)
    log = StreamLog(copy)
    assert [log.read(each.version) for each in forks] == forks
    assert log.head() == last.claim.head
    assert Mirror(destination, copy).copy_claims() == 0
    last.delta([2])
    retain(copy, _ALL, now=lambda: time.time() + 1)
    again, third = Mirror(destination, copy), Storage("memory://")
    for mirror in (again, Mirror(copy, third)):
        mirror.run(stop=threading.Event(), poll_seconds=0.001, once=True)
    for storage in (copy, third):
        assert [StreamLog(storage).read(each.version) for each in forks] == forks
        predictor, table = predictor_of(storage)
        assert predictor.sync() == last.claim.head.version
        assert torch.equal(table, last.table)


def test_invalid_forks_are_rejected(writer: Writer) -> None:
    _, destination = mirrored(writer)
    fork = promote(destination)

    def parsed(entry: Manifest, **changes: object) -> Manifest:
        data = json.dumps(json.loads(entry.to_json()) | changes).encode()
        return parse_manifest(entry_name(entry.version), data)

    assert parsed(fork) == fork
    fields = json.loads(fork.to_json())["forked_from"]
    assert parsed(fork, forked_from=None).forked_from is None
    assert parsed(fork, forked_from=fields | {"other": 1}) == fork
    for wrong in (
        fields | {"stream": fork.stream},
        fields | {"version": fork.version},
        fields | {"xxh3": "0" * 32},
        fields | {"version": -1},
        fields | {"stream": "x"},
        {"stream": fields["stream"]},
        [],
        1,
    ):
        with pytest.raises(MalformedError):
            parsed(fork, forked_from=wrong)
    with pytest.raises(MalformedError):
        parsed(fork, snapshot=1)
    for version in (1, 2):  # other kinds: an unknown field
        entry = StreamLog(destination).read(version)
        assert entry is not None
        assert replace(parsed(entry, forked_from=fields | {"version": -1}), xxh3="") == replace(entry, xxh3="")
    assert b"forked_from" not in StreamLog(writer.storage).claim().data


def test_a_trainer_is_restored_from_a_mirror_before_the_promotion() -> None:
    states = TableStates("ADAM", ((0, 4),), (StateSpec("momentum1", torch.float32, "columns"),))
    writer = Writer(Storage("memory://"), states=states)
    writer.training = [b"rank 0"]
    writer.snapshot()
    writer.snapshot()
    writer.delta([1])
    _, destination = mirrored(writer)
    assert recovery_path(StreamLog(destination)) == recovery_path(StreamLog(writer.storage))
    promote(destination)
    with pytest.raises(NotRecoverableError):
        recovery_path(StreamLog(destination))
