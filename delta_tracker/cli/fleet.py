"""``fleet``: show the version, the lag and the state of every predictor."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from delta_tracker.cli.followers import hosts_of
from delta_tracker.cli.output import table
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import duration
from delta_tracker.stream.fleet import State, evaluate
from delta_tracker.stream.heartbeat import GONE_SECONDS, SeenHeartbeat, remove_heartbeats, see_heartbeats
from delta_tracker.stream.pin import newest_pin
from delta_tracker.stream.store_clock import StoreClock

_BAD = ("failing", "stuck", "unpinned")

_HELP = """Show the version, the lag and the state of every predictor, by host.

A state is judged by the last ten heartbeats of a predictor, not by one: a predictor is stuck if its version did not
move while it lagged, failing if it also has an error, unpinned if it applies versions in spite of a rollback, silent if
it left no heartbeat in this time, and elsewhere if it has a version of another stream. The exit code is 1 if a
predictor is stuck, failing or unpinned, or if all are silent.

\b
Examples:
  delta-tracker fleet s3://bucket/ctr
  delta-tracker fleet s3://bucket/ctr --limit 10000 --json
  delta-tracker fleet s3://bucket/ctr --remove
"""


@click.command("fleet", help=_HELP)
@stream_command
@click.option("--limit", type=click.IntRange(1), default=4096, help="Heartbeats to read, newest first.")
@click.option("--remove", "removes", is_flag=True, help="Delete heartbeats that were not replaced for a day.")
def command(stream: Stream, limit: int, *, removes: bool) -> int:
    """Show the predictors with a heartbeat in the last hour. Return 1 if one needs attention, or all are silent."""
    before = sum(stream.storage.requests.values())
    head, clock, pin = stream.head(), StoreClock(), newest_pin(stream.storage)
    seen, num_unread = see_heartbeats(stream.storage, clock, max_age=GONE_SECONDS, limit=limit)
    num_removed = remove_heartbeats(stream.storage, clock) if removes else 0
    num_requests = sum(stream.storage.requests.values()) - before
    states: list[tuple[SeenHeartbeat, State]] = [
        (each, evaluate(each.beat, max(0.0, clock.now() - each.modified), head, order=pin)) for each in seen
    ]
    totals = dict(sorted(Counter(state for _, state in states).items()))
    hosts = hosts_of([(each.beat, state) for each, state in states])
    slowest = sorted(states, key=lambda each: each[0].beat.version or 0)[: -(-len(states) // 10)]
    shown = [each for each in states if each in slowest or each[1] in (*_BAD, "silent")]
    if stream.out.is_json:
        stream.out.json(
            {
                "version": head.version,
                "states": totals,
                "hosts": hosts,
                "shown": [{"state": state, **asdict(each.beat)} for each, state in shown],
                "pin": None if pin is None else asdict(pin),
                "left_out": num_unread,
                "removed": num_removed,
                "requests": num_requests,
            }
        )
    else:
        counts = ", ".join(f"{number} {state}" for state, number in totals.items()) or "none"
        age = duration(max(0.0, clock.now() - head.committed))
        stream.out.line(f"version {head.version}, committed {age} ago; predictors: {counts}; {num_requests} requests")
        if num_unread:
            stream.out.line(f"{num_unread} heartbeats are older than an hour or above --limit")
        if removes:
            stream.out.line(f"removed {num_removed} heartbeats that are older than a day")
        if pin is not None:
            age = duration(max(0.0, clock.now() - pin.time))
            stream.out.line(f"{pin.kind} {pin.counter}, {age} ago: version {pin.version} of {pin.bad} {pin.reason}")
        rows = [
            [host or "unknown", *("no data" if value is None else value for value in of_host.values())]
            for host, of_host in hosts.items()
        ]
        if rows:
            stream.out.show(table(["host", "predictors", "silent", "lowest", "median", "highest", "worst lag"], rows))
        if shown:
            listed_rows = [_row(each, state, clock.now()) for each, state in shown]
            stream.out.show(table(["predictor", "host", "state", "version", "lag"], listed_rows))
        for each, _ in shown:
            if each.beat.error is not None:  # it may be long, so it is not in the table
                stream.out.line(f"{each.beat.name} has an error: {each.beat.error}", "red")
            elif each.beat.why:
                stream.out.line(f"{each.beat.name}: {each.beat.why}")
    are_silent = bool(states) and all(state == "silent" for _, state in states)
    return 1 if are_silent or any(state in _BAD for _, state in states) else 0


def _row(seen: SeenHeartbeat, state: State, now: float) -> list[object]:
    beat = seen.beat
    since = f"no data for {duration(max(0.0, now - seen.modified))}"
    version = "none" if beat.version is None else beat.version
    lag = since if state == "silent" else "unknown" if beat.lag_versions is None else beat.lag_versions
    return [beat.name, beat.host, state, version, lag]
