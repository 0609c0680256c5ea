"""``takeover``: ask a standby to take over from the publisher of a stream."""

from __future__ import annotations

import time

import click

from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import duration
from delta_tracker.errors import InvalidArgumentError, LivePublisherError
from delta_tracker.stream.heartbeat import heartbeat_path
from delta_tracker.stream.liveness import Liveness
from delta_tracker.stream.takeover_request import request_takeover

_NAME = "takeover-command"
_LOOK_SECONDS = 0.5

_HELP = """Ask a standby to take over from the publisher of a stream.

Writes a request that names the newest generation. A standby in Standby.follow() obeys it at its next look: it claims
the stream, which fences the publisher. The command itself claims nothing, and the request stays if no standby runs. It
is obeyed by a standby that starts later, unless another publisher has claimed the stream before.

Without --force, nothing is requested if the last entry or heartbeat of the publisher is younger than --silence.

With --wait, the command waits for a claim of a later generation. Its exit code is 1 if there is none in time.

\b
Examples:
  delta-tracker takeover s3://bucket/ctr-recovery --wait 60
  delta-tracker takeover file:///streams/ctr-recovery --force --json
"""


@click.command("takeover", help=_HELP)
@stream_command
@click.option("--force", "is_forced", is_flag=True, help="Request the takeover even if the publisher is alive.")
@click.option(
    "--silence",
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="Time without an entry or a heartbeat after which the publisher counts as dead.",
)
@click.option(
    "--wait",
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="Time to wait for the claim of a standby.",
)
def command(stream: Stream, silence: float, wait: float, *, is_forced: bool) -> int:
    """Write the request, and wait. Return 1 if no publisher claimed the stream within ``wait`` seconds, otherwise 0."""
    for name, seconds in {"--silence": silence, "--wait": wait}.items():
        if not seconds < float("inf"):
            raise InvalidArgumentError(name, seconds, "Pass a number of seconds")
    head = stream.head()
    silent: float | None = None
    if not is_forced:
        liveness = Liveness(stream.storage, _NAME)
        try:
            signs = liveness.look()
        finally:
            stream.storage.delete(heartbeat_path(_NAME))  # it is not a predictor
        if signs is not None:
            head, silent = signs.head, signs.silent_seconds
            if silent < silence:
                raise LivePublisherError(stream.storage.url, head.generation, head.version, silent)
    request_takeover(stream.storage, head)
    if not stream.out.is_json:
        sign = "" if silent is None else f", whose last sign of life was {duration(silent)} ago"
        stream.out.line(f"requested a takeover from generation {head.generation}{sign}")
    successor = _successor(stream, head.generation, wait) if wait else None
    if stream.out.is_json:
        stream.out.json(
            {
                "url": stream.storage.url,
                "stream": head.stream,
                "generation": head.generation,
                "version": head.version,
                "silent_seconds": silent,
                "successor": successor,
            }
        )
    elif successor is not None:
        stream.out.line(f"generation {successor} has claimed the stream")
    elif wait:
        stream.out.line(f"no standby has claimed the stream within {duration(wait)}; the request stays", "yellow")
    return 1 if wait and successor is None else 0


def _successor(stream: Stream, generation: int, seconds: float) -> int | None:
    """Return the generation after ``generation`` in the log; None if there is none within ``seconds``."""
    end = time.monotonic() + seconds
    while (found := stream.head().generation) <= generation:
        if time.monotonic() >= end:
            return None
        time.sleep(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))
    return found
