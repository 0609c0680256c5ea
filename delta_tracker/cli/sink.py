"""``sink``: write a stream to a row store and follow it."""

from __future__ import annotations

import time

import click

from delta_tracker.cli.numbers import Number
from delta_tracker.cli.sink_target import open_target
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.termination import terminated
from delta_tracker.errors import FollowEndedError, InvalidArgumentError
from delta_tracker.predictor.predictor import Predictor

_SHOW_SECONDS = 0.2  # interval at which a new version is looked for, to print it

_HELP = """Write the stream at URL to a row store and follow it, until SIGTERM or Ctrl-C.

TARGET is redis://HOST:PORT/DB?prefix=PREFIX (rediss:// with TLS), lmdb:///DIRECTORY, or MODULE:FUNCTION for a row store
of your own: a function without arguments that returns a RowSink. Readers find each row by table and row id, or by table
and raw id, as of the stored version or a later one. Dense tensors are not written. Run one sink per row store; a second
one stops with exit code 2.

After an interruption at any point, the next run continues from the stored version. Errors of the stream or of the row
store are logged, and the write is tried again. SIGTERM ends the command with exit code 143.

\b
Examples:
  delta-tracker sink s3://bucket/ctr 'redis://127.0.0.1:6379/0?prefix=ctr' --name redis-1
  delta-tracker sink file:///streams/ctr lmdb:///var/lib/ctr --once
"""


@click.command("sink", help=_HELP)
@stream_command
@click.argument("target")
@click.option("--once", is_flag=True, help="Exit when TARGET has the newest version of URL.")
@click.option("--name", help="Write heartbeats with this name to URL.")
@click.option("--poll", type=Number(0.01), metavar="SECONDS", help="Polling interval. Default: by URL.")
@click.option("--cache", metavar="DIRECTORY", help="Directory in which the predictors of this host keep parts.")
def command(stream: Stream, target: str, name: str | None, poll: float | None, cache: str | None, *, once: bool) -> int:
    """Write the stream until SIGTERM or Ctrl-C, or with ``once`` up to its newest version, and print each version."""
    if once and poll is not None:
        raise InvalidArgumentError("--poll", poll, "Pass it without --once, which does not poll")
    sink = open_target(target)
    try:
        predictor = Predictor(sink, stream.storage, name=name, cache=cache)
        if once:
            predictor.sync()
            _show(stream, predictor)
            return 0
        with terminated(), predictor:
            predictor.follow(poll)
            _print_versions(stream, predictor)
    finally:
        sink.close()
    return 0


def _print_versions(stream: Stream, predictor: Predictor) -> None:
    """Print each version that is seen, until the thread of the predictor ends."""
    shown: int | None = None
    while not isinstance(predictor.error, FollowEndedError):
        if predictor.version is not None and predictor.version != shown:
            shown = predictor.version
            _show(stream, predictor)
        time.sleep(_SHOW_SECONDS)


def _show(stream: Stream, predictor: Predictor) -> None:
    if stream.out.is_json:
        stream.out.json({"version": predictor.version})
    else:
        stream.out.line(f"version {predictor.version} is stored")
