"""Dataclasses that describe the state of a change log. Checkpoints save and restore this state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from delta_tracker.rows import ChangedRows


@dataclass(frozen=True, slots=True, eq=False)
class PendingState:
    """State of one consumer in a :class:`LogState`.

    Args:
        batch: ``step()`` count at the consumer's last committed read.
        rows: table FQN to pending rows, with the old states that the tracking mode keeps. Tables without pending rows
            may be missing.
        is_behind: True if the consumer was dropped and needs a snapshot; ``rows`` is then empty.
    """

    batch: int
    rows: Mapping[str, ChangedRows]
    is_behind: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LogState:
    """State of a change log at one moment.

    Args:
        num_batches: number of ``step()`` calls.
        consumers: consumer name to the consumer's state.
        history: table FQN to all rows changed since the tracker was created, or None if the log does not keep them.
    """

    num_batches: int
    consumers: Mapping[str, PendingState]
    history: Mapping[str, ChangedRows] | None = None
