"""Summaries of log entries, and concurrent reads of many entries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from delta_tracker.cli.text import count
from delta_tracker.errors import MalformedError
from delta_tracker.stream.format.manifest import Manifest

KIND_STYLES = {"snapshot": "cyan", "claim": "yellow", "delta": ""}
_READS = 16  # concurrent requests to a remote store
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Amount:
    """Amount of data of one table in one or more versions.

    Args:
        rows: number of rows.
        num_bytes: bytes of the stored values, without ids.
    """

    rows: int = 0
    num_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.rows + other.rows, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """Summary of an entry's manifest.

    Args:
        version: index in the log.
        kind: claim, snapshot or delta.
        generation: generation of the publisher.
        cut: time of the cut, in Unix seconds.
        created: time of the commit by the publisher's clock, in Unix seconds.
        committed: time of the commit by the store's clock, in Unix seconds.
        batches: half-open range of the trainer's step counts that the version covers.
        pending_rows: number of changed rows left for later versions.
        num_rows: number of rows in all parts.
        num_bytes: bytes of all objects: the parts with ids and dense tensors, and in format 2 the states.
        part_bytes: bytes of the parts, which are what predictors read.
        num_parts: number of parts.
        tables: FQN to amount of data, for each table that has rows in this version.
        owners: FQN to the number of rows that got a raw id, and of rows that lost theirs, for each table with raw ids
            whose numbers the publisher knew.
        num_mapped: number of tables with raw ids.
    """

    version: int
    kind: str
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
    owners: Mapping[str, tuple[int, int]]
    num_mapped: int

    @property
    def owner_changes(self) -> str:
        """Numbers of rows that got a raw id or another one, and that lost theirs, as text.

        ``?`` if they are unknown, as in the first version of a publisher that continues a stream; empty without such
        tables, as in a claim.
        """
        if not self.num_mapped:
            return ""
        if len(self.owners) < self.num_mapped:
            return "?"
        return " / ".join(count(sum(numbers)) for numbers in zip(*self.owners.values(), strict=True))

    @property
    def skew(self) -> float:
        """Publisher's clock minus the store's clock at the commit, in seconds; see :attr:`Manifest.skew`."""
        return self.created - self.committed

    @classmethod
    def of(cls, manifest: Manifest) -> Entry:
        """Return the summary of ``manifest``."""
        return cls(
            manifest.version,
            manifest.kind,
            manifest.generation,
            manifest.cut,
            manifest.created,
            manifest.committed,
            manifest.batches,
            manifest.pending_rows,
            manifest.num_rows,
            manifest.total_bytes,
            manifest.num_bytes,
            len(manifest.parts),
            amounts(manifest),
            manifest.owner_changes,
            len(manifest.identities),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the summary as JSON values. Times are Unix seconds."""
        return {
            "version": self.version,
            "kind": self.kind,
            "generation": self.generation,
            "cut": self.cut,
            "created": self.created,
            "committed": self.committed,
            "batches": list(self.batches),
            "pending_rows": self.pending_rows,
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "parts": self.num_parts,
            "tables": {fqn: {"rows": each.rows, "bytes": each.num_bytes} for fqn, each in self.tables.items()},
            "owners": {
                fqn: {"admitted": admitted, "evicted": evicted} for fqn, (admitted, evicted) in self.owners.items()
            },
        }


def amounts(manifest: Manifest) -> dict[str, Amount]:
    """Return the amount of data of each table, by FQN. A row in several column shards is counted once per shard."""
    found: dict[str, Amount] = {}
    for part in manifest.parts:
        for block in part.blocks:
            held = found.get(block.table, Amount())
            found[block.table] = held + Amount(block.num_rows, block.num_rows * block.row_bytes)
    return found


def read_all(
    names: Sequence[_T], read: Callable[[_T], Manifest | None], keep: Callable[[Manifest], _R]
) -> Iterator[tuple[_T, _R | MalformedError | None]]:
    """Read entries concurrently and yield the results in the order of ``names``.

    Args:
        names: versions or names of the entries, passed to ``read``.
        read: returns an entry; None if it does not exist.
        keep: converts an entry to the value to yield. Only this value is held in memory.

    Yields:
        Pairs of a name and a value: the result of ``keep``, the error if the entry is malformed, or None if the entry
        does not exist.

    Raises:
        StorageError: if the store cannot be read.
    """

    def one(name: _T) -> _R | MalformedError | None:
        try:
            manifest = read(name)
        except MalformedError as error:
            return error
        return None if manifest is None else keep(manifest)

    left = iter(names)
    pool = ThreadPoolExecutor(_READS, thread_name_prefix="read")
    try:
        under_way: deque[tuple[_T, Future[_R | MalformedError | None]]] = deque()
        under_way.extend((name, pool.submit(one, name)) for name in islice(left, 2 * _READS))
        while under_way:
            name, future = under_way.popleft()
            yield name, future.result()
            under_way.extend((name, pool.submit(one, name)) for name in islice(left, 1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
