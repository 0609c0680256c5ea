"""``takeover``: ask a standby to take over from the publisher of a stream."""

import time

import click
from click.core import ParameterSource

from delta_tracker.cli.silence import SILENCE_SECONDS, check_silence
from delta_tracker.cli.stream_command import Number, Stream, stream_command
from delta_tracker.cli.text import duration
from delta_tracker.stream.takeover_request import cancel_takeover, request_takeover

_LOOK_SECONDS = 0.5

_HELP = """Ask a standby to take over from the publisher of a stream.

Writes a request that names the newest generation. A standby in Standby.follow() sees it at its next look and claims the
stream, which fences the publisher. The command itself claims nothing. The request stays if no standby runs, and a
standby that starts later follows it. It lapses when another publisher claims the stream, or with --cancel.

Without --force, nothing is requested if the last entry or heartbeat of the publisher is younger than --silence, and the
request also lapses when the publisher leaves an entry or a heartbeat.

With --wait, the command waits for a claim of a later generation. Its exit code is 1 if there is none in time.

\b
Examples:
  delta-tracker takeover s3://bucket/ctr-recovery --wait 60
  delta-tracker takeover file:///streams/ctr-recovery --force --json
  delta-tracker takeover s3://bucket/ctr-recovery --cancel
"""


@click.command("takeover", help=_HELP)
@stream_command
@click.option("--force", "is_forced", is_flag=True, help="Request the takeover even if the publisher is alive.")
@click.option(
    "--silence",
    default=SILENCE_SECONDS,
    metavar="SECONDS",
    type=Number(0),
    help="Time without an entry or a heartbeat after which the publisher counts as dead.",
)
@click.option("--wait", default=0.0, metavar="SECONDS", type=Number(0), help="Time to wait for the claim of a standby.")
@click.option("--cancel", "cancels", is_flag=True, help="Delete the request instead. Excludes the other options.")
def command(stream: Stream, silence: float, wait: float, *, is_forced: bool, cancels: bool) -> int:
    """Request or cancel a takeover. Return 1 if ``wait`` > 0 and no publisher claims the stream in time, else 0."""
    if cancels:
        source = click.get_current_context().get_parameter_source
        if any(source(name) is not ParameterSource.DEFAULT for name in ("is_forced", "wait", "silence")):
            raise click.UsageError("Pass --cancel without other options.")
        is_cancelled = cancel_takeover(stream.storage)
        text = "the request is cancelled" if is_cancelled else "there is no request"
        stream.out.result({"url": stream.storage.url, "cancelled": is_cancelled}, text)
        return 0
    head, silent = stream.head(), None
    if not is_forced and (seen := check_silence(stream.storage, silence)) is not None:
        head, silent = seen.head, seen.silent_seconds
    request_takeover(stream.storage, head, force=is_forced)
    sign = "" if silent is None else f", whose last sign of life was {duration(silent)} ago"
    stream.out.line(f"requested a takeover from generation {head.generation}{sign}")
    successor = _successor(stream, head.generation, wait) if wait else None
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
    if successor is not None:
        stream.out.line(f"generation {successor} has claimed the stream")
    elif wait:
        stream.out.line(f"no standby has claimed the stream within {duration(wait)}; the request stays", "yellow")
    return 1 if wait and successor is None else 0


def _successor(stream: Stream, generation: int, seconds: float) -> int | None:
    """Wait up to ``seconds`` for a generation after ``generation``, and return its number; None if there is none."""
    end = time.monotonic() + seconds
    while (found := stream.head().generation) <= generation:
        if time.monotonic() >= end:
            return None
        time.sleep(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))
    return found
