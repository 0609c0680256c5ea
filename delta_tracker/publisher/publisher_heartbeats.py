"""Heartbeats of a publisher, which show that its training thread advances: :class:`Heartbeats`."""

from concurrent.futures import Future, wait
from typing import Any

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage


class Heartbeats:
    """Writer of a publisher's heartbeats in a background thread.

    A heartbeat is written only when the training thread calls :meth:`beat` or :meth:`wait`. A standby therefore detects
    a job whose training hangs.

    Args:
        storage: store of the stream.
        seconds: time between two heartbeats, and between the claim and the first heartbeat.
    """

    def __init__(self, storage: Storage, seconds: float, runtime: Runtime) -> None:
        self._seconds = seconds
        self._writer = PublisherHeartbeatWriter(storage, seconds)
        self._worker = runtime.executor("publisher-heartbeat")
        # Start the thread now: a system that has no more threads must not fail training later.
        self._job: Future[None] = self._worker.submit(lambda: None)

    def beat(self, head: Manifest) -> None:
        """Start writing a heartbeat if one is due and none is being written. Does not wait for the store."""
        if self._writer.is_due() and self._job.done():
            self._job = self._worker.submit(self._writer.write, head)

    def wait(self, job: Future[Any], head: Manifest) -> None:
        """Wait until ``job`` is done. Write the heartbeats that are due in the meantime."""
        while not job.done():
            self.beat(head)
            wait([job], self._seconds)

    def close(self) -> None:
        """Wait for the heartbeat in progress, and end the thread."""
        self._worker.shutdown()
