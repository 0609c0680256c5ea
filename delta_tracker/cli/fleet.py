"""``fleet``: show the version, the lag and the state of every predictor."""

from __future__ import annotations

import click

from delta_tracker.cli.stream_command import Stream, stream_command

_HELP = """Show the version, the lag and the state of every predictor, by host.

\b
Examples:
  delta-tracker fleet s3://bucket/ctr
"""


@click.command("fleet", help=_HELP)
@stream_command
def command(stream: Stream) -> int:
    """Show the version, the lag and the state of every predictor."""
    raise NotImplementedError(stream.storage.url)
