"""Records of a change log's consumers: cursors, reads, times of changes, and the state for a checkpoint."""

import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import ChangedRows
from delta_tracker.types import Delta, DeltaRows

_NO_ROWS: Mapping[str, ChangedRows] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Read:
    """Uncommitted read of a consumer. Created by :meth:`LogConsumers.read`.

    Compaction does not merge rows marked before the end of the read with later rows. A commit, a rewind, or any other
    change of the consumer's record discards the read.

    Args:
        consumer: name of the consumer.
        start: log position of the consumer's cursor.
        stop: log position of the cut at which the read ends.
        batches: ``step()`` counts at the consumer's last committed read and at this read.

    Attributes:
        rows: pending rows by table FQN, including carried rows (see :class:`Consumer`) and rows that top-k leaves out.
            :meth:`LogConsumers.hold` empties this mapping.
        delta: result of :meth:`returns`, which must be called before the read is held or committed; None until then.
    """

    consumer: str
    start: int
    stop: int
    batches: tuple[int, int]
    rows: dict[str, ChangedRows] = field(default_factory=dict)
    delta: Delta | None = None

    def returns(self, rows: Mapping[str, DeltaRows], left_out: Mapping[str, ChangedRows] | None = None) -> Delta:
        """Create and return the delta of this read. ``left_out`` are the rows that top-k excluded from ``rows``."""
        start, stop, batches = self.start, self.stop, self.batches
        self.delta = Delta(rows, consumer=self.consumer, start=start, stop=stop, batches=batches, left_out=left_out)
        return self.delta


class Consumer(NamedTuple):
    """Immutable record of a consumer: its cursor, its reads and its carried rows.

    *Carried rows* are pending rows that are not in the log after the cursor: rows that top-k left out of committed
    reads, rows that a checkpoint or a rewind restored, and rows that were made pending for this consumer only.

    Callers replace the record in one statement. An interrupted call therefore changes all of its fields or none.
    """

    name: str
    position: int  # log position of the cursor
    batch: int  # `step()` count of the cursor
    moved_at: float  # time of the last committed read
    carried: Mapping[str, ChangedRows] = _NO_ROWS  # by table FQN
    carried_since: float | None = None  # time of the oldest change of a carried row, or a bound on it
    reads: tuple[Read, ...] = ()  # those that can be committed; any other change of the consumer discards them
    was_dropped: bool = False  # True if the consumer was dropped and needs a snapshot
    holder: str | None = None  # description of the owner that reserved the consumer
    is_transient: bool = False  # True if it exists only while a snapshot is copied; it is not saved in checkpoints
    note: object = None  # JSON value that the owner has set, or that was loaded with a state
    noted_at: int | None = None  # position when the note was set or loaded
    restored_at: int | None = None  # position at the last load of a state

    def moved(self, position: int, batch: int, carried: Mapping[str, ChangedRows] = _NO_ROWS) -> Self:
        """Return a copy of the record that has a new cursor, the carried rows ``carried``, and no reads.

        The cursor is at ``position`` and ``batch``. The age of the carried rows is measured from this call.
        """
        now = time.monotonic()
        rows = {fqn: rows for fqn, rows in carried.items() if len(rows)} if carried else _NO_ROWS
        since = now if rows else None
        moved = self._replace(position=position, batch=batch, moved_at=now, carried=rows, carried_since=since)
        return moved._replace(reads=(), was_dropped=False)

    def dropped(self, position: int, since: float | None) -> Self:
        """Return a copy of the record that marks the consumer as dropped. The copy has no pending rows.

        ``since`` is the time of the oldest change in the dropped rows; None if unknown.
        """
        oldest = self.moved_at if since is None else since
        moved = self.moved(position, self.batch)
        return moved._replace(moved_at=self.moved_at, carried_since=oldest, was_dropped=True)


@dataclass(frozen=True, slots=True, eq=False)
class PendingState:
    """State of one consumer in a :class:`LogState`.

    Args:
        batch: ``step()`` count at the consumer's last committed read.
        rows: pending rows by table FQN, with the old states that the tracking mode keeps. Tables without pending rows
            may be missing.
        was_dropped: True if the consumer was dropped and needs a snapshot. ``rows`` is then empty.
        note: the owner's note, a JSON value; None if not set.
    """

    batch: int
    rows: Mapping[str, ChangedRows]
    was_dropped: bool = False
    note: object = None


