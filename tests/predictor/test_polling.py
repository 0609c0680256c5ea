"""Polls become rare while a stream is at rest or hints arrive, and a resting follower sends few requests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from delta_tracker import Predictor, Rollout, Storage
from delta_tracker.errors import StorageError
from delta_tracker.predictor.polling import PollSchedule
from delta_tracker.stream import heartbeat as heartbeat_module
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pin import PINS, PinReader
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.reading import source as source_module
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.url import LOCAL_POLL_SECONDS, REMOTE_POLL_SECONDS, is_remote
from tests.notifiers import LocalNotifier
from tests.predictor.pointed import point_at_the_head
from tests.predictor.serving import eventually
from tests.predictor.waits import shorten_waits
from tests.stores.rules import fails, reads
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer


class Time:
    """Clock that a schedule's pauses advance."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def pauses(self, schedule: PollSchedule, count: int) -> list[float]:
        """Return the next pauses, each after a poll that found nothing."""
        found = []
        for _ in range(count):
            found.append(schedule.pause())
            self.seconds += found[-1]
        return found


def _middle(low: float, high: float) -> float:
    return (low + high) / 2


def _schedule(clock: Time, seconds: float = 1.0, uniform: Callable = _middle, **options: Any) -> PollSchedule:
    bounds = {"is_fixed": False, "longest": 5.0, "longest_hinted": 30.0} | options
    return PollSchedule(seconds, runtime=Runtime(monotonic=clock, uniform=uniform), **bounds)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "https", "file", "memory"])
def test_a_store_over_a_network_is_polled_less_often(scheme: str) -> None:
    assert is_remote(f"{scheme}:///x" if scheme == "file" else f"{scheme}://x") == (scheme not in ("file", "memory"))
    assert REMOTE_POLL_SECONDS > LOCAL_POLL_SECONDS


def test_the_interval_grows_while_no_version_comes_and_a_version_resets_it() -> None:
    clock = Time()
    schedule = _schedule(clock)
    assert clock.pauses(schedule, 7) == [1.0, 1.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    schedule.version_applied()
    assert clock.pauses(schedule, 2) == [1.0, 1.0]


def test_the_interval_does_not_grow_while_versions_come_regularly() -> None:
    clock = Time()
    schedule = _schedule(clock)
    schedule.version_applied()
    for _ in range(3):
        clock.seconds += 40.0
        schedule.version_applied()
        schedule.pause()
    assert clock.pauses(schedule, 80) == [1.0] * 80
    assert clock.pauses(schedule, 4)[-1] > 1.0, "twice the interval between versions has passed"


def test_a_fixed_interval_never_changes() -> None:
    clock = Time()
    schedule = _schedule(clock, 0.05, random.uniform, is_fixed=True)
    for _ in range(4):
        schedule.hint_received()
        schedule.version_applied()
    assert clock.pauses(schedule, 200) == [0.05] * 200


@pytest.mark.parametrize("is_fixed", [False, True])
def test_long_intervals_vary_by_a_quarter(is_fixed: bool) -> None:
    clock = Time()
    schedule = _schedule(clock, 4.0, random.uniform, is_fixed=is_fixed, longest=4.0)
    pauses = clock.pauses(schedule, 200)
    assert 3.0 <= min(pauses) < 3.3
    assert 4.7 < max(pauses) <= 5.0


def test_right_hints_make_polls_rare_until_one_is_missing() -> None:
    clock = Time()
    schedule = _schedule(clock)
    for _ in range(3):
        assert schedule.seconds < 30.0
        schedule.hint_received()
        schedule.version_applied()
        schedule.version_applied()  # the same hint announced two versions
        schedule.pause()
        clock.seconds += 1.0
    assert clock.pauses(schedule, 2) == [30.0, 30.0]
    schedule.version_applied()  # no hint came
    assert clock.pauses(schedule, 1) == [1.0]


@pytest.mark.parametrize(
    "break_trust", [PollSchedule.hints_failed, lambda schedule: (schedule.hint_received(), schedule.pause())]
)
def test_a_failure_or_a_wrong_hint_ends_the_trust(break_trust: Callable) -> None:
    clock = Time()
    schedule = _schedule(clock)
    for _ in range(3):
        schedule.hint_received()
        schedule.version_applied()
    break_trust(schedule)
    assert schedule.seconds == 1.0


def test_polls_after_a_hint_are_quick_while_a_cache_may_have_an_old_pointer() -> None:
    clock = Time()
    schedule = _schedule(clock, is_delayed=True)
    schedule.hint_received()
    pauses = clock.pauses(schedule, 14)
    assert pauses[:12] == [0.25] * 12, "for three seconds"
    assert min(pauses[12:]) >= 1.0


@pytest.mark.parametrize("poll_seconds", [None, 0.02])
def test_a_resting_follower_sends_few_requests_and_lists_nothing(
    monkeypatch: pytest.MonkeyPatch, poll_seconds: float | None
) -> None:
    shorten_waits(monkeypatch, gap_check_seconds=0.2)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    point_at_the_head(writer.storage)
    storage = writer.storage
    predictor = Predictor(writer.model(), storage, name="p")
    predictor.follow(poll_seconds)
    eventually(lambda: predictor.version == 1)
    eventually(lambda: (predictor.status().poll_seconds or 0) >= (0.02 if poll_seconds else 0.1))
    before, began = dict(storage.requests), time.monotonic()
    time.sleep(0.3)
    after, seconds = dict(storage.requests), time.monotonic() - began
    predictor.stop()
    found = {name: after[name] - before[name] for name in after}
    bound = seconds * (1 / 0.02 if poll_seconds else 1 / 0.075) + 2 * (seconds / 0.15 + 1) + 2
    assert found["list"] == 0
    assert sum(found.values()) <= bound


def test_a_url_that_lags_is_not_asked_at_each_poll() -> None:
    source, lagging = Storage("memory://"), WrappedStorage(Storage("memory://"))
    writer = Writer(source)
    writer.snapshot()
    mirror = Mirror(source, lagging)
    while mirror.step():
        pass
    newest = writer.delta([1]).version
    predictor = Predictor(writer.model(), [lagging, source])
    assert predictor.sync() == newest
    lagging.take()
    for _ in range(5):
        predictor.sync()
    assert not lagging.take()


def test_a_stream_without_a_pointer_is_listed_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch, gap_check_seconds=0.02)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    storage = writer.storage
    predictor = Predictor(writer.model(), storage)
    predictor.follow()
    eventually(lambda: predictor.version == 1)
    began, before = time.monotonic(), storage.requests["list"]
    eventually(lambda: storage.requests["list"] >= before + 6)
    seconds = time.monotonic() - began
    predictor.stop()
    assert seconds > 0.3, "0.1 at a constant interval"


