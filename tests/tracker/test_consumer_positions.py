"""Positions of consumers: unknown names and stale reads are refused."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError, StaleDeltaError
from delta_tracker.tracker.consumer_positions import ConsumerPositions
from delta_tracker.types import Delta


def _delta(consumer: str, stop: int) -> Delta:
    return Delta({}, consumer=consumer, start=0, stop=stop, batches=(0, stop))


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
    old, new = _delta("a", 1), _delta("a", 2)
    cursors.seal(old)
    cursors.seal(new)
    with pytest.raises(StaleDeltaError):
        cursors.check_uncommitted(old)
    assert cursors.pinned == {0, 2}
    cursors.check_uncommitted(new)
    cursors.advance(new)
    with pytest.raises(StaleDeltaError):
        cursors.check_uncommitted(new)
    with pytest.raises(StaleDeltaError):
        cursors.abort(new)
    places = [(each.position, each.batch) for each in (cursors["a"], cursors["b"])]
    assert (places, cursors.oldest) == ([(2, 2), (0, 0)], 0)
