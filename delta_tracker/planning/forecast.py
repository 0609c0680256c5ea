"""Forecast of memory, bytes, requests, disk and start-up time of a stream in a bucket."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from delta_tracker.buffers import capacity
from delta_tracker.planning.version_size import VersionSize, delta_size, snapshot_size, table_bytes
from delta_tracker.planning.workload import Workload
from delta_tracker.predictor.polling import GAP_CHECK_SECONDS
from delta_tracker.stream.heartbeat import BEAT_SECONDS
from delta_tracker.stream.maintenance.upkeep import RETAIN_EVERY
from delta_tracker.stream.pointer_writer import POINTER_SECONDS, SCAN_SECONDS
from delta_tracker.stream.storage.storage import PAGE_OBJECTS
from delta_tracker.tracker.modes import CAPTURES
from delta_tracker.tracker.row_sets.engines import ENGINES
from delta_tracker.types import TableSpec

_HOUR = 3600.0
_ID_BYTES = 8
# Counted requests of the publisher and of retention. Tests compare them with those of a real stream.
_ENTRY_CHECKS = 3  # reads for each entry by its publisher: of the entry before it, and twice of its own
_RETENTION_LISTS = 6  # listings of a retention pass besides those of the log and the parts
_RETENTION_HEADS = 2


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
    held = capacity(delta.reads().memory_bytes + snapshot.reads().memory_bytes)
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

    There are at most as many sets as consumers, one for the rows that change now, and one for an uncommitted read. In a
    mode with old states, a set has an id and an old state for each row that changed.
    """
    num_sets = 2 + workload.consumers
    capture = CAPTURES[workload.mode]
    row_bits = max(each.row_bits for name, each in ENGINES.items() if (name == "torch") == workload.is_torch_engine)
    return num_sets * sum(
        math.ceil(row_bits * workload.rows_of_rank(table, 0)[1] / 8)
        + (_rows_of_delta(workload, table) * (_ID_BYTES + capture.old_state_bytes(table)) if capture.keeps_old else 0)
        for table in workload.tables
    )


def _rows_of_delta(workload: Workload, table: TableSpec) -> int:
    return math.ceil(workload.rows_per_version(table) / workload.ranks)


def _publisher_bytes(workload: Workload) -> int:
    """Return the bytes of the changed rows of one rank in the tables' dtypes, their ids, and the dense tensors."""
    rows = sum(
        _rows_of_delta(workload, table) * (table.dim * table.dtype.itemsize + _ID_BYTES) for table in workload.tables
    )
    return capacity(rows + workload.dense_bytes)


def _publisher(versions: float, deltas: float, snapshots: float, delta: VersionSize, snapshot: VersionSize) -> Requests:
    """Return the requests of the publisher: parts, entries, the reads that check each entry, and the pointer."""
    scans = _HOUR / SCAN_SECONDS
    return Requests(
        puts=deltas * delta.num_writes + snapshots * snapshot.num_writes + min(versions, _HOUR / POINTER_SECONDS),
        gets=_ENTRY_CHECKS * versions + scans,
        lists=versions + 2 * scans,  # names above each entry
    )


def _entries(workload: Workload) -> int | None:
    """Return the maximum number of entries: retention deletes in passes, and only versions before a snapshot."""
    if workload.retained_versions is None or workload.snapshot_every is None:
        return None
    needed = workload.snapshot_every + math.ceil(workload.grace_seconds / workload.seconds)
    return max(workload.retained_versions, needed) + RETAIN_EVERY


def _retention(workload: Workload, versions: float, entries: int | None) -> Requests:
    """Return the requests of the retention: a pass lists all objects and reads each entry."""
    if entries is None:
        return Requests()
    passes = versions / RETAIN_EVERY
    pages = math.ceil(entries / PAGE_OBJECTS) + math.ceil(entries * workload.ranks / PAGE_OBJECTS)
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
    checks = _HOUR / (GAP_CHECK_SECONDS + workload.poll_seconds / 2)
    of_delta, of_snapshot = delta.reads(), snapshot.reads()
    return Requests(
        puts=_HOUR / max(BEAT_SECONDS, workload.poll_seconds) if workload.has_heartbeats else 0.0,
        gets=deltas * (1 + of_delta.num_gets) + snapshots * (1 + of_snapshot.num_gets) + polls + 2 * checks,
        heads=deltas * of_delta.num_heads + snapshots * of_snapshot.num_heads,
    )


def _disk_bytes(workload: Workload, entries: int | None, delta: VersionSize, snapshot: VersionSize) -> int | None:
    if entries is None or workload.snapshot_every is None:
        return None
    snapshots = math.ceil(entries / workload.snapshot_every)
    return snapshots * snapshot.num_bytes + (entries - snapshots) * delta.num_bytes
