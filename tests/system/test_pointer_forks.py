"""Forks while a thread reads the pointer object."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from delta_tracker.stream.pointer import PointerReader
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.stores.rules import Gate, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer


def test_a_forked_process_reads_the_pointer_while_a_thread_of_its_parent_does(
    tmp_path: Path,
) -> None:
    gate = Gate(nth(1, on("read")))
    storage = Storage(tmp_path)
    writer = Writer(storage)
    writer.snapshot()
    pointer = point_at_the_head(storage)
    view = PointerReader(WrappedStorage(storage, gate), seconds=0.0)
    thread = threading.Thread(target=view.newest)
    thread.start()
    assert gate.reached.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if view.newest(past_cache=True) == pointer else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    gate.open()
    thread.join()
    assert status == 0
