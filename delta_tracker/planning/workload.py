"""Description of a stream to forecast, specified by the caller or estimated from an existing stream."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from delta_tracker.arguments import check_count, check_type, is_number
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import FORMAT, Block, Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.url import REMOTE_POLL_SECONDS
from delta_tracker.types import TableSpec, TrackingMode

_COUNTS = {"ranks": 1, "predictors": 0, "consumers": 1, "dense_bytes": 0}
_LEAST_SECONDS = 0.001
_MAX_BLOCKS = 200_000  # of one version, whose sizes are computed one by one
_MINUTE = 60.0
_NUM_ENTRIES = 100  # the newest ones, which show the workload of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tables, rates and readers of a stream, as input of :func:`~delta_tracker.planning.forecast.forecast`.

    The forecast assumes that rows are split evenly over the ranks (row-wise sharding), and that changed rows are spread
    evenly over a table. A row that changes again in a later version counts again.

    Args:
        tables: tables of the model, such as ``tuple(tracker.tables.values())``.
        changed: fraction of rows that change per minute, 0 or more: one number for all tables, or a mapping by FQN. A
            delta contains the fraction ``min(1, changed * seconds / 60)`` of the rows.
        seconds: seconds between two versions.
        encoding: encoding of the rows; None for each table's own dtype.
        ranks: number of ranks of the trainer.
        predictors: number of predictors that read the bucket.
        poll_seconds: seconds between two polls of a predictor. The default is that of ``follow()`` for a bucket.
        has_heartbeats: True if the predictors write heartbeats, which they do if they have a name.
        snapshot_every: value of ``Cadence.snapshot_every``; None if the only snapshot is at the start.
        retained_versions: value of ``Retention.versions``; None if no versions are deleted.
        dense_bytes: size in bytes of the dense tensors, which are part of each version.
        mode: tracking mode.
        consumers: number of consumers of the tracker.
        is_torch_engine: True if the tracker uses the torch engine, which takes more memory than other engines.

    Raises:
        InvalidArgumentError: if there are no tables or more than 200,000 shards, if a table does not support the
            encoding, or if a number is invalid.

    Example:
        >>> import torch
        >>> table = TableSpec("user", 1_000_000, 64, torch.float32)
        >>> Workload(tables=(table,), changed=0.01, seconds=30).rows_per_version(table)
        5000
    """

    tables: tuple[TableSpec, ...]
    changed: float | Mapping[str, float]
    seconds: float
    encoding: Encoding | None = None
    ranks: int = 1
    predictors: int = 1
    poll_seconds: float = REMOTE_POLL_SECONDS
    has_heartbeats: bool = True
    snapshot_every: int | None = None
    retained_versions: int | None = None
    dense_bytes: int = 0
    mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: int = 1
    is_torch_engine: bool = False

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            check_count(name, getattr(self, name), least)
        for name in ("snapshot_every", "retained_versions"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("seconds", "poll_seconds"):
            seconds = getattr(self, name)
            if not is_number(seconds) or seconds < _LEAST_SECONDS:
                raise InvalidArgumentError(name, seconds, f"Pass seconds, {_LEAST_SECONDS:g} or more")
        if not isinstance(self.mode, TrackingMode):
            raise InvalidArgumentError("mode", self.mode, f"Pass one of {[str(mode) for mode in TrackingMode]}")
        check_type("encoding", self.encoding, Encoding, "Encoding.INT8")
        self._check_tables()

    def _check_tables(self) -> None:
        if not self.tables:
            raise InvalidArgumentError("tables", self.tables, "Pass at least one table")
        if self.ranks * len(self.tables) > _MAX_BLOCKS:
            tables = "1 table" if len(self.tables) == 1 else f"{len(self.tables)} tables"
            remedy = f"Pass at most {_MAX_BLOCKS // len(self.tables)} ranks for {tables}"
            raise InvalidArgumentError("ranks", self.ranks, remedy)
        names = [table.fqn for table in self.tables]
        if len(set(names)) < len(names):
            raise InvalidArgumentError("tables", names, "Give each table another name")
        for table in self.tables:
            share = self._changed_of(table)
            if not is_number(share) or share < 0:
                raise InvalidArgumentError("changed", share, f"Pass a fraction of 0 or more for {table.fqn}")
            self.encoding_of(table).width(table.dim)  # raises if the width is not supported

    @property
    def table_bytes(self) -> int:
        """Total size of the tables in bytes, in their own dtypes."""
        return sum(each.num_bytes for each in self.tables)

    def encoding_of(self, table: TableSpec) -> Encoding:
        """Return the encoding of a table's rows in the stream."""
        return Encoding.of(table.dtype_name) if self.encoding is None else self.encoding

    def rows_per_version(self, table: TableSpec) -> int:
        """Return the number of rows of a table in a delta, summed over all ranks."""
        num_rows = table.num_rows * min(1.0, self._changed_of(table) * self.seconds / _MINUTE)
        return math.ceil(round(num_rows, 6))  # 3.0000000004 is 3

    def _changed_of(self, table: TableSpec) -> float:
        if not isinstance(self.changed, Mapping):
            return self.changed
        if table.fqn not in self.changed:
            raise InvalidArgumentError("changed", sorted(self.changed), f"Pass a fraction for {table.fqn} too")
        return self.changed[table.fqn]

    def rows_of_rank(self, table: TableSpec, rank: int) -> tuple[int, int]:
        """Return the half-open range of a table's rows on a rank, for row-wise sharding as in TorchRec."""
        block = math.ceil(table.num_rows / self.ranks)
        return min(rank * block, table.num_rows), min((rank + 1) * block, table.num_rows)


def observe(log: StreamLog) -> Workload:
    """Estimate the workload of an existing stream from its last 100 entries. Reads no rows.

    ``seconds`` is the median interval between versions, and ``ranks`` is the largest number of parts in a delta.

    Raises:
        InvalidArgumentError: if there is no stream; if the entries contain fewer than two deltas; if the stream has
            training states or raw ids; or if it has several encodings, unless each is the dtype of its table.
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
