"""Calls of a tracker that fail or are interrupted: they change nothing, or the next read returns all rows."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.errors import (
    DetachedError,
    InvalidArgumentError,
    NeedsSnapshotError,
    ReservedConsumerError,
)
from delta_tracker.sharding import step_hook
from delta_tracker.sharding.step_hook import _STEPS
from delta_tracker.tracker import hooks
from delta_tracker.tracker.log_segments import LogSegments
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import ShadowStore
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.tracker import interrupted_calls, interrupted_cases

_ROWS = 8
_EVERY = list(range(_ROWS))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    """A process of its own: an exception at the end of a ``with`` statement may leave the state of its thread."""
    pool = RankPool(1)
    yield pool
    pool.stop()


def _model(*, is_sparse: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(_ROWS, 4, sparse=is_sparse))


def _train(model: nn.Module, *ids: int) -> None:
    model.zero_grad()
    model(torch.tensor([ids])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _ids(tracker: ModelDeltaTracker, consumer: str | None = None) -> list[int]:
    return tracker.get_delta_ids(consumer)["0"].tolist()


@pytest.mark.promise("lossless")
def test_a_clear_of_all_consumers_that_is_refused_clears_none() -> None:
    tracker = ModelDeltaTracker(_model(), ["free", "taken"])
    tracker.mark_changed("0", torch.tensor([1, 2]))
    with tracker.reserve("taken", holder="a test"), pytest.raises(ReservedConsumerError):
        tracker.clear()
    assert _ids(tracker, "free") == [1, 2]


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("place", ["watch_collections", "watch_syncs"])
def test_a_reattach_that_fails_detaches_the_tracker(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str
) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    num_hooks = len(_STEPS._hooks)
    with monkeypatch.context() as patch:
        patch.setattr(hooks, place, _raising(error))
        with pytest.raises(error):
            tracker.reattach()
    assert len(_STEPS._hooks) == num_hooks - 1, "the hooks that were registered are removed"
    _train(model, 3)
    with pytest.raises(DetachedError):
        tracker.get_delta()
    tracker.reattach()
    assert _ids(tracker) == _EVERY
    _train(model, 5)
    assert _ids(tracker) == [5]
    assert len(_STEPS._hooks) == num_hooks


@pytest.mark.promise("lossless")
@pytest.mark.parametrize(("owner", "method"), [(LogSegments, "cut"), (SegmentStore, "reset"), (ShadowStore, "reset")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_load_that_runs_out_of_memory_loses_no_row(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], owner: type, method: str
) -> None:
    model = _model(is_sparse=owner is not ShadowStore)
    tracker = ModelDeltaTracker(model, ["first", "second"])
    _train(model, 2)
    saved = tracker.state_dict()
    assert _ids(tracker, "first") == [2]
    _train(model, 4)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, _raising(error))
        with pytest.raises(error):
            tracker.load_state_dict(saved)
    assert _ids(tracker, "first") == _EVERY
    assert _ids(tracker, "second") == _EVERY
    _train(model, 6)
    assert _ids(tracker, "first") == [6]
    tracker.load_state_dict(saved)
    assert _ids(tracker, "first") == [2]


def test_an_interrupted_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is counted once, and its updates are those of a batch that was counted."""
    model = _model()
    tracker = ModelDeltaTracker(model)
    _train(model, 2)
    with monkeypatch.context() as patch:
        patch.setattr(hooks.TrackerHooks, "num_updates", _raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tracker.step()
    assert (tracker.num_batches, tracker.progress.num_unstepped) == (0, 1)
    tracker.step()
    assert (tracker.num_batches, tracker.progress.num_unstepped) == (1, 0)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.EmbeddingBag(_ROWS, 4, sparse=True)
        self.b = nn.EmbeddingBag(_ROWS, 4, sparse=True)


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_load_without_a_state_that_is_interrupted_loses_no_row(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    tracker = ModelDeltaTracker(_Two())
    with monkeypatch.context() as patch:
        patch.setattr(LogSegments, "cut", _raising(error))
        with pytest.raises(error):
            tracker.load_state_dict({})
    assert {fqn: ids.tolist() for fqn, ids in tracker.get_delta_ids().items()} == {"a": _EVERY, "b": _EVERY}


@pytest.mark.promise("lossless")
def test_a_restore_from_a_stream_that_is_interrupted_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = ModelDeltaTracker(_model())
    tracker.mark_changed("0", torch.tensor([1]))
    with monkeypatch.context() as patch:
        patch.setattr(LogSegments, "cut", _raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tracker.checkpoint.restore_from_stream(3, {"default": {"0": torch.tensor([2])}}, {})
    assert _ids(tracker) == _EVERY


def test_names_that_are_no_strings_are_refused() -> None:
    tracker = ModelDeltaTracker(_model())
    for name in (3, None, ["a"]):
        with pytest.raises(InvalidArgumentError, match="Pass a name that is a string"):
            tracker.add_consumer(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="Pass one of the known consumers"):
        tracker.get_delta(["default"])  # type: ignore[arg-type]
    assert tracker.consumers == ("default",)
    tracker.load_state_dict(tracker.state_dict())


@pytest.mark.promise("lossless")
def test_a_detached_tracker_has_no_state() -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    tracker.detach()
    _train(model, 3)
    with pytest.raises(DetachedError):
        tracker.state_dict()


@pytest.mark.parametrize("is_copy", [False, True], ids=["handle", "handle of a copy"])
def test_an_interrupted_release_can_be_repeated(is_copy: bool) -> None:
    tracker = ModelDeltaTracker(_model())
    handle = tracker.reserve(holder="a test")
    released = handle.begin_copy() if is_copy else handle
    with _Locked(tracker), pytest.raises(KeyboardInterrupt):
        released.release()
    released.release()
    assert tracker.consumers == ("default",)
    if is_copy:
        handle.begin_copy().release()
        handle.release()
    tracker.reserve(holder="another test").release()


class _Keyed:
    """A lookup of one id of each of two features."""

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids

    def keys(self) -> list[str]:
        return ["f", "g"]

    def values(self) -> Tensor:
        return torch.arange(2 * self._num_ids)

    def length_per_key(self) -> list[int]:
        return [self._num_ids] * 2


def test_embeddings_of_a_wrong_width_are_refused_before_a_row_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"a": nn.EmbeddingBag(_ROWS, 4, sparse=True), "b": nn.EmbeddingBag(_ROWS, 8, sparse=True)})
    tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    monkeypatch.setattr(tracker._model.found, "features", {"a": ["f"], "b": ["g"]})
    with pytest.raises(InvalidArgumentError, match="8 columns for 'b'"):
        tracker.record_embeddings(_Keyed(1), torch.zeros(2, 4))
    assert not any(tracker.num_pending().values())
    tracker.record_embeddings(_Keyed(0), torch.empty(0, 4))  # a rank without ids
    assert not any(tracker.num_pending().values())


_ERRORS = [KeyboardInterrupt, MemoryError, RuntimeError]


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("error", _ERRORS)
def test_a_consumer_can_be_cleared_after_the_interrupted_drop_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The store was once empty between two statements, and every later call raised IndexError."""
    model = _model()
    tracker = ModelDeltaTracker(model, max_bytes=1)
    _train(model, 2)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentStore, "_recycle", _raising(error))
        with suppress(KeyboardInterrupt):
            tracker.step()
    with pytest.raises(NeedsSnapshotError, match="Call clear"):
        tracker.get_delta()
    tracker.clear()
    _train(model, 3)
    assert _ids(tracker) == [3]


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("call", ["clear", "get_delta", "get_delta_ids", "remove_consumer"])
def test_rows_are_only_gone_if_the_call_that_drops_them_returns(
    monkeypatch: pytest.MonkeyPatch, call: str, error: type[BaseException]
) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model, ["first", "second"])
    _train(model, 2)
    with monkeypatch.context() as patch:
        patch.setattr(LogSegments, "compact", _raising(error))
        try:
            getattr(tracker, call)("first")
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt, "maintenance that fails does not fail the call"
            is_gone = call == "remove_consumer"
        else:
            is_gone = True
    if call == "remove_consumer":
        assert tracker.consumers == ("second",)
    else:
        assert (2 in _ids(tracker, "first")) == (not is_gone)
    assert 2 in _ids(tracker, "second")


@pytest.mark.promise("lossless")
def test_no_consumer_is_cleared_if_not_all_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model, ["first", "second"])
    _train(model, 2)
    cut, num_calls = SegmentStore.cut, itertools.count()

    def fail(store: SegmentStore, position: int) -> None:
        if next(num_calls):
            raise MemoryError
        cut(store, position)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentStore, "cut", fail)
        with suppress(MemoryError):
            tracker.clear()
            assert not any(tracker.num_pending("first").values())
            assert not any(tracker.num_pending("second").values())
            return
    assert (_ids(tracker, "first"), _ids(tracker, "second")) == ([2], [2])


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("method", ["begin_write", "end_write", "acknowledge_writes", "notice_writes"])
def test_an_interrupted_step_of_an_optimizer_is_sent_once(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    own = getattr(LogWrites, method)

    def interrupted(log: LogWrites, *args: Any) -> None:
        own(log, *args)
        raise KeyboardInterrupt

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[5]])).sum().backward()
    before = tracker.read_rows("0")
    with monkeypatch.context() as patch:
        patch.setattr(LogWrites, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    changed = (tracker.read_rows("0") != before).any(dim=1).nonzero().flatten().tolist()
    assert set(_ids(tracker)) >= set(changed)
    assert _ids(tracker) == []
    model(torch.tensor([[6]])).sum().backward()
    optimizer.zero_grad()
    _train(model, 6)
    assert _ids(tracker) == [6]


@pytest.mark.parametrize("method", ["end_write", "acknowledge_writes"])
def test_an_interrupted_hook_of_one_tracker_leaves_no_step_of_another_open(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    model = _model()
    trackers = [ModelDeltaTracker(model) for _ in range(3)]
    own = getattr(LogWrites, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[5]])).sum().backward()
    with monkeypatch.context() as patch:

        def interrupted(log: LogWrites, *args: Any) -> None:
            own(log, *args)
            raise KeyboardInterrupt

        patch.setattr(LogWrites, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for tracker in trackers:
        assert 5 in _ids(tracker)
        assert _ids(tracker) == []


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("name", ["_Step", "_has_closure", "_has_others", "_is_skipped"])
def test_an_error_in_a_hook_of_an_optimizer_does_not_reach_the_step(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]
) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    with monkeypatch.context() as patch:
        patch.setattr(step_hook, name, _raising(error))
        _train(model, 5)
    assert tracker.num_hook_errors > 0
    assert _ids(tracker) == _EVERY
    assert _ids(tracker) == []
    _train(model, 6)
    assert _ids(tracker) == [6]


def _raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


class _Locked:
    """Context manager in which another thread holds the lock of a tracker's log, and Ctrl-C arrives once.

    The signal is repeated until Python handles it: a wait that begins right after a signal does not see it.
    """

    def __init__(self, tracker: ModelDeltaTracker) -> None:
        self._lock = tracker._log.lock
        self._is_held = threading.Event()
        self._is_heard = threading.Event()
        self._may_end = threading.Event()

    def _hold(self) -> None:
        with self._lock:
            self._is_held.set()
            while not self._is_heard.wait(0.3):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._may_end.wait(60)

    def _interrupt(self, *_: object) -> None:
        if not self._is_heard.is_set():
            self._is_heard.set()
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()
        self._is_held.wait()

    def __exit__(self, *_: object) -> None:
        self._is_heard.set()
        self._may_end.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("kind", interrupted_calls.WORLDS)
@pytest.mark.parametrize("call", interrupted_calls.CALLS)
def test_an_exception_at_each_line_of_a_call_loses_no_row(call: str, kind: str) -> None:
    sample = None if SWEEPS_ARE_WHOLE else 1
    assert interrupted_calls.problems(call, interrupted_calls.WORLDS[kind], sample) == []


@pytest.mark.sweep("long")
@pytest.mark.timeout(1800)
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_an_exception_at_each_line_of_a_call_loses_no_row_of_a_sharded_table(one_rank: RankPool, mode: str) -> None:
    for call in interrupted_cases.CALLS:
        sample = None if SWEEPS_ARE_WHOLE else 1
        (problems,) = one_rank.run(f"{interrupted_cases.__name__}:case", call=call, mode=mode, sample=sample)
        assert problems == []