@dataclass(frozen=True, slots=True, eq=False)
class LogState:
    """State of a change log for a checkpoint.

    Args:
        num_batches: number of ``step()`` calls.
        consumers: state of each consumer, by name.
        history: all rows changed since the tracker was created, by table FQN; None if the log does not keep them.
    """

    num_batches: int
    consumers: Mapping[str, PendingState]
    history: Mapping[str, ChangedRows] | None = None


class Cursors:
    """Records of a log's consumers, and the times of changes between the cursors.

    Callers must hold the log's lock, except to read a single attribute or record.

    Args:
        names: names of the consumers. There must be at least one name, and no name twice.

    Attributes:
        consumers: records by name, in the order in which the consumers were added.
        origin: rows by table FQN that a rewind makes pending in addition to all rows in the log: rows that changed
            before the log's first position, and rows that were made pending for one consumer only.
        num_batches: number of ``step()`` calls, including the calls counted in a restored checkpoint.

    Raises:
        InvalidArgumentError: if ``names`` is empty, is a string or contains a name twice, or if a name is not a string.
    """

    def __init__(self, names: Sequence[str]) -> None:
        is_list = not isinstance(names, str) and isinstance(names, Collection)
        for name in names if is_list else ():
            check_consumer_name(name)
        if not is_list or not names or len(set(names)) != len(names):
            raise InvalidArgumentError("consumers", names, "Pass a list of one or more different names")
        self.consumers = {name: Consumer(name, 0, 0, time.monotonic()) for name in names}
        self.origin = _NO_ROWS
        self.num_batches = 0
        self._times: dict[int, float] = {}  # both ascending

    @property
    def pinned(self) -> set[int]:
        """Positions at which segments must not be merged: the cursors, and the ends of uncommitted reads.

        Dropped consumers are ignored.
        """
        pinned = set()
        for each in self.consumers.values():
            if not each.was_dropped:
                pinned.add(each.position)
                for read in each.reads:
                    pinned.add(read.stop)
        return pinned

    @property
    def num_bytes(self) -> int:
        """Size of the carried rows of all consumers in bytes."""
        return sum(rows.num_bytes for each in self.consumers.values() for rows in each.carried.values())

    def rows(self) -> Iterator[ChangedRows]:
        """Yield the rows of :attr:`origin`, then each consumer's carried rows and the rows that its reads left out."""
        yield from self.origin.values()
        for each in self.consumers.values():
            yield from each.carried.values()
            for read in each.reads:
                if read.delta is not None:
                    yield from read.delta.held_back.values()

    def note_change(self, position: int) -> None:
        """Record the current time as the time of the first change at ``position``, unless one was recorded before."""
        if position not in self._times:
            self._times[position] = time.monotonic()

    def pending_since(self, consumer: Consumer) -> float | None:
        """Return the time of the oldest change of a consumer's pending rows; None if no row is known to be pending.

        The time (``time.monotonic()``) is exact for rows in the log, and a lower bound for rows that reads left out.
        A row that a read finds by comparing a shard with a copy counts as changed at the time of the read.
        """
        since = consumer.carried_since
        for position, when in self._times.items():
            if position >= consumer.position:
                return when if since is None else min(since, when)
        return since

    def merge_times(self, pinned: Collection[int]) -> None:
        """For each interval that starts at a position in ``pinned``, keep only the time of the earliest change."""
        ordered, times = sorted(pinned), dict[int, float]()
        for position, when in self._times.items():
            index = bisect_right(ordered, position)
            if index:
                times.setdefault(ordered[index - 1], when)
        self._times = times


def check_consumer_name(name: object) -> None:
    """Raise InvalidArgumentError if ``name`` is not a string."""
    if not isinstance(name, str):
        raise InvalidArgumentError("consumer", name, "Pass a name that is a string, such as 'serving'")
