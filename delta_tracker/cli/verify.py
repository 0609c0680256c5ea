"""``verify``: check the hashes of a stream's entries and parts, and the links between entries."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import click
import torch
from torch import Tensor

from delta_tracker.cli.entries import read_all
from delta_tracker.cli.predictors import Skews
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import escaped, plural, size
from delta_tracker.errors import CorruptPartError, MalformedError
from delta_tracker.raw_ids import NO_OWNER, check_owners, check_unique
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.manifest import Link, Manifest, Part, Stored, entry_name
from delta_tracker.stream.format.object_reader import Ranged, check_size
from delta_tracker.stream.format.part_reader import PartReader, read_training
from delta_tracker.stream.format.table_choice import TableChoice, mirrored_tables
from delta_tracker.stream.reading.path import newest_readable
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Identity

# Parts up to this size are read as a whole, larger ones in pieces of 8 MiB.
_MEMORY_BYTES = 32 << 20

_HELP = """Check everything that a reader of the stream may read.

Each entry of the log must follow the format, name its predecessor by hash, and not decrease the generation. After the
newest snapshot, no entry may be missing. Each part must have the size, the hash, the tensors and the ids that its entry
records, and so must the optimizer states and the training states of format 2. The same holds for merged entries, which
must replace entries of this log. After each version, no raw id may own two rows of a table. After a promotion, the
entries of the former stream are checked too. Reads every byte, in bounded memory, and changes nothing. Skips entries
that retention deletes during the check.

Exit code 0 if nothing is damaged, 1 otherwise.

\b
Examples:
  delta-tracker verify file:///streams/ctr
  delta-tracker verify s3://bucket/ctr --quick
  delta-tracker verify s3://bucket/ctr --json | jq .findings
"""


@click.command("verify", help=_HELP)
@stream_command
@click.option("--quick", is_flag=True, help="Compare the sizes of parts only, without reading their bytes.")
def command(stream: Stream, *, quick: bool) -> int:
    """Check the stream, and print the problems that were found."""
    check = _Check(stream, is_quick=quick)
    check.run()
    counts, skews, findings = check.counts, check.skews.problems(), check.findings
    names = ("entries", "merged", "parts", "bytes")
    found = {"url": stream.storage.url, "ok": not findings} | {name: counts[name] for name in names}
    if tables := list(check.choice.patterns):
        stream.out.line(f"a mirror of the tables {', '.join(map(escaped, tables))} only, without the other parts")
    stream.out.json(found | {"mirrored_tables": tables, "skews": skews, "findings": findings})
    done = ", ".join(
        (
            plural(counts["entries"], "entry", "entries"),
            plural(counts["merged"], "merged entry", "merged entries"),
            plural(counts["parts"], "part"),
            size(counts["bytes"]),
        )
    )
    for skew in skews:
        stream.out.line(skew, "yellow")
    for finding in findings:
        away = "" if finding.is_in_the_way else " (older than the newest snapshot: new predictors do not read it)"
        stream.out.line(f"damaged: {finding.where}: {finding.problem}{away}", "red")
    if not findings:
        stream.out.line(f"{'sizes and links agree' if quick else 'no damage found'}: {done}", "bold green")
        return 0
    stream.out.line(f"{plural(len(findings), 'finding')} in {done}", "bold red")
    if any(finding.is_in_the_way for finding in findings):
        step = "copy the objects back from a mirror, or call Publisher.snapshot(): predictors continue from it"
        stream.out.line(f"Next: {step}")
    return 1


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem with an entry or object. ``is_in_the_way`` is True if a new predictor must read the entry or object."""

    where: str
    problem: str
    is_in_the_way: bool


