"""``inspect``: show a stream's contents, its predictors, and the entries that a new predictor reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click
from msgspec import to_builtins
from rich.table import Table

from delta_tracker.cli.entries import Amount, Entry, contiguous, total
from delta_tracker.cli.listings import PREDICTOR_COLUMNS, predictor_cells, version_table
from delta_tracker.cli.output import Output, facts, table
from delta_tracker.cli.predictors import SeenPredictor, Skews, read_predictors
from delta_tracker.cli.silence import SILENCE_SECONDS
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import count, duration, escaped, format_time, plural, size
from delta_tracker.errors import MalformedError, NoSnapshotError
from delta_tracker.stream.format.manifest import DTYPE_NAMES, Manifest
from delta_tracker.stream.format.table_choice import mirrored_tables
from delta_tracker.stream.heartbeat import see_publisher
from delta_tracker.stream.pin import newest_pin
from delta_tracker.stream.reading.path import snapshots
from delta_tracker.stream.store_clock import StoreClock

_HELP = """Show the contents of a stream, what a new predictor reads, and the predictors that follow it.

Reads every entry of the log, but no rows. Predictors are listed by their heartbeats, with the states that
delta-tracker fleet --help describes, and omitted after an hour without a heartbeat. A publisher of versions with states
leaves heartbeats too. Exit code 1 if an entry is malformed, or if a new predictor cannot reach the newest version.
Times are by the store's clock; a host whose clock differs from it by more than a minute is reported.
For tables with managed collisions, "ids in / out" are the numbers of raw ids that were admitted and evicted, or ? if
the publisher did not know them.

\b
Examples:
  delta-tracker inspect file:///streams/ctr
  delta-tracker inspect s3://bucket/ctr -o endpoint=http://localhost:8333 -o allow_http=true
  delta-tracker inspect s3://bucket/ctr --json | jq .head.age_seconds
