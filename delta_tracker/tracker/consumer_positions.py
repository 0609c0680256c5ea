"""Registry of the consumers of a change log, with the cursor, uncommitted read and carried rows of each consumer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from delta_tracker.errors import InvalidArgumentError, ReservedConsumerError, StaleDeltaError
from delta_tracker.rows import ChangedRows, merge_first
from delta_tracker.tracker.log_state import PendingState
from delta_tracker.tracker.read import Read
from delta_tracker.types import Delta


@dataclass(frozen=True, slots=True, eq=False)
class Consumer:
    """Record of a consumer."""

    position: int  # log position of the cursor
    batch: int  # `step()` count of the cursor
    read: Read | None = None  # uncommitted read
    reading: Read | None = None  # read in progress
    carried: Mapping[str, ChangedRows] = field(default_factory=dict)  # by table FQN
    is_behind: bool = False  # True if the consumer was dropped and needs a snapshot
    holder: str | None = None  # description of the owner that reserved the consumer
    is_transient: bool = False  # True if it exists only while a snapshot is copied; it is not saved in checkpoints

    def moved(self, position: int, batch: int) -> Consumer:
        """Return the record at another position, without reads and carried rows."""
        return Consumer(position=position, batch=batch, holder=self.holder, is_transient=self.is_transient)


class ConsumerPositions:
    """Registry of a log's consumers.

    For each consumer, it keeps the cursor (a log position and a ``step()`` count), the reads and the carried rows.
    *Carried rows* are pending rows that are not in the log after the cursor: rows that committed reads left out, rows
    that were restored from a checkpoint or by a rewind, and rows that were made pending for this consumer only (see
    :meth:`~delta_tracker.tracker.log_consumers.LogConsumers.distrust`).

    The last statement of each method that changes a consumer replaces the consumer's record, so that an interrupted
    call has either no effect or its whole effect.

    Args:
        names: names of the consumers, at least one, all different.

    Attributes:
        num_batches: number of ``step()`` calls.

    Raises:
        InvalidArgumentError: if ``names`` is empty, repeats a name or is a string, or if a name is not a string.
    """

    def __init__(self, names: Sequence[str]) -> None:
        is_list = not isinstance(names, str) and isinstance(names, Collection)
        for name in names if is_list else ():
            check_name(name)
        if not is_list or not names or len(set(names)) != len(names):
            raise InvalidArgumentError("consumers", names, "Pass a list of one or more different names")
        self._consumers = {name: Consumer(position=0, batch=0) for name in names}
        self._origin: Mapping[str, ChangedRows] = {}
        self.num_batches = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all consumers, in the order in which they were added."""
        return tuple(self._consumers)

    @property
    def pinned(self) -> set[int]:
        """Positions across which segments must not be merged: cursors and ends of reads.

        Positions of dropped consumers are not included.
        """
        standing = self._standing.values()
        reads = [read for each in standing for read in (each.read, each.reading) if read is not None]
        return {each.position for each in standing} | {read.stop for read in reads}

    @property
    def oldest(self) -> int | None:
        """Smallest cursor position of the consumers that were not dropped; None if all were dropped.

        No read starts before this position.
        """
        return min([each.position for each in self._consumers.values() if not each.is_behind], default=None)

    @property
    def hindmost(self) -> str | None:
        """Name of the consumer with the lowest cursor position; None if all consumers were dropped."""
        standing = self._standing
        return min(standing, key=lambda name: standing[name].position, default=None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the carried rows of all consumers."""
        return sum(rows.num_bytes for each in self._consumers.values() for rows in each.carried.values())

    def held(self) -> Iterator[ChangedRows]:
        """Yield the rows of :attr:`origin` and, for each consumer, the carried rows and those its read left out."""
        yield from self._origin.values()
        for each in self._consumers.values():
            yield from each.carried.values()
            if each.read is not None and each.read.delta is not None:
                yield from each.read.delta.kept.values()

    def resolve(self, name: str | None) -> str:
        """Return ``name`` if a consumer has this name. If ``name`` is None, return the name of the only consumer.

        Transient consumers are found by name only.

        Raises:
            InvalidArgumentError: if there is no such consumer, or ``name`` is None and there are several consumers.
        """
        if isinstance(name, str) and name in self._consumers:
            return name
        lasting = [known for known, consumer in self._consumers.items() if not consumer.is_transient]
        if name is None and len(lasting) == 1:
            return lasting[0]
        known = ", ".join(map(repr, lasting)) or "none"
        remedy = f"Pass one of the known consumers: {known}"
        if name is None:
            remedy = f"Pass a name, because the tracker has several; known consumers: {known}"
        raise InvalidArgumentError("consumer", name, remedy)

    def reserve(self, name: str, holder: str | None) -> None:
        """Reserve consumer ``name`` for ``holder``, or end the reservation if ``holder`` is None.

        Args:
            name: the consumer.
            holder: description of the owner, for error messages; None to end the reservation.
        """
        self._consumers[name] = replace(self._consumers[name], holder=holder)

    def abandon(self, name: str) -> None:
        """End the reservation of consumer ``name`` and discard its reads. Remove a transient consumer.

        Does nothing if there is no such consumer: memory may have run out before it was added.
        """
        consumer = self._consumers.get(name)
        if consumer is None:
            return
        if consumer.is_transient:
            del self._consumers[name]
        else:
            self._consumers[name] = replace(consumer, holder=None, read=None, reading=None)

    def check_free(self, name: str) -> None:
        """Check that consumer ``name`` is not reserved.

        Raises:
            ReservedConsumerError: if the consumer is reserved.
        """
        holder = self._consumers[name].holder
        if holder is not None:
            remedy = (
                "Pass another consumer, which you add with consumers=[...] or tracker.add_consumer(name): "
                "each reader and each Publisher(tracker, url, consumer) needs its own"
            )
            raise ReservedConsumerError(name, holder, remedy)

    @property
    def origin(self) -> Mapping[str, ChangedRows]:
        """Rows that :meth:`rewind` makes pending in addition to all rows in the log, by table FQN.

        They are rows that changed before the log's first position, for example before a restored checkpoint was saved,
        and rows that :meth:`carry` added.
        """
        return self._origin

    def __getitem__(self, name: str) -> Consumer:
        """Return the record of consumer ``name``."""
        return self._consumers[name]

    def add(self, name: str, position: int, *, holder: str | None) -> None:
        """Add consumer ``name``.

        Args:
            name: the consumer.
            position: position of the cursor.
            holder: description of the owner of a transient consumer, which exists only while a snapshot is copied, is
                not saved in checkpoints and has no metrics. None adds an ordinary consumer.
        """
        self._consumers[name] = Consumer(
            position=position, batch=self.num_batches, holder=holder, is_transient=holder is not None
        )

    def place(self, names: Collection[str], position: int) -> None:
        """Move consumers to a position. Discards their reads and their carried rows.

        Args:
            names: the consumers. They keep their reservations.
            position: position of the cursors.
        """
        moved = {name: self._consumers[name].moved(position, self.num_batches) for name in names}
        self._consumers = {**self._consumers, **moved}

    def give_up(self, name: str, position: int) -> None:
        """Drop consumer ``name``: discard its pending rows and move it to ``position``."""
        known = self._consumers[name]
        self._consumers[name] = replace(known.moved(position, known.batch), is_behind=True)

    def rewind(self, name: str) -> None:
        """Move consumer ``name`` to the log's first position and replace its carried rows with :attr:`origin`.

        Discards its reads.
        """
        self._consumers[name] = replace(self._consumers[name].moved(0, 0), carried=self._origin)

    def restore(self, position: int, states: Mapping[str, PendingState], origin: Mapping[str, ChangedRows]) -> None:
        """Move consumers to a position and replace their carried rows. Discards their reads.

        Args:
            position: position of the cursors.
            states: consumer name to the consumer's state. Its pending rows become the consumer's carried rows.
            origin: new value of :attr:`origin`.
        """
        placed = {
            name: replace(
                self._consumers[name].moved(position, state.batch),
                is_behind=state.is_behind,
                carried={fqn: rows for fqn, rows in state.rows.items() if len(rows)},
            )
            for name, state in states.items()
        }
        self._consumers, self._origin = {**self._consumers, **placed}, origin

    def carry(self, name: str, fqn: str, rows: ChangedRows, *, origin: ChangedRows | None) -> None:
        """Add rows to a consumer's carried rows. If an id is already carried, the new row replaces the old one.

        Discards the consumer's reads.

        Args:
            name: the consumer.
            fqn: the table.
            rows: the rows, with local ids.
            origin: rows to add to :attr:`origin`, so that :meth:`rewind` makes them pending; None to add none.
        """
        consumer = self._consumers[name]
        carried = replace(consumer, carried=_over(rows, fqn, consumer.carried), read=None, reading=None)
        if origin is not None:
            self._origin = _over(origin, fqn, self._origin)
        self._consumers[name] = carried

    def forget_tables(self, fqns: Collection[str]) -> None:
        """Drop all rows of the tables ``fqns`` from the carried rows and from :attr:`origin`.

        Called when the ids in these tables refer to different rows than before. Discards all reads.
        """
        origin = {fqn: rows for fqn, rows in self._origin.items() if fqn not in fqns}
        consumers = {
            name: replace(
                each,
                carried={fqn: rows for fqn, rows in each.carried.items() if fqn not in fqns},
                read=None,
                reading=None,
            )
            for name, each in self._consumers.items()
        }
        self._consumers, self._origin = consumers, origin

    def remove(self, name: str) -> None:
        """Remove consumer ``name``."""
        del self._consumers[name]

    def begin(self, read: Read) -> None:
        """Store ``read`` as the read in progress of its consumer, which replaces an earlier one."""
        self._consumers[read.consumer] = replace(self._consumers[read.consumer], reading=read)

    def hold(self, read: Read) -> None:
        """Make ``read``, which is in progress, the uncommitted read of its consumer. Replaces an earlier one."""
        self._consumers[read.consumer] = replace(self._consumers[read.consumer], read=read, reading=None)

    def advance(self, read: Read) -> None:
        """Move a consumer's cursor to the end of ``read``, and discard its reads.

        The rows that the read left out become the consumer's carried rows.
        """
        carried = {} if read.delta is None else {fqn: rows.aged() for fqn, rows in read.delta.kept.items()}
        self._consumers[read.consumer] = replace(
            self._consumers[read.consumer],
            position=read.stop, batch=read.batches[1], carried=carried, read=None, reading=None,
        )  # fmt: skip

    def discard(self, read: Read) -> bool:
        """Discard ``read``. Return False if it is neither in progress nor uncommitted."""
        consumer = self._consumers.get(read.consumer)
        if consumer is None or read not in (consumer.reading, consumer.read):
            return False
        is_held = consumer.read is read
        self._consumers[read.consumer] = replace(consumer, read=None) if is_held else replace(consumer, reading=None)
        return True

    def has_committed(self, read: Read) -> bool:
        """Return True if the newest change of a consumer's cursor is that of :meth:`advance` with ``read``."""
        return read.consumer in self._consumers and self._consumers[read.consumer].position == read.stop

    def uncommitted(self, delta: Delta) -> Read:
        """Return the uncommitted read that returned ``delta``.

        Raises:
            StaleDeltaError: if there is none.
            InvalidArgumentError: if the consumer was removed.
        """
        read = self._consumers[self.resolve(delta.consumer)].read
        if read is None or read.delta is not delta:
            raise StaleDeltaError(delta.consumer)
        return read

    def current(self, read: Read) -> Consumer:
        """Check that ``read`` is in progress or uncommitted, and return its consumer.

        Raises:
            StaleDeltaError: if it is neither.
            InvalidArgumentError: if the consumer was removed.
        """
        consumer = self._consumers.get(read.consumer) or self._consumers[self.resolve(read.consumer)]
        if read not in (consumer.reading, consumer.read):
            raise StaleDeltaError(read.consumer)
        return consumer

    @property
    def _standing(self) -> dict[str, Consumer]:
        """Mapping from name to consumer, for the consumers that were not dropped. Only these can read the log."""
        return {name: each for name, each in self._consumers.items() if not each.is_behind}


def _over(rows: ChangedRows, fqn: str, tables: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
    """Return a copy of ``tables`` in which ``rows`` are added to table ``fqn`` and replace rows with equal ids."""
    return {**tables, fqn: merge_first(rows, tables[fqn]) if fqn in tables else rows}


def check_name(name: object) -> None:
    """Check the name of a consumer, because a checkpoint with a name of another type could not be loaded.

    Raises:
        InvalidArgumentError: if ``name`` is not a string.
    """
    if not isinstance(name, str):
        raise InvalidArgumentError("consumer", name, "Pass a name that is a string, such as 'serving'")
