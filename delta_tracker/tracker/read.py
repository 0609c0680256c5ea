"""One read of a consumer of the change log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from delta_tracker.rows import ChangedRows
from delta_tracker.types import Delta, DeltaRows


class ReadLog(Protocol):
    """Interface of a change log to its reads. Each method implements the method of :class:`Read` with its name."""

    def hold(self, read: Read) -> None:
        """Make ``read`` the only read of its consumer."""

    def commit(self, read: Read) -> None:
        """Move the consumer's cursor to the end of ``read``."""

    def abort(self, read: Read) -> None:
        """Discard ``read``."""


@dataclass(slots=True, eq=False)
class Read:
    """Read of a consumer, which ends with :meth:`commit` or :meth:`abort`.

    Until then, no compaction merges the rows marked before the end of the read with later ones. Whatever else changes
    the consumer discards the read.

    Args:
        log: the change log, which began the read.
        consumer: name of the consumer.
        start: log position of the consumer's cursor.
        stop: log position of the cut at which the read ends.
        batches: ``step()`` counts at the consumer's last committed read and at this one.

    Attributes:
        rows: table FQN to pending rows, including carried rows (see :class:`~delta_tracker.tracker.cursors.Consumer`),
            before top-k selects some of them. Empty after :meth:`hold`.
        shared: FQNs of the tables whose tensors in ``rows`` belong to the log. Copy these tensors before returning
            them to the user.
        delta: result of :meth:`returns`; None if it was not called, because the read returned all of ``rows``.
    """

    log: ReadLog
    consumer: str
    start: int
    stop: int
    batches: tuple[int, int]
    rows: Mapping[str, ChangedRows] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    delta: Delta | None = None

    def returns(self, rows: Mapping[str, DeltaRows], left_out: Mapping[str, ChangedRows] | None = None) -> Delta:
        """Return the delta with ``rows``. Call it before :meth:`hold` and :meth:`commit`.

        Args:
            rows: table FQN to the rows that the consumer receives.
            left_out: table FQN to the rows that top-k left out.
        """
        start, stop, batches = self.start, self.stop, self.batches
        self.delta = Delta(rows, consumer=self.consumer, start=start, stop=stop, batches=batches, left_out=left_out)
        return self.delta

    def hold(self) -> None:
        """Leave the read uncommitted, and discard an earlier uncommitted one, whose rows it includes.

        Raises:
            StaleDeltaError: if the read was discarded.
            InvalidArgumentError: if the consumer was removed.
        """
        self.log.hold(self)

    def commit(self) -> None:
        """Move the consumer's cursor to the end of the read. The rows that its delta left out stay pending.

        If the call is interrupted, the rows of the read may stay pending, with unknown old states. The errors are those
        of :meth:`hold`.
        """
        self.log.commit(self)

    def abort(self) -> None:
        """Discard the read: its rows stay pending, after :meth:`commit` with unknown old states.

        An earlier uncommitted read of the consumer stays valid. Does nothing if the read was discarded.
        """
        self.log.abort(self)
