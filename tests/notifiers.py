"""Hints of new versions without a broker: :class:`LocalNotifier`."""

from __future__ import annotations

import threading

from delta_tracker.live_objects import Forkable, protect


class LocalNotifier(Forkable):
    """Notifier that sends hints between threads of one process."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._changed = threading.Condition()
        protect(self)

    def announce(self, stream: str, version: int) -> None:
        with self._changed:
            self._newest[stream] = max(version, self._newest.get(stream, version))
            self._changed.notify_all()

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._newest.get(stream, after) > after, timeout_seconds)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held during the fork."""
        self._changed = threading.Condition()
