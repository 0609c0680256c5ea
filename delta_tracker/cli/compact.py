"""``compact``: versions merged into larger ones."""

from __future__ import annotations

import click

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import size
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import Merged
from delta_tracker.stream.maintenance.compaction import DEFAULT_MAX_BYTES, compact

_HELP = """Merge the deltas behind the newest snapshot into larger ones, or with it into a newer snapshot.

A new predictor, or one that comes back after a pause, then has less to read. Nothing is taken away: merged entries
stand beside the log, and only retention, which the publisher runs, removes what they make superfluous.

Safe at any time, beside a live publisher, its own compactions and readers: a merged entry is created only if it is
absent, after its parts are written. One that is interrupted leaves at most parts that nothing names, which retention
removes after an hour. The memory it takes is about --max-bytes and 40 bytes for each row.

\b
Examples:
  delta-tracker compact file:///streams/ctr
  delta-tracker compact s3://bucket/ctr --fold 0.2 --max-bytes 4000000000
"""


@click.command("compact", help=_HELP)
@stream_command
@click.option(
    "--fold",
    default=0.5,
    show_default=True,
    type=float,
    help="Make a snapshot once the deltas behind the newest one have this part of its bytes.",
)
@click.option(
    "--max-bytes",
    default=DEFAULT_MAX_BYTES,
    show_default=True,
    type=int,
    help="How much of the deltas to hold in memory at once.",
)
@click.option(
    "--min-versions", default=2, show_default=True, type=int, help="Merge only if so many deltas are not merged yet."
)
def command(stream: Stream, fold: float, max_bytes: int, min_versions: int) -> int:
    """Merge until there is nothing left that was there at the start."""
    head = stream.head()
    made: list[Manifest] = []
    with stream.out.progress("merging", None):
        while not made or made[-1].version < head.version:
            merged = compact(stream.log, fold=fold, max_bytes=max_bytes, min_versions=min_versions)
            if merged is None or merged in made:
                break
            made.append(merged)
    if stream.out.is_json:
        merged_as_json = [Entry.of(each).to_dict() | {"first": Merged.of(each).first} for each in made]
        stream.out.json({"url": stream.storage.url, "merged": merged_as_json})
        return 0
    for each in made:
        first = Merged.of(each).first
        stream.out.line(
            f"merged versions {first} to {each.version} into a {each.kind} of {each.num_rows:,} rows, "
            f"{size(each.num_bytes)}"
        )
    if not made:
        stream.out.line(f"nothing to merge: fewer than {min_versions} new deltas, or none that fit")
    return 0
