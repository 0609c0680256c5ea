"""Pins: all predictors that follow them end at one version, whatever happens meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_tracker import ModelTarget, Predictor, Rollout
from delta_tracker.errors import (
    CorruptPartError,
    MissingVersionError,
    NoSnapshotError,
    PinError,
)
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pin import Pin, PinReader, newest_pin, pin_name
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.reading.runtime import Runtime
from tests.predictor.breaking import Breaking
from tests.predictor.pin_fleet import Fleet
from tests.predictor.serving import eventually
from tests.stores.rules import calls, fails, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = Fleet(tmp_path / "stream")
    for _ in range(4):
        fleet.published("delta")
    return fleet


def test_a_pin_holds_old_and_new_predictors_until_a_release(fleet: Fleet) -> None:
    old, other = fleet.join(), fleet.join(follows_pins=False)
    for each in (old, other):
        each.sync()
    pin_version(fleet.storage, 3)
    bad = fleet.published("delta")
    new = fleet.join()
    for each in (old, new, other):
        each.sync()
    fleet.assert_holds(old, 3)
    fleet.assert_holds(new, 3)
    fleet.assert_holds(other, bad)  # opted out
    assert old.status().pinned == 3
    with pytest.raises(PinError, match="no snapshot above version"):
        release_pin(fleet.storage)
    snapshot = fleet.published("snapshot")
    old.sync()
    fleet.assert_holds(old, 3)
    assert release_pin(fleet.storage).version == snapshot
    newest = fleet.published("delta")
    for each in (old, new, other):
        each.sync()
        fleet.assert_holds(each, newest)


@pytest.mark.parametrize("version", [3, 6])
def test_a_rollback_is_not_undone_by_an_older_release(fleet: Fleet, version: int) -> None:
    pin_version(fleet.storage, 3)
    fleet.published("snapshot")
    release_pin(fleet.storage)
    for _ in range(2):
        newest = fleet.published("delta")
    predictor = fleet.join()
    predictor.rollback(version)
    for _ in range(2):
        predictor.sync()
        fleet.assert_holds(predictor, version)
    predictor.release()
    predictor.sync()
    fleet.assert_holds(predictor, newest)


def test_a_pin_ends_at_the_first_snapshot_of_a_promoted_log(fleet: Fleet) -> None:
    predictor = fleet.join()
    predictor.sync()
    pin_version(fleet.storage, 3)
    predictor.sync()
    fleet.promoted()
    predictor.sync()
    fleet.assert_holds(predictor, 3)
    newest = fleet.published("snapshot")
    predictor.sync()
    fleet.assert_holds(predictor, newest)
    assert predictor.status().pinned is None
    newest = fleet.published("delta")
    predictor.sync()
    fleet.assert_holds(predictor, newest)


@pytest.mark.parametrize("state", ["at the pin", "before the pin", "position loaded", "no position loaded"])
def test_a_pin_that_is_not_reached_ends_with_its_stream(fleet: Fleet, state: str) -> None:
    predictor = fleet.join()
    predictor.sync()
    position = predictor.state_dict()
    pin_version(fleet.storage, 3)
    if state != "before the pin":
        predictor.sync()
    fleet.promoted()
    fleet.published("snapshot")
    newest = fleet.published("delta")
    if state.endswith("loaded"):
        predictor.load_state_dict(position if state == "position loaded" else {})
    predictor.sync()
    fleet.assert_holds(predictor, newest)


def test_a_canary_leaves_a_pin_that_has_ended_by_an_older_snapshot(fleet: Fleet) -> None:
    model = fleet.writer.model()
    predictor = Predictor(model, fleet.storage, rollout=Rollout(follows_pins=True, canary=Canary(versions=2)))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    predictor.sync()
    pin_version(fleet.storage, 2)
    predictor.sync()
    fleet.promoted()
    versions = [fleet.published("snapshot") for _ in range(6)]
    predictor.sync()
    assert predictor.version == versions[-3]
    assert torch.equal(model[FQN], fleet.bits[versions[-3]])


def test_a_pin_of_a_stream_that_was_replaced_does_not_stop_a_predictor_that_starts_again(fleet: Fleet) -> None:
    before = fleet.join()
    before.sync()
    pin_version(fleet.storage, 3)
    fleet.promoted()
    newest = fleet.published("snapshot")
    retain(fleet.storage, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(fleet.storage).read(3) is None
    after = fleet.join()
    after.load_state_dict(before.state_dict())
    after.sync()
    fleet.assert_holds(after, newest)


def test_a_predictor_goes_from_a_former_stream_to_the_pin_of_the_new_one(fleet: Fleet) -> None:
    predictor = fleet.join()
    former = predictor.sync()
    fleet.promoted()
    for kind in ("snapshot", "delta", "delta"):
        good = fleet.published(kind)
    bad = fleet.published("snapshot")
    pin_version(fleet.storage, good)
    assert predictor.sync() == good
    fleet.assert_holds(predictor, good)
    status = predictor.status()
    assert status.last_resync.startswith(f"version {former} to {good}: StreamReplacedError"), f"it has served {bad}"
    assert (status.pinned, status.resyncs) == (good, 1)


def test_a_predictor_goes_from_a_former_stream_past_what_a_release_of_the_new_one_skips(fleet: Fleet) -> None:
    canary = Predictor(
        fleet.writer.model(), fleet.storage, rollout=Rollout(canary=Canary(versions=2), follows_pins=True)
    )
    canary._reader.source.pins = PinReader(seconds=0.0)
    canary.sync()
    last = fleet.writer.claim.head.version
    fleet.promoted()
    good = fleet.published("snapshot")
    fleet.published("snapshot")  # bad
    pin_version(fleet.storage, good)
    released = fleet.published("snapshot")
    release_pin(fleet.storage)
    for _ in range(4):
        assert canary.sync() == last, "the canary may not apply the good version yet"
    for _ in range(2):
        fleet.published("delta")
    assert canary.sync() == released
    assert canary.status().last_resync.startswith(f"version {last} to {released}: ")


@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
def test_an_interrupted_move_to_the_pin_of_a_new_stream_is_completed(fleet: Fleet, num_left: int) -> None:
    model = fleet.writer.model()
    table = Breaking.of(model[FQN])
    predictor = Predictor(
        ModelTarget({**model, FQN: table}, chunk_rows=5), fleet.storage, rollout=Rollout(follows_pins=True)
    )
    predictor._reader.source.pins = PinReader(seconds=0.0)
    predictor.sync()
    fleet.promoted()
    fleet.published("snapshot")
    good = fleet.published("delta")
    fleet.published("snapshot")
    pin_version(fleet.storage, good)
    table.left = num_left
    with pytest.raises(RuntimeError, match="device lost"):
        predictor.sync()
    assert predictor.status().pinned == good
    assert predictor.sync() == good
    assert torch.equal(model[FQN], fleet.bits[good])


def test_a_pin_whose_stream_ends_during_the_move_to_it_is_no_longer_reported(fleet: Fleet) -> None:
    fleet.deltas(2)
    predictor = fleet.join(is_fragile=True)
    predictor.sync()
    pin_version(fleet.storage, 2)
    fleet.tables[predictor].left = 1
    with pytest.raises(RuntimeError, match="device lost"):
        predictor.sync()
    assert predictor.status().pinned == 2
    fleet.promoted()
    with pytest.raises(NoSnapshotError):
        predictor.sync()
    assert predictor.status().pinned is None


def test_a_damaged_snapshot_after_a_pin_that_has_ended_is_passed_over(fleet: Fleet) -> None:
    predictor = fleet.join()
    pin_version(fleet.storage, 3)
    predictor.sync()
    fleet.promoted()
    good = fleet.published("snapshot")
    damaged = StreamLog(fleet.storage).read(fleet.published("snapshot"))
    assert damaged is not None
    for part in damaged.parts:
        fleet.storage.delete(part.name)
    with pytest.raises(CorruptPartError):
        predictor.sync()
    fleet.assert_holds(predictor, good)


def test_a_damaged_stream_after_a_pin_leaves_the_pinned_rows(fleet: Fleet) -> None:
    predictor = fleet.join()
    pin_version(fleet.storage, 3)
    predictor.sync()
    fleet.promoted()
    damaged = StreamLog(fleet.storage).read(fleet.published("snapshot"))
    assert damaged is not None
    for part in damaged.parts:
        fleet.storage.delete(part.name)
    for _ in range(2):
        with pytest.raises(CorruptPartError):
            predictor.sync()
        fleet.assert_holds(predictor, 3)
    good = fleet.published("snapshot")
    assert predictor.sync() == good
    assert predictor.status().pinned is None


def test_a_restart_at_a_pin_does_not_continue_the_former_stream(fleet: Fleet) -> None:
    before = fleet.join()
    pin_version(fleet.storage, 3)
    before.sync()
    fleet.promoted()
    after = fleet.join()
    after.load_state_dict(before.state_dict())
    fleet.models[-1][FQN].copy_(fleet.bits[3])
    after.sync()
    fleet.assert_holds(after, 3)
    assert after.status().pinned == 3
    newest = fleet.published("snapshot")
    assert after.sync() == newest
    fleet.assert_holds(after, newest)


@pytest.mark.parametrize("damaged", [4, 5, 6])
@pytest.mark.parametrize("fold", [0.01, 1e9], ids=["merged snapshot", "merged delta"])
def test_a_damaged_version_on_the_way_to_a_pin_is_passed_over(fleet: Fleet, fold: float, damaged: int) -> None:
    pin_version(fleet.storage, 3)
    predictor = fleet.join()
    predictor.sync()
    fleet.deltas(1)
    newest = fleet.newest
    merged = compact(StreamLog(fleet.storage), fold=fold)
    assert merged is not None
    assert merged.version == newest
    pin_version(fleet.storage, newest, replaces=True)
    fleet.damage(damaged)
    predictor.sync()
    fleet.assert_holds(predictor, newest)
    assert predictor.status().error is None


def test_an_outage_of_the_pins_is_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    runtime = Runtime(monotonic=lambda: now[0], uniform=lambda low, high: (low + high) / 2)
    storage = WrappedStorage(fleet.storage)
    fleet.writer.delta([1])
    predictor = Predictor(fleet.writer.model(), storage, rollout=Rollout(follows_pins=True), runtime=runtime)
    predictor.sync()
    said: list[float] = []
    for is_down in (True, False):
        storage.rules[:] = [fails(on("size", name=lambda name: name.startswith("control/pins")))] if is_down else []
        began = now[0]
        while now[0] < began + 3600.0:
            caplog.clear()
            predictor.sync()
            said += [now[0] for each in caplog.records if "pin" in each.getMessage()]
            now[0] += 5.0
    assert said == [1005.0, 4600.0], "at the first look that fails, and at the first one that succeeds"


def test_a_rollback_that_fails_leaves_the_pin(fleet: Fleet) -> None:
    predictor = fleet.join()
    pin_version(fleet.storage, 3)
    predictor.sync()
    entry = StreamLog(fleet.storage).read(2)
    assert entry is not None
    for part in entry.parts:
        fleet.storage.delete(part.name)
    with pytest.raises(CorruptPartError):
        predictor.rollback(3)
    fleet.promoted()
    newest = fleet.published("snapshot")
    assert predictor.sync() == newest


def test_follow_under_a_pin_checks_the_pinned_version_and_not_the_newest(fleet: Fleet) -> None:
    good = fleet.published("delta")
    Writer(fleet.storage, num_rows=30).snapshot()  # a bad trainer: its tables do not fit
    pin_version(fleet.storage, good)
    predictor = fleet.join()
    predictor.follow(0.001)
    eventually(lambda: predictor.version == good)
    predictor.stop()
    fleet.assert_holds(predictor, good)


def test_a_canary_that_starts_after_a_release_takes_an_older_snapshot(fleet: Fleet) -> None:
    pin_version(fleet.storage, fleet.published("delta"))
    fleet.published("snapshot")
    released = release_pin(fleet.storage)
    for _ in range(6):
        fleet.published("delta")
        fleet.published("delta")
        fleet.published("snapshot")
    retain(fleet.storage, Retention(versions=10, grace_seconds=0.0))
    assert released.version not in StreamLog(fleet.storage).versions(), "the snapshot of the release is gone"
    canary = Predictor(
        fleet.writer.model(), fleet.storage, rollout=Rollout(canary=Canary(versions=2), follows_pins=True)
    )
    assert canary.sync() == fleet.writer.claim.head.version - 2


def test_a_claim_of_another_publisher_ends_no_pin(fleet: Fleet) -> None:
    predictor = fleet.join()
    pin_version(fleet.storage, 2)
    newest = fleet.published("claim")
    predictor.sync()
    fleet.assert_holds(predictor, 2)
    release_pin(fleet.storage)
    predictor.sync()
    fleet.assert_holds(predictor, newest)


def test_retention_keeps_the_path_of_a_pin(fleet: Fleet) -> None:
    pin_version(fleet.storage, 3)
    for _ in range(3):
        fleet.published("snapshot")
    retain(fleet.storage, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(fleet.storage).versions()[:2] == [0, 1]
    predictor = fleet.join()
    predictor.sync()
    fleet.assert_holds(predictor, 3)
    release_pin(fleet.storage)
    assert retain(fleet.storage, Retention(versions=1, grace_seconds=0.0)).versions > 0


def test_retention_keeps_a_merged_snapshot_that_a_pin_needs(fleet: Fleet) -> None:
    compact(fleet.storage)
    pin_version(fleet.storage, 5)
    for _ in range(3):
        fleet.published("snapshot")
        compact(fleet.storage)
    retain(fleet.storage, Retention(versions=1, grace_seconds=0.0))
    predictor = fleet.join()
    predictor.sync()
    fleet.assert_holds(predictor, 5)


def test_a_pin_written_during_a_retention_pass_ends_the_pass(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.published("snapshot")
    has_chosen = nth(1, on("sync", name="log"))  # what to delete
    pins = calls(has_chosen, before=lambda _: pin_version(fleet.storage, 3))
    retain(WrappedStorage(fleet.storage, pins), Retention(versions=1, grace_seconds=0.0))
    predictor = fleet.join()
    predictor.sync()
    fleet.assert_holds(predictor, 3)


def test_a_pin_whose_path_is_deleted_meanwhile_is_corrected(fleet: Fleet) -> None:
    newest = fleet.published("snapshot")
    deletes = calls(on("create", name=pin_name(1)), after=lambda *_: fleet.storage.delete(entry_name(2)))
    with pytest.raises(MissingVersionError):
        pin_version(WrappedStorage(fleet.storage, deletes), 3)
    pin = newest_pin(fleet.storage)
    assert pin is not None
    assert (pin.counter, pin.kind, pin.version) == (2, "release", newest)
    predictor = fleet.join()
    predictor.sync()
    fleet.assert_holds(predictor, newest)


@pytest.mark.advice("PinError: _create _former")
def test_one_of_two_operators_is_refused(fleet: Fleet) -> None:
    races = calls(nth(1, on("create")), before=lambda _: pin_version(fleet.storage, 2))
    with pytest.raises(PinError, match="another pin or release was written at the same time, with the counter 1"):
        pin_version(WrappedStorage(fleet.storage, races), 3)
    with pytest.raises(PinError, match="already pinned to version 2"):
        pin_version(fleet.storage, 3)
    assert pin_version(fleet.storage, 3, replaces=True).counter == 2
    predictor = fleet.join()
    predictor.sync()
    fleet.assert_holds(predictor, 3)


@pytest.mark.advice("MissingVersionError: _missing")
def test_a_pin_of_another_entry_is_refused(fleet: Fleet) -> None:
    predictor = fleet.join()
    predictor.sync()
    pin = pin_version(fleet.storage, 3)
    forged = replace(pin, counter=2, version=2)  # with the hash of version 3
    fleet.storage.create(pin_name(2), forged.to_json())
    with pytest.raises(MissingVersionError):
        predictor.sync()
    fleet.assert_holds(predictor, 5)
    pin_version(fleet.storage, 2, replaces=True)
    predictor.sync()
    fleet.assert_holds(predictor, 2)
    fleet.storage.delete(pin_name(3))  # a store with fewer pins, such as a mirror
    fleet.storage.delete(pin_name(2))
    predictor.sync()
    fleet.assert_holds(predictor, 2)


def _forged(fleet: Fleet) -> dict[str, Pin | None]:
    """Return pins with the counter 1: the right one of version 3, and wrong ones; None for no pin."""
    right = pin_version(fleet.storage, 3)
    return {
        "right": right,
        "none": None,
        "hash": replace(right, version=2),
        "missing": replace(right, version=4, xxh3="0" * 32, bad=9),
        "stream": replace(right, stream="0" * 32),
        "release": replace(right, kind="release", version=5, bad=4, xxh3="0" * 32),
    }


@pytest.mark.sweep("short")
def test_a_forged_pin_counts_only_while_it_exists(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences of pins with one counter: a wrong pin of this stream stops a predictor, the right one pins it."""
    monkeypatch.setattr("delta_tracker.stream.pin._RECHECK_SECONDS", 0.0)
    pins = _forged(fleet)
    for names in itertools.product(pins, repeat=3 if SWEEPS_ARE_WHOLE else 2):
        fleet.storage.delete(pin_name(1))
        predictor = fleet.join()
        predictor.sync()
        is_pinned = False
        for name in (*names, "right"):
            pin = pins[name]
            fleet.storage.delete(pin_name(1))
            if pin is not None:
                fleet.storage.create(pin_name(1), pin.to_json())
            is_pinned |= name == "right"
            if name in {"hash", "missing"} and not is_pinned:
                with pytest.raises(MissingVersionError):
                    predictor.sync()
            else:
                predictor.sync()
            fleet.assert_holds(predictor, 3 if is_pinned else 5)
        fleet.leave(predictor)


def test_a_malformed_pin_leaves_the_one_before(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    pin = pin_version(fleet.storage, 3)
    for counter, data in enumerate((b"{", b"[" * 99_999, pin.to_json(), b"x" * (17 << 10)), 2):
        fleet.storage.create(pin_name(counter), data)
    predictor = fleet.join()
    for _ in range(2):
        predictor.sync()
    fleet.assert_holds(predictor, 3)
    assert caplog.text.count("ignored malformed pin") == 4
    assert pin_version(fleet.storage, 2, replaces=True).counter == 6
    predictor.sync()
    fleet.assert_holds(predictor, 2)
