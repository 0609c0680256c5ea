"""Promotions: predictors at any version of the former stream continue in the next one, without an operator."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from delta_tracker.predictor.predictor import Rollout
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.reading.canary import Canary
from tests.predictor.readers import KINDS, Kind, Log, Reader, lose, mirror, new_store
from tests.predictor.serving import eventually
from tests.stores.wrapped import WrappedStorage

_POSITIONS = pytest.mark.parametrize("position", ["ahead", "at", "below", "below the start"])
_BOTH = pytest.mark.parametrize("kind", KINDS)
_RESTARTS = pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])


class Promotion:
    """A source with the snapshot 1, its mirror, and a predictor of both at a version relative to the mirror's.

    Attributes:
        log: the trainer of the source.
        source: store of the source.
        mirror: store of the mirror.
        reader: the predictor.
    """

    def __init__(self, kind: Kind, position: str) -> None:
        self.source, self.mirror = new_store(), new_store()
        self.log = Log(self.source)
        self.log.snapshot()
        reader = self.reader = Reader(kind, [self.source, self.mirror], self.log.rows)
        self.log.deltas(1)
        if position != "below the start":
            mirror(self.source, self.mirror)
        if position.startswith("below"):
            reader.sync()
        self.log.deltas(1)
        if position == "below the start":
            self.log.snapshot()
        mirror(self.source, self.mirror)
        if position == "at":
            reader.sync()
        self.log.deltas(1)
        if position == "ahead":
            reader.sync()
        assert reader.predictor.version is not None

    def promote(self) -> Log:
        """Lose the source, and continue the training at the mirror."""
        lose(self.source)
        return self.log.promoted(self.mirror)


@_BOTH
@_POSITIONS
@_RESTARTS
def test_predictors_continue_in_the_stream_of_a_promoted_mirror(kind: Kind, position: str, restarts: bool) -> None:
    promotion = Promotion(kind, position)
    reader, held = promotion.reader, promotion.reader.predictor.version
    end = StreamLog(promotion.mirror.inner).versions()[-1]
    after = promotion.promote()
    if restarts:
        reader = reader.restarted([promotion.source, promotion.mirror])
    for version in reader.syncs(3):
        assert reader.place[0] == promotion.log.stream, "the next stream has no snapshot yet"
        assert version in (held, end)
    after.snapshot()
    after.deltas(2)
    reader.assert_reaches(after)
    after.deltas(3)
    reader.assert_reaches(after)
    assert reader.predictor.status().error is None


@_BOTH
@_RESTARTS
def test_predictors_below_the_mirror_of_a_lost_source_continue_there(kind: Kind, restarts: bool) -> None:
    promotion = Promotion(kind, "below the start")
    reader = promotion.reader
    mirror(promotion.source, promotion.mirror)
    lose(promotion.source)
    if restarts:
        reader = reader.restarted([promotion.source, promotion.mirror])
    reader.assert_reaches(promotion.log)


@_BOTH
@pytest.mark.parametrize("has_version", [False, True])
def test_the_longest_mirror_of_a_lost_source_is_followed(kind: Kind, has_version: bool) -> None:
    source, shorter, longer = new_store(), new_store(), new_store()
    log = Log(source)
    log.snapshot()
    mirror(source, shorter)
    reader = Reader(kind, [source, shorter, longer], log.rows)
    if has_version:
        reader.sync()
    log.deltas(2)
    mirror(source, longer)
    lose(source)
    reader.assert_reaches(log)


@_BOTH
@_RESTARTS
def test_a_lower_number_of_the_next_stream_is_reported(
    kind: Kind, restarts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    promotion = Promotion(kind, "ahead")
    held = promotion.log.deltas(8)
    promotion.reader.assert_reaches(promotion.log)
    after = promotion.promote()
    reader = promotion.reader.restarted([promotion.source, promotion.mirror]) if restarts else promotion.reader
    first = after.snapshot()
    assert first < held
    reader.assert_reaches(after)
    said = [each.getMessage() for each in caplog.records]
    assert any(str(held) in each and str(first) in each for each in said), said
    assert str(held) in reader.predictor.status().last_resync


@pytest.mark.parametrize("position", ["ahead", "at"])
def test_follow_continues_in_the_stream_of_a_promoted_mirror(position: str) -> None:
    promotion = Promotion("model", position)
    predictor = promotion.reader.predictor
    after = promotion.promote()
    after.snapshot()
    newest = after.deltas(2)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: promotion.reader.place == (after.stream, newest) and predictor.error is None, seconds=10.0)
    predictor.stop()
    promotion.reader.check()


@_BOTH
@_POSITIONS
def test_predictors_continue_after_several_promotions_of_a_mirror(kind: Kind, position: str) -> None:
    promotion = Promotion(kind, position)
    log = promotion.promote()
    for _ in range(2):
        log.snapshot()
        log.deltas(1)
        log = log.promoted(promotion.mirror)
    log.snapshot()
    log.deltas(1)
    promotion.reader.assert_reaches(log)


@_BOTH
@pytest.mark.parametrize("is_read", [False, True], ids=["absent meanwhile", "reading"])
def test_predictors_follow_a_chain_of_mirrors(kind: Kind, is_read: bool) -> None:
    """Each mirror lacks the versions that the predictor has reached when it is promoted."""
    stores = [new_store() for _ in range(4)]
    log = Log(stores[0])
    log.snapshot()
    reader = Reader(kind, stores, log.rows)
    for lost, store in pairwise(stores):
        mirror(lost, store)
        log.deltas(2)
        if is_read or lost is stores[0]:
            reader.assert_reaches(log)
        lose(lost)
        log = log.promoted(store)
        log.snapshot()
    reader.assert_reaches(log)


@_BOTH
def test_a_promotion_is_proven_after_retention_deleted_what_led_to_it(kind: Kind) -> None:
    promotion = Promotion(kind, "ahead")
    after = promotion.promote()
    for _ in range(6):
        after.snapshot()
    compact(promotion.mirror.inner, fold=1e-9)
    retain(promotion.mirror.inner, Retention(versions=1, grace_seconds=0.0), now=lambda: time.time() + 1)
    log = StreamLog(promotion.mirror.inner)
    found = {version: log.read(version) for version in log.versions()}
    (fork,) = (version for version, entry in found.items() if entry is not None and entry.forked_from is not None)
    assert fork + 2 not in found, "nothing leads from the claim of the promotion to the newest version"
    promotion.reader.assert_reaches(after)


@_BOTH
def test_a_mirror_that_begins_after_a_promotion_proves_it(kind: Kind) -> None:
    promotion = Promotion(kind, "ahead")
    after = promotion.promote()
    after.deltas(1)
    after.snapshot()
    third = new_store()
    mirror(promotion.mirror, third)
    after.deltas(2)
    mirror(promotion.mirror, third)
    lose(promotion.mirror)
    reader = promotion.reader.restarted([promotion.source, promotion.mirror, third])
    reader.assert_reaches(after)


@_BOTH
@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 1], id="source first"),
        pytest.param([1, 0], id="mirror first"),
    ],
)
def test_a_promotion_is_followed_while_the_former_source_can_be_read(kind: Kind, order: list[int]) -> None:
    promotion = Promotion(kind, "ahead")
    after = promotion.log.promoted(promotion.mirror)
    after.snapshot()
    after.deltas(2)
    urls = [promotion.source, promotion.mirror]
    reader = promotion.reader.restarted([urls[each] for each in order])
    reader.assert_reaches(after)
    promotion.log.deltas(1)  # a trainer that was forgotten
    reader.sync()
    assert reader.place == (after.stream, after.newest)


@_BOTH
def test_a_predictor_without_a_version_begins_in_the_newest_stream(kind: Kind) -> None:
    promotion = Promotion("model", "at")
    after = promotion.log.promoted(promotion.mirror)
    after.snapshot()
    reader = Reader(kind, [promotion.source, promotion.mirror], promotion.log.rows)
    reader.assert_reaches(after)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("has_pin_at_mirror", [False, True])
def test_a_pin_of_the_former_stream_ends_with_the_first_snapshot_of_the_next(
    is_ahead: bool, has_pin_at_mirror: bool
) -> None:
    source, destination = new_store(), new_store()
    log = Log(source)
    good = log.snapshot()
    log.deltas(1)
    mirror(source, destination)
    log.deltas(1)
    reader = Reader("model", [source, destination], log.rows, rollout=Rollout(follows_pins=True))
    if is_ahead:
        reader.assert_reaches(log)
        reader = reader.restarted([source, destination])
    pin_version(source.inner, good)
    if has_pin_at_mirror:
        mirror(source, destination)
    reader.sync()
    assert reader.predictor.version == good
    lose(source)
    after = log.promoted(destination)
    reader.syncs(5)
    assert reader.place == (log.stream, good), "the versions after the pin are bad"
    after.snapshot()
    after.deltas(1)
    reader.assert_reaches(after)
    assert reader.predictor.status().pinned is None


@_BOTH
@_POSITIONS
def test_a_canary_continues_behind_the_newest_version_of_the_next_stream(kind: Kind, position: str) -> None:
    promotion = Promotion(kind, position)
    after = promotion.promote()
    reader = promotion.reader.restarted(
        [promotion.source, promotion.mirror], rollout=Rollout(canary=Canary(versions=2))
    )
    first = after.snapshot()
    reader.syncs(6)
    assert reader.place[0] == promotion.log.stream, "the snapshot is too new"
    after.deltas(2)
    reader.syncs(6)
    assert reader.place == (after.stream, first)
    after.deltas(1)
    reader.syncs(2)
    assert reader.place == (after.stream, first + 1)


@_POSITIONS
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_an_interrupted_move_to_the_next_stream_is_completed(position: str, restarts: bool) -> None:
    promotion = Promotion("row store", position)
    reader, after = promotion.reader, promotion.promote()
    after.snapshot()
    for number in (0, 1, 10, 20, 21, 22):
        reader.interrupt(after=number)
        if restarts:
            reader = reader.restarted([promotion.source, promotion.mirror])
    reader.assert_reaches(after)


def test_an_own_rollback_lasts_until_its_release_after_a_promotion_too() -> None:
    promotion = Promotion("model", "at")
    reader = promotion.reader
    reader.predictor.rollback(1)
    after = promotion.promote()
    after.snapshot()
    reader.syncs(5)
    assert reader.place == (promotion.log.stream, 1)
    reader.predictor.release()
    reader.assert_reaches(after)


def test_a_stream_that_no_promotion_connects_is_not_followed() -> None:
    promotion = Promotion("model", "ahead")
    held = promotion.reader.place
    other = WrappedStorage(new_store())
    unrelated = Log(other, promotion.log.rows)
    unrelated.deltas(3)
    unrelated.snapshot()
    reader = promotion.reader.restarted([promotion.source, other])
    lose(promotion.source)
    reader.syncs(10)
    assert reader.place == held


@_BOTH
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_pin_of_the_next_stream_counts_if_former_ones_have_higher_counters(
    kind: Kind, restarts: bool, is_lost: bool
) -> None:
    """The mirror lacks the last pins of the source when it is promoted, so that its counters begin below them."""
    urls = [new_store(), new_store()]
    log = Log(urls[0])
    log.snapshot()
    mirror(*urls)
    log.deltas(2)
    for version in (log.newest, log.newest - 1):
        pin_version(urls[0].inner, version, replaces=True)
    reader = Reader(kind, urls, log.rows, rollout=Rollout(follows_pins=True))
    reader.syncs(2)
    assert reader.place == (log.stream, log.newest - 1)
    after = log.promoted(urls[1])
    pinned = after.snapshot()
    after.deltas(1)
    if is_lost:
        lose(urls[0])
    else:
        reader = reader.restarted(urls)  # it looks at all urls at once
    for source in reader.predictor._reader.sources.all:
        source.pins = PinReader(seconds=0.0)
    reader.assert_reaches(after)
    if restarts:
        reader = reader.restarted(urls)
    order = pin_version(urls[1].inner, pinned)
    assert order.counter == 1
    reader.syncs(5)
    assert reader.place == (after.stream, pinned)
    after.deltas(1)
    reader.syncs(5)
    assert reader.place == (after.stream, pinned)


@_BOTH
def test_a_pin_that_was_followed_before_a_promotion_does_not_hold_a_predictor_after_a_restart(kind: Kind) -> None:
    urls = [new_store(), new_store()]
    log = Log(urls[0])
    log.snapshot()
    log.deltas(2)
    mirror(*urls)
    pin_version(urls[0].inner, log.newest - 1)
    reader = Reader(kind, urls, log.rows, rollout=Rollout(follows_pins=True))
    reader.syncs(2)
    assert reader.place == (log.stream, log.newest - 1)
    lose(urls[0])
    after = log.promoted(urls[1])
    after.snapshot()
    reader.assert_reaches(after)
    reader = reader.restarted(urls)
    after.deltas(2)
    reader.assert_reaches(after)


@_BOTH
def test_a_pin_that_a_predictor_has_released_does_not_hold_it_at_a_mirror_without_the_pin(kind: Kind) -> None:
    urls = [new_store(), new_store()]
    log = Log(urls[0])
    first = log.snapshot()
    log.deltas(3)
    mirror(*urls)
    pin_version(urls[0].inner, first)
    reader = Reader(kind, urls, log.rows, rollout=Rollout(follows_pins=True))
    reader.syncs(2)
    assert reader.predictor.version == first
    reader.predictor.release()
    reader.predictor.sync(1)
    assert reader.predictor.version == first + 1
    lose(urls[0])
    reader.restarted(urls).assert_reaches(log)


@_BOTH
@pytest.mark.parametrize("stream", ["former", "next"])
def test_the_first_pin_of_the_next_stream_ends_an_own_rollback(
    kind: Kind, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_tracker.predictor.reader._SURVEY_SECONDS", 0.0)
    urls = [new_store(), new_store()]
    log = Log(urls[0])
    good = log.snapshot()
    mirror(*urls)
    log.deltas(2)
    for version in (log.newest, log.newest - 1):
        pin_version(urls[0].inner, version, replaces=True)
    reader = Reader(kind, urls, log.rows, rollout=Rollout(follows_pins=True))
    for source in reader.predictor._reader.sources.all:
        source.pins = PinReader(seconds=0.0)
    reader.syncs(2)
    if stream == "former":
        reader.predictor.rollback(good)
    lose(urls[0])
    after = log.promoted(urls[1])
    pinned = after.snapshot()
    after.deltas(2)
    if stream == "next":
        reader.assert_reaches(after)
        reader.predictor.rollback(pinned)
    held = reader.place
    reader.syncs(4)
    assert reader.place == held
    pin_version(urls[1].inner, pinned + 1)
    reader.syncs(4)
    assert reader.place == (after.stream, pinned + 1)


@_BOTH
@pytest.mark.parametrize("shows", [0, 1])
def test_a_rollback_overrules_an_order_that_was_just_written(kind: Kind, shows: int) -> None:
    urls = [new_store(), new_store()]
    log = Log(urls[0])
    good = log.snapshot()
    log.deltas(1)
    mirror(*urls)
    reader = Reader(kind, urls[::-1], log.rows, rollout=Rollout(follows_pins=True))
    reader.assert_reaches(log)
    pin_version(urls[shows].inner, log.newest)
    reader.predictor.rollback(good)
    for source in reader.predictor._reader.sources.all:
        source.pins = PinReader(seconds=0.0)
    reader.syncs(3)
    assert reader.predictor.version == good
