"""What the entries of an existing stream show of its workload."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.workload import Workload
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import FORMAT, Block, Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.types import TableSpec

_NUM_ENTRIES = 100
_MINUTE = 60.0
_LEAST_SECONDS = 1e-3


def observe(log: StreamLog) -> Workload:
    """Return the workload of a stream, from its last 100 entries. Reads no rows.

    The time between two versions is their median, and the number of ranks the largest number of parts of a delta.

    Raises:
        InvalidArgumentError: if there is no stream, or if it has fewer than two deltas, has states or raw ids, or has
            different encodings of tables of one dtype.
        MalformedError, StorageError: if the entries cannot be read.
    """
    url = log.storage.url
    entries = [entry for entry in map(log.read, log.versions()[-_NUM_ENTRIES:]) if entry is not None]
    if not entries:
        raise InvalidArgumentError("--from", url, "Check the URL, or start the publisher: there is no stream")
    versions = [entry for entry in entries if entry.kind != "claim"]
    deltas = [entry for entry in versions if entry.kind == "delta"]
    if len(deltas) < 2:  # noqa: PLR2004  a rate needs two times
        raise InvalidArgumentError("--from", url, "Pass a stream with two deltas or more, or describe it with --table")
    if versions[-1].format != FORMAT:
        remedy = "Describe its tables with --table: its states or raw ids are not part of a plan"
        raise InvalidArgumentError("--from", url, remedy)
    gaps = [after.seconds_since(before) for before, after in pairwise(versions)]
    seconds = max(_LEAST_SECONDS, statistics.median(gaps))
    tables = tuple(versions[-1].tables.values())
    snapshots = [entry.version for entry in versions if entry.kind == "snapshot"]
    return Workload(
        tables=tables,
        changed={each.fqn: _changed(deltas, each) * _MINUTE / seconds for each in tables},
        seconds=seconds,
        encoding=_encoding(url, versions, tables),
        ranks=max(len(entry.parts) for entry in deltas) or 1,
        snapshot_every=snapshots[-1] - snapshots[-2] if len(snapshots) > 1 else None,
        dense_bytes=sum(spec.num_bytes for spec in versions[-1].dense.values()),
    )


def _blocks(entries: list[Manifest]) -> Iterator[Block]:
    return (block for entry in entries for part in entry.parts for block in part.blocks)


def _changed(deltas: list[Manifest], table: TableSpec) -> float:
    """Return the mean share of a table's rows in a delta."""
    cells = sum(block.num_rows * block.num_columns for block in _blocks(deltas) if block.table == table.fqn)
    return cells / len(deltas) / max(1, table.num_rows * table.dim)


def _encoding(url: str, versions: list[Manifest], tables: tuple[TableSpec, ...]) -> Encoding | None:
    dtypes = {each.fqn: each.dtype for each in tables}
    found = {block.table: block.encoding for block in _blocks(versions) if block.table in dtypes}
    if all(encoding is Encoding.of(dtypes[fqn]) for fqn, encoding in found.items()):
        return None
    if len(set(found.values())) > 1:
        remedy = "Describe its tables with --table, one encoding at a time: they have different encodings"
        raise InvalidArgumentError("--from", url, remedy)
    return next(iter(found.values()))
