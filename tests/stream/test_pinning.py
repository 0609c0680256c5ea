"""Rollbacks and releases of a stream: what is refused, what retention keeps, and races with it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import delta_tracker
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MissingVersionError,
    NoSnapshotError,
    PinError,
    UnsupportedStoreError,
)
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance import retention as retention_module
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pin import Deletions, announce_deletions, newest_pin, pin_name, running_deletions
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import Gate, calls, nth, on
from tests.stores.wrapped import Operation, WrappedStorage
from tests.stream.streams import Writer

_ALL = Retention(versions=1, grace_seconds=0.0)


def stream(num_deltas: int = 4) -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    for row in range(num_deltas):
        writer.delta([row])
    return writer


@pytest.mark.advice("PinError: release_pin")
def test_a_pin_and_its_release() -> None:
    writer = stream()
    pin = pin_version(writer.storage, 3, reason="bad feature")
    entry = StreamLog(writer.storage).read(3)
    assert entry is not None
    assert (pin.counter, pin.kind, pin.version, pin.xxh3, pin.bad) == (1, "pin", 3, entry.xxh3, 5)
    assert newest_pin(writer.storage) == pin
    writer.delta([1])
    with pytest.raises(PinError, match="no snapshot above version 5"):
        release_pin(writer.storage)
    assert newest_pin(writer.storage) == pin
    snapshot = writer.snapshot()
    writer.delta([2])
    release = release_pin(writer.storage)
    assert (release.counter, release.kind, release.version, release.bad) == (2, "release", snapshot.version, 5)
    with pytest.raises(PinError, match="not pinned"):
        release_pin(writer.storage)
    assert pin_version(writer.storage, 2).counter == 3


def test_a_merged_snapshot_is_no_release() -> None:
    writer = stream()
    pin_version(writer.storage, 2)
    for row in range(4):
        writer.delta([row])
    compact(writer.storage, fold=1e-9)
    assert any(each.kind == "snapshot" and each.last > 5 for each in StreamLog(writer.storage).merged())
    with pytest.raises(PinError, match="no snapshot above version"):
        release_pin(writer.storage)


def test_a_second_pin_must_replace_the_first() -> None:
    writer = stream()
    pin_version(writer.storage, 2)
    with pytest.raises(PinError, match="already pinned to version 2, counter 1"):
        pin_version(writer.storage, 3)
    writer.delta([1])
    again = pin_version(writer.storage, 1, replaces=True)
    assert (again.counter, again.version, again.bad) == (2, 1, 6)


@pytest.mark.parametrize("order", ["pin", "release"])
def test_an_order_counts_more_than_forged_pins_above_the_next_counter(order: str) -> None:
    writer = stream()
    first = pin_version(writer.storage, 4)
    for counter in (3, 4, 9):
        writer.storage.create(pin_name(counter), replace(first, counter=counter, xxh3="0" * 32).to_json())
    if order == "pin":
        newest = pin_version(writer.storage, 3, replaces=True)
    else:
        writer.snapshot()
        newest = release_pin(writer.storage)
    for after in range(6):
        assert newest_pin(writer.storage, after=after) == newest


@pytest.mark.parametrize("version", [0, 6, -1, True, 1.0])
def test_claims_and_versions_that_do_not_exist_are_refused(version: int) -> None:
    writer = stream()
    with pytest.raises((InvalidArgumentError, NoSnapshotError)):
        pin_version(writer.storage, version)
    assert newest_pin(writer.storage) is None
    with pytest.raises(InvalidArgumentError, match="at most 1,000 characters"):
        pin_version(writer.storage, 1, reason="x" * 1001)
    with pytest.raises(UnsupportedStoreError, match="not possible over http"):
        pin_version(Storage("http://127.0.0.1:1/x"), 1)


def test_versions_with_missing_or_short_parts_are_refused() -> None:
    writer = stream()
    manifest = StreamLog(writer.storage).read(2)
    assert manifest is not None
    writer.storage.replace(manifest.parts[0].name, b"short")
    with pytest.raises(CorruptPartError, match="has 5 bytes"):
        pin_version(writer.storage, 3)
    writer.storage.delete(manifest.parts[0].name)
    with pytest.raises(CorruptPartError, match="does not exist"):
        pin_version(writer.storage, 3)
    writer.storage.delete(entry_name(2))
    with pytest.raises(MissingVersionError):
        pin_version(writer.storage, 3)
    assert newest_pin(writer.storage) is None


def test_of_two_pins_at_once_one_is_refused() -> None:
    writer = stream()
    barrier = threading.Barrier(2)
    found: list[object] = []

    def pin(version: int) -> None:
        storage = WrappedStorage(writer.storage, calls(on("create", "delete"), before=lambda _: barrier.wait()))
        try:
            found.append(pin_version(storage, version).version)
        except PinError as error:
            found.append(error.reason)

    threads = [threading.Thread(target=pin, args=(version,)) for version in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "another pin or release was written at the same time, with the counter 1" in found
    newest = newest_pin(writer.storage)
    assert newest is not None
    assert newest.version in found
    assert newest.counter == 1


@pytest.mark.parametrize("is_folded", [False, True])
def test_retention_keeps_what_leads_to_a_pin(is_folded: bool) -> None:
    writer = stream()
    if is_folded:
        compact(writer.storage, fold=1e-9)
    pin = pin_version(writer.storage, 5 if is_folded else 3)
    for _ in range(3):
        writer.snapshot()
        writer.delta([1])
    retain(writer.storage, _ALL)
    assert pin_version(writer.storage, pin.version, replaces=True).version == pin.version
    for _ in range(2):
        writer.snapshot()
    release_pin(writer.storage)
    assert retain(writer.storage, _ALL).versions > 0
    with pytest.raises((MissingVersionError, NoSnapshotError, CorruptPartError)):
        pin_version(writer.storage, pin.version)


@pytest.mark.parametrize("operation", ["size", "replace", "delete"])
def test_a_pin_during_a_retention_pass_keeps_its_versions_or_is_undone(operation: str) -> None:
    """Pin before each look, announcement and deletion of a pass in turn."""
    outcomes = set()
    for number in range(40):
        writer = stream()
        for _ in range(2):
            writer.snapshot()
            writer.delta([1])
        count, outcome = 0, ""
        original = getattr(writer.storage, operation)

        def pins(*arguments: object, writer: Writer = writer, original: Callable[..., object] = original) -> object:
            nonlocal count, outcome
            count += 1
            if count == number + 1:  # noqa: B023  called in this round
                try:
                    pin_version(writer.storage, 3)
                    outcome = "pinned"
                except (MissingVersionError, NoSnapshotError, CorruptPartError, PinError):
                    outcome = "refused"
            return original(*arguments)

        setattr(writer.storage, operation, pins)
        retain(writer.storage, _ALL)
        setattr(writer.storage, operation, original)
        if not outcome:
            break
        outcomes.add(outcome)
        newest = newest_pin(writer.storage)
        if outcome == "pinned":
            assert pin_version(writer.storage, 3, replaces=True).version == 3
        else:
            assert newest is None or newest.kind == "release"
    assert number >= (5 if operation == "delete" else 1)
    assert "refused" in outcomes if operation == "delete" else "pinned" in outcomes


@pytest.mark.advice("PinError: pin_version")
def test_an_interrupted_pass_is_announced_for_an_hour(tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri()))
    for _ in range(7):
        writer.snapshot()
    name = announce_deletions(writer.storage, writer.claim.head.stream, 3)
    with pytest.raises(PinError, match="versions below 3"):
        pin_version(writer.storage, 2)
    newest = newest_pin(writer.storage)
    assert newest is not None
    assert newest.kind == "release"
    assert pin_version(writer.storage, 6).version == 6
    retain(writer.storage, Retention())
    assert len(running(writer.storage)) == 1
    hour_ago = time.time() - 3700
    os.utime(tmp_path / name, (hour_ago, hour_ago))
    assert pin_version(writer.storage, 2, replaces=True).version == 2
    assert retain(writer.storage, Retention()).orphans == 1
    assert not (tmp_path / name).exists()


def running(storage: Storage) -> list[Deletions]:
    return running_deletions(storage, now=time.time())


def test_a_pin_during_two_passes_finds_both(tmp_path: Path) -> None:
    """A pass that keeps all versions runs between the announcement and the first deletion of one that does not."""
    writer = Writer(Storage(tmp_path))
    writer.snapshot()
    for row in range(4):
        writer.delta([row])
    for _ in range(2):
        writer.snapshot()
        writer.delta([1])
    old = tmp_path / "predictors" / "old.json"
    writer.storage.replace("predictors/old.json", b"{}")
    day_ago = time.time() - 90_000
    os.utime(old, (day_ago, day_ago))

    def during(_: Operation) -> None:
        assert retain(writer.storage, Retention()).orphans == 1
        with pytest.raises(PinError, match="versions below 8"):
            pin_version(writer.storage, 4)

    assert retain(WrappedStorage(writer.storage, calls(nth(1, on("delete")), before=during)), _ALL).versions > 0
    assert not old.exists()
    assert running(writer.storage) == []


def test_a_pass_that_ends_while_a_pin_is_checked_is_found() -> None:
    writer = stream()
    for _ in range(2):
        writer.snapshot()
    storage = writer.storage
    gate = Gate(on("delete"))
    passing = threading.Thread(target=lambda: retain(WrappedStorage(storage, gate), _ALL))

    def end_the_pass(_: Operation) -> None:
        gate.open()
        passing.join(30)

    passing.start()
    assert gate.reached.wait(30)
    with pytest.raises((MissingVersionError, NoSnapshotError, CorruptPartError)):
        pin_version(WrappedStorage(storage, calls(on("objects", name="control/retention"), before=end_the_pass)), 3)
    assert not passing.is_alive()
    newest = newest_pin(storage)
    assert newest is not None
    assert newest.kind == "release"


def test_a_pass_ends_before_its_announcement_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = stream()
    for _ in range(2):
        writer.snapshot()
    monkeypatch.setattr(retention_module, "_PASS_SECONDS", 0.0)
    assert retain(writer.storage, _ALL).versions == 0
    assert pin_version(writer.storage, 3).version == 3


def test_a_pin_between_the_look_and_the_deletions_of_a_pass_ends_the_pass() -> None:
    writer = stream()
    for _ in range(2):
        writer.snapshot()
    storage = writer.storage

    def pin(_: Operation) -> None:
        with pytest.raises(PinError, match="a retention pass deletes versions below"):
            pin_version(storage, 3)

    second_look = nth(2, on("size", name=pin_name(1)))
    assert retain(WrappedStorage(storage, calls(second_look, before=pin)), _ALL).versions == 0
    assert running(storage) == []
    assert pin_version(storage, 3).counter == 3


def test_a_pin_whose_versions_are_deleted_meanwhile_is_undone() -> None:
    for has_pin in (False, True):
        writer = stream()
        if has_pin:
            pin_version(writer.storage, 4)
        deletes = calls(on("create"), before=lambda _, inner=writer.storage: inner.delete(entry_name(2)))
        with pytest.raises(MissingVersionError):
            pin_version(WrappedStorage(writer.storage, deletes), 2, replaces=True)
        newest = newest_pin(writer.storage)
        assert newest is not None
        assert (newest.kind, newest.version) == (("pin", 4) if has_pin else ("release", 1))


def test_the_documented_loop_pins_the_last_good_version(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(delta_tracker.__file__).parent / "guide" / "fleet.md").read_text()
    (loop,) = (each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "pin_version" in each)
    writer, pauses = stream(), list[float]()
    monkeypatch.setattr("time.sleep", pauses.append)
    measured = iter([(1, 0.80), (2, 0.81), (3, 0.60)])
    exec(loop, names := dict[str, Any]())
    names["watch"](writer.storage, lambda: next(measured), 0.7)
    pin = newest_pin(writer.storage)
    assert pin is not None
    assert (pin.kind, pin.version, pin.reason) == ("pin", 2, "quality 0.6000 at version 3")
    assert pauses == [60, 60]
