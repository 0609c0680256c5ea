"""Sinks that fail and block by a script, and threads that cannot be started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from delta_tracker.monitor.collection_report import CollectionReport
from delta_tracker.monitor.sinks.base_sink import Sink

_PATIENCE_SECONDS = 60


class ScriptedSink(Sink):
    """Sink that follows a script at its next deliveries, and checks its calls against the contract of :class:`Sink`."""

    def __init__(self, number: int) -> None:
        self._name = f"sink {number}"
        self.script: list[str] = []
        self.may_return = threading.Event()
        self.may_return.set()
        self.total = 0.0
        self.event_ids: list[int] = []
        self.wrong: list[str] = []
        self.is_closed = False
        self._inside = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_inside(self) -> bool:
        return self._inside.locked()

    def deliver(self, collection: CollectionReport) -> None:
        if not self._inside.acquire(blocking=False):
            self.wrong.append("called while it delivers")
            return
        try:
            if self.is_closed:
                self.wrong.append("called after its end")
            what = self.script.pop() if self.script else "take"
            if "block" in what:
                self.may_return.wait(_PATIENCE_SECONDS)
            if "fail" in what:
                raise OSError("on purpose")
            mine = [each for each in collection.windows if each.definition.name == "records"]
            self.total += sum(each.values["sum"] for each in mine)
            self.event_ids += [each.id for each in collection.events if each.name == "mark"]
        finally:
            self._inside.release()

    def close(self) -> None:
        if self._inside.locked():
            self.wrong.append("closed while it delivers")
        if self.is_closed:
            self.wrong.append("closed twice")
        self.is_closed = True


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """Make thread starts fail, as at the end of a program since Python 3.12."""
    refusal = RuntimeError("can't create new thread at interpreter shutdown")
    with mock.patch.object(threading.Thread, "start", side_effect=refusal):
        yield
