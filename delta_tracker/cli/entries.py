"""Summaries of log entries, and concurrent reads of many entries."""

from __future__ import annotations

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
    """Amount of data of one table in one or more versions. ``num_bytes`` counts the stored values, without ids."""

    rows: int = 0
    num_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.rows + other.rows, self.num_bytes + other.num_bytes)


class OwnerChanges(Struct, frozen=True):
    """Numbers of a table's rows whose raw id is new (``admitted``) or was removed without a new one (``evicted``)."""

    admitted: int
    evicted: int


class Entry(Struct, frozen=True, kw_only=True, rename={"num_rows": "rows", "num_bytes": "bytes", "num_parts": "parts"}):
    """Summary of an entry's manifest. The attributes have the names of the JSON output. Times are Unix seconds.

    Args:
        kind: claim, snapshot or delta.
        cut: time of the cut.
        created: time of the commit by the publisher's clock.
        committed: time of the commit by the store's clock.
        batches: half-open range of the trainer's step counts that the version covers.
        pending_rows: number of changed rows left for later versions.
        num_rows: number of rows in all parts.
        num_bytes: bytes of all objects: the parts with ids and dense tensors, and in format 2 the states.
        part_bytes: bytes of the parts, which predictors read.
        tables: FQN to amount of data, for each table that has rows in this version.
        owners: FQN to the changes of raw ids, for each table with raw ids; None if they are unknown, as in the first
            version of a publisher that continues a stream.
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
        """Numbers of rows that got a new raw id, and of rows that lost theirs, as text.

        ``?`` if they are unknown; empty without such tables, as in a claim.
        """
        known = [each for each in self.owners.values() if each is not None]
        if len(known) < len(self.owners):
            return "?"
        sums = sum(each.admitted for each in known), sum(each.evicted for each in known)
        return " / ".join(map(count, sums)) if known else ""

    @property
    def took(self) -> str:
        """Time from the cut to the commit as text; empty if it is unknown, as in a claim."""
        return duration(self.created - self.cut) if 0 < self.cut <= self.created else ""

    @property
    def skew(self) -> float:
        """Publisher's clock minus the store's clock at the commit, in seconds; see :attr:`Manifest.skew`."""
        return self.created - self.committed

    @classmethod
    def of(cls, manifest: Manifest) -> Entry:
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
    """Return the amount of data of each table, by FQN. A row in several column shards is counted once per shard."""
    blocks = (block for part in manifest.parts for block in part.blocks)
    return total({each.table: Amount(each.num_rows, each.num_rows * each.row_bytes)} for each in blocks)


def total(amounts: Iterable[Mapping[str, Amount]]) -> defaultdict[str, Amount]:
    """Return the sum of amounts of data, by FQN."""
    found = defaultdict[str, Amount](Amount)
    for each in amounts:
        for fqn, amount in each.items():
            found[fqn] += amount
    return found


def contiguous(versions: Sequence[int]) -> int:
    """Return the start index of the contiguous range that ends at the last version; 0 if ``versions`` is empty.

    A new reader reads only versions in this range. ``versions`` must be ascending.

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
    """Read entries concurrently and yield the results in the order of ``names``. Holds at most 32 of them in memory.

    Args:
        names: versions or names of the entries, passed to ``read``.
        read: returns an entry; None if it does not exist.

    Yields:
        Pairs of a name and the entry, the error if the entry is malformed, or None if it does not exist.
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
