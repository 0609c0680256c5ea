"""Heartbeats of a publisher, which show that its training thread advances: :class:`Heartbeats`."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage


class Heartbeats:
    """Writer of the heartbeats of a publisher, in a thread of its own.

    The thread writes only when the training thread calls :meth:`beat` or :meth:`wait`, so that a job whose training
    hangs is considered dead.

    Args:
        storage: store of the stream.
        seconds: time between two heartbeats. The first is written this long after the claim.
    """

    def __init__(self, storage: Storage, seconds: float, runtime: Runtime) -> None:
        self._seconds = seconds
        self._writer = PublisherHeartbeatWriter(storage, seconds)
        self._worker = runtime.executor("publisher-heartbeat")
        # Start the thread now: a system that has no more threads must not fail training later.
        self._job: Future[None] = self._worker.submit(lambda: None)

    def beat(self, head: Manifest) -> None:
        """Start to write a heartbeat if one is due and none is being written. Makes no request in this thread."""
        if self._writer.is_due() and self._job.done():
            self._job = self._worker.submit(self._writer.write, head)

    def wait(self, job: Future[Any], head: Manifest) -> None:
        """Wait until a job has ended, and write heartbeats meanwhile."""
        while not job.done():
            self.beat(head)
            wait([job], self._seconds)

    def close(self) -> None:
        """End the thread after the heartbeat in progress."""
        self._worker.shutdown()
