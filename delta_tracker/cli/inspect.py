"""``inspect``: show a stream's contents, its predictors, and the entries that a new predictor reads."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.entries import KIND_STYLES, Entry
from delta_tracker.cli.followers import FollowerView
from delta_tracker.cli.output import cell, table
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.survey import Survey, count_kinds, survey
from delta_tracker.cli.text import count, duration, moment, several, size
from delta_tracker.stream.format.manifest import DTYPE_NAMES

_HELP = """Show the contents of a stream, what a new predictor reads, and the predictors that follow it.

Reads every entry of the log, but no rows. Predictors are listed by their heartbeats: "silent" after 30 seconds without
a heartbeat, and omitted after an hour. A publisher of versions with states leaves heartbeats too. Exit code 1 if an
entry is malformed, or if a new predictor cannot reach the newest version. Times are by the store's clock; a host whose
clock differs from it by more than a minute is reported.
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
    """Print a summary of the stream as tables or as one JSON object. Return 1 if there are findings, otherwise 0."""
    found = survey(stream)
    newest = found.entries[max(0, len(found.entries) - last) :]
    if stream.out.is_json:
        versions = [entry.to_dict() for entry in newest]
        stream.out.json({"url": stream.storage.url} | found.to_dict() | {"versions": versions})
    else:
        screen = [_facts(stream.storage.url, found), _tables(found), _generations(found)]
        screen += [_versions(newest, found.now)] if newest else []
        for each in (*screen, _predictors(found)):
            stream.out.show(each)
            stream.out.line()
        if found.num_gone:
            stream.out.line(f"{several(found.num_gone, 'predictor')} without a heartbeat for an hour", "dim")
        for follower in found.followers:
            if follower.beat.error is not None:
                stream.out.line(f"{follower.beat.name} has an error: {follower.beat.error}", "red")
        for skew in found.skews:
            stream.out.line(skew, "yellow")
        for finding in found.findings:
            stream.out.line(f"damaged: {finding}", "bold red")
    return 1 if found.findings else 0


def _facts(url: str, found: Survey) -> Table:
    head, kinds = found.head, count_kinds(found.entries)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    first = found.entries[0].version if found.entries else head.version
    age = duration(max(0.0, found.now - head.committed))
    lines = {
        "url": url,
        "stream": head.stream,
        "head": f"version {head.version}, a {head.kind}, committed {age} ago ({moment(head.committed)}) by generation "
        f"{head.generation}",
        "publisher": _publisher(found),
        "pending": f"{several(head.pending_rows, 'changed row')} left for later versions",
        "log": f"versions {first} to {head.version}: {several(kinds['snapshot'], 'snapshot')}, "
        f"{several(kinds['delta'], 'delta')}, {several(kinds['claim'], 'claim')}; "
        f"{several(found.num_merged, 'merged entry', 'merged entries')}",
        "size": f"{size(found.part_bytes)} in {several(found.num_parts, 'part')}, {size(found.entry_bytes)} of entries",
        "new predictor": _start(found),
    }
    if found.num_strays:
        lines["below a gap"] = (
            f"{several(found.num_strays, 'entry', 'entries')} below a missing one: retention leaves only claims and "
            "the entries before them; see delta-tracker verify"
        )
    for name, line in lines.items():
        facts.add_row(name, cell(line))
    return facts


def _publisher(found: Survey) -> str:
    if found.beat_seconds_ago is None:
        return f"generation {found.head.generation}; no heartbeat, which only publishers with states leave"
    silent = "silent, " if found.is_silent else ""
    return f"generation {found.head.generation}, {silent}last heartbeat {duration(found.beat_seconds_ago)} ago"


def _start(found: Survey) -> str:
    if found.start is None:
        return "has no snapshot to start from"
    snapshot, behind = found.start.snapshot, len(found.start.entries) - 1
    return (
        f"reads {size(found.start.num_bytes)} in {several(found.start.num_parts, 'part')}: "
        f"{'the merged ' if snapshot.merges else ''}snapshot {snapshot.version}, then {several(behind, 'version')}"
    )


def _tables(found: Survey) -> Table:
    rows = []
    for fqn, spec in found.tables.items():
        snapshot, deltas = found.in_snapshot(fqn), found.in_deltas(fqn)
        shape = f"{count(spec.num_rows)} x {spec.dim} {DTYPE_NAMES[spec.dtype]}"
        rows.append((fqn, shape, size(snapshot.num_bytes), count(deltas.rows), size(deltas.num_bytes)))
    return table(("table", ">rows x columns", ">snapshot", ">delta rows", ">delta bytes"), rows)


def _generations(found: Survey) -> Table:
    rows = []
    for generation, entries in found.generations():
        kinds = count_kinds(entries)
        rows.append(
            (
                count(generation),
                f"{entries[0].version} to {entries[-1].version}",
                count(kinds["snapshot"]),
                count(kinds["delta"]),
                count(sum(entry.num_rows for entry in entries)),
                size(sum(entry.num_bytes for entry in entries)),
                moment(entries[0].committed),
            )
        )
    return table((">generation", ">versions", ">snapshots", ">deltas", ">rows", ">bytes", "since"), rows)


def _versions(entries: Sequence[Entry], now: float) -> Table:
    has_owners = any(entry.owners for entry in entries)
    rows = (
        (
            str(entry.version),
            cell(entry.kind, KIND_STYLES[entry.kind]),
            duration(max(0.0, now - entry.committed)),
            f"{entry.batches[0]} to {entry.batches[1]}",
            count(entry.num_rows),
            size(entry.num_bytes),
            count(entry.pending_rows),
            *([entry.owner_changes] if has_owners else []),
        )
        for entry in entries
    )
    heads = (">version", "kind", ">age", ">batches", ">rows", ">bytes", ">pending")
    return table((*heads, ">ids in / out") if has_owners else heads, rows)


def _predictors(found: Survey) -> Table | Text:
    if not found.followers:
        return cell("no predictor has written a heartbeat in the last hour", "dim")
    heads = ("predictor", "state", ">heartbeat", ">version", ">behind", ">since", ">resyncs")
    return table(heads, (_predictor(found, follower) for follower in found.followers))


def _predictor(found: Survey, follower: FollowerView) -> tuple[object, ...]:
    beat, seconds = follower.beat, found.behind_seconds(follower)
    behind = "other stream" if follower.behind is None else count(follower.behind)
    return (
        beat.name,
        cell(follower.state, "green" if follower.state == "live" else "red"),
        f"{duration(follower.seconds_ago)} ago",
        "none" if beat.version is None else str(beat.version),
        "" if beat.version is None else behind,
        duration(seconds) if seconds and follower.behind else "",
        count(beat.resyncs),
    )