class _Owners:
    """Checker of raw ids: after each version, no raw id may own two rows of a table.

    Memory usage is 8 bytes for each row of tables with raw ids, and 16 bytes for each row of the current version.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._identities: Mapping[str, Identity] = {}
        self._new: list[tuple[str, Tensor | slice, Tensor]] = []

    def add(self, rows: BlockRows) -> None:
        if rows.owners is not None:
            ids = slice(*rows.block.rows) if rows.ids is None else rows.ids.clone()
            self._new.append((rows.block.table, ids, rows.owners(0, rows.block.num_rows)[:, 0].clone()))

    def clear(self) -> None:
        """Discard all raw ids. The check resumes at the next snapshot. Call this for a missing or damaged version."""
        self._held, self._new = {}, []

    def problems(self, manifest: Manifest, *, is_whole: bool) -> Iterator[str]:
        """Yield a description of each problem after the version ``manifest``. Pass its rows to :meth:`add` first.

        ``is_whole`` is False if some rows of the version could not be added.
        """
        if manifest.kind == "claim":
            return
        new = sorted(self._new, key=lambda each: isinstance(each[1], Tensor))  # whole blocks before listed rows
        self._new = []
        if not is_whole:
            self.clear()
            return
        if manifest.kind == "snapshot":
            self._identities = manifest.identities
            self._held = {fqn: torch.full((each.num_rows,), NO_OWNER) for fqn, each in self._identities.items()}
        elif self._held and manifest.identities != self._identities:
            self.clear()
            yield "its buckets of raw ids are not those of its predecessor, but it is no snapshot"
            return
        changed: dict[str, list[Tensor]] = {}
        for fqn, ids, owners in new:
            if fqn in self._held:
                self._held[fqn][ids] = owners
                changed.setdefault(fqn, []).append(torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids)
        for fqn, pieces in changed.items():
            try:
                rows = torch.cat(pieces)
                check_owners(self._identities[fqn], rows, self._held[fqn][rows], is_unique=False)
                check_unique(self._held[fqn])
            except ValueError as error:
                yield f"after it, in table {fqn!r}: {error}"


@dataclass
class _Check:
    """Checker of all entries and objects of a stream, which also stores the results.

    Args:
        stream: stream to check.
        is_quick: True to compare only the sizes of objects.

    Attributes:
        findings: damage that was found.
        choice: tables that the store contains, if it is a mirror of selected tables.
        skews: differences between the clocks of the publishers and the clock of the store.
        counts: numbers of well-formed entries of the log (``entries``) and merged ones (``merged``), checked objects,
            including damaged ones (``parts``), and bytes of these objects (``bytes``).
    """

    stream: Stream
    is_quick: bool
    findings: list[Finding] = field(default_factory=list)
    skews: Skews = field(default_factory=Skews)
    counts: Counter[str] = field(default_factory=Counter)
    _start: int = -1  # version of the newest snapshot, -1 for none
    _links: dict[int, Link] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _stream: str = ""  # stream of the newest well-formed entry
    _so_far: str = ""  # stream of the entries that were checked so far
    _streams: set[str] = field(default_factory=set)  # this one and the former ones
    _owners: _Owners = field(default_factory=_Owners)
    choice: TableChoice = field(default_factory=lambda: TableChoice(None))
    _advance: Callable[[int], None] = field(init=False)  # of the progress bar

    def run(self) -> None:
        """Check the entries of the log, the merged entries, and their objects."""
        storage = self.stream.storage
        self.choice = mirrored_tables(storage)
        head, newest = self._newest()
        self._stream = "" if head is None else head.stream
        self._start, is_missing = self._newest_snapshot(head)
        if is_missing:
            self._find(entry_name(self._start), "the newest snapshot is missing: no reader can start", self._start)
        # The listing is made after the head was read, so that it contains the parts of all entries up to the head.
        self._sizes = {each.name: each.num_bytes for each in storage.objects("parts")}
        listed = self.stream.log.versions()
        with self.stream.out.progress("verifying", sum(self._sizes.values())) as self._advance:
            self._check_strays([version for version in listed if version > newest], newest)  # before it can be deleted
            self._check_log([version for version in listed if version <= newest], head)
            self._check_merged()

    def _newest(self) -> tuple[Manifest | None, int]:
        """Return the newest well-formed entry (None if there is none) and the newest version."""
        try:
            head = self.stream.head()
        except MalformedError:  # reported when the entry is checked
            return newest_readable(self.stream.log), max(self.stream.log.versions(), default=-1)
        return head, head.version

    def _check_log(self, versions: Sequence[int], head: Manifest | None) -> None:
        before: Manifest | None = None
        complete = self._start  # up to this version, no entry that readers need is missing
        for version, manifest in read_all(versions, self.stream.log.read):
            if self._start >= 0 and complete < version - 1:
                self._find_missing(complete + 1, version - 1)
            complete = max(complete, version)
            if before is None or before.version != version - 1:
                before = None
                self._owners.clear()
            if isinstance(manifest, MalformedError):
                self._find(manifest.path, manifest.reason, version)
            elif manifest is not None:
                self._check_entry(manifest, before)
            elif version > self._start >= 0 and self._newest_snapshot(head)[0] < version:
                self._find_missing(version, version)  # retention deletes no such entry
            before = manifest if isinstance(manifest, Manifest) else None

    def _check_entry(self, manifest: Manifest, before: Manifest | None) -> None:
        """Check an entry of the log, its links and its objects. ``before`` is the previous entry; None if unknown."""
        version = manifest.version
        self.counts["entries"] += 1
        self._links[version] = manifest.link
        self.skews.add(manifest)
        for problem in _chain_problems(manifest, before, self._so_far, self._stream):
            self._find(entry_name(version), problem, version)
        is_newest = manifest.stream == self._stream  # if the entries before it are of another stream, that was reported
        if not self._so_far or is_newest or _starts(manifest, before, self._so_far, self._stream):
            self._so_far = manifest.stream
        self._streams.add(self._so_far)
        if manifest.forked_from is not None:
            self._streams.add(manifest.forked_from.stream)
        is_whole = self._check_parts(manifest, partial(self.stream.log.read, version))
        chosen = manifest.narrowed(self.choice.takes)
        for problem in self._owners.problems(chosen, is_whole=is_whole and not self.is_quick):
            self._find(entry_name(version), problem, version)

    def _check_strays(self, versions: Sequence[int], newest: int) -> None:
        """Report ``versions``, which are above ``newest``, unless they were committed during the check."""
        if versions and self.stream.log.storage.size(entry_name(newest + 1)) is None:
            problem = f"it is above version {newest + 1}, which is missing: delete it"
            for version in versions:
                self._find(entry_name(version), problem, version)

    def _check_merged(self) -> None:
        log = self.stream.log
        for merged, manifest in read_all(log.merged(), log.read_merged):
            if isinstance(manifest, MalformedError):
                self._find(manifest.path, manifest.reason, merged.last)
            elif manifest is not None:
                self.counts["merged"] += 1
                for problem in self._merged_problems(manifest):
                    self._find(merged.name, problem, merged.last)
                self._check_parts(manifest, partial(log.read_merged, merged))

    def _newest_snapshot(self, head: Manifest | None) -> tuple[int, bool]:
        """Return the version of the newest snapshot (-1 for none), and True if the snapshot of ``head`` is missing."""
        named = -1 if head is None or head.snapshot is None else head.snapshot
        try:
            snapshot = self.stream.log.newest_snapshot()
        except MalformedError:  # reported when the entry is checked
            return named, False
        return (named, named >= 0) if snapshot is None else (snapshot.version, False)

    def _check_parts(self, manifest: Manifest, again: Callable[[], Manifest | None]) -> bool:
        """Check an entry's objects. Return True if all are intact. ``again`` is a function that rereads the entry."""
        is_whole = True
        for each, check in self._checks(manifest):
            try:
                check()
            except CorruptPartError as error:
                is_whole = False
                there = again()
                if there is None or there.xxh3 != manifest.xxh3:
                    return is_whole  # retention deleted the version
                if self._is_without_parts(manifest, each):
                    return is_whole
                self._find(error.path, error.reason, manifest.version)
            self.counts.update(parts=1, bytes=each.num_bytes)
            self._advance(each.num_bytes)
        return is_whole

    def _is_without_parts(self, manifest: Manifest, stored: Part | Stored) -> bool:
        """Return True if the object ``stored`` is missing because retention deleted it.

        Retention keeps the entry before a claim, but deletes the objects of this entry.
        """
        log = self.stream.log
        has_newer = manifest.version < self._start or manifest.stream != self._stream
        has_merged = manifest.version == self._start and manifest.kind == "delta"  # a snapshot that ends with it
        return (has_newer or has_merged) and log.storage.size(stored.name) is None and log.precedes_claim(manifest)

    def _checks(self, manifest: Manifest) -> Iterator[tuple[Part | Stored, Callable[[], object]]]:
        """Yield each object of an entry with a function that checks the object and raises CorruptPartError."""
        manifest = self.choice.copied(manifest)
        if self.is_quick:
            for each in manifest.objects:
                yield each, partial(self._check_size, each)
            return
        storage = self.stream.storage
        for part in manifest.parts:
            readers: list[PartReader] = []
            yield part, partial(self._check_part, part, manifest, readers)
            if part.states is not None:
                yield part.states, partial(self._check_states, part.states, readers)
        for stored in manifest.training:
            yield stored, partial(_check_training, storage, stored)

    def _check_part(self, part: Part, manifest: Manifest, readers: list[PartReader]) -> None:
        """Check every byte of a part. If the part is intact, append its reader to ``readers``."""
        reader = PartReader(self.stream.storage, part, manifest, memory_bytes=_MEMORY_BYTES)
        reader.check_tensors()
        readers.append(reader)
        if manifest.merges is None:  # a merged entry has the raw ids of the entries that it replaces
            for rows in reader.rows:
                self._owners.add(rows)

    def _check_states(self, states: Stored, readers: Sequence[PartReader]) -> None:
        """Check every byte of the states of a part. If ``readers`` is empty, check only the hash."""
        if readers:
            readers[0].with_states()
        else:
            Ranged(self.stream.storage, states, is_whole=True).finish()

    def _check_size(self, stored: Part | Stored) -> None:
        found = self._sizes.get(stored.name)
        storage = self.stream.storage
        check_size(stored, storage.size(stored.name) if found is None else found, storage)

    def _merged_problems(self, manifest: Manifest) -> Iterator[str]:
        if self._streams and manifest.stream not in self._streams:
            yield f"it belongs to stream {manifest.stream}"
        for link, role in ((manifest.parent, "it follows"), (manifest.merges, "it replaces")):
            if link is not None and self._links.get(link.version, link) != link:
                yield f"{role} another version {link.version} than the log's"

    def _find_missing(self, first: int, last: int) -> None:
        what = "it is missing" if first == last else f"it and the entries up to version {last} are missing"
        self._find(entry_name(first), f"{what}, and the newest snapshot is below it", last)

    def _find(self, where: str, problem: str, version: int) -> None:
        self.findings.append(Finding(escaped(where), escaped(problem), version >= self._start))


