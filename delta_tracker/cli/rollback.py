"""``rollback``: return all predictors that follow pins to a version."""

from __future__ import annotations

import click

from delta_tracker.cli.stream_command import Stream, stream_command

_HELP = """Return all predictors that follow pins to a version.

\b
Examples:
  delta-tracker rollback s3://bucket/ctr 41
"""


@click.command("rollback", help=_HELP)
@stream_command
def command(stream: Stream) -> int:
    """Return all predictors that follow pins to a version."""
    raise NotImplementedError(stream.storage.url)
