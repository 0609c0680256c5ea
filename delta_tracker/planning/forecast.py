"""Forecast of memory, bytes, requests, disk and start-up time of a stream in a bucket."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from delta_tracker.planning.version_size import VersionSize, delta_size, snapshot_size, table_bytes
from delta_tracker.planning.workload import Workload
from delta_tracker.types import TableSpec, TrackingMode

_HOUR = 3600.0
_ID_BYTES = 8
# Constants of the publisher and the predictor; tests compare them with the requests of a real stream.
_ENTRY_CHECKS = 3  # reads for each entry by its publisher: of the entry before it, and twice of its own
_POINTER_SECONDS = 1.0
_SCAN_SECONDS = 600.0
_RETAIN_EVERY = 16
_GAP_CHECK_SECONDS = 5.0
_HEARTBEAT_SECONDS = 5.0
_PAGE_OBJECTS = 1000
_RETENTION_LISTS = 6  # listings of a retention pass besides those of the log and the parts
_RETENTION_HEADS = 2
_STATE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Numbers of requests per hour.

    Providers bill ``PUT``, ``POST`` and ``LIST`` as class A, ``GET`` and ``HEAD`` as class B. Most do not bill
    deletions.

    Args:
        puts: requests that write.
        lists: pages of listings.
        gets: requests that read, also of objects that do not exist yet.
        heads: requests for the size of an object.
        deletes: deletions.
    """

    puts: float = 0.0
    lists: float = 0.0
    gets: float = 0.0
    heads: float = 0.0
    deletes: float = 0.0

    def __add__(self, other: Requests) -> Requests:
        mine, others = asdict(self), asdict(other)
        return Requests(**{name: mine[name] + others[name] for name in mine})

    def times(self, factor: float) -> Requests:
        """Return these numbers multiplied by ``factor``."""
        return Requests(**{name: factor * value for name, value in asdict(self).items()})

    @property
    def class_a(self) -> float:
        """Requests per hour that write or list."""
        return self.puts + self.lists

    @property
    def class_b(self) -> float:
        """Requests per hour that read."""
        return self.gets + self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Memory, bytes, requests, disk and start-up of a stream in a bucket.

    Args:
        workload: the workload.
        delta: sizes of a delta.
        snapshot: sizes of a snapshot.
        tracker_bytes: maximum memory of the tracker on one rank.
        publisher_bytes: memory of the host on one rank for the copy of the rows of a delta. A GPU takes as much, at
            most 512 MiB, and torch rounds pinned memory up to a power of two.
        predictor_bytes: memory of a predictor: the tables, and the parts of a snapshot and a delta.
        written_bytes: bytes written per hour, by all ranks.
        read_bytes: bytes read per hour, by one predictor.
        publisher: requests of the publisher, without retention.
        retention: requests of the retention.
        predictor: requests of one predictor that follows.
        entries: maximum number of entries that the log keeps; None if nothing is deleted.
        disk_bytes: maximum bytes of the stream; None if nothing is deleted.
        start_bytes: bytes that a new predictor reads, with half of the deltas between two snapshots; None if there is
            only one snapshot, so that they grow without a bound.
        longest_start_bytes: the same with all of these deltas.
    """

    workload: Workload
    delta: VersionSize
    snapshot: VersionSize
    tracker_bytes: int
    publisher_bytes: int
    predictor_bytes: int
    written_bytes: float
    read_bytes: float
    publisher: Requests
    retention: Requests
    predictor: Requests
    entries: int | None
    disk_bytes: int | None
    start_bytes: float | None
    longest_start_bytes: float | None

    @property
    def requests(self) -> Requests:
        """Requests per hour of the publisher, the retention and all predictors."""
        return self.publisher + self.retention + self.predictor.times(self.workload.predictors)


def forecast(workload: Workload) -> Forecast:
    """Return the forecast for a workload.

    Counted are the requests to a bucket in steady operation, without HTTP caches, compaction, hints, pins, ``status()``
    and metrics, training states, raw ids, retries, and the requests of starting processes.

    Example:
        >>> import torch
        >>> from delta_tracker.types import TableSpec
        >>> table = TableSpec("user", 1_000_000, 64, torch.float32)
        >>> found = forecast(Workload(tables=(table,), changed=0.01, seconds=60, snapshot_every=60))
        >>> found.tracker_bytes, found.publisher_bytes  # 3 bits per row; 9/8 of 10,000 rows with their ids
        (375000, 2970000)
    """
    delta, snapshot = delta_size(workload), snapshot_size(workload)
    versions = _HOUR / workload.seconds
    snapshots = 0.0 if workload.snapshot_every is None else versions / workload.snapshot_every
    deltas = versions - snapshots
    held = _reused(delta.reads().memory_bytes + snapshot.reads().memory_bytes)
    entries = _entries(workload)
    start = longest = None
    if workload.snapshot_every is not None:
        first, each = snapshot.entry_bytes + snapshot.reads().num_bytes, delta.entry_bytes + delta.reads().num_bytes
        longest = first + (workload.snapshot_every - 1) * each
        start = (first + longest) / 2
    return Forecast(
        workload=workload,
        delta=delta,
        snapshot=snapshot,
        tracker_bytes=_tracker_bytes(workload),
        publisher_bytes=_publisher_bytes(workload),
        predictor_bytes=table_bytes(workload.tables) + workload.dense_bytes + held,
        written_bytes=deltas * delta.num_bytes + snapshots * snapshot.num_bytes,
        read_bytes=deltas * (delta.entry_bytes + delta.reads().num_bytes)
        + snapshots * (snapshot.entry_bytes + snapshot.reads().num_bytes),
        publisher=_publisher(versions, deltas, snapshots, delta, snapshot),
        retention=_retention(workload, versions, entries),
        predictor=_predictor(workload, deltas, snapshots, delta, snapshot),
        entries=entries,
        disk_bytes=_disk_bytes(workload, entries, delta, snapshot),
        start_bytes=start,
        longest_start_bytes=longest,
    )


def _tracker_bytes(workload: Workload) -> int:
    """Return the bytes of the sets of changed rows of rank 0, which has the most rows.

    There are at most as many sets as consumers, one for the rows that change now, and one for an uncommitted read. A
    set has a bit per row, or a byte with the torch engine. In a mode with old states, it has an id and an old state for
    each row that changed.
    """
    num_sets = 2 + workload.consumers
    row_bits = 8 if workload.is_torch_engine else 1
    return num_sets * sum(
        math.ceil(row_bits * workload.rows_of_rank(table, 0)[1] / 8)
        + _rows_of_delta(workload, table) * _old_state_bytes(workload.mode, table)
        for table in workload.tables
    )


def _old_state_bytes(mode: TrackingMode, table: TableSpec) -> int:
    if mode is TrackingMode.EMBEDDING:
        return _ID_BYTES + table.dim * table.dtype.itemsize
    return _ID_BYTES + _STATE_BYTES if mode in (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD) else 0


def _rows_of_delta(workload: Workload, table: TableSpec) -> int:
    return math.ceil(workload.rows_per_version(table) / workload.ranks)


def _publisher_bytes(workload: Workload) -> int:
    """Return the bytes of the changed rows of one rank in the tables' dtypes, their ids, and the dense tensors."""
    rows = sum(
        _rows_of_delta(workload, table) * (table.dim * table.dtype.itemsize + _ID_BYTES) for table in workload.tables
    )
    return _reused(rows + workload.dense_bytes)


