"""The version that a publisher writes, for tests whose result must not depend on the speed of its threads."""

from __future__ import annotations

from concurrent import futures

from delta_tracker import Publisher
from delta_tracker.publisher.versions import Copying, Cut, Flight


def flight(publisher: Publisher) -> Flight | None:
    """Return the state of the version; None if there is none."""
    versions = publisher._versions
    return None if versions is None else versions._flight


def finish(publisher: Publisher) -> None:
    """Wait until the threads of a publisher have done what they can without the training thread."""
    found = flight(publisher)
    if isinstance(found, Copying):
        futures.wait([found.job])
    elif isinstance(found, Cut) and found.is_started:
        futures.wait([found.outcome])
