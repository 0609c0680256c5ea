"""Consumers of a log: unknown names and stale reads are refused."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError, StaleDeltaError
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.cursors import Read
from delta_tracker.tracker.store.segments import SegmentStore


def _log(*consumers: str) -> ChangeLog:
    log = ChangeLog({"t": SegmentStore(8)}, consumers, delete_on_read=True, max_bytes=None)
    log.writes.mark("t", torch.tensor([1]))
    return log


def _held(log: ChangeLog) -> Read:
    read = log.consumers.read("a")
    log.consumers.hold(read)
    return read


def test_unknown_consumers_are_refused() -> None:
    for names in ([], ["a", "a"], "a"):
        with pytest.raises(InvalidArgumentError, match="consumers"):
            _log(*names) if isinstance(names, list) else ChangeLog({}, names, delete_on_read=True, max_bytes=None)
    for names in ([1], [None], ["a", ("b",)], [["a"]]):
        with pytest.raises(InvalidArgumentError, match="Pass a name that is a string"):
            _log(*names)  # type: ignore[arg-type]
    consumers = _log("a", "b").consumers
    with pytest.raises(
        InvalidArgumentError, match=r"consumer=\['a'\] cannot be used\. Pass one of the known consumers: 'a', 'b'"
    ):
        consumers.find(["a"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"known consumers: 'a', 'b'") as caught:
        consumers.find("c")
    assert (caught.value.argument, caught.value.value) == ("consumer", "c")
    with pytest.raises(InvalidArgumentError, match="has several"):
        consumers.find(None)
    assert _log("only").consumers.resolve(None) == "only"


def test_only_the_newest_read_can_be_committed_and_only_once() -> None:
    log = _log("a", "b")
    old, new = _held(log), _held(log)
    with pytest.raises(StaleDeltaError):
        log.consumers.commit(old)
    log.consumers.abort(old)
    log.consumers.commit(new)
    with pytest.raises(StaleDeltaError):
        log.consumers.commit(new)
    assert [log.cursors.consumers[name].position for name in ("a", "b")] == [new.stop, 0]
    assert [log.consumers.num_pending(name) for name in ("a", "b")] == [{"t": 0}, {"t": 1}]


def test_a_read_in_progress_leaves_the_uncommitted_one_valid() -> None:
    log = _log("a")
    old = _held(log)
    log.writes.mark("t", torch.tensor([2]))
    log.consumers.abort(log.consumers.read("a"))
    log.writes.mark("t", torch.tensor([3]))
    log.consumers.commit(old)
    assert log.consumers.read("a").rows["t"].ids.tolist() == [2, 3]


def test_a_read_that_ends_inside_another_one_of_its_consumer_discards_it() -> None:
    log = _log("a")
    outer = log.consumers.read("a")
    log.writes.mark("t", torch.tensor([2]))
    log.consumers.abort(log.consumers.read("a"))
    inner = log.consumers.read("a")
    log.consumers.commit(inner)
    with pytest.raises(StaleDeltaError):
        log.consumers.commit(outer)
    assert log.consumers.num_pending("a") == {"t": 0}
