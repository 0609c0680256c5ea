"""``mirror``: copy a stream to another store, and follow it."""

from __future__ import annotations

import click

from delta_tracker.cli.stream_command import Stream, stream_command

_HELP = """Copy a stream to another store, and follow it.

\b
Examples:
  delta-tracker mirror s3://bucket/ctr s3://other/ctr
"""


@click.command("mirror", help=_HELP)
@stream_command
def command(stream: Stream) -> int:
    """Copy a stream to another store, and follow it."""
    raise NotImplementedError(stream.storage.url)
