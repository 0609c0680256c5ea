"""Forks while a thread reads the pointer object."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from delta_tracker.stream.pointer import PointerView
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.pointed import point_at_the_head
from tests.stream.streams import Writer


def test_a_forked_process_reads_the_pointer_while_a_thread_of_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, reads, ends = Storage(tmp_path.as_uri()), threading.Event(), threading.Event()
    writer = Writer(storage)
    writer.snapshot()
    pointer = point_at_the_head(storage)
    read = storage.read

    def waits(*args: Any, **options: Any) -> Any:
        if not reads.is_set():
            reads.set()
            ends.wait(60)
        return read(*args, **options)

    monkeypatch.setattr(storage, "read", waits)
    view = PointerView(storage, seconds=0.0)
    thread = threading.Thread(target=view.newest)
    thread.start()
    assert reads.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if view.newest(past_cache=True) == pointer else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ends.set()
    thread.join()
    assert status == 0
