"""``release``: let the predictors of a rolled back stream continue."""

from __future__ import annotations

import click

from delta_tracker.cli.stream_command import Stream, stream_command

_HELP = """Let the predictors of a rolled back stream continue from a snapshot.

\b
Examples:
  delta-tracker release s3://bucket/ctr
"""


@click.command("release", help=_HELP)
@stream_command
def command(stream: Stream) -> int:
    """Let the predictors of a rolled back stream continue."""
    raise NotImplementedError(stream.storage.url)
