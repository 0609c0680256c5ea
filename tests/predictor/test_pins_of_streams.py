"""Pins of streams that end, and predictors that are interrupted on the way to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from delta_tracker import Predictor, Rollout
from delta_tracker.errors import CorruptPartError, InvalidArgumentError, SinkError, StorageError, StreamError
from delta_tracker.predictor import sink_writer
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.memory_sink import MemorySink, Stored
from tests.predictor.pin_fleet import Fleet, steps
from tests.stores.rules import fails, nth, on
from tests.stores.wrapped import READS, WrappedStorage
from tests.stream.streams import FQN, Writer


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with mock.patch.object(sink_writer, "CHUNK_ROWS", 5):
        yield


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A stream with the snapshot 1 and the deltas 2 to 5."""
    fleet = Fleet(tmp_path / "stream")
    fleet.deltas(4)
    return fleet


def _entry_parts(fleet: Fleet, version: int) -> list[str]:
    entry = StreamLog(fleet.storage).read(version)
    assert entry is not None
    return [part.name for part in entry.parts]


def _sink_predictor(fleet: Fleet) -> tuple[Predictor, MemorySink]:
    sink = MemorySink(Stored())
    predictor = Predictor(sink, fleet.storage, rollout=Rollout(follows_pins=True))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    return predictor, sink


def _sink_rows(sink: MemorySink) -> torch.Tensor:
    return torch.stack([sink.stored.rows[str(sink.stored.current), FQN, row][1] for row in range(20)])


# Interrupted moves


def test_a_pin_with_the_number_of_the_version_of_a_former_stream_is_followed(fleet: Fleet) -> None:
    older = fleet.copy()
    same = fleet.deltas(3)
    predictor = fleet.join(storage=(flaky := WrappedStorage(fleet.storage)))
    predictor.sync()
    flaky.take()
    fleet.put_back(older)
    fleet.promoted()
    while fleet.published("snapshot") < same:
        pass
    fleet.published("delta")
    pin_version(fleet.storage, same)
    position, rows = predictor.state_dict(), fleet.rows_of(predictor).clone()
    predictor.sync()
    fleet.assert_holds(predictor, same)
    assert predictor.status().stream == fleet.writer.claim.head.stream
    for number in range(1, flaky.count(*READS) + 1):
        flaky = WrappedStorage(fleet.storage, fails(nth(number)))
        predictor = fleet.join(storage=flaky)
        predictor.load_state_dict(position)
        fleet.rows_of(predictor).copy_(rows)
        for _ in range(4):
            try:
                predictor.sync()
            except StorageError:
                continue
        fleet.assert_holds(predictor, same)
        assert predictor.status().stream == fleet.writer.claim.head.stream


@pytest.mark.parametrize("is_release", [False, True])
def test_pins_of_a_log_that_was_made_again_count_from_1(fleet: Fleet, is_release: bool) -> None:
    """A mirror that is started again at an empty destination has none of the pins that its predictors followed."""
    older, predictor = fleet.copy(), fleet.join()
    predictor.sync()
    assert pin_version(fleet.storage, 4).counter == 1
    predictor.sync()
    fleet.assert_holds(predictor, 4)
    if is_release:
        fleet.published("snapshot")
        assert release_pin(fleet.storage).counter == 2
        predictor.sync()
    fleet.put_back(older)
    fleet.promoted()
    good, newest = fleet.published("snapshot"), fleet.deltas(9)
    predictor.sync()
    fleet.assert_holds(predictor, newest)
    assert pin_version(fleet.storage, good).counter == 1
    predictor.sync()
    fleet.assert_holds(predictor, good)
    fleet.published("snapshot")
    release_pin(fleet.storage)
    predictor.sync()
    fleet.assert_holds(predictor, fleet.newest)