def _reused(num_bytes: int) -> int:
    """Return the size of reused memory for ``num_bytes``: an eighth more, so that it also fits a larger version."""
    return num_bytes + num_bytes // 8


def _publisher(versions: float, deltas: float, snapshots: float, delta: VersionSize, snapshot: VersionSize) -> Requests:
    """Return the requests of the publisher: parts, entries, the reads that check each entry, and the pointer."""
    scans = _HOUR / _SCAN_SECONDS
    return Requests(
        puts=deltas * delta.num_writes + snapshots * snapshot.num_writes + min(versions, _HOUR / _POINTER_SECONDS),
        gets=_ENTRY_CHECKS * versions + scans,
        lists=versions + 2 * scans,  # names above each entry
    )


def _entries(workload: Workload) -> int | None:
    """Return the maximum number of entries: retention deletes in passes, and only versions before a snapshot."""
    if workload.retained_versions is None or workload.snapshot_every is None:
        return None
    needed = workload.snapshot_every + math.ceil(workload.grace_seconds / workload.seconds)
    return max(workload.retained_versions, needed) + _RETAIN_EVERY


def _retention(workload: Workload, versions: float, entries: int | None) -> Requests:
    """Return the requests of the retention: a pass lists all objects and reads each entry."""
    if entries is None:
        return Requests()
    passes = versions / _RETAIN_EVERY
    pages = math.ceil(entries / _PAGE_OBJECTS) + math.ceil(entries * workload.ranks / _PAGE_OBJECTS)
    heads = _RETENTION_HEADS * passes
    return Requests(
        puts=passes,
        lists=passes * (_RETENTION_LISTS + pages + 2),  # two listings to renew the pointer
        gets=passes * (entries + 1),
        heads=heads,
        deletes=versions * (1 + workload.ranks) + passes,
    )


def _predictor(
    workload: Workload, deltas: float, snapshots: float, delta: VersionSize, snapshot: VersionSize
) -> Requests:
    """Return the requests of one predictor: entries, parts, polls that find nothing, checks for gaps, heartbeats."""
    polls = _HOUR / workload.poll_seconds
    checks = _HOUR / (_GAP_CHECK_SECONDS + workload.poll_seconds / 2)
    of_delta, of_snapshot = delta.reads(), snapshot.reads()
    return Requests(
        puts=_HOUR / max(_HEARTBEAT_SECONDS, workload.poll_seconds) if workload.has_heartbeats else 0.0,
        gets=deltas * (1 + of_delta.num_gets) + snapshots * (1 + of_snapshot.num_gets) + polls + 2 * checks,
        heads=deltas * of_delta.num_heads + snapshots * of_snapshot.num_heads,
    )


def _disk_bytes(workload: Workload, entries: int | None, delta: VersionSize, snapshot: VersionSize) -> int | None:
    if entries is None or workload.snapshot_every is None:
        return None
    snapshots = math.ceil(entries / workload.snapshot_every)
    return snapshots * snapshot.num_bytes + (entries - snapshots) * delta.num_bytes
