"""The states of a version while it is published, and what the ranks vote to change them at the same batch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from delta_tracker.stream.format.manifest import Kind
from delta_tracker.types import Delta


class Stage(Enum):
    """How far a version is. All ranks change it at the same batch; without a version there is no flight."""

    COPYING = "copying"
    """All rows of a snapshot are copied and written while training continues. Then the changed ones are read."""
    WRITING = "writing"
    """The rows are read. They are written and committed while training continues."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A version that is being published.

    Args:
        kind: what it is to be.
        stage: how far it is.
        job: what the worker does in this stage: the copied part, or None without one; then the committed manifest.
        read: the tracker's read that it consists of, once there is one.
    """

    kind: Kind
    stage: Stage
    job: Future[Any]
    read: Delta | None = None


class Votes(NamedTuple):
    """What a rank votes after a batch, to be counted at the next one. Each holds if it holds for any rank.

    Args:
        is_due: a version should begin.
        wants_snapshot: it should be a snapshot.
        is_working: the worker has not finished the present stage.
    """

    is_due: bool = False
    wants_snapshot: bool = False
    is_working: bool = False
