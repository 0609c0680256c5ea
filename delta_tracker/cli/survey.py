"""Summary of a stream, made by reading all entries of its log once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from delta_tracker.cli.entries import Amount, Entry, read_all
from delta_tracker.cli.followers import SILENT_SECONDS, FollowerView, read_followers
from delta_tracker.cli.stream_command import Stream
from delta_tracker.cli.text import plain
from delta_tracker.cli.times import Skews
from delta_tracker.errors import MalformedError, NoSnapshotError
from delta_tracker.stream.format.manifest import DTYPE_NAMES, Manifest
from delta_tracker.stream.heartbeat import see_publisher
from delta_tracker.stream.reading.path import snapshots
from delta_tracker.stream.store_clock import StoreClock
from delta_tracker.types import TableSpec

_NONE = Amount()


@dataclass(frozen=True, slots=True)
class Start:
    """Entries that a new predictor reads to reach the newest version.

    Args:
        snapshot: snapshot to start from.
        entries: the snapshot and the versions after it, up to the newest version or to the last one before a missing or
            malformed version. Where a merged entry bridges such a version, it is among them.
    """

    snapshot: Manifest
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the parts of these entries."""
        return sum(entry.part_bytes for entry in self.entries)

    @property
    def num_parts(self) -> int:
        """Total number of parts of these entries."""
        return sum(entry.num_parts for entry in self.entries)

    def to_dict(self) -> dict[str, object]:
        """Return the totals of these entries as JSON values."""
        return {
            "snapshot": self.snapshot.version,
            "is_merged": self.snapshot.merges is not None,
            "versions": len(self.entries),
            "rows": sum(entry.num_rows for entry in self.entries),
            "parts": self.num_parts,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Summary of a stream.

    Args:
        head: newest entry.
        now: Unix time of the summary by the store's clock, in seconds.
        tables: FQN to spec of each table in the newest version that is not a claim.
        entries: entries of the contiguous range of versions that ends at the head, except malformed entries.
        num_strays: number of entries before this range. New predictors do not read them. Retention may leave such
            entries behind, because it keeps each claim and the entry before the claim.
        num_merged: number of merged entries.
        entry_bytes: bytes of the manifests of all entries, including merged entries.
        num_parts: number of parts in the store, including parts that no entry lists.
        part_bytes: bytes of these parts.
        start: entries that a new predictor reads; None if there is no snapshot to start from.
        followers: predictors with a heartbeat in the last hour.
        beat_seconds_ago: age of the last heartbeat of the publisher that wrote the head, in seconds; None if it has
            left none. Only publishers of versions with states leave heartbeats.
        num_gone: number of predictors whose last heartbeat is older than an hour.
        skews: descriptions of clocks that differ from the store's by more than a minute.
        findings: descriptions of malformed entries, and of the problem that prevents a new predictor from reaching the
            head.
    """

    head: Manifest
    now: float
    tables: Mapping[str, TableSpec]
    entries: Sequence[Entry]
    num_strays: int
    num_merged: int
    entry_bytes: int
    num_parts: int
    part_bytes: int
    start: Start | None
    followers: Sequence[FollowerView]
    num_gone: int
    beat_seconds_ago: float | None
    skews: Sequence[str]
    findings: Sequence[str]

    def in_snapshot(self, fqn: str) -> Amount:
        """Return the amount of data of a table in the snapshot from which a new predictor starts."""
        return _NONE if self.start is None else self.start.entries[0].tables.get(fqn, _NONE)

    def in_deltas(self, fqn: str) -> Amount:
        """Return the amount of data of a table in all deltas of ``entries``."""
        deltas = (entry for entry in self.entries if entry.kind == "delta")
        return sum((entry.tables.get(fqn, _NONE) for entry in deltas), start=_NONE)

    def generations(self) -> Iterator[tuple[int, list[Entry]]]:
        """Yield the number and the entries of each generation, in ascending order."""
        for generation, entries in groupby(self.entries, key=lambda entry: entry.generation):
            yield generation, list(entries)

    @property
    def is_silent(self) -> bool:
        """True if the publisher leaves heartbeats, and its last one and the head are older than 30 seconds."""
        committed = self.now - self.head.committed
        return self.beat_seconds_ago is not None and min(committed, self.beat_seconds_ago) > SILENT_SECONDS

    def behind_seconds(self, follower: FollowerView) -> float | None:
        """Return the age of the oldest version that a predictor has not applied, in seconds.

        The result is 0 if the predictor has applied all versions, and None if the age is unknown.
        """
        held = follower.beat.version
        if follower.lag_versions is None or held is None:
            return None
        waiting = [entry for entry in self.entries if entry.version > held]
        if not waiting:
            return 0.0
        return max(0.0, self.now - waiting[0].committed) if waiting[0].version == held + 1 else None

    def to_dict(self) -> dict[str, object]:
        """Return the summary as JSON values. Times are Unix seconds."""
        head = self.head
        return {
            "stream": head.stream,
            "head": Entry.of(head).to_dict() | {"age_seconds": max(0.0, self.now - head.committed)},
            "log": _counts(self.entries)
            | {
                "merged": self.num_merged,
                "strays": self.num_strays,
                "entry_bytes": self.entry_bytes,
                "parts": self.num_parts,
                "part_bytes": self.part_bytes,
            },
            "publisher": {
                "generation": head.generation,
                "heartbeat_seconds_ago": self.beat_seconds_ago,
                "is_silent": self.is_silent,
            },
            "new_predictor": None if self.start is None else self.start.to_dict(),
            "generations": [
                {"generation": generation, "created": entries[0].created, "committed": entries[0].committed}
                | _counts(entries)
                for generation, entries in self.generations()
            ],
            "tables": {fqn: self._table(fqn, spec) for fqn, spec in self.tables.items()},
            "predictors": [each.to_dict() | {"behind_seconds": self.behind_seconds(each)} for each in self.followers],
            "predictors_gone": self.num_gone,
            "skews": list(self.skews),
            "findings": list(self.findings),
        }

    def _table(self, fqn: str, spec: TableSpec) -> dict[str, object]:
        snapshot, deltas = self.in_snapshot(fqn), self.in_deltas(fqn)
        return {
            "rows": spec.num_rows,
            "dim": spec.dim,
            "dtype": DTYPE_NAMES[spec.dtype],
            "snapshot_bytes": snapshot.num_bytes,
            "delta_rows": deltas.rows,
            "delta_bytes": deltas.num_bytes,
        }


def survey(stream: Stream) -> Survey:
    """Return the summary of a stream. Reads every entry of the log and every heartbeat; lists merged entries and parts.

    Raises:
        InvalidArgumentError: if there is no stream.
        MalformedError: if the newest entry is malformed.
        StorageError: if the store cannot be read.
    """
    head = stream.head()
    storage, log = stream.storage, stream.log
    listed = [version for version in log.versions() if version <= head.version]
    found: list[tuple[int, Entry | MalformedError]] = []
    with stream.out.progress("reading the log", len(listed)) as progress:
        for version, entry in read_all(listed, log.read, Entry.of):
            progress.advance()
            if entry is not None:  # None if retention deleted it
                found.append((version, entry))
    first = contiguous([version for version, _ in found])
    entries = [entry for _, entry in found[first:] if isinstance(entry, Entry)]
    start, problem = _start(stream, head, {version: entry for version, entry in found if isinstance(entry, Entry)})
    last = next((entry.version for entry in reversed(entries) if entry.kind != "claim"), head.version)
    parts, manifests = storage.objects("parts"), [*storage.objects("log"), *storage.objects("merged")]
    skews, clock = Skews(), StoreClock()
    for entry in entries:
        skews.add(entry)
    clock.saw("log", [head.committed, *(entry.committed for entry in entries)], began=clock.reader_time())
    followers, num_gone = read_followers(storage, head, clock)
    began, seen = clock.reader_time(), see_publisher(storage, head)
    beat = None if seen is None else seen[1]
    clock.saw("publisher", [] if beat is None else [beat], began=began)
    return Survey(
        head=head,
        now=clock.now(),
        tables=(log.read(last) or head).tables,
        entries=entries,
        num_strays=first,
        num_merged=len(log.merged()),
        entry_bytes=sum(each.num_bytes for each in manifests),
        num_parts=len(parts),
        part_bytes=sum(part.num_bytes for part in parts),
        start=start,
        followers=followers,
        num_gone=num_gone,
        beat_seconds_ago=None if beat is None else max(0.0, clock.now() - beat),
        skews=skews.problems(followers, clock),
        findings=[*(plain(entry.problem) for _, entry in found[first:] if isinstance(entry, MalformedError)), *problem],
    )


def contiguous(versions: Sequence[int]) -> int:
    """Return the start index of the contiguous range that ends at the last version; 0 if ``versions`` is empty.

    A new reader reads only versions in this range.

    Args:
        versions: versions in ascending order.

    Example:
        >>> contiguous([0, 1, 5, 6, 7])
        2
    """
    first = len(versions) - 1
    while first > 0 and versions[first - 1] == versions[first] - 1:
        first -= 1
    return max(first, 0)


def count_kinds(entries: Sequence[Entry]) -> Counter[str]:
    """Return the number of entries of each kind."""
    return Counter(entry.kind for entry in entries)


def _start(stream: Stream, head: Manifest, held: Mapping[int, Entry]) -> tuple[Start | None, list[str]]:
    """Return the entries that a new predictor reads, and the problem that prevents it from reaching the head.

    The entries are None if there is no readable snapshot. The problem is a list of at most one description.

    Args:
        stream: the stream.
        head: newest entry.
        held: version to summary of each readable entry.
    """
    try:
        snapshot = next(snapshots(stream.log), None)
    except MalformedError as error:
        return None, [plain(f"a new predictor cannot start: {error.problem}")]
    if snapshot is None:
        return None, [plain(f"a new predictor cannot start: {NoSnapshotError(stream.storage.url).problem}")]
    path = [Entry.of(snapshot)]
    while (version := path[-1].version + 1) <= head.version:
        entry = held.get(version) or _merged_from(stream, version)
        if entry is None:
            problem = f"a new predictor stops before version {version}, which is missing or malformed"
            return Start(snapshot, tuple(path)), [problem]
        path.append(entry)
    return Start(snapshot, tuple(path)), []


def _merged_from(stream: Stream, version: int) -> Entry | None:
    """Return the merged entry that a predictor applies if ``version`` is missing or malformed; None if it has none."""
    try:
        merged = stream.log.longest_merged(version - 1)
    except MalformedError:
        return None
    return None if merged is None or merged.version < version else Entry.of(merged)


def _counts(entries: Sequence[Entry]) -> dict[str, object]:
    kinds = count_kinds(entries)
    return {
        "first": entries[0].version if entries else None,
        "last": entries[-1].version if entries else None,
        "snapshots": kinds["snapshot"],
        "deltas": kinds["delta"],
        "claims": kinds["claim"],
        "rows": sum(entry.num_rows for entry in entries),
        "bytes": sum(entry.num_bytes for entry in entries),
    }
