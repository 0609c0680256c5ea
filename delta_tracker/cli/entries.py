"""The entries of a log, read many at a time and kept as a few numbers each: a log may be long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from delta_tracker.errors import MalformedError
from delta_tracker.stream.format.manifest import Manifest

_READS = 16  # of a remote store at once
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Amount:
    """Rows of one table in a version, and the bytes of their values as they are stored, without ids."""

    rows: int = 0
    num_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.rows + other.rows, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of a manifest.

    Args:
        version: place in the log.
        kind: claim, snapshot or delta.
        generation: of its publisher.
        cut: Unix seconds.
        created: Unix seconds.
        batches: half-open range of the trainer's step counts.
        pending_rows: changed rows that it leaves for later.
        num_rows: rows in all its parts.
        num_bytes: bytes of all its parts, ids and dense tensors included.
        num_parts: objects that it names.
        tables: amount by FQN, of those that have rows in it.
    """

    version: int
    kind: str
    generation: int
    cut: float
    created: float
    batches: tuple[int, int]
    pending_rows: int
    num_rows: int
    num_bytes: int
    num_parts: int
    tables: dict[str, Amount]

    @classmethod
    def of(cls, manifest: Manifest) -> Entry:
        """The numbers of a manifest."""
        return cls(
            manifest.version,
            manifest.kind,
            manifest.generation,
            manifest.cut,
            manifest.created,
            manifest.batches,
            manifest.pending_rows,
            manifest.num_rows,
            manifest.num_bytes,
            len(manifest.parts),
            amounts(manifest),
        )

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "version": self.version,
            "kind": self.kind,
            "generation": self.generation,
            "cut": self.cut,
            "created": self.created,
            "batches": list(self.batches),
            "pending_rows": self.pending_rows,
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "parts": self.num_parts,
            "tables": {fqn: {"rows": each.rows, "bytes": each.num_bytes} for fqn, each in self.tables.items()},
        }


def amounts(manifest: Manifest) -> dict[str, Amount]:
    """Rows and bytes by table. A row in several column shards counts once for each."""
    found: dict[str, Amount] = {}
    for part in manifest.parts:
        for block in part.blocks:
            held = found.get(block.table, Amount())
            found[block.table] = held + Amount(block.num_rows, block.num_rows * block.row_bytes)
    return found


def read_all(
    names: Sequence[_T], read: Callable[[_T], Manifest | None], keep: Callable[[Manifest], _R]
) -> Iterator[tuple[_T, _R | MalformedError | None]]:
    """Read entries in order, several at once.

    Args:
        names: what ``read`` takes.
        read: gives an entry, None if there is none.
        keep: makes of each entry what is kept of it.

    Yields:
        Each name with what is kept of its entry; with the error, if it does not follow the format; None if it is gone.

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
