"""``rollback``: pin a stream to a version. All predictors with ``follows_pins`` then return to this version."""

import click

from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.stream.pinning import pin_version

_HELP = """Return all predictors that follow pins to VERSION, and keep them there until a release.

Predictors built with follows_pins=True look for pins every few seconds. The entries that lead to the version and every
byte of the rows are checked first, and retention keeps them. Of two commands at the same time, one fails with exit code
2.

\b
Examples:
  delta-tracker rollback s3://bucket/ctr 41 --reason "AUC fell by 2 %"
  delta-tracker rollback s3://bucket/ctr 40 --replace
"""


@click.command("rollback", help=_HELP)
@stream_command
@click.argument("version", type=click.IntRange(0))
@click.option("--reason", default="", show_default=False, metavar="TEXT", help="Text that is stored with the pin.")
@click.option("--quick", is_flag=True, help="Compare the sizes of objects only, without reading their bytes.")
@click.option("--replace", "replaces", is_flag=True, help="Replace the pin that applies.")
def command(stream: Stream, version: int, reason: str, *, quick: bool, replaces: bool) -> int:
    """Pin the stream to a version, and print the pin."""
    if not stream.storage.is_read_only:
        stream.head()
    pin = pin_version(stream.storage, version, reason=reason, replaces=replaces, is_quick=quick)
    stream.out.result(pin, f"pinned to version {pin.version} of {pin.bad}, counter {pin.counter}")
    stream.out.line("Predictors without follows_pins=True ignore it: delta-tracker fleet shows them as unpinned")
    stream.out.line("To end it, call publisher.snapshot() in the repaired trainer, then run delta-tracker release")
    return 0
