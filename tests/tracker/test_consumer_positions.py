"""Positions of consumers: unknown names and stale reads are refused."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError, StaleDeltaError
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.consumer_positions import ConsumerPositions
from delta_tracker.tracker.read import Read


def _read(consumer: str, stop: int) -> Read:
    return Read(ChangeLog({}, [consumer], delete_on_read=True, max_bytes=None), consumer, 0, stop, (0, stop))


def test_unknown_consumers_are_refused() -> None:
    for names in ([], ["a", "a"], "a"):
        with pytest.raises(InvalidArgumentError, match="consumers"):
            ConsumerPositions(names)
    for names in ([1], [None], ["a", ("b",)], [["a"]]):
        with pytest.raises(InvalidArgumentError, match="Pass a name that is a string"):
            ConsumerPositions(names)  # type: ignore[arg-type]
    cursors = ConsumerPositions(["a", "b"])
    with pytest.raises(
        InvalidArgumentError, match=r"consumer=\['a'\] cannot be used\. Pass one of the known consumers: 'a', 'b'"
    ):
        cursors.resolve(["a"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"known consumers: 'a', 'b'") as caught:
        cursors.resolve("c")
    assert (caught.value.argument, caught.value.value) == ("consumer", "c")
    with pytest.raises(InvalidArgumentError, match="has several"):
        cursors.resolve(None)
    assert ConsumerPositions(["only"]).resolve(None) == "only"


def test_only_the_newest_read_can_be_committed_and_only_once() -> None:
    cursors = ConsumerPositions(["a", "b"])
    old, new = _read("a", 1), _read("a", 2)
    for read in (old, new):
        cursors.begin(read)
        cursors.hold(read)
    with pytest.raises(StaleDeltaError):
        cursors.current(old)
    assert not cursors.discard(old)
    assert cursors.pinned == {0, 2}
    cursors.current(new)
    cursors.advance(new)
    with pytest.raises(StaleDeltaError):
        cursors.current(new)
    assert not cursors.discard(new)
    assert cursors.has_committed(new)
    places = [(each.position, each.batch) for each in (cursors["a"], cursors["b"])]
    assert (places, cursors.oldest) == ([(2, 2), (0, 0)], 0)


def test_a_read_in_progress_is_pinned_and_leaves_the_uncommitted_one_valid() -> None:
    cursors = ConsumerPositions(["a"])
    old, new = _read("a", 1), _read("a", 2)
    cursors.begin(old)
    cursors.hold(old)
    cursors.begin(new)
    assert cursors.pinned == {0, 1, 2}
    assert cursors.discard(new)
    assert cursors.pinned == {0, 1}
    cursors.current(old)
