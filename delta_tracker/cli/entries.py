"""Summaries of log entries, and concurrent reads of many entries."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec import Struct

from delta_tracker.cli.text import count, duration
from delta_tracker.errors import MalformedError
from delta_tracker.stream.format.manifest import Kind, Manifest

_READS = 16  # concurrent requests to a remote store
_BATCH = 2 * _READS  # entries that are read ahead, which take memory
_T = TypeVar("_T")


class Amount(Struct, frozen=True, rename={"num_bytes": "bytes"}):
    """Number of rows of one table in one or more versions, and the size of these rows in bytes without row ids."""

    rows: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.rows + other.rows, self.num_bytes + other.num_bytes)


class OwnerChanges(Struct, frozen=True):
    """Number of rows with a new raw id (``admitted``), and of rows that lost theirs without a new one (``evicted``)."""

    admitted: int
    evicted: int


class Entry(Struct, frozen=True, kw_only=True, rename={"num_rows": "rows", "num_bytes": "bytes", "num_parts": "parts"}):
    """Summary of a log entry for output as text or JSON. Times are Unix seconds.

    Args:
        kind: ``claim``, ``snapshot`` or ``delta``.
        cut: time at which the publisher read the rows.
        created: time of the commit, according to the publisher's clock.
        committed: time of the commit, according to the store's clock.
        batches: half-open range of the trainer's step counts that the version covers.
        pending_rows: number of changed rows that are not in the version and stay pending.
        num_rows: number of rows in all parts.
        num_bytes: total size of the version's objects in bytes: parts and, in format 2, states.
        part_bytes: total size of the parts in bytes. Predictors read only parts: rows, row ids and dense tensors.
        tables: amount of data of each table that has rows in the version, by FQN.
        owners: changes of raw ids in each table with raw ids, by FQN. None if the changes are unknown, for example in
            the first version of a publisher that continues a stream.
    """

    version: int
    kind: Kind
    generation: int
    cut: float
    created: float
    committed: float
    batches: tuple[int, int]
    pending_rows: int
    num_rows: int
    num_bytes: int
    part_bytes: int
    num_parts: int
    tables: dict[str, Amount]
    owners: dict[str, OwnerChanges | None]

    @property
    def owner_changes(self) -> str:
        """Total numbers of admitted and evicted raw ids, formatted as text.

        The text is ``?`` if a number is unknown. It is empty if the entry has no tables with raw ids.
        """
        known = [each for each in self.owners.values() if each is not None]
        if len(known) < len(self.owners):
            return "?"
        sums = sum(each.admitted for each in known), sum(each.evicted for each in known)
        return " / ".join(map(count, sums)) if known else ""

    @property
    def took(self) -> str:
        """Time from the cut to the commit, formatted as text. Empty if it is unknown, for example for a claim."""
        return duration(self.created - self.cut) if 0 < self.cut <= self.created else ""

    @property
    def skew(self) -> float:
        """The publisher's clock minus the store's clock at the commit, in seconds; see :attr:`Manifest.skew`."""
        return self.created - self.committed

    @classmethod
    def of(cls, manifest: Manifest) -> "Entry":
        """Return the summary of ``manifest``."""
        changes = {fqn: manifest.owner_changes.get(fqn) for fqn in manifest.identities}
        return cls(
            version=manifest.version,
            kind=manifest.kind,
            generation=manifest.generation,
            cut=manifest.cut,
            created=manifest.created,
            committed=manifest.committed,
            batches=manifest.batches,
            pending_rows=manifest.pending_rows,
            num_rows=manifest.num_rows,
            num_bytes=manifest.total_bytes,
            part_bytes=manifest.num_bytes,
            num_parts=len(manifest.parts),
            tables=amounts(manifest),
            owners={fqn: None if each is None else OwnerChanges(*each) for fqn, each in changes.items()},
        )


def amounts(manifest: Manifest) -> dict[str, Amount]:
    """Return the amount of data of each table in ``manifest``, by FQN. Rows are counted once per column shard."""
    blocks = (block for part in manifest.parts for block in part.blocks)
    return total({each.table: Amount(each.num_rows, each.num_rows * each.row_bytes)} for each in blocks)


def total(amounts: Iterable[Mapping[str, Amount]]) -> defaultdict[str, Amount]:
    """Add up amounts of data, and return the sum for each table, by FQN."""
    found = defaultdict[str, Amount](Amount)
    for each in amounts:
        for fqn, amount in each.items():
            found[fqn] += amount
    return found


def contiguous(versions: Sequence[int]) -> int:
    """Return the index in ``versions`` at which the last range without gaps begins; 0 if ``versions`` is empty.

    New readers read only the versions in this range. ``versions`` must be in ascending order.

    Example:
        >>> contiguous([0, 1, 5, 6, 7])
        2
    """
    first = len(versions) - 1
    while first > 0 and versions[first - 1] == versions[first] - 1:
        first -= 1
    return max(first, 0)


def read_all(
    names: Sequence[_T], read: Callable[[_T], Manifest | None]
) -> Iterator[tuple[_T, Manifest | MalformedError | None]]:
    """Read entries concurrently, and yield the results in the order of ``names``. Buffers at most 32 results.

    Args:
        names: names or versions of the entries, which are passed to ``read``.
        read: function that returns an entry, or None if the entry is missing.

    Yields:
        Pairs of a name and a result. The result is the entry, an error if it is malformed, or None if it is missing.
    """

    def one(name: _T) -> Manifest | MalformedError | None:
        try:
            return read(name)
        except MalformedError as error:
            return error

    pool = ThreadPoolExecutor(_READS, thread_name_prefix="read")
    try:
        for begin in range(0, len(names), _BATCH):
            batch = names[begin : begin + _BATCH]
            yield from zip(batch, pool.map(one, batch), strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
