"""Statistics of a stream's log in bounded memory: sizes, time between versions, comparison with full snapshots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from delta_tracker.cli.entries import Amount, amounts
from delta_tracker.cli.times import CommitTimes, Skews
from delta_tracker.monitor.buckets import LogBuckets
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.types import TableSpec

MAX_BINS = 240
_MAX_LOST = 100
_MAX_CORRECTION = 0.01  # of the time that a chart covers
_SUMS = (
    "deltas",
    "snapshots",
    "restarts",
    "delta_bytes",
    "snapshot_bytes",
    "full_bytes",
    "gaps",
    "gap_seconds",
)


@dataclass(slots=True)
class Bin:
    """Statistics of consecutive snapshots and deltas, here called versions. Times are Unix seconds.

    Args:
        first: first version.
        last: last version.
        begin: commit time of the first version, see :class:`~delta_tracker.cli.times.CommitTimes`.
        end: commit time of the last version, never before ``begin``.
        deltas: number of deltas.
        snapshots: number of snapshots.
        restarts: number of claims between a version and its predecessor, summed over the versions.
        delta_bytes: bytes of the deltas' parts.
        snapshot_bytes: bytes of the snapshots' parts.
        full_bytes: total bytes of the versions if each were a full snapshot.
        pending_rows: maximum of the versions' pending rows.
        gaps: number of versions whose predecessor's commit time is known.
        gap_seconds: seconds from the predecessor's commit to the version's commit, summed over these versions.
        max_gap: longest of these times, in seconds.
        tables: FQN to amount of data of the table in the deltas.
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
    pending_rows: int = 0
    gaps: int = 0
    gap_seconds: float = 0.0
    max_gap: float = 0.0
    tables: dict[str, Amount] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of versions."""
        return self.deltas + self.snapshots

    def merge(self, later: Bin) -> None:
        """Merge ``later``, the bin of the next versions, into this bin."""
        self.last, self.end = later.last, later.end
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in ("pending_rows", "max_gap"):
            setattr(self, name, max(getattr(self, name), getattr(later, name)))
        for fqn, amount in later.tables.items():
            self.tables[fqn] = self.tables.get(fqn, Amount()) + amount


class History:
    """Statistics of a stream's snapshots and deltas, in a bounded number of bins.

    Memory: one :class:`Amount` per table and bin, with at most ``2 * max_bins`` bins.

    Args:
        max_bins: half the maximum number of bins. Neighboring bins are merged when the maximum is exceeded.

    Attributes:
        bins: bins in ascending order of versions.
        tables: FQN to spec of the table in the newest version that has the table.
        totals: FQN to amount of data of the table in all deltas.
        sizes: distribution of the sizes of deltas, in bytes.
        gaps: distribution of the seconds between the commits of successive versions.
        delays: distribution of the seconds from a version's cut to its commit.
        newest: the newest entry that was added; None if there is none.
        skews: differences between the clocks of the publishers and the store's.
        lost: the first 100 missing versions.
        missing: number of missing versions between existing versions. Versions missing after a claim are not counted,
            because retention keeps the claim and deletes the entries after it.
        full_bytes: size of a full snapshot at the newest version, in bytes.
        num_claims: number of claims after a version: new publishers that took over the stream.
        last_claim: newest of these claims; None if there is none.
        min_claim_seconds: shortest time between two consecutive of these claims, infinity if there are not two.
    """

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self.bins: list[Bin] = []
        self.tables: dict[str, TableSpec] = {}
        self.totals: dict[str, Amount] = defaultdict(Amount)
        self.sizes = LogBuckets()
        self.gaps = LogBuckets()
        self.delays = LogBuckets()
        self.skews = Skews()
        self.newest: Manifest | None = None
        self.missing = 0
        self.lost: list[int] = []
        self.full_bytes = 0
        self.num_claims = 0
        self.last_claim: int | None = None
        self.min_claim_seconds = float("inf")
        self._claimed = -float("inf")
        self._max_bins = max_bins
        self._width = 1
        self._is_measured = False
        self._times = CommitTimes()
        self._committed: float | None = None
        self._restarts = 0

    def add(self, manifest: Manifest) -> None:
        """Add an entry of the log. Entries must be added in ascending order."""
        if self.newest is not None and self.newest.kind != "claim":
            self.missing += manifest.version - self.newest.version - 1
            missing = range(self.newest.version + 1, manifest.version)
            self.lost += missing[: _MAX_LOST - len(self.lost)]
        self.newest = manifest
        self.skews.add(manifest)
        committed = self._times.next(manifest)
        if manifest.kind == "claim":
            if self.bins:
                self._restarts += 1
                self.num_claims += 1
                self.last_claim = manifest.version
                self.min_claim_seconds = min(self.min_claim_seconds, committed - self._claimed)
                self._claimed = committed
            return
        self.tables.update(manifest.tables)
        self._learn_full_bytes(manifest)
        entry = self._bin_of(manifest, committed)
        for fqn, amount in entry.tables.items():
            self.totals[fqn] += amount
        if not self.bins or self.bins[-1].count >= self._width:
            self.bins.append(entry)
        else:
            self.bins[-1].merge(entry)
        if len(self.bins) > 2 * self._max_bins:
            self._halve()

    @property
    def is_timed(self) -> bool:
        """True if the times of the bins ascend and no clock was corrected by more than 1 % of the time they cover.

        Otherwise, versions must be shown in their order, not at their times.
        """
        seconds = self.bins[-1].end - self.bins[0].begin if self.bins else 0.0
        return seconds > 0 and not self._times.are_shifted and self._times.max_correction <= _MAX_CORRECTION * seconds

    def _bin_of(self, manifest: Manifest, committed: float) -> Bin:
        is_delta = manifest.kind == "delta"
        gap = None if self._committed is None else committed - self._committed
        self.sizes.extend([manifest.num_bytes] if is_delta else [])
        self.gaps.extend([] if gap is None else [gap])
        self.delays.extend([manifest.created - manifest.cut] if 0 < manifest.cut <= manifest.created else [])
        self._committed = committed
        restarts, self._restarts = self._restarts, 0
        return Bin(
            manifest.version,
            manifest.version,
            committed,
            committed,
            deltas=int(is_delta),
            snapshots=int(not is_delta),
            restarts=restarts,
            delta_bytes=manifest.num_bytes if is_delta else 0,
            snapshot_bytes=0 if is_delta else manifest.num_bytes,
            full_bytes=self.full_bytes,
            pending_rows=manifest.pending_rows,
            gaps=int(gap is not None),
            gap_seconds=gap or 0.0,
            max_gap=gap or 0.0,
            tables=amounts(manifest) if is_delta else {},
        )

    def _learn_full_bytes(self, manifest: Manifest) -> None:
        """Update ``full_bytes`` from an entry.

        ``full_bytes`` is the size of all rows and dense tensors. Row sizes are computed from the encodings of the
        newest snapshot or, before the first snapshot, from the dtypes of the tables.
        """
        dense = sum(spec.num_bytes for spec in manifest.dense.values())
        if manifest.kind == "snapshot":
            rows = sum(block.num_rows * block.row_bytes for block in _blocks(manifest) if block.ids == "all")
            self.full_bytes, self._is_measured = rows + dense, True
        elif not self._is_measured:
            specs = self.tables.values()
            self.full_bytes = dense + sum(spec.num_rows * spec.dim * spec.dtype.itemsize for spec in specs)

    def _halve(self) -> None:
        pairs = zip(self.bins[::2], [*self.bins[1::2], None], strict=False)
        self.bins = []
        for first, second in pairs:
            if second is not None:
                first.merge(second)
            self.bins.append(first)
        self._width *= 2


def _blocks(manifest: Manifest) -> Iterator[Block]:
    return (block for part in manifest.parts for block in part.blocks)
