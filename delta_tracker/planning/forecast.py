"""Forecast of memory, traffic, requests, disk space and start-up time of a stream in a bucket."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch

from delta_tracker.buffers import capacity
from delta_tracker.planning.workload import Workload
from delta_tracker.predictor.polling import GAP_CHECK_SECONDS
from delta_tracker.stream.format.codec import pack_ids
from delta_tracker.stream.format.digests import PIECE_BYTES
from delta_tracker.stream.format.manifest import Block, DenseSpec, IdForm, Kind, Link, Manifest, Part
from delta_tracker.stream.format.object_reader import MEMORY_BYTES
from delta_tracker.stream.format.part_writer import HASHED_BYTES, is_shared, safetensors_header
from delta_tracker.stream.heartbeat import BEAT_SECONDS
from delta_tracker.stream.log import part_name
from delta_tracker.stream.maintenance.retention import GRACE_SECONDS
from delta_tracker.stream.maintenance.upkeep import RETAIN_EVERY
from delta_tracker.stream.pointer_writer import POINTER_SECONDS, SCAN_SECONDS
from delta_tracker.stream.storage.objects import PAGE_OBJECTS, UPLOAD_BYTES
from delta_tracker.tracker.modes import CAPTURES
from delta_tracker.tracker.row_sets.engines import ENGINES
from delta_tracker.types import TableSpec

_HOUR = 3600.0
_ID_BYTES = 8
# Counted requests of the publisher and of retention. Tests compare them with those of a real stream.
_ENTRY_CHECKS = 3  # reads for each entry by its publisher: of the entry before it, and twice of its own
_RETENTION_LISTS = 6  # listings of a retention pass besides those of the log and the parts
_RETENTION_HEADS = 2
_SAMPLE = 1 << 16
_HASH = "0" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Numbers of requests to a store per hour.

    Providers bill ``PUT``, ``POST`` and ``LIST`` as class A, and ``GET`` and ``HEAD`` as class B. Most providers do not
    bill deletions.

    Args:
        puts: requests that write an object, including all requests of a multipart upload.
        lists: requests that list objects, one for each page.
        gets: requests that read an object, including requests for objects that do not exist yet.
        heads: requests for the size of an object.
        deletes: requests that delete an object.
    """

    puts: float = 0.0
    lists: float = 0.0
    gets: float = 0.0
    heads: float = 0.0
    deletes: float = 0.0

    def __add__(self, other: "Requests") -> "Requests":
        mine, others = asdict(self), asdict(other)
        return Requests(**{name: mine[name] + others[name] for name in mine})

    def times(self, factor: float) -> "Requests":
        """Return a copy with all numbers multiplied by ``factor``."""
        return Requests(**{name: factor * value for name, value in asdict(self).items()})

    @property
    def class_a(self) -> float:
        """Number of class A requests (write or list) per hour."""
        return self.puts + self.lists

    @property
    def class_b(self) -> float:
        """Number of class B requests (read) per hour."""
        return self.gets + self.heads


