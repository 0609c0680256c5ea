"""Statistics of the log of a stream, in bounded memory: sizes, intervals, and a comparison with full snapshots."""

from dataclasses import dataclass, field
from itertools import chain, islice

from delta_tracker.cli.entries import Amount, amounts, total
from delta_tracker.monitor.buckets import LogBuckets
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import TableSpec

MAX_BINS = 480
_MAX_LOST = 100


@dataclass(slots=True, kw_only=True)
class Bin:
    """Statistics of a range of consecutive versions (snapshots and deltas). Times are Unix seconds.

    Args:
        begin: commit time of the first version; see :class:`History`.
        end: commit time of the last version, at least ``begin``.
        restarts: number of claims directly before versions of the bin.
        delta_bytes: total size of the parts of deltas, in bytes.
        snapshot_bytes: total size of the parts of snapshots, in bytes.
        full_bytes: estimated total size of the parts if each version were a full snapshot, in bytes.
        gaps: number of measured intervals between a version of the bin and the previous version.
        gap_seconds: sum of the intervals in seconds.
        max_gap: longest interval in seconds.
        tables: amount of data of each table in the deltas of the bin, by FQN.
    """

    first: int
    last: int
    begin: float
    end: float
    deltas: int = 0
    snapshots: int = 0
    restarts: int = 0
    delta_bytes: int = 0
    snapshot_bytes: int = 0
    full_bytes: int = 0
    gaps: int = 0
    gap_seconds: float = 0.0
    max_gap: float = 0.0
    tables: dict[str, Amount] = field(default_factory=dict)

    def add(self, manifest: Manifest) -> None:
        """Add the next version to the counts, sizes and tables of the bin. :class:`History` sets the other fields."""
        self.last = manifest.version
        if manifest.kind == "delta":
            self.deltas += 1
            self.delta_bytes += manifest.num_bytes
            self.tables = total([self.tables, amounts(manifest)])
        else:
            self.snapshots += 1
            self.snapshot_bytes += manifest.num_bytes


class History:
    """Statistics of a stream's versions (snapshots and deltas) in at most 480 bins.

    The commit time of the first entry is taken from the store's clock. Later times are computed with
    :meth:`Manifest.seconds_since`. Memory usage is one :class:`Amount` per table and bin.

    Args:
        num_entries: upper bound on the number of entries to add.

    Attributes:
        bins: bins in ascending order of versions.
        tables: spec of each table by FQN, from the newest version that contains the table.
        sizes: distribution of the sizes of deltas, in bytes.
        gaps: distribution of the times between the commits of successive versions, in seconds.
        delays: distribution of the times from the cut of a version to its commit, in seconds.
        newest: newest entry that was added; None if there is none.
        missing: ranges of missing versions between existing versions. A gap directly after a claim is omitted, because
            retention keeps claims but deletes the versions after them.
        claims: version and commit time of each claim after the first version. Each claim is a change of publisher.
    """

    def __init__(self, num_entries: int) -> None:
        self.bins: list[Bin] = []
        self.tables: dict[str, TableSpec] = {}
        self.sizes = LogBuckets()
        self.gaps = LogBuckets()
        self.delays = LogBuckets()
        self.newest: Manifest | None = None
        self.missing: list[range] = []
        self.claims: list[tuple[int, float]] = []
        self._versions_per_bin = max(1, -(-num_entries // MAX_BINS))
        self._time = 0.0  # commit time of the newest entry
        self._num_restarts = 0  # claims since the last version
        self._full_bytes = 0  # size of a full snapshot at the newest version
        self._is_measured = False  # True if this is the size of a snapshot in the log

    def add(self, manifest: Manifest) -> None:
        """Add an entry of the log. Entries must be added in ascending order of versions."""
        before, self.newest = self.newest, manifest
        if before is None:
            self._time = manifest.committed
        else:
            self._time += manifest.seconds_since(before)
            if before.kind != "claim" and manifest.version > before.version + 1:
                self.missing.append(range(before.version + 1, manifest.version))
        if manifest.kind != "claim":
            self._add_version(manifest)
        elif self.bins:
            self._num_restarts += 1
            self.claims.append((manifest.version, self._time))

    @property
    def num_missing(self) -> int:
        """Number of versions in :attr:`missing`."""
        return sum(map(len, self.missing))

    @property
    def lost(self) -> list[int]:
        """First 100 versions in :attr:`missing`."""
        return list(islice(chain.from_iterable(self.missing), _MAX_LOST))

    def _add_version(self, manifest: Manifest) -> None:
        self.tables.update(manifest.tables)
        self._update_full_bytes(manifest)
        if manifest.kind == "delta":
            self.sizes.extend([manifest.num_bytes])
        if 0 < manifest.cut <= manifest.created:
            self.delays.extend([manifest.created - manifest.cut])
        last = self.bins[-1] if self.bins else None
        if last is None or last.deltas + last.snapshots >= self._versions_per_bin:
            own = Bin(first=manifest.version, last=manifest.version, begin=self._time, end=self._time)
            self.bins.append(own)
        else:
            own = last
        own.add(manifest)
        own.full_bytes += self._full_bytes
        own.restarts += self._num_restarts
        self._num_restarts = 0
        if last is not None:
            gap = self._time - last.end
            self.gaps.extend([gap])
            own.gaps += 1
            own.gap_seconds += gap
            own.max_gap = max(own.max_gap, gap)
        own.end = self._time

    def _update_full_bytes(self, manifest: Manifest) -> None:
        """Update the estimated size of a full snapshot, which contains all rows and dense tensors.

        The size of the rows depends on the encodings of the newest snapshot. Before the first snapshot, it depends on
        the dtypes of the tables.
        """
        dense = sum(spec.num_bytes for spec in manifest.dense.values())
        if manifest.kind == "snapshot":
            blocks = (block for part in manifest.parts for block in part.blocks if block.ids == "all")
            self._full_bytes, self._is_measured = sum(each.num_rows * each.row_bytes for each in blocks) + dense, True
        elif not self._is_measured:
            self._full_bytes = dense + sum(each.num_bytes for each in self.tables.values())