"""


@click.command("inspect", help=_HELP)
@stream_command
@click.option("--last", default=10, metavar="N", type=click.IntRange(0), help="List the newest N versions.")
def command(stream: Stream, last: int) -> int:
    """Print a summary of the stream as tables or as one JSON object. Return 1 if there are problems, otherwise 0."""
    found, entries, predictors = _survey(stream)
    newest = entries[max(0, len(entries) - last) :]
    stream.out.json(found | {"versions": newest})
    _print(stream.out, found, newest, predictors)
    return 1 if found["findings"] else 0


def _print(out: Output, found: dict[str, Any], newest: Sequence[Entry], predictors: Sequence[SeenPredictor]) -> None:
    screen = [_facts(found), _tables(found)]
    if newest:
        head = found["head"]
        screen.append(version_table(newest, head["committed"] + head["age_seconds"]))
    if predictors:
        screen.append(table(PREDICTOR_COLUMNS, map(predictor_cells, predictors)))
    for each in screen:
        out.show(each)
        out.line()
    if not predictors:
        out.line("no predictor has written a heartbeat in the last hour", "dim")
    if num_gone := found["predictors_gone"]:
        out.line(f"{plural(num_gone, 'predictor')} without a heartbeat for an hour", "dim")
    for predictor in predictors:
        if predictor.beat.error is not None:
            out.line(f"{predictor.beat.name} has an error: {predictor.beat.error}", "red")
    for skew in found["skews"]:
        out.line(skew, "yellow")
    for finding in found["findings"]:
        out.line(f"problem: {finding}", "bold red")


def _survey(stream: Stream) -> tuple[dict[str, Any], list[Entry], list[SeenPredictor]]:
    """Read all entries of the log and all heartbeats. List, but do not read, merged entries and parts.

    Returns:
        A tuple of a summary as a JSON object, with times in Unix seconds; the well-formed entries of the contiguous
        range of versions that ends at the head; and the predictors with a heartbeat in the last hour.
    """
    head = stream.head()
    storage, log = stream.storage, stream.log
    read = stream.entries([version for version in log.versions() if version <= head.version])
    found = [(version, Entry.of(each) if isinstance(each, Manifest) else each) for version, each in read]
    first = contiguous([version for version, _ in found])
    entries = [entry for _, entry in found[first:] if isinstance(entry, Entry)]
    findings = [escaped(entry.problem) for _, entry in found[first:] if isinstance(entry, MalformedError)]
    held = {version: entry for version, entry in found if isinstance(entry, Entry)}
    snapshot, start, problems = _start(stream, head, held)
    last = next((entry.version for entry in reversed(entries) if entry.kind != "claim"), head.version)
    parts, manifests = storage.objects("parts"), [*storage.objects("log"), *storage.objects("merged")]
    clock = StoreClock()
    clock.observe("log", [head.committed, *(entry.committed for entry in entries)], began=clock.reader_time())
    predictors, num_gone = read_predictors(storage, head, clock, order=newest_pin(storage))
    began, seen = clock.reader_time(), see_publisher(storage, head)
    beat = None if seen is None else seen[1]
    clock.observe("publisher", [] if beat is None else [beat], began=began)
    now = clock.now()
    age = max(0.0, now - head.committed)
    beat_age = None if beat is None else max(0.0, now - beat)
    figures = {
        "url": storage.url,
        "mirrored_tables": list(mirrored_tables(storage).patterns),  # empty for all
        "stream": head.stream,
        "head": to_builtins(Entry.of(head)) | {"age_seconds": age},
        "log": _counts(entries)
        | {
            "merged": len(log.merged()),
            "strays": first,  # retention may leave entries before a gap: each claim, and the entry before it
            "entry_bytes": sum(each.num_bytes for each in manifests),
            "parts": len(parts),  # also those that no entry lists
            "part_bytes": sum(part.num_bytes for part in parts),
        },
        "publisher": {
            "generation": head.generation,
            "heartbeat_seconds_ago": beat_age,  # None if it leaves none
            "is_silent": beat_age is not None and min(age, beat_age) > SILENCE_SECONDS,
        },
        "new_predictor": None if snapshot is None else _new_predictor(snapshot, start),
        "tables": _table_facts(log.read(last) or head, start, entries),
        "predictors": [each.to_dict() for each in predictors],
        "predictors_gone": num_gone,
        "skews": Skews(entries).problems(predictors, clock),
        "findings": findings + problems,
    }
    return figures, entries, predictors


def _start(stream: Stream, head: Manifest, held: Mapping[int, Entry]) -> tuple[Manifest | None, list[Entry], list[str]]:
    """Return the snapshot and the entries that a new predictor reads, and a list of problems.

    The entries are the snapshot and the entries after it, up to ``head``. If a version is missing or malformed and no
    merged entry replaces it, the entries end before this version, and the list describes the problem. If there is no
    readable snapshot, the snapshot is None and there are no entries. ``held`` contains the readable entries by version.
    """
    try:
        snapshot = next(snapshots(stream.log), None)
    except MalformedError as error:
        return None, [], [escaped(f"a new predictor cannot start: {error.problem}")]
    if snapshot is None:
        return None, [], [escaped(f"a new predictor cannot start: {NoSnapshotError(stream.storage.url).problem}")]
    path = [Entry.of(snapshot)]
    while (version := path[-1].version + 1) <= head.version:
        entry = held.get(version) or _merged_from(stream, version)
        if entry is None:
            return snapshot, path, [f"a new predictor stops before version {version}, which is missing or malformed"]
        path.append(entry)
    return snapshot, path, []


def _merged_from(stream: Stream, version: int) -> Entry | None:
    """Return the merged entry that a predictor applies if it cannot read ``version``; None if there is none."""
    try:
        merged = stream.log.longest_merged(version - 1)
    except MalformedError:
        return None
    return None if merged is None or merged.version < version else Entry.of(merged)


def _new_predictor(snapshot: Manifest, path: Sequence[Entry]) -> dict[str, object]:
    return {
        "snapshot": snapshot.version,
        "is_merged": snapshot.merges is not None,
        "versions": len(path),
        "rows": sum(entry.num_rows for entry in path),
        "parts": sum(entry.num_parts for entry in path),
        "bytes": sum(entry.part_bytes for entry in path),
    }


def _counts(entries: Sequence[Entry]) -> dict[str, object]:
    kinds = Counter(entry.kind for entry in entries)
    return {
        "first": entries[0].version if entries else None,
        "last": entries[-1].version if entries else None,
        "snapshots": kinds["snapshot"],
        "deltas": kinds["delta"],
        "claims": kinds["claim"],
        "rows": sum(entry.num_rows for entry in entries),
        "bytes": sum(entry.num_bytes for entry in entries),
    }


def _table_facts(newest: Manifest, start: Sequence[Entry], entries: Sequence[Entry]) -> dict[str, dict[str, object]]:
    """Return each table's shape, bytes in the snapshot ``start[0]``, and rows and bytes in all deltas, by FQN."""
    in_snapshot = start[0].tables if start else {}
    in_deltas = total(entry.tables for entry in entries if entry.kind == "delta")
    return {
        fqn: {
            "rows": spec.num_rows,
            "dim": spec.dim,
            "dtype": DTYPE_NAMES[spec.dtype_name],
            "snapshot_bytes": in_snapshot.get(fqn, Amount()).num_bytes,
            "delta_rows": in_deltas[fqn].rows,
            "delta_bytes": in_deltas[fqn].num_bytes,
        }
        for fqn, spec in newest.tables.items()
    }


