"""Heartbeats of the predictors of a stream."""

from __future__ import annotations

from delta_tracker.stream.heartbeat import Heartbeat, see_heartbeats
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import StoreClock


def read_heartbeats(storage: Storage) -> list[Heartbeat]:
    """Return them, sorted by object name, without malformed ones."""
    return [seen.beat for seen in see_heartbeats(storage, StoreClock())[0]]
