"""``plan``: forecast memory, bytes, requests, disk and start-up time of a stream before it is deployed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Table

from delta_tracker.cli.numbers import Number
from delta_tracker.cli.output import Output, cell, table
from delta_tracker.cli.stream_command import store_options
from delta_tracker.cli.text import count, duration, several, size
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.forecast import Forecast, Requests, forecast
from delta_tracker.planning.observed import observe
from delta_tracker.planning.version_size import table_bytes
from delta_tracker.planning.workload import Workload
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.url import REMOTE_POLL_SECONDS
from delta_tracker.types import TableSpec, TrackingMode

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_TABLE = re.compile(r"(?:(\d{1,6})\*)?(\d{1,15}(?:\.\d{1,9})?)([kMG]?)x(\d{1,9})(?::(\w{1,9}))?", re.ASCII)
_DTYPES = {each.name: each.dtype for each in Encoding if not each.is_quantized}
_HOURS, _MILLION, _MB = 24, 1e6, 1e6
_MAX_TABLES = 10_000

_HELP = """Forecast memory, bytes, requests, disk and start-up time of a stream in a bucket.

Describe the tables with --table, or take them and their rates from an existing stream with --from; other options then
replace what the stream shows. Rows are assumed to be split evenly over the ranks, and changed rows to be spread evenly
over a table. Not counted: compaction, HTTP caches, hints, pins, metrics, training states, raw ids, retries and the
requests of starting processes. Requests that write or list are class A, those that read class B; deletions, which most
providers do not bill, are shown apart.

\b
Examples:
  delta-tracker plan --table 100Mx64 --changed 0.01 --ranks 8 --predictors 50
  delta-tracker plan --table 26*1Mx128:BF16 --changed 0.05 --encoding INT8
  delta-tracker plan --from s3://bucket/ctr --predictors 200 --json
