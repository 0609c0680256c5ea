"""Stop flags: only a thread with a flag is interrupted, at its next check or during a request."""

from __future__ import annotations

import asyncio
import threading

import pytest

from delta_tracker.stream.interruption import Interrupted, check, checked, interruptible, send_request


async def _late(waits: asyncio.Event) -> str:
    await waits.wait()
    return "late"


def test_a_thread_without_a_flag_is_never_interrupted() -> None:
    check()
    assert list(checked([1, 2])) == [1, 2]
    assert send_request(lambda: "blocking", lambda: _late(asyncio.Event())) == "blocking"


def test_checks_raise_once_the_flag_is_set() -> None:
    stop = threading.Event()
    with interruptible(stop):
        check()
        items = checked([1, 2, 3])
        assert next(items) == 1
        stop.set()
        with pytest.raises(Interrupted):
            next(items)
        with pytest.raises(Interrupted):
            check()
    check()


def test_a_flag_is_limited_to_its_thread_and_block() -> None:
    outer, inner = threading.Event(), threading.Event()
    outer.set()
    with interruptible(outer):
        with interruptible(inner):
            check()
        other = threading.Thread(target=check)
        other.start()
        other.join(60)
        with pytest.raises(Interrupted):
            check()


def test_a_request_is_abandoned_when_the_flag_is_set() -> None:
    stop, cancelled = threading.Event(), []

    async def request() -> str:
        try:
            return await _late(asyncio.Event())
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def at_once() -> str:
        return "answer"

    with interruptible(stop):
        assert send_request(lambda: "blocking", at_once) == "answer"
        timer = threading.Timer(0.05, stop.set)
        timer.start()
        with pytest.raises(Interrupted):
            send_request(lambda: "blocking", request)
        timer.join(60)
    assert cancelled == [True]
