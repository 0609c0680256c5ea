"""``tail``: print versions as they are committed."""

import time

import click

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.listings import KIND_STYLES
from delta_tracker.cli.stream_command import Number, Stream, stream_command
from delta_tracker.cli.text import count, format_time, size
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.path import next_entry
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.source import Source

# Number of polls between two listings of the log. A listing shows if the next version is missing or not committed yet.
_LOOKS_PER_LISTING = 10
_COLUMNS = "{:<19}  {:>9}  {:<8}  {:>4}  {:>11}  {:>7}  {:>7}  {:>9}"

_HELP = """Print versions as they are committed, until Ctrl-C. Waits for a stream that does not exist yet.

"took" is the time from a version's cut, when its rows were read, to its commit. "pending" is the number of changed rows
left for later versions. With --json, each line is an object. Exit code 1 if the next version is missing, or if the
stream was replaced.

\b
Examples:
  delta-tracker tail file:///streams/ctr
  delta-tracker tail s3://bucket/ctr --lines 100 --count 100
  delta-tracker tail s3://bucket/ctr --json | jq -r '[.version, .bytes] | @tsv'
"""


@click.command("tail", help=_HELP)
@stream_command
@click.option("--lines", "-n", default=10, type=click.IntRange(0), help="Number of old versions to print first.")
@click.option("--count", "-c", "limit", type=click.IntRange(1), help="Exit after this many lines.")
@click.option("--every", default=1.0, type=Number(0.01), metavar="SECONDS", help="Polling interval.")
def command(stream: Stream, lines: int, limit: int | None, every: float) -> int:
    """Print the last ``lines`` versions, then each new version. Stop after ``limit`` versions, or at Ctrl-C."""
    head = stream.wait_for_head(every)
    stream.out.line(_COLUMNS.format("committed", "version", "kind", "gen", "rows", "bytes", "took", "pending"), "bold")
    num_shown = 0
    for version in range(max(0, head.version - lines + 1), head.version + 1):
        manifest = stream.log.read(version)  # None for one that retention deleted
        if manifest is not None:
            num_shown += _show(stream, manifest)
            if num_shown == limit:
                return 0
    source, position = Source(0, stream.storage), Position.after(head)
    num_looks = 0
    while num_shown != limit:
        found = source.next(position, looks_for_gap=num_looks == _LOOKS_PER_LISTING)
        manifest = next_entry(source.log, position, found)
        if manifest is not None:
            num_shown += _show(stream, manifest)
            position = Position.after(manifest)
            continue
        num_looks = num_looks % _LOOKS_PER_LISTING + 1
        time.sleep(every)
    return 0


def _show(stream: Stream, manifest: Manifest) -> int:
    entry = Entry.of(manifest)
    line = _COLUMNS.format(
        format_time(entry.committed),
        entry.version,
        entry.kind,
        entry.generation,
        count(entry.num_rows),
        size(entry.num_bytes),
        entry.took,
        count(entry.pending_rows),
    )
    stream.out.result(entry, line, KIND_STYLES[entry.kind])
    return 1
