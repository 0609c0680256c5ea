"""``release``: allow the predictors of a stream that was rolled back to continue."""

import click

from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.stream.pinning import release_pin

_HELP = """Let the predictors of a rolled back stream continue from a snapshot.

The newest snapshot of the log must be above every version that existed at the rollback. Otherwise, the command fails
with exit code 2: call publisher.snapshot() in the repaired trainer, or wait for the next snapshot of its cadence.

\b
Examples:
  delta-tracker release s3://bucket/ctr
"""


@click.command("release", help=_HELP)
@stream_command
@click.option("--reason", default="", show_default=False, metavar="TEXT", help="Text that is stored with the release.")
def command(stream: Stream, reason: str) -> int:
    """Release the pin of the stream, and print the release."""
    if not stream.storage.is_read_only:
        stream.head()
    pin = release_pin(stream.storage, reason=reason)
    stream.out.result(pin, f"released: predictors continue from the snapshot {pin.version}, counter {pin.counter}")
    return 0
