"""``fleet``: show the version, the lag and the state of every predictor."""

from collections import Counter

import click
from msgspec import to_builtins

from delta_tracker.cli.listings import PREDICTOR_COLUMNS, no_data_text, predictor_cells
from delta_tracker.cli.output import table
from delta_tracker.cli.predictors import SeenPredictor, hosts_of, read_predictors
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import duration
from delta_tracker.stream.pin import Pin, newest_pin
from delta_tracker.stream.store_clock import StoreClock

_BAD = ("failing", "stuck", "unpinned")

_HELP = """Show the version, the lag and the state of every predictor, by host.

A state is judged by the last ten heartbeats of a predictor, not by one: a predictor is stuck if its version did not
move while it lagged, failing if it also has an error, unpinned if it applies versions in spite of a rollback, silent if
it left no heartbeat in this time, stopped if stop() wrote the last one, and elsewhere if it has a version of another
stream. The exit code is 1 if a predictor is stuck, failing or unpinned, or if all are silent.

\b
Examples:
  delta-tracker fleet s3://bucket/ctr
  delta-tracker fleet s3://bucket/ctr --limit 10000 --json
"""


@click.command("fleet", help=_HELP)
@stream_command
@click.option("--limit", type=click.IntRange(1), default=4096, help="Heartbeats to read, newest first.")
def command(stream: Stream, limit: int) -> int:
    """Show the predictors. Return 1 if a predictor is failing, stuck or unpinned, or if all are silent, otherwise 0."""
    before = sum(stream.storage.requests.values())
    head, clock, pin = stream.head(), StoreClock(), newest_pin(stream.storage)
    predictors, num_unread = read_predictors(stream.storage, head, clock, order=pin, limit=limit)
    num_requests = sum(stream.storage.requests.values()) - before
    totals = dict(sorted(Counter(each.health for each in predictors).items()))
    hosts = hosts_of(predictors)
    slowest = sorted(predictors, key=lambda each: each.beat.version or 0)[: -(-len(predictors) // 10)]
    bad = (*_BAD, "silent")
    shown = [
        each
        for each in predictors
        if each in slowest or each.health in bad or each.beat.error is not None or each.beat.differences
    ]
    stream.out.json(
        {
            "version": head.version,
            "states": totals,
            "hosts": hosts,
            "shown": [to_builtins(each.beat) | {"state": each.health} for each in shown],
            "pin": pin,
            "left_out": num_unread,
            "requests": num_requests,
        }
    )
    counts = ", ".join(f"{number} {state}" for state, number in totals.items()) or "none"
    age = duration(max(0.0, clock.now() - head.committed))
    stream.out.line(f"version {head.version}, committed {age} ago; predictors: {counts}; {num_requests} requests")
    if num_unread:
        stream.out.line(f"{num_unread} heartbeats are older than an hour or above --limit")
    if pin is not None:
        stream.out.line(_described(pin, clock.now()))
    rows = [
        [host or "unknown", *("no data" if value is None else value for value in of_host.values())]
        for host, of_host in hosts.items()
    ]
    if rows:
        stream.out.show(table(["host", "predictors", "silent", "lowest", "median", "highest", "worst lag"], rows))
    if shown:
        stream.out.show(table(PREDICTOR_COLUMNS, map(predictor_cells, shown)))
    for each in shown:
        style = "" if each.beat.error is None else "red"
        if remark := _remark(each, clock.now()):  # an error may be long, so it is not in the table
            stream.out.line(f"{each.beat.name}{remark}", style)
    are_silent = bool(predictors) and all(each.is_silent for each in predictors)
    return 1 if are_silent or any(each.health in _BAD for each in predictors) else 0


def _described(pin: Pin, now: float) -> str:
    is_pin, age = pin.kind == "pin", duration(max(0.0, now - pin.time))
    what = f"rolled back from version {pin.bad} to {pin.version}" if is_pin else f"released at version {pin.version}"
    return f"{what}, {age} ago" + (f": {pin.reason}" if pin.reason else "")


def _remark(predictor: SeenPredictor, now: float) -> str:
    """Return the remark about a predictor that is printed below the table; empty if there is none."""
    if predictor.beat.error is not None:
        return f" has an error: {predictor.beat.error}"
    if predictor.is_silent:
        return f": {no_data_text(predictor, now)}"
    said = [each for each in (predictor.beat.why, predictor.beat.differences) if each]
    return f": {'; '.join(said)}" if said else ""