def test_an_outage_at_a_pin_shows_as_soon_as_at_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pointer, checks at the newest version become rare. Those at a pin must not inherit that."""
    shorten_waits(monkeypatch, gap_check_seconds=0.05)
    writer, is_down = Writer(Storage("memory://")), threading.Event()
    storage = WrappedStorage(writer.storage, fails(lambda each: is_down.is_set() and not each.name.startswith(PINS)))
    good, newest = writer.snapshot().version, writer.delta([1]).version
    predictor = Predictor(writer.model(), storage, rollout=Rollout(follows_pins=True))
    predictor._reader.source.pins = PinReader(seconds=0.0)
    predictor.follow(poll_seconds=0.005)
    predictor.wait(newest, timeout=60)
    checks = storage.requests["list"]
    eventually(lambda: storage.requests["list"] >= checks + 5)  # rare by now
    pin_version(writer.storage, good)
    eventually(lambda: predictor.version == good)
    checks = storage.requests["list"]
    eventually(lambda: storage.requests["list"] >= checks + 2)
    storage.take()
    is_down.set()
    eventually(lambda: predictor.error is not None)
    num_polls = sum(each.name.startswith(PINS) for each in storage.take())
    with pytest.raises(StorageError):
        predictor.stop()
    assert num_polls < 40, "120 at the intervals of the newest version"


def test_a_deleted_version_is_noticed_although_the_pointer_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_LIST_SECONDS", 3600.0)
    shorten_waits(monkeypatch, gap_check_seconds=0.01, back_off_seconds=0.002)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    point_at_the_head(writer.storage)
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    manifests = [writer.delta([number]) for number in range(3)]
    writer.snapshot()
    for each in manifests[:2]:
        writer.storage.delete(f"log/{each.version:020d}.json")
    writer.storage.delete(f"log/{1:020d}.json")  # retention deletes in ascending order
    predictor.follow()
    eventually(lambda: predictor.version == writer.claim.head.version)
    predictor.stop()
    assert predictor.status().resyncs == 1


def test_a_claim_does_not_prove_that_the_next_version_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention keeps claims, also when it has deleted the entry after them."""
    monkeypatch.setattr(source_module, "_LIST_SECONDS", 3600.0)
    shorten_waits(monkeypatch, gap_check_seconds=0.01, back_off_seconds=0.002)
    first = Writer(Storage("memory://"))
    first.snapshot()
    writer = Writer(first.storage)
    point_at_the_head(writer.storage)
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    assert predictor.version == writer.claim.head.version
    deleted = writer.snapshot()
    writer.snapshot()
    writer.storage.delete(f"log/{deleted.version:020d}.json")
    predictor.follow()
    eventually(lambda: predictor.version == writer.claim.head.version)
    predictor.stop()


def test_hints_make_a_follower_poll_rarely() -> None:
    writer, notifier = Writer(Storage("memory://")), LocalNotifier()
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(notifier=notifier)
    for number in range(100):  # a poll may find a version just before its hint
        eventually(lambda: predictor.version == writer.claim.head.version)
        time.sleep(0.02)  # the follower waits
        if predictor.status().poll_seconds == 1.0:
            break
        notifier.announce(writer.claim.head.stream, writer.delta([number % 20]).version)
    assert predictor.status().poll_seconds == 1.0
    predictor.stop()
    assert predictor.status().poll_seconds is None


def test_a_rare_poll_does_not_delay_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_tracker.predictor.follower._BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat_module.HeartbeatWriter, "is_due", lambda self: True)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    storage = writer.storage
    predictor = Predictor(writer.model(), storage, name="p")
    predictor.follow(3600.0)
    eventually(lambda: predictor.version == 1)
    before = storage.requests["write"]
    eventually(lambda: storage.requests["write"] >= before + 3)
    predictor.stop()


def test_the_heartbeat_of_a_resting_follower_needs_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch, gap_check_seconds=3600.0)
    monkeypatch.setattr(heartbeat_module.HeartbeatWriter, "is_due", lambda self: True)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    storage = WrappedStorage(writer.storage)
    predictor = Predictor(writer.model(), storage, name="p")
    predictor.sync()
    with storage.under(fails(reads)), pytest.raises(StorageError):
        predictor._reader.source.log.read(1)
    predictor.follow(0.2)
    first = storage.requests["write"]
    eventually(lambda: storage.requests["write"] > first)
    before = dict(storage.requests)
    eventually(lambda: storage.requests["write"] >= before["write"] + 2)
    predictor.stop()
    assert storage.requests["list"] == before["list"]
    assert storage.requests["size"] == before["size"]
