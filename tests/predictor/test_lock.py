"""Lock between lookups and writes: exclusion, fairness and interrupts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from delta_tracker.predictor.lock import TableLock
from tests.waiting import eventually


def _start(*works: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"


def _waiting(lock: TableLock) -> tuple[int, int]:
    """Return the numbers of waiting readers and writers, which only the lock's private state has."""
    return lock._num_queued + lock._num_invited, lock._num_waiting


def test_a_writer_is_alone() -> None:
    lock = TableLock()
    inside = {"readers": 0, "writers": 0}
    faults = []
    mutex = threading.Lock()

    def enter(kind: str, step: int) -> None:
        with mutex:
            inside[kind] += step
            if inside["writers"] > 1 or (inside["writers"] and inside["readers"]):
                faults.append(dict(inside))

    def read() -> None:
        for _ in range(300):
            with lock.reading():
                enter("readers", 1)
                with lock.reading():
                    time.sleep(0)
                enter("readers", -1)

    def write() -> None:
        for _ in range(300):
            with lock.writing():
                enter("writers", 1)
                time.sleep(0)
                enter("writers", -1)

    _join(_start(read, read, read, write, write))
    assert not faults
    assert inside == {"readers": 0, "writers": 0}


def test_readers_that_wait_for_a_write_enter_before_the_next_write() -> None:
    lock, order = TableLock(), []
    first_may_end = threading.Event()

    def write(name: str, may_end: threading.Event | None) -> None:
        with lock.writing():
            order.append(name)
            if may_end is not None:
                assert may_end.wait(60)

    def read() -> None:
        with lock.reading():
            order.append("read")

    threads = _start(lambda: write("first", first_may_end))
    eventually(lambda: order == ["first"])
    threads += _start(read, read)
    eventually(lambda: _waiting(lock) == (2, 0))
    threads += _start(lambda: write("second", None))
    eventually(lambda: _waiting(lock) == (2, 1))
    first_may_end.set()
    _join(threads)
    assert order == ["first", "read", "read", "second"]


def test_a_waiting_writer_enters_before_later_readers() -> None:
    lock, order = TableLock(), []
    first_may_end = threading.Event()

    def read(name: str, may_end: threading.Event | None) -> None:
        with lock.reading():
            order.append(name)
            if may_end is not None:
                assert may_end.wait(60)

    def write() -> None:
        with lock.writing():
            order.append("write")

    threads = _start(lambda: read("first", first_may_end))
    eventually(lambda: order == ["first"])
    threads += _start(write)
    eventually(lambda: _waiting(lock) == (0, 1))
    threads += _start(lambda: read("second", None))
    eventually(lambda: _waiting(lock) == (1, 1))
    first_may_end.set()
    _join(threads)
    assert order == ["first", "write", "second"]


@pytest.mark.parametrize("is_invited", [False, True])
def test_an_interrupted_reader_blocks_no_other_thread(monkeypatch: pytest.MonkeyPatch, is_invited: bool) -> None:
    lock = TableLock()
    held, hold = threading.Event(), threading.Event()

    def write() -> None:
        with lock.writing():
            held.set()
            hold.wait(60)

    threads = _start(write)
    assert held.wait(60)
    ordinary = lock._may_read.wait

    def interrupted(timeout: float | None = None) -> None:
        if is_invited:
            hold.set()
            ordinary()
        raise KeyboardInterrupt

    monkeypatch.setattr(lock._may_read, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), lock.reading():
        pass
    monkeypatch.undo()
    hold.set()
    threads += _start(lambda: lock.writing().__enter__())
    _join(threads)
    assert _waiting(lock) == (0, 0)


def test_an_interrupted_writer_blocks_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = TableLock()
    held, hold = threading.Event(), threading.Event()
    read = []

    def first() -> None:
        with lock.reading():
            held.set()
            hold.wait(60)

    def second() -> None:
        with lock.reading():
            read.append(True)

    threads = _start(first)
    assert held.wait(60)

    def interrupted(timeout: float | None = None) -> None:
        lock._mutex.release()
        threads.extend(_start(second))
        eventually(lambda: _waiting(lock)[0] == 1)
        lock._mutex.acquire()
        raise KeyboardInterrupt

    monkeypatch.setattr(lock._may_write, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), lock.writing():
        pass
    eventually(lambda: bool(read))
    hold.set()
    _join(threads)
    assert _waiting(lock) == (0, 0)