@dataclass(frozen=True, slots=True)
class VersionSize:
    """Sizes of the objects that store one version.

    Args:
        entry_bytes: size of the entry in the log.
        part_bytes: size of each part. Ranks without data in the version write no part.
    """

    entry_bytes: int
    part_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the entry and all parts in bytes."""
        return self.entry_bytes + sum(self.part_bytes)

    @property
    def num_writes(self) -> int:
        """Number of requests that write the parts and the entry. Large parts are multipart uploads."""
        return 1 + sum(1 if each <= UPLOAD_BYTES else 2 + math.ceil(each / UPLOAD_BYTES) for each in self.part_bytes)

    @property
    def read_bytes(self) -> int:
        """Number of bytes that one predictor receives while it reads the entry and the parts."""
        return self.entry_bytes + self.reads().num_bytes

    def reads(self, memory_bytes: int = MEMORY_BYTES) -> "Reads":
        """Return the requests that one predictor sends to read the parts.

        Parts that fit in ``memory_bytes`` together are read once, as a whole. Each other part is read twice, in pieces:
        once to check the hash, and once to apply the rows.
        """
        left, num_gets, num_heads, num_bytes = memory_bytes, 0, 0, 0
        for each in self.part_bytes:
            if each <= left:
                left, num_gets, num_bytes = left - each, num_gets + 1, num_bytes + each
            else:
                num_gets += 2 * math.ceil(each / PIECE_BYTES)
                num_heads, num_bytes = num_heads + 1, num_bytes + 2 * each
        return Reads(num_gets, num_heads, num_bytes, memory_bytes - left)


@dataclass(frozen=True, slots=True)
class Reads:
    """Requests that one predictor sends to read the parts of one version.

    Args:
        num_bytes: number of bytes received.
        memory_bytes: memory in bytes for the parts that are read as a whole.
    """

    num_gets: int
    num_heads: int
    num_bytes: int
    memory_bytes: int


class Forecast:
    """Result of :func:`forecast`: memory, traffic, requests, disk space and start-up time of a stream in a bucket."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.delta = version_size(workload, "delta")
        self.snapshot = version_size(workload, "snapshot")
        self._versions = _HOUR / workload.seconds
        self._snapshots = 0.0 if workload.snapshot_every is None else self._versions / workload.snapshot_every
        self._deltas = self._versions - self._snapshots

    @property
    def tracker_bytes(self) -> int:
        """Maximum size in bytes of the sets of changed rows in the tracker of rank 0 (the rank with the most rows).

        The tracker has at most one set for each consumer, one for newly changed rows, and one for an uncommitted read.
        If the mode includes old states, a set also contains an id and an old state for each changed row.
        """
        load = self.workload
        num_sets, capture = 2 + load.consumers, CAPTURES[load.mode]
        row_bits = max(each.row_bits for name, each in ENGINES.items() if (name == "torch") == load.is_torch_engine)
        num_bytes = 0
        for table in load.tables:
            num_bytes += math.ceil(row_bits * load.rows_of_rank(table, 0)[1] / 8)
            if capture.keeps_old:
                num_bytes += self._rows_of_delta(table) * (_ID_BYTES + capture.old_state_bytes(table))
        return num_sets * num_bytes

    @property
    def publisher_bytes(self) -> int:
        """Host memory in bytes on one rank for a copy of the rows of a delta, their ids, and the dense tensors.

        On a GPU, the copy takes the same amount of device memory, at most 512 MiB. Torch may round the amount up.
        """
        num_bytes = {each.fqn: each.dim * each.dtype.itemsize + _ID_BYTES for each in self.workload.tables}
        rows = sum(self._rows_of_delta(each) * num_bytes[each.fqn] for each in self.workload.tables)
        return capacity(rows + self.workload.dense_bytes)

    @property
    def predictor_bytes(self) -> int:
        """Memory of a predictor in bytes: tables, dense tensors, and the parts of a snapshot and a delta."""
        held = capacity(self.delta.reads().memory_bytes + self.snapshot.reads().memory_bytes)
        return self.workload.table_bytes + self.workload.dense_bytes + held

    @property
    def written_bytes(self) -> float:
        """Number of bytes that all ranks together write per hour."""
        return self._deltas * self.delta.num_bytes + self._snapshots * self.snapshot.num_bytes

    @property
    def read_bytes(self) -> float:
        """Number of bytes that one predictor reads per hour."""
        return self._deltas * self.delta.read_bytes + self._snapshots * self.snapshot.read_bytes

    @property
    def publisher(self) -> Requests:
        """Requests of the publisher per hour, without retention: writes of versions and pointer, and entry checks."""
        versions, scans = self._versions, _HOUR / SCAN_SECONDS
        return Requests(
            puts=self._deltas * self.delta.num_writes
            + self._snapshots * self.snapshot.num_writes
            + min(versions, _HOUR / POINTER_SECONDS),
            gets=_ENTRY_CHECKS * versions + scans,
            lists=versions + 2 * scans,  # names above each entry
        )

    @property
    def retention(self) -> Requests:
        """Requests of retention per hour. Each pass lists all objects and reads all entries."""
        if self.entries is None:
            return Requests()
        passes = self._versions / RETAIN_EVERY
        num_ranks = self.workload.ranks
        pages = math.ceil(self.entries / PAGE_OBJECTS) + math.ceil(self.entries * num_ranks / PAGE_OBJECTS)
        return Requests(
            puts=passes,
            lists=passes * (_RETENTION_LISTS + pages + 2),  # two listings to renew the pointer
            gets=passes * (self.entries + 2),
            heads=_RETENTION_HEADS * passes,
            deletes=self._versions * (1 + num_ranks) + passes,
        )

    @property
    def predictor(self) -> Requests:
        """Requests of one predictor per hour: entries, parts, polls without a version, gap checks, and heartbeats."""
        poll_seconds = self.workload.poll_seconds
        polls, checks = _HOUR / poll_seconds, _HOUR / (GAP_CHECK_SECONDS + poll_seconds / 2)
        delta, snapshot = self.delta.reads(), self.snapshot.reads()
        return Requests(
            puts=_HOUR / max(BEAT_SECONDS, poll_seconds) if self.workload.has_heartbeats else 0.0,
            gets=self._deltas * (1 + delta.num_gets) + self._snapshots * (1 + snapshot.num_gets) + polls + 2 * checks,
            heads=self._deltas * delta.num_heads + self._snapshots * snapshot.num_heads,
        )

    @property
    def requests(self) -> Requests:
        """Total requests of the publisher, retention and all predictors per hour."""
        return self.publisher + self.retention + self.predictor.times(self.workload.predictors)

    @property
    def entries(self) -> int | None:
        """Maximum number of entries in the log; None if no entries are deleted."""
        load = self.workload
        if load.retained_versions is None or load.snapshot_every is None:
            return None
        needed = load.snapshot_every + math.ceil(GRACE_SECONDS / load.seconds)
        return max(load.retained_versions, needed) + RETAIN_EVERY

    @property
    def disk_bytes(self) -> int | None:
        """Maximum size of the stream in bytes; None if no versions are deleted."""
        if self.entries is None or self.workload.snapshot_every is None:
            return None
        snapshots = math.ceil(self.entries / self.workload.snapshot_every)
        return snapshots * self.snapshot.num_bytes + (self.entries - snapshots) * self.delta.num_bytes

    @property
    def start_bytes(self) -> float | None:
        """Mean number of bytes that a new predictor reads: a snapshot, and half of the deltas between two snapshots.

        None if only one snapshot is written, because the number of deltas is then unbounded.
        """
        longest = self.longest_start_bytes
        return None if longest is None else (self.snapshot.read_bytes + longest) / 2

    @property
    def longest_start_bytes(self) -> int | None:
        """Maximum number of bytes that a new predictor reads; None if :attr:`start_bytes` is None."""
        if self.workload.snapshot_every is None:
            return None
        return self.snapshot.read_bytes + (self.workload.snapshot_every - 1) * self.delta.read_bytes

    def _rows_of_delta(self, table: TableSpec) -> int:
        return math.ceil(self.workload.rows_per_version(table) / self.workload.ranks)


