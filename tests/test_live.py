"""Lookups beside continuous apply: no row is torn, versions go up, dense tensors switch at a version's end only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from delta_tracker.table_lock import TableLock
from tests.long_run import serve_while_applying


def test_readers_beside_continuous_apply(tmp_path: Path) -> None:
    counts = serve_while_applying(f"file://{tmp_path}/stream", num_versions=80)
    assert counts["torn rows"] == counts["wrong dense tensors"] == counts["steps back"] == 0
    assert counts["versions seen"] > 5
    assert counts["lookups while applying"] > 0


def test_a_reader_waits_for_one_write_at_most() -> None:
    """However often the writer comes back at once."""
    lock, order = TableLock(), []
    inside, arrived = threading.Event(), threading.Event()

    def read() -> None:
        assert inside.wait(30)
        with lock.reading():
            order.append("read")

    def wait_to_read(thread: int, wait=TableLock._wait_to_read) -> None:
        arrived.set()
        wait(lock, thread)

    lock._wait_to_read = wait_to_read
    reader = threading.Thread(target=read)
    reader.start()
    with lock.writing():
        inside.set()
        assert arrived.wait(30)
        while not lock._waiting:
            lock._changed.acquire()
            lock._changed.release()
        order.append("write")
    for _ in range(100):
        with lock.writing():
            order.append("write")
    reader.join(30)
    assert order.index("read") == 1


def test_a_writer_waits_for_no_reader_that_comes_after_it() -> None:
    lock, order = TableLock(), []
    first, second = threading.Event(), threading.Event()

    def write() -> None:
        with lock.writing():
            order.append("write")

    def read() -> None:
        second.set()
        with lock.reading():
            order.append("read")

    writer, reader = threading.Thread(target=write), threading.Thread(target=read)
    with lock.reading():
        writer.start()
        while not lock._num_writers_waiting:
            first.wait(0.001)
        reader.start()
        assert second.wait(30)
        while not lock._waiting:
            first.wait(0.001)
        with lock.reading():  # who is inside may enter again
            order.append("inside")
    writer.join(30)
    reader.join(30)
    assert order == ["inside", "write", "read"]


def test_an_error_in_a_wait_leaves_the_lock_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = TableLock()
    lock._is_writing = True

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(lock._changed, "wait", interrupted)
    for hold in (lock.reading, lock.writing):
        with pytest.raises(KeyboardInterrupt), hold():
            pass
    monkeypatch.undo()
    lock._is_writing = False
    with lock.writing():
        pass
    with lock.reading():
        assert lock.is_reading
    assert not lock.is_reading
    assert (lock._waiting, lock._next, lock._num_writers_waiting) == (set(), set(), 0)
