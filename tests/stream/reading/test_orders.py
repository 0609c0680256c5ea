"""Orders of several urls and streams, forged ones, and calls of other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

from delta_tracker import Predictor
from delta_tracker.errors import StreamError
from delta_tracker.predictor import reader
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.pin import Pin, pin_name
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.reading import orders
from delta_tracker.stream.reading import source as source_module
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pin_fleet import Fleet
from tests.stores.rules import fails, reads
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_tracker.stream.pin._RECHECK_SECONDS", 0.0)
    monkeypatch.setattr(reader, "_SURVEY_SECONDS", 0.0)
    monkeypatch.setattr(source_module, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A stream with the snapshot 1 and the deltas 2 to 5."""
    fleet = Fleet(tmp_path / "stream")
    fleet.deltas(4)
    return fleet


def mirrored(fleet: Fleet) -> tuple[WrappedStorage, WrappedStorage, Mirror]:
    """Return the source, a mirror of it, and what copies to it."""
    source, copy = WrappedStorage(fleet.storage), WrappedStorage(Storage("memory://"))
    mirror = Mirror(fleet.storage, copy)
    _copy(mirror)
    return source, copy, mirror


def _copy(mirror: Mirror) -> None:
    while mirror.step():
        pass


def _synced(predictor: Predictor, *, rounds: int = 6) -> int | None:
    for _ in range(rounds):
        with suppress(StreamError):
            predictor.sync()
    return predictor.version


def _forged(kind: str, counter: int, fleet: Fleet) -> Pin:
    entry = fleet.writer.claim.head
    right = Pin(counter=counter, stream=entry.stream, kind="pin", version=2, xxh3="0" * 32, bad=9, reason="", time=0.0)
    return {
        "another entry": right,
        "no entry": replace(right, version=9),
        "release": replace(right, kind="release", version=9, bad=8),
    }[kind]


# Forged pins


@pytest.mark.parametrize("state", ["free", "pinned", "rolled back", "released"])
@pytest.mark.parametrize("kind", ["another entry", "no entry", "release"])
@pytest.mark.parametrize("at", ["source", "mirror"])
@pytest.mark.parametrize("is_lost", [True, False], ids=["url is lost", "pin is lost"])
def test_a_forged_pin_that_is_lost_stops_no_predictor(
    fleet: Fleet, state: str, kind: str, at: str, is_lost: bool
) -> None:
    source, copy, mirror = mirrored(fleet)
    if state != "free":
        pin_version(source, 3)
        mirror.copy_pins()
    predictor = fleet.join(storage=[source, copy])
    predictor.sync()
    if state == "rolled back":
        predictor.rollback(2)
    if state == "released":
        predictor.release()
    forger, other = (source, copy) if at == "source" else (copy, source)
    forged = _forged(kind, 1 if state == "free" else 2, fleet)
    forger.create(pin_name(forged.counter), forged.to_json())
    _synced(predictor, rounds=2)
    newest = fleet.published("delta")
    _copy(mirror)
    if is_lost:
        forger.rules.append(fails(reads))
    else:
        forger.delete(pin_name(forged.counter))
    kept = {"free": newest, "pinned": 3, "rolled back": 2, "released": newest}[state]
    assert _synced(predictor) == kept
    fleet.assert_holds(predictor, kept)
    pin_version(other, 4, replaces=True)
    assert _synced(predictor) == 4
    fleet.assert_holds(predictor, 4)


def test_a_pin_that_was_read_at_another_url_is_kept_when_its_own_is_lost(fleet: Fleet) -> None:
    source, copy, mirror = mirrored(fleet)
    predictor = fleet.join(storage=[copy, source])
    predictor.sync()
    pin_version(source, 3)
    assert _synced(predictor, rounds=2) == 3
    source.rules.append(fails(reads))
    fleet.published("delta")
    _copy(mirror)
    assert _synced(predictor) == 3


def test_a_forged_pin_of_a_mirror_does_not_undo_a_followed_one(fleet: Fleet) -> None:
    source, copy, _ = mirrored(fleet)
    for version in (4, 3):
        pin_version(source, version, replaces=True)
    predictor = fleet.join(storage=[source, copy])
    predictor.sync()
    position, rows = predictor.state_dict(), fleet.rows_of(predictor)
    fleet.published("delta")
    for name in (pin_name(1), pin_name(2)):
        copy.delete(name)  # the mirror lags
    source.rules.append(fails(reads))
    predictor = fleet.join(storage=[source, copy])
    predictor.load_state_dict(position)
    fleet.rows_of(predictor).copy_(rows)
    copy.create(pin_name(1), _forged("no entry", 1, fleet).to_json())
    _synced(predictor, rounds=2)
    copy.delete(pin_name(1))
    assert _synced(predictor) == 3


# Counters of several streams


