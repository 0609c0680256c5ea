"""`Predictor.stop()` ends its thread from any caller, whatever other threads are doing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from delta_tracker import Predictor
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.stream import interruption
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.serving import Breakable, eventually
from tests.stores.rules import calls
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_LONG_SECONDS = 60.0


@pytest.fixture
def writer() -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    return writer


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "predictor"]


@contextmanager
def _interrupting(handler: Callable[..., None]) -> Iterator[None]:
    """Call ``handler`` in the main thread after a short delay."""

    def once(*arguments: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        handler(*arguments)

    former = signal.signal(signal.SIGALRM, once)
    # Python misses a signal that arrives just as the thread begins to wait, so send it again.
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


class _Stuck:
    """A predictor whose thread is inside a write until ``gate`` is set."""

    def __init__(self, writer: Writer) -> None:
        self.gate, inside = threading.Event(), threading.Event()
        target = Breakable.of(writer.model()[FQN])
        self.predictor = Predictor({FQN: target}, writer.storage)
        self.predictor.sync()

        def wait(number: int) -> None:
            inside.set()
            self.gate.wait(_LONG_SECONDS)

        target.before_write = wait
        self.predictor.follow(poll_seconds=0.001)
        writer.delta([3])
        assert inside.wait(_LONG_SECONDS)


def test_a_signal_handler_may_call_stop_during_stop(writer: Writer) -> None:
    stuck, calls = _Stuck(writer), []

    def handler(*_: object) -> None:
        stuck.gate.set()
        stuck.predictor.stop()
        calls.append(_threads())

    with _interrupting(handler):
        stuck.predictor.stop()
    assert calls == [[]]


def test_a_signal_handler_may_call_stop_during_follow(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, answers = Predictor(writer.model(), writer.storage), threading.Event()
    monkeypatch.setattr(predictor._follower, "_check_newest", lambda: answers.wait(_LONG_SECONDS))

    def handler(*_: object) -> None:
        answers.set()
        predictor.stop()

    with _interrupting(handler):
        predictor.follow(poll_seconds=0.001)
    assert _threads() == []


def test_a_signal_handler_may_call_stop_during_wait(writer: Writer) -> None:
    predictor, calls = Predictor(writer.model(), writer.storage), list[bool]()

    def look() -> bool:
        if not calls:
            calls.append(True)
            signal.raise_signal(signal.SIGALRM)  # while the wait looks for the version
        return False

    former = signal.signal(signal.SIGALRM, lambda *_: predictor.stop())
    predictor.follow(poll_seconds=0.001)
    with pytest.raises(InvalidArgumentError, match="not following"):
        predictor._follower.wait(look, _LONG_SECONDS)
    signal.signal(signal.SIGALRM, former)
    assert _threads() == []


def test_an_interrupted_stop_leaves_one_thread_at_most(writer: Writer) -> None:
    stuck = _Stuck(writer)

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), _interrupting(handler):
        stuck.predictor.stop()
    with pytest.raises(InvalidArgumentError, match="already following"):
        stuck.predictor.follow()
    stuck.gate.set()
    stuck.predictor.stop()
    assert _threads() == []
    stuck.predictor.follow(poll_seconds=0.001)
    assert len(_threads()) == 1
    stuck.predictor.stop()


@contextmanager
def _looking_up(predictor: Predictor) -> Iterator[None]:
    """Keep another thread inside ``predictor.reading()``."""
    inside, end = threading.Event(), threading.Event()

    def look_up() -> None:
        with predictor.reading():
            inside.set()
            end.wait(_LONG_SECONDS)

    reader = threading.Thread(target=look_up)
    reader.start()
    assert inside.wait(_LONG_SECONDS)
    try:
        yield
    finally:
        end.set()
        reader.join()


def _stop_while_it_waits(predictor: Predictor) -> None:
    """Stop the predictor once its thread waits for a lookup to end."""
    writer = predictor._destination
    assert isinstance(writer, ModelWriter)
    eventually(lambda: writer.lock._num_waiting == 1)
    begin = time.monotonic()
    predictor.stop()
    assert time.monotonic() - begin < _LONG_SECONDS / 2


def test_stop_does_not_wait_for_a_lookup(writer: Writer) -> None:
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    predictor.follow(poll_seconds=0.001)
    with _looking_up(predictor):
        writer.delta([3])
        _stop_while_it_waits(predictor)
    predictor.sync()
    with predictor.reading() as served:
        assert (served.version, served.applying) == (2, None)


def test_a_stop_before_the_first_row_of_another_stream_keeps_the_position(writer: Writer) -> None:
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    before = predictor.state_dict()
    with _looking_up(predictor):
        for name in (*writer.storage.names("log"), *writer.storage.names("control")):
            writer.storage.delete(name)
        other = Writer(writer.storage)
        other.snapshot()
        predictor.follow(poll_seconds=0.001)
        _stop_while_it_waits(predictor)
    assert predictor.state_dict() == before
    predictor.sync()
    assert predictor.status().stream == other.claim.head.stream


def test_the_last_heartbeat_does_not_outlive_stop(writer: Writer) -> None:
    is_slow = threading.Event()

    def wait(_: object) -> None:
        if is_slow.is_set():
            interruption.sleep(_LONG_SECONDS)

    store = WrappedStorage(Storage("memory://"), calls(before=wait))
    predictor = Predictor(writer.model(), writer.storage, name="p", heartbeats=store)
    predictor.sync()
    predictor.follow(poll_seconds=0.001)
    is_slow.set()
    predictor.stop()
    assert "last-heartbeat" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.advice("InvalidArgumentError: Follower.stop")
def test_the_thread_of_follow_cannot_stop_itself(writer: Writer) -> None:
    said: list[str] = []

    class Notifier:
        def announce(self, stream: str, version: int) -> None:
            """Ignore it."""

        def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
            if not said:
                try:
                    predictor.stop()
                except InvalidArgumentError as error:
                    said.append(str(error))
            return False

        def close(self) -> None:
            """Nothing to close."""

    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(poll_seconds=0.001, notifier=Notifier())
    eventually(lambda: bool(said))
    assert "Call it in another thread" in said[0]
    writer.delta([3])
    eventually(lambda: predictor.version == 2)
    predictor.stop()
    assert _threads() == []