def _check_training(storage: Storage, stored: Stored) -> None:
    """Check every byte and the structure of a training state. Raises CorruptPartError."""
    Ranged(storage, stored, is_whole=True).finish()
    read_training(storage, stored)


def _starts(manifest: Manifest, before: Manifest | None, stream: str, newest: str) -> bool:
    """Return True if an entry may start a new stream in the log. Takes the arguments of :func:`_chain_problems`."""
    if manifest.forked_from is not None:
        return before is None or manifest.forked_from.stream == stream
    return before is None and manifest.stream == newest  # the promotion itself is missing or malformed


def _chain_problems(manifest: Manifest, before: Manifest | None, stream: str, newest: str) -> Iterator[str]:
    """Compare an entry with the previous entries. Yield a description of each contradiction.

    Args:
        manifest: entry to check.
        before: previous entry; None if it is missing or malformed.
        stream: stream id of the previous entries; empty for the first entry.
        newest: stream id of the newest well-formed entry of the log.
    """
    if stream and manifest.stream != stream and not _starts(manifest, before, stream, newest):
        yield f"it belongs to stream {manifest.stream}, and the entries before it to {stream}"
    if before is None:
        return
    if manifest.parent != before.link:
        yield f"its parent is {manifest.parent}, but its predecessor is {before.link}"
    if manifest.generation < before.generation:
        yield f"its generation {manifest.generation} is below {before.generation}, the generation of its predecessor"
    if manifest.kind != "snapshot" and manifest.forked_from is None and manifest.snapshot != before.snapshot:
        yield f"its newest snapshot is {manifest.snapshot}, but its predecessor's is {before.snapshot}"