def _facts(found: dict[str, Any]) -> Table:
    head, log, beat = found["head"], found["log"], found["publisher"]
    heard = "; no heartbeat, which only publishers with states leave"
    if beat["heartbeat_seconds_ago"] is not None:
        silent = "silent, " if beat["is_silent"] else ""
        heard = f", {silent}last heartbeat {duration(beat['heartbeat_seconds_ago'])} ago"
    start = "has no snapshot to start from"
    if new := found["new_predictor"]:
        merged = "the merged " if new["is_merged"] else ""
        start = f"reads {size(new['bytes'])} in {plural(new['parts'], 'part')}: {merged}snapshot {new['snapshot']}, "
        start += f"then {plural(new['versions'] - 1, 'version')}"
    first = head["version"] if log["first"] is None else log["first"]
    kinds = ", ".join(plural(log[f"{kind}s"], kind) for kind in ("snapshot", "delta", "claim"))
    lines = {
        "url": found["url"],
        "stream": found["stream"],
        "head": f"version {head['version']}, a {head['kind']}, committed {duration(head['age_seconds'])} ago "
        f"({format_time(head['committed'])}) by generation {head['generation']}",
        "publisher": f"generation {head['generation']}{heard}",
        "pending": f"{plural(head['pending_rows'], 'changed row')} left for later versions",
        "log": f"versions {first} to {head['version']}: {kinds}; "
        f"{plural(log['merged'], 'merged entry', 'merged entries')}",
        "size": f"{size(log['part_bytes'])} in {plural(log['parts'], 'part')}, {size(log['entry_bytes'])} of entries",
        "new predictor": start,
    }
    if tables := found["mirrored_tables"]:
        lines["mirror of"] = f"the tables {', '.join(map(escaped, tables))} only"
    if log["strays"]:
        lines["below a gap"] = (
            f"{plural(log['strays'], 'entry', 'entries')} below a missing one: retention leaves only claims and the "
            "entries before them; see delta-tracker verify"
        )
    return facts(lines)


def _tables(found: dict[str, Any]) -> Table:
    rows = (
        (
            fqn,
            f"{count(each['rows'])} x {each['dim']} {each['dtype']}",
            size(each["snapshot_bytes"]),
            count(each["delta_rows"]),
            size(each["delta_bytes"]),
        )
        for fqn, each in found["tables"].items()
    )
    return table(("table", ">rows x columns", ">snapshot", ">delta rows", ">delta bytes"), rows)