def forecast(workload: Workload) -> Forecast:
    """Return the forecast for a workload.

    The forecast is for a bucket in steady operation. It does not include HTTP caches, compaction, hints, pins,
    ``status()``, metrics, training states, raw ids, retries, and requests at the start of a process.

    Example:
        >>> import torch
        >>> from delta_tracker.types import TableSpec
        >>> table = TableSpec("user", 1_000_000, 64, torch.float32)
        >>> found = forecast(Workload(tables=(table,), changed=0.01, seconds=60, snapshot_every=60))
        >>> found.tracker_bytes, found.publisher_bytes  # 3 bits per row; 9/8 of 10,000 rows with their ids
        (375000, 2970000)
    """
    return Forecast(workload)


def version_size(workload: Workload, kind: Kind) -> VersionSize:
    """Return the sizes of the objects of one delta or snapshot. Rows that change during a snapshot are not counted.

    Example:
        >>> table = TableSpec("user", 1_000_000, 64, torch.float32)
        >>> size = version_size(Workload(tables=(table,), changed=0.01, seconds=60), "delta")
        >>> round(size.part_bytes[0], -4)  # 10,000 rows of 256 bytes and their ids of 8 bytes
        2640000
    """
    parts = []
    for rank in range(workload.ranks):
        blocks = list(_blocks(workload, rank, kind))
        dense_bytes = workload.dense_bytes if rank == 0 else 0
        if blocks or dense_bytes:
            tensors = _tensors(blocks, dense_bytes)
            num_bytes = sum(each.num_bytes for each in tensors.values())
            is_hashed = num_bytes >= HASHED_BYTES and is_shared(blocks, has_dense=bool(dense_bytes))
            digests = (_HASH,) * len(tensors) if is_hashed else ()
            num_bytes += len(safetensors_header(tensors.items()))
            parts.append(Part(part_name(1, 1, f"r{rank}"), num_bytes, _HASH, tuple(blocks), (), tensors=digests))
    entry = Manifest(
        stream=_HASH,
        generation=1,
        writer=_HASH,
        version=1000,
        kind=kind,
        parent=Link(999, _HASH),
        snapshot=1000,
        batches=(100_000, 100_100),
        cut=time.time(),
        created=time.time(),
        tables={each.fqn: each for each in workload.tables},
        parts=tuple(parts),
    )
    return VersionSize(len(entry.to_json()), tuple(part.num_bytes for part in parts))