def _promoted(fleet: Fleet, copy: WrappedStorage) -> Writer:
    """Lose the source of a mirror, and continue its stream at the mirror."""
    promote(copy)
    writer = Writer(copy)
    writer.snapshot()
    return writer


@pytest.mark.parametrize("ends", ["a pin", "nothing"])
def test_a_pin_of_a_promoted_mirror_applies_whatever_its_counter(fleet: Fleet, ends: str) -> None:
    """The mirror lacks the last pins of the source, so the first pin after the promotion has a known counter."""
    source, copy, _ = mirrored(fleet)
    for version in (4, 3):
        pin_version(source, version, replaces=True)
    predictor = fleet.join(storage=[source, copy])
    assert predictor.sync() == 3
    if ends == "a pin":
        predictor.release()
        assert predictor.sync() == 5
    source.rules.append(fails(reads))
    writer = _promoted(fleet, copy)
    good = writer.claim.head.version
    _synced(predictor)
    writer.delta([3])
    for counter in (1, 2):
        assert pin_version(copy, good, replaces=True).counter == counter
    assert _synced(predictor) == good
    assert predictor.status().pinned == good
    assert predictor.status().stream == writer.claim.head.stream


def test_a_pin_of_a_promoted_mirror_applies_at_a_source_that_became_its_mirror(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source had more pins than the mirror when its stream was lost."""
    monkeypatch.setattr(reader, "_SURVEY_SECONDS", 3600.0)
    source, copy, _ = mirrored(fleet)
    for version in (4, 3):
        pin_version(source, version, replaces=True)
    predictor = fleet.join(storage=[source, copy])
    assert predictor.sync() == 3
    writer = _promoted(fleet, copy)
    good = writer.claim.head.version
    _synced(predictor)
    assert pin_version(copy, good, replaces=True).counter == 1
    writer.delta([3])
    predictor._reader._surveyed_at = float("-inf")  # the mirror is found by a survey
    assert _synced(predictor) == good
    for stored in [each for folder in ("log", "parts", "control") for each in fleet.storage.objects(folder)]:
        fleet.storage.delete(stored.name)
    back = Mirror(copy, fleet.storage)
    _copy(back)
    back.copy_claims()
    copy.rules.append(fails(reads))
    monkeypatch.setattr(source_module, "_LIST_SECONDS", 0.0)  # a minute later
    assert _synced(predictor) == good
    assert predictor._reader.storage is source, "the pin applies there"


# Other threads


class _Interleaved:
    """Calls a function before one line of ``orders.py`` is run, as another thread may do.

    Args:
        line: number of the line among those that are run, from 1.
        call: the function.
    """

    def __init__(self, line: int, call: Callable[[], object]) -> None:
        self._left = line
        self._call = call

    @property
    def is_done(self) -> bool:
        """True if so many lines were run."""
        return self._left <= 0

    def __enter__(self) -> Self:
        self._former = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != orders.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self._call()
        return self


def _start(thread: threading.Thread) -> None:
    """Start a thread, and give it the time to end unless it waits for a lock."""
    thread.start()
    thread.join(0.02)


def test_a_release_by_another_thread_is_kept_wherever_a_round_is(fleet: Fleet) -> None:
    """While a forged pin is dropped that an own rollback overrules, and while that rollback is replaced."""
    newest, num_lines, is_done = fleet.newest, 0, True
    while is_done:
        num_lines += 1
        forged = _forged("no entry", 1, fleet)
        fleet.storage.create(pin_name(1), forged.to_json())
        predictor = fleet.join()
        with suppress(StreamError):
            predictor.sync()
        predictor.rollback(2)
        fleet.storage.delete(pin_name(1))
        with _Interleaved(num_lines, predictor.release) as released:
            predictor.sync()
        is_done = released.is_done
        if is_done:
            assert _synced(predictor, rounds=2) == newest, num_lines
        else:
            fleet.assert_holds(predictor, 2)
        fleet.leave(predictor)
    assert num_lines > 20


def test_a_rollback_during_the_first_check_of_follow_is_kept(fleet: Fleet) -> None:
    """While the thread of follow() drops a forged pin, another thread rolls back, or waits until that is done."""
    num_lines, is_done = 0, True
    while is_done:
        num_lines += 1
        forged = _forged("no entry", 1, fleet)
        fleet.storage.create(pin_name(1), forged.to_json())
        predictor = fleet.join()
        with suppress(StreamError):
            predictor.sync()
        fleet.storage.delete(pin_name(1))
        thread = threading.Thread(target=predictor.rollback, args=(2,))
        interleaved = _Interleaved(num_lines, partial(_start, thread))
        threading.settrace(interleaved)
        try:
            predictor.follow(poll_seconds=60.0)
        finally:
            threading.settrace(None)
        predictor.stop()
        if is_done := interleaved.is_done:
            thread.join()
            assert _synced(predictor, rounds=2) == 2, num_lines
        fleet.leave(predictor)
    assert num_lines > 10