@pytest.mark.parametrize("num_operations", [0, 3])
def test_a_row_store_follows_a_pin_with_the_number_of_the_version_of_a_former_stream(
    fleet: Fleet, num_operations: int
) -> None:
    older = fleet.copy()
    same = fleet.deltas(3)
    predictor, sink = _sink_predictor(fleet)
    predictor.sync()
    fleet.put_back(older)
    fleet.promoted()
    while fleet.published("snapshot") < same:
        pass
    pin_version(fleet.storage, same)
    sink.fails_after = num_operations
    with pytest.raises(SinkError):
        predictor.sync()
    sink.fails_after = None
    assert predictor.sync() == same
    assert sink.stored.current == fleet.writer.claim.head.stream
    assert torch.equal(_sink_rows(sink), fleet.bits[same])


@pytest.mark.parametrize("kind", ["table", "row store"])
@pytest.mark.parametrize("order", ["pin", "release"])
def test_an_interrupted_move_to_another_stream_obeys_a_newer_order(fleet: Fleet, kind: str, order: str) -> None:
    predictor, sink = (fleet.join(is_fragile=True), None) if kind == "table" else _sink_predictor(fleet)
    predictor.sync()
    fleet.promoted()
    first, second = fleet.published("snapshot"), fleet.published("snapshot")
    pin_version(fleet.storage, second)
    if sink is None:
        fleet.fails(predictor, after=1)
    else:
        sink.fails_after = 3
        with pytest.raises(SinkError):
            predictor.sync()
        sink.fails_after = None
    if order == "pin":
        pin_version(fleet.storage, first, replaces=True)
        assert steps(predictor) == [first]
        return
    fleet.published("snapshot")
    release_pin(fleet.storage)
    newest = fleet.published("snapshot")
    retain(fleet.storage, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(fleet.storage).read(second) is None
    assert steps(predictor) == [newest]


@pytest.mark.parametrize("kind", ["table", "row store"])
@pytest.mark.parametrize("num_done", [0, 2, 4, 5])
def test_a_release_on_the_way_to_a_pin_leads_back_to_the_newest_version(fleet: Fleet, kind: str, num_done: int) -> None:
    predictor, sink = (fleet.join(is_fragile=True), None) if kind == "table" else _sink_predictor(fleet)
    predictor.sync()
    pin_version(fleet.storage, 3)  # by way of the versions 1 and 2
    if sink is None:
        fleet.fails(predictor, after=num_done)
    else:
        sink.fails_after = 3 + 2 * num_done
        with pytest.raises(SinkError):
            predictor.sync()
        sink.fails_after = None
    assert predictor.status().pinned == 3
    predictor.release()
    for has_more in (False, True):
        newest = fleet.published("delta") if has_more else fleet.newest
        assert predictor.sync() == newest
        assert predictor.status().pinned is None
        assert torch.equal(fleet.rows_of(predictor) if sink is None else _sink_rows(sink), fleet.bits[newest])
    pin_version(fleet.storage, 4, replaces=True)
    assert predictor.sync() == 4


@pytest.mark.parametrize("state", ["at a version", "at a pin", "on the way to a pin"])
def test_mixed_tables_start_at_the_pin_of_the_new_stream(fleet: Fleet, state: str) -> None:
    predictor = fleet.join(is_fragile=True)
    predictor.sync()
    if state != "at a version":
        pin_version(fleet.storage, 3)
    if state == "at a pin":
        predictor.sync()
    if state == "on the way to a pin":
        fleet.fails(predictor, after=1)
    fleet.promoted()
    good = fleet.published("snapshot")
    if state != "on the way to a pin":
        fleet.fails(predictor, after=1)
    pin_version(fleet.storage, good)
    fleet.published("snapshot")  # bad
    assert steps(predictor) == [good]
    fleet.assert_holds(predictor, good)


def test_an_interrupted_resync_to_another_stream_is_not_continued_in_the_former_one(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = fleet.join(is_fragile=True, follows_pins=False)
    predictor.sync()
    name = _entry_parts(fleet, fleet.published("delta"))[0]
    data = fleet.storage.read(name, max_bytes=1 << 20)
    assert data is not None
    stored = data.tobytes()
    fleet.storage.delete(name)
    fleet.promoted()
    newest = fleet.published("snapshot")
    fleet.fails(predictor, after=1)
    fleet.storage.create(name, stored)
    assert steps(predictor) == [newest]
    assert "mixed ones" in caplog.text


# Rows that are newer than the position


def test_a_pin_at_the_applied_version_replaces_rows_of_an_interrupted_one(fleet: Fleet) -> None:
    predictor = fleet.join(is_fragile=True)
    last = predictor.sync()
    fleet.published("snapshot")  # bad
    fleet.tables[predictor].left = 1
    with pytest.raises(RuntimeError, match="device lost"):
        predictor._reader.writer.apply(fleet.writer.claim.head, fleet.storage, is_elsewhere=False)
    pin_version(fleet.storage, last)
    predictor.sync()
    with predictor.reading() as served:
        assert served.applying is None
    fleet.assert_holds(predictor, last)


def test_a_pin_at_the_stored_version_replaces_rows_of_an_interrupted_one(fleet: Fleet) -> None:
    predictor, sink = _sink_predictor(fleet)
    last = predictor.sync()
    fleet.published("delta")  # bad
    sink.fails_after = 2
    with pytest.raises(SinkError):
        predictor.sync()
    sink.fails_after = None
    pin_version(fleet.storage, last)
    predictor.sync()
    assert predictor.version == last
    assert torch.equal(_sink_rows(sink), fleet.bits[last])


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_pin_at_a_loaded_position_replaces_rows_that_were_saved_later(fleet: Fleet, num_more: int) -> None:
    predictor = fleet.join()
    predictor.sync()
    position = predictor.state_dict()
    last = fleet.published("delta") if num_more else predictor.version
    fleet.published("delta")
    predictor.sync()
    after = fleet.restart(position, fleet.rows_of(predictor))
    after.sync(num_more) if num_more else None
    assert after.version == last
    pin_version(fleet.storage, last)
    after.sync()
    fleet.assert_holds(after, last)
    assert after.status().pinned == last


# Streams that end


@pytest.mark.parametrize("has_snapshot", [False, True])
@pytest.mark.parametrize("state", ["above the pin", "restart above the pin", "below the pin", "on the way", "released"])
def test_a_former_stream_is_not_continued_after_an_order(fleet: Fleet, state: str, has_snapshot: bool) -> None:
    predictor = fleet.join(is_fragile=state == "on the way")
    held: int | None = None if state == "on the way" else predictor.sync()
    position, rows = predictor.state_dict(), fleet.rows_of(predictor).clone()
    fleet.deltas(12)
    compact(fleet.storage, fold=1e9)
    pin_version(fleet.storage, 3 if "above" in state else 8)
    if state == "on the way":
        fleet.fails(predictor, after=4)  # the four chunks of the snapshot are complete
        held = 1
    if state == "released":
        fleet.published("snapshot")
        release_pin(fleet.storage)
        fleet.published("delta")
    fleet.promoted()
    if has_snapshot:
        held = fleet.published("snapshot")
    if state.startswith("restart"):
        predictor = fleet.restart(position, rows)
    assert steps(predictor) == [held]
    newest = fleet.published("snapshot")
    assert steps(predictor)[-1] == newest
    assert predictor.status().pinned is None


def test_a_predictor_on_the_way_to_a_pin_goes_to_that_of_the_new_stream(fleet: Fleet) -> None:
    predictor = fleet.join(is_fragile=True)
    pin_version(fleet.storage, 3)
    fleet.fails(predictor, after=4)  # the four chunks of the snapshot are complete
    fleet.promoted()
    good = fleet.published("snapshot")
    fleet.published("snapshot")  # bad
    pin_version(fleet.storage, good)
    assert steps(predictor) == [good]


def test_an_order_whose_stream_had_ended_is_followed_in_an_older_copy_of_the_log(fleet: Fleet) -> None:
    predictor = fleet.join()
    last = predictor.sync()
    pin_version(fleet.storage, 3)
    older = fleet.copy()
    fleet.promoted()
    assert steps(predictor) == [last]
    fleet.put_back(older)
    predictor.sync()
    assert steps(predictor) == [3]
    fleet.assert_holds(predictor, 3)


@pytest.mark.parametrize("fault", ["a part is missing", "an entry is malformed", "a part is unreadable"])
def test_a_fault_of_a_former_stream_leads_to_the_pin_of_the_new_one(fleet: Fleet, fault: str) -> None:
    predictor = fleet.join(storage=(flaky := WrappedStorage(fleet.storage)))
    predictor.sync()
    last = fleet.published("delta")
    names = _entry_parts(fleet, last)
    fleet.promoted()
    fleet.published("snapshot")
    good = fleet.published("delta")
    fleet.published("snapshot")  # bad
    pin_version(fleet.storage, good)
    if fault == "a part is missing":
        fleet.damage(last)
    elif fault == "an entry is malformed":
        fleet.storage.replace(entry_name(last), b"{")
    else:
        flaky.rules.append(fails(on(name=names.__contains__)))
    assert steps(predictor) == [good]
    fleet.assert_holds(predictor, good)


@pytest.mark.parametrize("fault", ["malformed", "unreadable"])
def test_a_pin_of_a_former_stream_does_not_prevent_a_recovery(fleet: Fleet, fault: str) -> None:
    pin_version(fleet.storage, 3)
    fleet.promoted()
    fleet.published("snapshot")
    predictor = fleet.join(storage=(flaky := WrappedStorage(fleet.storage)))
    predictor.sync()
    damaged = fleet.published("delta")
    good = fleet.deltas(8)
    compact(fleet.storage, fold=1e9)
    fleet.damage(damaged)
    head = entry_name(fleet.published("delta"))
    predictor._reader._in_a_row = 0  # otherwise it catches up with the merged version
    if fault == "unreadable":
        flaky.rules.append(fails(on(name=head)))
    else:
        fleet.storage.replace(head, b"{")
    for _ in range(4):
        try:
            predictor.sync()
        except StreamError:
            continue
    assert predictor.version == good


def test_a_resync_applies_nothing_after_a_pin_that_was_found_meanwhile(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = fleet.join()
    good = predictor.sync()
    fleet.damage(fleet.published("delta"))
    fleet.published("snapshot")
    pin = pin_version(fleet.storage, good)
    orders = iter([None])
    assert predictor._reader.source.pins is not None
    monkeypatch.setattr(predictor._reader.source.pins, "order", lambda _, **given: next(orders, pin))
    assert steps(predictor) == [good]
    assert predictor.status().resyncs == 0


def test_the_pin_of_an_older_copy_of_the_log_does_not_lead_back(fleet: Fleet) -> None:
    predictor = fleet.join()
    predictor.sync()
    pin_version(fleet.storage, 3)
    predictor.sync()
    older = fleet.copy()
    fleet.promoted()
    newest = fleet.published("snapshot")
    assert predictor.sync() == newest
    fleet.put_back(older)
    assert steps(predictor) == ["StreamReplacedError"]
    fleet.assert_holds(predictor, newest)
    fleet.writer = Writer(fleet.storage)
    newest = fleet.published("snapshot")
    release_pin(fleet.storage)
    assert steps(predictor) == [newest]
    fleet.assert_holds(predictor, newest)


def test_a_release_is_followed_again_from_a_position_before_it(fleet: Fleet) -> None:
    predictor = fleet.join()
    predictor.sync()
    position, rows = predictor.state_dict(), fleet.rows_of(predictor).clone()
    bad = fleet.deltas(4)
    pin_version(fleet.storage, 3)
    predictor.sync()
    released = fleet.published("snapshot")
    release_pin(fleet.storage)
    newest = fleet.published("delta")
    predictor.sync()
    fleet.rows_of(predictor).copy_(rows)
    predictor.load_state_dict(position)
    assert steps(predictor) == [released, newest], f"versions up to {bad} are bad"
    fleet.assert_holds(predictor, newest)


# Faults at the end of a pin


def test_a_malformed_merged_snapshot_does_not_hold_up_a_predictor_whose_pin_has_ended(fleet: Fleet) -> None:
    predictor = fleet.join()
    pin_version(fleet.storage, 3)
    predictor.sync()
    fleet.promoted()
    fleet.published("snapshot")
    newest = fleet.deltas(14)
    compact(fleet.storage, fold=1e-9)
    merged = [each for each in StreamLog(fleet.storage).merged() if each.kind == "snapshot"]
    fleet.storage.replace(merged[-1].name, b"{")
    assert predictor.sync() == newest


def test_an_unreadable_snapshot_does_not_hold_up_a_predictor_whose_pin_has_ended(fleet: Fleet) -> None:
    predictor = fleet.join(storage=(flaky := WrappedStorage(fleet.storage)))
    pin_version(fleet.storage, 3)
    predictor.sync()
    fleet.promoted()
    good = fleet.published("snapshot")
    parts = _entry_parts(fleet, fleet.published("snapshot"))
    flaky.rules.append(fails(on(name=parts.__contains__)))
    for _ in range(2):
        with pytest.raises(StorageError):
            predictor.sync()
    assert predictor.sync(1) == good


@pytest.mark.parametrize("has_later", [False, True])
def test_a_release_passes_over_a_damaged_snapshot(fleet: Fleet, has_later: bool) -> None:
    predictor = fleet.join()
    pin_version(fleet.storage, 3)
    predictor.sync()
    released = fleet.published("snapshot")
    release_pin(fleet.storage)
    if has_later:
        later = fleet.published("snapshot")
    fleet.damage(fleet.published("snapshot"))
    if has_later:
        retain(fleet.storage, Retention(versions=2, grace_seconds=0.0))
        assert StreamLog(fleet.storage).read(released) is None
    for each in (predictor, fleet.join()):
        assert each.sync(1) == (later if has_later else released)
        with pytest.raises(CorruptPartError):
            each.sync()


def test_a_canary_that_waits_for_a_release_of_the_new_stream_stays_at_its_url(fleet: Fleet, tmp_path: Path) -> None:
    other = Storage((tmp_path / "mirror").as_uri(), create=True)
    mirror = Mirror(fleet.storage, other)
    while mirror.step():
        pass
    canary = fleet.join(storage=[fleet.storage, other], canary=Canary(versions=2))
    canary.sync()
    last = fleet.newest
    fleet.promoted()
    good = fleet.published("snapshot")
    fleet.published("snapshot")  # bad
    pin_version(fleet.storage, good)
    fleet.published("snapshot")
    release_pin(fleet.storage)
    for _ in range(5):
        assert canary.sync() == last
    assert canary._reader.storage is fleet.storage


def test_a_canary_applies_nothing_after_a_pin_that_it_does_not_allow_yet(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    now += 100.0
    good = fleet.published("snapshot")
    now -= 90.0  # the clock of the next publisher is behind
    bad = fleet.published("claim")
    now += 50.0
    fleet.published("delta")
    pin_version(fleet.storage, good)
    canary = fleet.join(canary=Canary(seconds=20.0))
    assert steps(canary) == [1, 2, 3, 4, 5]
    with pytest.raises(InvalidArgumentError):
        canary.rollback(good)
    canary.rollback(bad)
    assert steps(canary) == [bad]
    now += 100.0
    fleet.published("delta")
    canary.release()
    assert steps(canary) == [good]


def test_a_canary_with_mixed_tables_says_that_it_waits_for_a_release(fleet: Fleet) -> None:
    predictor = fleet.join(is_fragile=True, canary=Canary(versions=2))
    held = predictor.sync()
    pin_version(fleet.storage, 2)
    fleet.fails(predictor, after=1)
    good = fleet.published("snapshot")
    assert release_pin(fleet.storage).version == good
    assert predictor.sync() == held
    assert predictor.status().why == f"the canary does not allow version {good} of the release yet"
    fleet.deltas(2)
    assert predictor.sync() == good
    fleet.assert_holds(predictor, good)


def test_a_predictor_that_waits_for_the_next_stream_searches_its_origin_rarely(fleet: Fleet) -> None:
    good = fleet.published("delta")
    storage = WrappedStorage(fleet.storage)
    predictor = fleet.join(storage=storage)
    predictor.sync()
    fleet.published("delta")
    pin_version(fleet.storage, good)
    fleet.promoted()
    origin = entry_name(0)  # the search reads the first entry
    reads = []
    for _ in range(3):
        storage.take()
        assert predictor.sync() == good
        reads.append([each.name for each in storage.take()].count(origin))
    assert reads[0] > 0
    assert reads[1:] == [0, 0]
