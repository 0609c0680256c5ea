"""What a change log knows at one moment: the form in which a checkpoint takes it out and puts it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from delta_tracker.rows import ChangedRows


@dataclass(frozen=True, slots=True, eq=False)
class PendingState:
    """What one consumer has not received yet.

    Args:
        batch: ``step()`` count at its last committed read.
        rows: table FQN to its pending rows, each with the state in which the consumer has it; tables without any may
            be missing.
        is_behind: its changes were given up to bound memory; ``rows`` is then empty.
    """

    batch: int
    rows: Mapping[str, ChangedRows]
    is_behind: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether there is anything that it has not received."""
        return self.is_behind or any(map(len, self.rows.values()))


@dataclass(frozen=True, slots=True, eq=False)
class LogState:
    """All that a log knows at one moment.

    Args:
        num_batches: ``step()`` calls.
        consumers: name to what is pending for it.
        history: table FQN to all rows changed since the start, in a log that keeps them; otherwise None.
    """

    num_batches: int
    consumers: Mapping[str, PendingState]
    history: Mapping[str, ChangedRows] | None = None