"""


@click.command("plan", help=_HELP)
@click.option(
    "--table",
    "shapes",
    multiple=True,
    metavar="[N*]ROWSxDIM[:DTYPE]",
    help="A table, or N tables, of F32 (default), F16 or BF16. Rows may end with k, M or G. Repeat it for others.",
)
@click.option("--from", "url", metavar="URL", help="Stream whose tables and rates to take.")
@click.option("--option", "-o", "options", multiple=True, metavar="NAME=VALUE", help="Option of the store of --from.")
@click.option("--changed", type=Number(0), help="Fraction of the rows that change in a minute.")
@click.option("--every", type=Number(0.001), help="Seconds between versions.  [default: 30]")
@click.option("--encoding", type=click.Choice(list(Encoding.__members__), case_sensitive=False), help="Of all tables.")
@click.option("--ranks", type=click.IntRange(1), help="Ranks of the trainer.  [default: 1]")
@click.option("--predictors", default=1, type=click.IntRange(0), help="Predictors that follow.")
@click.option("--poll", default=REMOTE_POLL_SECONDS, type=Number(0.001), help="Seconds between polls.")
@click.option("--heartbeats/--no-heartbeats", default=True, help="Predictors have names.")
@click.option("--snapshot-every", type=click.IntRange(0), help="Versions per snapshot; 0 for none.  [default: 1000]")
@click.option("--retain", type=click.IntRange(1), metavar="N", help="Versions that the retention keeps.")
@click.option("--dense-bytes", type=click.IntRange(0), help="Bytes of the dense tensors.  [default: 0]")
@click.option(
    "--mode",
    default="id_only",
    type=click.Choice([each.value for each in TrackingMode], case_sensitive=False),
    help="Tracking mode.",
)
@click.option("--consumers", default=1, type=click.IntRange(1), help="Consumers of the tracker.")
@click.option("--torch-engine", is_flag=True, help="The tracker uses the torch engine.")
@click.option("--bandwidth", type=Number(0, above=True), help="MB per second of a starting predictor.")
@click.option("--price-a", type=Number(0), help="Price of a million requests of class A.")
@click.option("--price-b", type=Number(0), help="Price of a million requests of class B.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object on stdout.")
def command(  # noqa: PLR0913  one parameter per option
    *,
    shapes: Sequence[str],
    url: str | None,
    options: Sequence[str],
    changed: float | None,
    every: float | None,
    encoding: str | None,
    ranks: int | None,
    predictors: int,
    poll: float,
    snapshot_every: int | None,
    retain: int | None,
    dense_bytes: int | None,
    mode: str,
    consumers: int,
    bandwidth: float | None,
    price_a: float | None,
    price_b: float | None,
    heartbeats: bool,
    torch_engine: bool,
    is_json: bool,
) -> int:
    """Print the forecast as tables or as one JSON object."""
    if bool(shapes) == (url is not None):
        raise click.UsageError("Pass --table or --from, not both." if shapes else "Pass --table or --from.")
    if options and url is None:
        raise click.UsageError("Pass --option only together with --from.")
    seen = None if url is None else observe(StreamLog(Storage(url, options=store_options(options))))
    if changed is None and seen is None:
        raise click.UsageError("Pass --changed, the fraction of the rows that change in a minute, such as 0.01.")
    if snapshot_every is None:
        snapshot_every = 1000 if seen is None else seen.snapshot_every
    found = forecast(
        Workload(
            tables=tuple(_tables(shapes)) if seen is None else seen.tables,
            changed=changed if changed is not None else seen.changed if seen else 0.0,
            seconds=every or (seen.seconds if seen else 30.0),
            encoding=Encoding.named(encoding) if encoding else seen.encoding if seen else None,
            ranks=ranks or (seen.ranks if seen else 1),
            predictors=predictors,
            poll_seconds=poll,
            has_heartbeats=heartbeats,
            snapshot_every=snapshot_every or None,
            retained_versions=retain,
            dense_bytes=dense_bytes if dense_bytes is not None else seen.dense_bytes if seen else 0,
            mode=TrackingMode.of(mode),
            consumers=consumers,
            is_torch_engine=torch_engine,
        )
    )
    out = Output(is_json=is_json)
    prices = {"class_a": price_a, "class_b": price_b}
    if is_json:
        out.json(_values(found, bandwidth, prices))
        return 0
    out.show(_facts(found, bandwidth))
    out.line()
    out.show(_requests(found))
    out.line()
    out.show(_bill(found, prices))
    return 0


def _tables(shapes: Sequence[str]) -> list[TableSpec]:
    found: list[TableSpec] = []
    for shape in shapes:
        match = _TABLE.fullmatch(shape)
        dtype = None if match is None else _DTYPES.get((match[5] or "F32").upper())
        if match is None or dtype is None:
            raise InvalidArgumentError("--table", shape, f"Write it as 100Mx64 or 26*1Mx64:F16; dtypes: {[*_DTYPES]}")
        number, num_rows = int(match[1] or 1), round(float(match[2]) * _UNITS[match[3]])
        if len(found) + number > _MAX_TABLES:
            raise InvalidArgumentError("--table", shape, f"Pass at most {_MAX_TABLES} tables")
        found += [TableSpec(f"ebc.t{len(found) + each}", num_rows, int(match[4]), dtype) for each in range(number)]
    return found


def _facts(found: Forecast, bandwidth: float | None) -> Table:
    load = found.workload
    rows = sum(each.num_rows for each in load.tables)
    per_version = sum(map(load.rows_per_version, load.tables))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    lines = {
        "tables": f"{several(len(load.tables), 'table')}, {count(rows)} rows, {size(table_bytes(load.tables))}",
        "delta": f"every {duration(load.seconds)}: {count(per_version)} rows, {size(found.delta.num_bytes)}",
        "snapshot": f"{size(found.snapshot.num_bytes)}, {_snapshots(load)}",
        "written": f"{size(found.written_bytes)} per hour, by {several(load.ranks, 'rank')}",
        "read": f"{size(found.read_bytes)} per hour by a predictor, "
        f"{size(found.read_bytes * load.predictors)} by {count(load.predictors)}",
        "trainer": f"at most {size(found.tracker_bytes)} of a rank for the tracker, "
        f"{size(found.publisher_bytes)} for a delta",
        "predictor": f"{size(found.predictor_bytes)} for the tables, a snapshot and a delta",
        "start": _start(found, bandwidth),
        "stored": f"{size(found.written_bytes * _HOURS)} more per day: nothing is deleted"
        if found.disk_bytes is None
        else f"at most {size(found.disk_bytes)} in {several(found.entries or 0, 'version')}",
    }
    for name, line in lines.items():
        facts.add_row(name, cell(line))
    return facts


def _snapshots(load: Workload) -> str:
    if load.snapshot_every is None:
        return "once, at the start"
    return f"every {several(load.snapshot_every, 'version')} ({duration(load.snapshot_every * load.seconds)})"


def _start(found: Forecast, bandwidth: float | None) -> str:
    if found.start_bytes is None or found.longest_start_bytes is None:
        return "reads ever more, because there is only one snapshot"
    text = f"reads {size(found.start_bytes)} on average, at most {size(found.longest_start_bytes)}"
    if bandwidth is None:
        return text
    least, most = (each / (bandwidth * _MB) for each in (found.start_bytes, found.longest_start_bytes))
    return f"{text}: {duration(least)} and {duration(most)}"


def _requests(found: Forecast) -> Table:
    rows = {
        "publisher": found.publisher,
        "retention": found.retention,
        "a predictor": found.predictor,
        "together": found.requests,
    }
    heads = ("requests per hour", ">PUT", ">LIST", ">GET", ">HEAD", ">DELETE")
    return table(heads, ((name, *(count(round(each)) for each in asdict(of).values())) for name, of in rows.items()))


def _bill(found: Forecast, prices: dict[str, float | None]) -> Table:
    rows, names = [], {"class_a": "A: write, list", "class_b": "B: read"}
    for name, per_day in _per_day(found.requests).items():
        price = prices[name]
        cost = "unknown" if price is None else f"{price * per_day / _MILLION:,.2f}"
        rows.append((names[name], count(round(per_day)), cost))
    return table(("class", ">requests per day", ">cost per day"), rows)


def _per_day(requests: Requests) -> dict[str, float]:
    return {"class_a": _HOURS * requests.class_a, "class_b": _HOURS * requests.class_b}


def _values(found: Forecast, bandwidth: float | None, prices: dict[str, float | None]) -> dict[str, object]:
    """Return the forecast as JSON values. Bytes and requests are per hour, where not stated otherwise."""
    starts = (found.start_bytes, found.longest_start_bytes)
    seconds = [None if each is None or bandwidth is None else each / (bandwidth * _MB) for each in starts]
    bill = {
        name: {
            "requests_per_day": per_day,
            "cost_per_day": None if (price := prices[name]) is None else price * per_day / _MILLION,
        }
        for name, per_day in _per_day(found.requests).items()
    }
    load = found.workload
    return {
        "tables": len(load.tables),
        "rows": sum(each.num_rows for each in load.tables),
        "table_bytes": table_bytes(load.tables),
        "rows_per_version": sum(map(load.rows_per_version, load.tables)),
        "seconds_between_versions": load.seconds,
        "ranks": load.ranks,
        "predictors": load.predictors,
        "delta_bytes": found.delta.num_bytes,
        "snapshot_bytes": found.snapshot.num_bytes,
        "written_bytes": found.written_bytes,
        "read_bytes_per_predictor": found.read_bytes,
        "tracker_bytes": found.tracker_bytes,
        "publisher_bytes": found.publisher_bytes,
        "predictor_bytes": found.predictor_bytes,
        "start_bytes": {"average": starts[0], "longest": starts[1]},
        "start_seconds": {"average": seconds[0], "longest": seconds[1]},
        "versions_kept": found.entries,
        "stored_bytes": found.disk_bytes,
        "requests": {
            "publisher": asdict(found.publisher),
            "retention": asdict(found.retention),
            "predictor": asdict(found.predictor),
            "total": asdict(found.requests),
        },
        "bill": bill,
    }
