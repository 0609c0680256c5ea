"""`Predictor.wait` returns when a version is applied, and raises a typed error if it is not."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from delta_tracker import Gate, Predictor, Rollout, Storage
from delta_tracker.errors import (
    FollowEndedError,
    HeldVersionError,
    InvalidArgumentError,
    ModelMismatchError,
    WaitTimeoutError,
)
from tests.predictor.serving import eventually
from tests.stream.streams import FQN, Writer

_DEADLINE = 60.0  # seconds; no test reaches it


@pytest.fixture
def writer() -> Writer:
    return Writer(Storage("memory://"))


def test_it_waits_for_any_version_and_for_each(writer: Writer) -> None:
    with Predictor(writer.model(), writer.storage) as predictor:
        predictor.follow(poll_seconds=0.01)
        with pytest.raises(WaitTimeoutError, match=r"not applied any version after 0 s and holds no version\. Check"):
            predictor.wait(timeout=0)
        begun = threading.Timer(0.05, writer.snapshot)
        begun.start()
        assert predictor.wait(timeout=_DEADLINE) == 1
        begun.join()
        for version in (2, 3):
            later = threading.Timer(0.02, writer.delta, args=[[version]])
            later.start()
            assert predictor.wait(version, timeout=_DEADLINE) == version
            assert predictor.version == version
            later.join()
        assert predictor.wait(1, timeout=0) == 3


def test_many_threads_wait_without_polling(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(poll_seconds=0.01)
    looks: list[int] = []
    real = predictor._follower.wait

    def counted(is_there: Callable[[], bool], seconds: float | None) -> bool:
        def look() -> bool:
            looks.append(1)
            return is_there()

        return real(look, seconds)

    monkeypatch.setattr(predictor._follower, "wait", counted)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(predictor.wait(2, _DEADLINE))) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # a wait that polled would look many times
    writer.delta([3])
    for thread in threads:
        thread.join()
    predictor.stop()
    assert found == [2] * 8
    assert len(looks) <= 8 * 4, "they look when a version is applied only"


def test_a_sync_wakes_it(writer: Writer) -> None:
    writer.snapshot()
    with Predictor(writer.model(), writer.storage) as predictor:
        predictor.follow(poll_seconds=1000)
        predictor.wait(1, timeout=_DEADLINE)
        writer.delta([3])
        synced = threading.Timer(0.05, predictor.sync)
        synced.start()
        assert predictor.wait(2, timeout=_DEADLINE) == 2
        synced.join()


def test_a_sync_that_ends_at_a_held_version_wakes_it(writer: Writer) -> None:
    writer.snapshot()
    with (
        suppress(HeldVersionError),
        Predictor(writer.model(), writer.storage, rollout=Rollout(gate=Gate())) as predictor,
    ):
        predictor.follow(poll_seconds=1000)
        eventually(lambda: predictor._reader.source.lag.empty_poll is not None)  # the thread looks again in 1000 s
        writer.delta([3])
        writer.table[5] = torch.nan
        writer.write("delta", [writer.rows([5])])
        held: list[str] = []

        def act() -> None:
            with pytest.raises(HeldVersionError):
                predictor.sync()
            held.append("sync")

        acting = threading.Timer(0.05, act)
        acting.start()
        assert predictor.wait(2) == 2
        acting.join()
        assert held == ["sync"]
        acting = threading.Timer(0.05, predictor.rollback, args=[3])  # bypasses the gate
        acting.start()
        assert predictor.wait(3) == 3
        acting.join()


def test_a_stop_ends_it(writer: Writer) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow()
    stopped = threading.Timer(0.1, predictor.stop)
    stopped.start()
    with pytest.raises(InvalidArgumentError, match="not following"):
        predictor.wait(99, timeout=_DEADLINE)
    stopped.join()
    with pytest.raises(InvalidArgumentError, match=r"not following.*Call follow\(\) first, or sync\(\) instead"):
        predictor.wait(99)
    assert predictor.wait() == 1


def test_the_last_error_is_in_the_message(writer: Writer) -> None:
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(poll_seconds=0.001)
    writer.snapshot()
    predictor.wait(1, timeout=_DEADLINE)
    predictor._destination.resolve = _refuse  # type: ignore[method-assign]
    writer.delta([1])
    eventually(lambda: predictor.error is not None)
    with pytest.raises(
        WaitTimeoutError, match=r"holds version 1; the last attempt failed: ModelMismatchError: "
    ) as error:
        predictor.wait(2, timeout=0.01)
    assert (error.value.wanted, error.value.version) == (2, 1)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    with pytest.raises(ModelMismatchError):
        predictor.stop()


def _refuse(*_: object) -> None:
    raise ModelMismatchError(FQN, "5 x 4", "missing")


def test_an_error_that_ends_the_thread_ends_it(writer: Writer) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage)
    predictor.follow(poll_seconds=0.001)
    predictor.wait(1, timeout=_DEADLINE)
    predictor._destination.resolve = _exit  # type: ignore[method-assign]
    threading.Timer(0.05, writer.delta, args=[[1]]).start()
    with pytest.raises(FollowEndedError, match="SystemExit"):
        predictor.wait(2, timeout=_DEADLINE)
    with pytest.raises(FollowEndedError, match="SystemExit"):
        predictor.stop()


def _exit(*_: object) -> None:
    raise SystemExit("over")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"version": -1}, "version=-1"),
        ({"version": 1.0}, "version=1.0"),
        ({"version": True}, "version=True"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": float("nan")}, "timeout=nan"),
    ],
)
def test_invalid_arguments_are_refused(writer: Writer, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        Predictor(writer.model(), writer.storage).wait(**arguments)


def test_it_is_refused_inside_reading(writer: Writer) -> None:
    writer.snapshot()
    with Predictor(writer.model(), writer.storage) as predictor:
        predictor.follow()
        predictor.wait(timeout=_DEADLINE)
        with predictor.reading(), pytest.raises(InvalidArgumentError, match="inside reading"):
            predictor.wait(2)
