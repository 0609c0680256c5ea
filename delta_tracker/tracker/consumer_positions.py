"""The position of each consumer in the log: its cursor, its uncommitted read, and what its reads left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from delta_tracker.errors import InvalidArgumentError, ReservedConsumerError, StaleDeltaError, UnknownConsumerError
from delta_tracker.rows import ChangedRows, merge_first
from delta_tracker.tracker.log_state import PendingState
from delta_tracker.types import Delta


@dataclass(slots=True)
class _Consumer:
    position: int
    batch: int
    sealed: Delta | None = None
    carried: Mapping[str, ChangedRows] = field(default_factory=dict)
    is_behind: bool = False
    holder: str | None = None
    is_transient: bool = False


class ConsumerPositions:
    """Where each consumer stands in the log, in cuts and in batches, and which rows its last reads left out.

    A read seals a range of positions; :meth:`commit` moves the cursor to the range's end and carries over what the
    read left out, :meth:`abort` forgets the read. Sealing again replaces the former read, whose commit is then a
    :class:`StaleDeltaError`.

    Args:
        names: the consumers' names, at least one, all different.

    Raises:
        InvalidArgumentError: for an empty list or a name twice.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not names or len(set(names)) != len(names):
            raise InvalidArgumentError("consumers", names, "Pass a list of one or more different names")
        self._consumers = {name: _Consumer(position=0, batch=0) for name in names}
        self._origin: Mapping[str, ChangedRows] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All consumers, in the order of their making."""
        return tuple(self._consumers)

    @property
    def pinned(self) -> set[int]:
        """Positions that a cursor or an uncommitted read still needs apart from their neighbours."""
        standing = self._standing.values()
        return {each.position for each in standing} | {each.sealed.stop for each in standing if each.sealed is not None}

    @property
    def oldest(self) -> int | None:
        """The smallest cursor: nothing before it will be read. None where there is none."""
        return min((each.position for each in self._consumers.values() if not each.is_behind), default=None)

    @property
    def hindmost(self) -> str | None:
        """The consumer that stands furthest back, None when all were given up."""
        standing = self._standing
        return min(standing, key=lambda name: standing[name].position, default=None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that are carried over."""
        return sum(rows.num_bytes for each in self._consumers.values() for rows in each.carried.values())

    def resolve(self, name: str | None) -> str:
        """The name of a consumer; None means the only one.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
        """
        if name is None and len(self._consumers) == 1:
            return next(iter(self._consumers))
        if name is None or name not in self._consumers:
            raise UnknownConsumerError(name, self._consumers)
        return name

    def reserve(self, name: str, holder: str | None, *, is_transient: bool = False) -> None:
        """Note who alone reads and moves consumer ``name``; None ends the reservation."""
        self._consumers[name].holder = holder
        self._consumers[name].is_transient = is_transient

    def check_free(self, name: str) -> None:
        """Refuse a consumer that is reserved.

        Raises:
            ReservedConsumerError: if it is.
        """
        holder = self._consumers[name].holder
        if holder is not None:
            raise ReservedConsumerError(name, holder)

    @property
    def origin(self) -> Mapping[str, ChangedRows]:
        """Table FQN to the rows that had changed before the log's first position."""
        return self._origin

    def start(self, name: str) -> tuple[int, int]:
        """The cursor of consumer ``name``: its position and its batch count."""
        consumer = self._consumers[name]
        return consumer.position, consumer.batch

    def carried(self, name: str) -> Mapping[str, ChangedRows]:
        """Table FQN to the rows that the committed reads of ``name`` have left out."""
        return self._consumers[name].carried

    def is_behind(self, name: str) -> bool:
        """Whether the changes of ``name`` were given up."""
        return self._consumers[name].is_behind

    def is_transient(self, name: str) -> bool:
        """Return True if ``name`` exists for the time of a copy only, so that no checkpoint holds it."""
        return self._consumers[name].is_transient

    def place(self, name: str, position: int, batch: int, *, is_behind: bool = False) -> None:
        """Put consumer ``name``, new or known, at a position, with nothing pending from before it."""
        placed = _Consumer(position=position, batch=batch, is_behind=is_behind)
        known = self._consumers.get(name)
        if known is not None:
            placed.holder, placed.is_transient = known.holder, known.is_transient
        self._consumers[name] = placed

    def give_up(self, name: str, position: int) -> None:
        """Put consumer ``name`` at a position without what was pending from before it."""
        self.place(name, position, self._consumers[name].batch, is_behind=True)

    def rewind(self, name: str) -> None:
        """Put consumer ``name`` back to the log's first position, with what had changed before it."""
        self.place(name, 0, 0)
        self._consumers[name].carried = self._origin

    def restore(self, position: int, states: Mapping[str, PendingState], origin: Mapping[str, ChangedRows]) -> None:
        """Put every consumer of ``states`` at a position, with what is pending for it. Drops their open reads."""
        self._origin = origin
        for name, state in states.items():
            self.place(name, position, state.batch, is_behind=state.is_behind)
            self._consumers[name].carried = {fqn: rows for fqn, rows in state.rows.items() if len(rows)}

    def carry(self, name: str, fqn: str, rows: ChangedRows, *, in_origin: bool) -> None:
        """Make rows of a table pending for ``name``, in place of what is carried of them. Drops its open read.

        Args:
            name: the consumer.
            fqn: the table.
            rows: the rows.
            in_origin: let :meth:`rewind` give them too.
        """
        consumer = self._consumers[name]
        consumer.carried = _over(rows, fqn, consumer.carried)
        consumer.sealed = None
        if in_origin:
            self._origin = _over(rows, fqn, self._origin)

    def forget_tables(self, fqns: Collection[str]) -> None:
        """Drop what reads have left out of some tables, whose ids mean other rows from now on, and every open read."""
        self._origin = {fqn: rows for fqn, rows in self._origin.items() if fqn not in fqns}
        for consumer in self._consumers.values():
            consumer.carried = {fqn: rows for fqn, rows in consumer.carried.items() if fqn not in fqns}
            consumer.sealed = None

    def remove(self, name: str) -> None:
        """Forget consumer ``name``."""
        del self._consumers[name]

    def seal(self, delta: Delta) -> bool:
        """Make ``delta`` its consumer's one uncommitted read; return True if it had another one."""
        consumer = self._consumers[delta.consumer]
        replaces = consumer.sealed is not None
        consumer.sealed = delta
        return replaces

    def commit(self, delta: Delta) -> None:
        """Move the cursor to the end of the consumer's uncommitted read.

        Raises:
            StaleDeltaError: if ``delta`` is not that read any more.
        """
        consumer = self._sealed_by(delta)
        consumer.carried = {fqn: rows.aged() for fqn, rows in delta.kept.items()}
        consumer.position, consumer.batch, consumer.sealed = delta.stop, delta.batches[1], None

    def abort(self, delta: Delta) -> None:
        """Forget the consumer's uncommitted read; its rows stay pending.

        Raises:
            StaleDeltaError: if ``delta`` is not that read any more.
        """
        self._sealed_by(delta).sealed = None

    @property
    def _standing(self) -> dict[str, _Consumer]:
        """The consumers that were not given up: only they need the log."""
        return {name: each for name, each in self._consumers.items() if not each.is_behind}

    def _sealed_by(self, delta: Delta) -> _Consumer:
        consumer = self._consumers[self.resolve(delta.consumer)]
        if consumer.sealed is not delta:
            raise StaleDeltaError(delta.consumer)
        return consumer


def _over(rows: ChangedRows, fqn: str, tables: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
    """Tables with some rows in place of what was there of them."""
    return {**tables, fqn: merge_first(rows, tables[fqn]) if fqn in tables else rows}
