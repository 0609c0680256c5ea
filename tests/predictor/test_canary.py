"""A canary stays behind the newest version in all that it does: start, catch up, resync and roll back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker import Canary, Predictor, Rollout, Storage
from delta_tracker.errors import InvalidArgumentError, NoSnapshotError, StreamError, StreamReplacedError
from delta_tracker.stream import heartbeat as heartbeat_module
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import promote
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.reading.canary import CanaryBound
from tests.heartbeats import read_heartbeats
from tests.predictor.cache_server import cache_server
from tests.predictor.serving import eventually
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import Clock, clocked
from tests.stream.streams import FQN, Writer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"versions": 1, "seconds": 1.0},
        {"versions": 0},
        {"versions": True},
        {"versions": 1.5},
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
    ],
)
def test_invalid_distances_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        Canary(**options)


def test_a_canary_over_http_starts_from_a_merged_snapshot_below_the_newest_one(tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri(), create=True))
    writer.snapshot()
    for number in range(2):
        writer.delta([number])
    assert compact(writer.storage, fold=0.01) is not None
    before = writer.delta([2])
    retain(writer.storage, Retention(versions=1, grace_seconds=0.0))
    assert 1 not in StreamLog(writer.storage).versions()
    table = writer.table.clone()
    writer.change([3])
    PointerWriter(writer.storage).write_now(writer.snapshot())
    with cache_server(writer.storage) as cache:
        predictor = Predictor(model := writer.model(), cache.url, rollout=Rollout(canary=Canary(versions=1)))
        assert predictor.sync() == before.version
    assert torch.equal(model[FQN], table)


def _copied(tmp_path: Path) -> tuple[str, Writer]:
    """Publish five versions, copy the stream, and publish 25 more. Return its url and the writer."""
    url = f"file://{tmp_path}/stream"
    writer = Writer(Storage(url, create=True))
    writer.snapshot()
    for number in range(4):
        writer.delta([number])
    shutil.copytree(tmp_path / "stream", tmp_path / "copy")
    for number in range(25):
        writer.delta([number % 20])
    return url, writer


def _return_copy(tmp_path: Path) -> None:
    (tmp_path / "stream").rename(tmp_path / "lost")
    (tmp_path / "copy").rename(tmp_path / "stream")


def test_a_canary_counts_again_in_an_older_copy_of_the_log(tmp_path: Path) -> None:
    url, writer = _copied(tmp_path)
    predictor = Predictor(writer.model(), url, rollout=Rollout(canary=Canary(versions=5)))
    assert predictor.sync() == 25
    _return_copy(tmp_path)
    later = Writer(Storage(url))
    assert later.snapshot().version == 7
    with pytest.raises(StreamReplacedError):
        predictor.sync()
    assert predictor.version == 25, "the canary does not allow the first newer rows yet"
    for number in range(5):
        later.delta([number])
    assert predictor.sync() == 7


def test_a_canary_counts_again_if_the_lost_entries_were_above_its_next_one(tmp_path: Path) -> None:
    url, writer = _copied(tmp_path)
    predictor = Predictor(writer.model(), url, rollout=Rollout(canary=Canary(versions=5)))
    assert predictor.sync(2) == 2
    _return_copy(tmp_path)
    assert Writer(Storage(url)).snapshot().version == 7
    assert predictor.sync() == 2


@pytest.mark.parametrize("canary", [Canary(versions=2), Canary(seconds=0.0001)])
def test_the_requests_for_a_version_do_not_grow_with_the_distance_of_a_canary(canary: Canary) -> None:
    requests = []
    for count in (40, 160):
        writer = Writer(Storage("memory://"))
        writer.snapshot()
        store = WrappedStorage(writer.storage, is_remote=True)
        predictor = Predictor(writer.model(), store, rollout=Rollout(canary=canary))
        for _ in range(4):
            writer.delta([1])
        predictor.sync()
        for _ in range(count):
            writer.delta([1])
        before = store.count()
        predictor.sync()
        requests.append((store.count() - before) / count)
    assert requests[1] <= requests[0] < 8


@pytest.fixture
def writer() -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    return writer


def test_a_canary_stays_some_versions_behind(writer: Writer) -> None:
    model = writer.model()
    predictor = Predictor(model, writer.storage, rollout=Rollout(canary=Canary(versions=3)))
    with pytest.raises(NoSnapshotError):
        predictor.sync()
    tables = {}
    for number in range(6):
        version = writer.delta([number]).version
        tables[version] = writer.table.clone()
    assert predictor.sync() == 4
    assert torch.equal(model[FQN], tables[4])
    status = predictor.status()
    assert (status.lag_versions, status.resyncs) == (3, 0)


def test_a_canary_stays_some_seconds_behind() -> None:
    clock = Clock()
    with clock.of_the_log():
        writer = Writer(clocked(clock))
        for number in range(10):
            clock.seconds += 10
            if number % 4 == 0:
                writer.snapshot()
            else:
                writer.delta([number])
        predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(canary=Canary(seconds=25.0)))
        assert predictor.sync() == 7, "version 10 is 30 seconds younger"
        clock.seconds += 1000
        assert predictor.sync() == 7, "the clock alone does not make a version old"
        writer.delta([1])
        assert predictor.sync() == 10


def test_an_entry_of_a_clock_that_is_ahead_does_not_let_later_versions_pass() -> None:
    clock = Clock()
    writer = Writer(clocked(clock))
    bound = CanaryBound(Canary(seconds=600.0), StreamLog(writer.storage))
    with clock.of_the_log():
        first = writer.snapshot()
    with clock.of_the_log(ahead=3600.0):
        writer.delta([1])
    assert bound.allows(first)
    with clock.of_the_log():
        assert not any(bound.allows(writer.delta([number])) for number in range(4))


def test_a_canary_waits_while_the_clock_of_the_next_publisher_is_behind() -> None:
    clock = Clock()
    with clock.of_the_log():
        writer = Writer(clocked(clock))
        writer.snapshot()
        clock.seconds += 100
        newest = writer.delta([1])
        predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(canary=Canary(seconds=10.0)))
        assert predictor.sync() == newest.version - 1
    with clock.of_the_log(ahead=-50.0):
        writer = Writer(writer.storage)
        last = writer.snapshot()
        writer.delta([1])
        assert predictor.sync() == newest.version - 1, "no version was created 10 seconds after it"
    with clock.of_the_log():
        clock.seconds += 20
        writer.delta([2])
        assert predictor.sync() >= last.version


def test_a_canary_of_seconds_leaves_a_stream_that_a_promotion_has_ended() -> None:
    clock = Clock()
    with clock.of_the_log():
        writer = Writer(clocked(clock))
        writer.snapshot()
        clock.seconds += 100
        held = writer.delta([1])
        predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(canary=Canary(seconds=10.0)))
        assert predictor.sync() == held.version - 1
        promote(writer.storage)
        clock.seconds += 100
        snapshot = Writer(writer.storage).snapshot()
        clock.seconds += 100
        Writer(writer.storage).delta([2])
        assert predictor.sync() == snapshot.version


def test_a_canary_follows(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module.HeartbeatWriter, "is_due", lambda self: True)
    predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(canary=Canary(versions=2)), name="p")
    predictor.follow(0.001)
    for number in range(5):
        writer.delta([number])
        eventually(lambda: predictor.version == (writer.claim.head.version - 2 or None))
    eventually(lambda: read_heartbeats(writer.storage)[0].lag_versions == 2)
    predictor.stop()
    assert read_heartbeats(writer.storage)[0].canary_versions == 2


def test_a_restored_position_above_the_bound_waits(writer: Writer) -> None:
    model = writer.model()
    first = Predictor(model, writer.storage)
    for number in range(3):
        writer.delta([number])
    first.sync()
    canary = Predictor(model, writer.storage, rollout=Rollout(canary=Canary(versions=3)))
    canary.load_state_dict(first.state_dict())
    assert canary.sync() == 4
    for number in range(3):
        writer.delta([number])
        assert canary.sync() == 4
    writer.delta([1])
    assert canary.sync() == 5


def test_a_canary_resyncs_to_a_snapshot_below_the_bound(writer: Writer) -> None:
    storage, model = writer.storage, writer.model()
    predictor = Predictor(model, storage, rollout=Rollout(canary=Canary(versions=2)))
    for number in range(3):
        writer.delta([number])
    predictor.sync()
    damaged = [writer.delta([number]) for number in range(3)]
    for each in damaged:
        writer.storage.replace(each.parts[0].name, b"x")
    table = None
    for _ in range(2):
        snapshot = writer.snapshot()
        table = writer.table.clone() if table is None else table
    with pytest.raises(StreamError):
        predictor.sync()  # the older snapshot is one version behind the newest
    assert predictor.version == snapshot.version - 5
    writer.delta([1])
    assert predictor.sync() == snapshot.version - 1
    assert torch.equal(model[FQN], table)
    assert predictor.status().resyncs == 1


def test_a_canary_refuses_a_rollback_above_the_bound(writer: Writer) -> None:
    predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(canary=Canary(versions=3)))
    for number in range(5):
        writer.delta([number])
    predictor.sync()
    with pytest.raises(InvalidArgumentError, match="3 versions"):
        predictor.rollback(4)
    predictor.rollback(2)
    assert predictor.version == 2
