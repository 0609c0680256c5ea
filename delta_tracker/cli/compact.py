"""``compact``: merge versions into larger ones."""

import click
from msgspec import to_builtins

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.stream_command import Number, Stream, stream_command
from delta_tracker.cli.text import size
from delta_tracker.stream.format.manifest import Manifest, Merged
from delta_tracker.stream.maintenance.compaction import DEFAULT_MAX_BYTES, compact

_HELP = """Merge the deltas after the newest snapshot into larger ones, or with it into a newer snapshot.

A new predictor, or one that resumes after a pause, then has less to read. Nothing is deleted: merged entries are stored
in addition to the log, and only the publisher's retention deletes superseded versions.

Safe to run concurrently with a publisher, its compactions and readers: a merged entry is created only if it is absent,
after its parts are written. If interrupted, it leaves at most parts that no entry names, which retention deletes after
an hour. Needs about --max-bytes of memory plus 40 bytes per row.

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
    type=Number(0, 10, above=True),
    help="Create a snapshot once the deltas after the newest one have this fraction of its bytes.",
)
@click.option("--max-bytes", default=DEFAULT_MAX_BYTES, type=int, help="Maximum bytes of deltas held in memory.")
@click.option("--min-versions", default=2, type=int, help="Merge only if at least this many deltas are not merged yet.")
def command(stream: Stream, fold: float, max_bytes: int, min_versions: int) -> int:
    """Merge versions within the limits of the options, and print the merged entries."""
    head = stream.head()
    made: list[Manifest] = []
    with stream.out.progress("merging", None):
        while not made or made[-1].version < head.version:
            merged = compact(stream.log, fold=fold, max_bytes=max_bytes, min_versions=min_versions)
            if merged is None or merged in made:
                break
            made.append(merged)
    merged_as_json = [to_builtins(Entry.of(each)) | {"first": Merged.of(each).first} for each in made]
    stream.out.json({"url": stream.storage.url, "merged": merged_as_json})
    for each in made:
        first = Merged.of(each).first
        stream.out.line(
            f"merged versions {first} to {each.version} into a {each.kind} of {each.num_rows:,} rows, "
            f"{size(each.num_bytes)}"
        )
    if not made:
        stream.out.line(f"nothing to merge: fewer than {min_versions} new deltas, or all exceed --max-bytes")
    return 0