def _blocks(workload: Workload, rank: int, kind: Kind) -> Iterator[Block]:
    for table in workload.tables:
        first, end = workload.rows_of_rank(table, rank)
        share = (end - first) / max(1, table.num_rows)
        num_rows, encoding = end - first, workload.encoding_of(table)
        form: IdForm = "all"
        if kind == "delta":
            num_rows, form = min(num_rows, round(workload.rows_per_version(table) * share)), encoding.listed_form
        if num_rows:
            yield Block(table.fqn, (first, end), (0, table.dim), num_rows, form, encoding)


def _tensors(blocks: Sequence[Block], dense_bytes: int) -> dict[str, DenseSpec]:
    tensors: dict[str, DenseSpec] = {}
    for index, block in enumerate(blocks):
        if block.ids == "list":
            tensors[f"{index}.ids"] = DenseSpec("int64", (block.num_rows,))
        elif block.ids == "gaps":
            packed, escapes = _gaps(float(f"{block.num_rows / (block.rows[1] - block.rows[0]):.3g}"))
            tensors[f"{index}.gaps"] = DenseSpec("uint8", (round(packed * block.num_rows),))
            tensors[f"{index}.escapes"] = DenseSpec("int64", (round(escapes * block.num_rows),))
        width = block.encoding.width(block.num_columns)
        tensors[f"{index}.values"] = DenseSpec(block.encoding.dtype_name, (block.num_rows, width))
    if dense_bytes:
        tensors["dense.0"] = DenseSpec("uint8", (dense_bytes,))
    return tensors


@cache
def _gaps(density: float) -> tuple[float, float]:
    """Return the compressed bytes and the number of large gaps (escapes) per id, for random ids."""
    gaps = np.random.default_rng(0).geometric(min(1.0, density), _SAMPLE)
    packed, escapes = pack_ids(torch.from_numpy(np.cumsum(gaps) - 1))
    return len(packed) / _SAMPLE, len(escapes) / _SAMPLE
