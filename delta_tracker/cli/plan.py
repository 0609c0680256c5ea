"""``plan``: forecast the memory, bytes, requests, disk space and start-up time of a stream before deployment."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from delta_tracker.cli.output import Output, facts, table
from delta_tracker.cli.stream_command import Number, store_options
from delta_tracker.cli.text import count, duration, plural, size
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.planning.forecast import Forecast, forecast
from delta_tracker.planning.workload import Workload, observe
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
@click.option("--every", "seconds", type=Number(0.001), help="Seconds between versions.  [default: 30]")
@click.option("--encoding", type=click.Choice(list(Encoding.__members__), case_sensitive=False), help="Of all tables.")
@click.option("--ranks", type=click.IntRange(1), help="Ranks of the trainer.  [default: 1]")
@click.option("--predictors", default=1, type=click.IntRange(0), help="Predictors that follow.")
@click.option("--poll", "poll_seconds", default=REMOTE_POLL_SECONDS, type=Number(0.001), help="Seconds between polls.")
@click.option("--heartbeats/--no-heartbeats", "has_heartbeats", default=True, help="Predictors have names.")
@click.option("--snapshot-every", type=click.IntRange(0), help="Versions per snapshot; 0 for none.  [default: 1000]")
@click.option(
    "--retain", "retained_versions", type=click.IntRange(1), metavar="N", help="Versions that the retention keeps."
)
@click.option("--dense-bytes", type=click.IntRange(0), help="Bytes of the dense tensors.  [default: 0]")
@click.option(
    "--mode",
    default="id_only",
    type=click.Choice([each.value for each in TrackingMode], case_sensitive=False),
    help="Tracking mode.",
)
@click.option("--consumers", default=1, type=click.IntRange(1), help="Consumers of the tracker.")
@click.option("--torch-engine", "is_torch_engine", is_flag=True, help="The tracker uses the torch engine.")
@click.option("--bandwidth", type=Number(0, above=True), help="MB per second of a starting predictor.")
@click.option("--price-a", type=Number(0), help="Price of a million requests of class A.")
@click.option("--price-b", type=Number(0), help="Price of a million requests of class B.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object on stdout.")
def command(
    *,
    shapes: Sequence[str],
    url: str | None,
    options: Sequence[str],
    bandwidth: float | None,
    price_a: float | None,
    price_b: float | None,
    is_json: bool,
    **fields: Any,  # noqa: ANN401  of the Workload
) -> int:
    """Print the forecast as tables or as one JSON object. ``fields`` are the fields of a :class:`Workload`."""
    if bool(shapes) == (url is not None):
        raise click.UsageError("Pass --table or --from, not both." if shapes else "Pass --table or --from.")
    if options and url is None:
        raise click.UsageError("Pass --option only together with --from.")
    given = {name: value for name, value in fields.items() if value is not None}
    given["mode"] = TrackingMode.of(given["mode"])
    if "encoding" in given:
        given["encoding"] = Encoding.named(given["encoding"])
    if "snapshot_every" in given:
        given["snapshot_every"] = given["snapshot_every"] or None
    if url is not None:
        load = replace(observe(StreamLog(Storage(url, options=store_options(options)))), **given)
    elif "changed" in given:
        load = Workload(**({"seconds": 30.0, "snapshot_every": 1000} | given), tables=tuple(_tables(shapes)))
    else:
        raise click.UsageError("Pass --changed, the fraction of the rows that change in a minute, such as 0.01.")
    found = _values(forecast(load), bandwidth, {"class_a": price_a, "class_b": price_b})
    out = Output(is_json=is_json)
    out.json(found)
    out.show(facts(_facts(found)))
    out.line()
    names = {"publisher": "publisher", "retention": "retention", "predictor": "a predictor", "total": "together"}
    requests = found["requests"]
    hourly = [(name, *(count(round(each)) for each in requests[key].values())) for key, name in names.items()]
    out.show(table(("requests per hour", ">PUT", ">LIST", ">GET", ">HEAD", ">DELETE"), hourly))
    out.line()
    daily = []
    for key, name in {"class_a": "A: write, list", "class_b": "B: read"}.items():
        per_day, cost = found["bill"][key].values()
        daily.append((name, count(round(per_day)), "unknown" if cost is None else f"{cost:,.2f}"))
    out.show(table(("class", ">requests per day", ">cost per day"), daily))
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


def _values(found: Forecast, bandwidth: float | None, prices: dict[str, float | None]) -> dict[str, Any]:
    """Return the forecast as a JSON object. Bytes read, bytes written and requests are per hour."""
    load = found.workload
    starts = {"average": found.start_bytes, "longest": found.longest_start_bytes}
    per_day = {"class_a": _HOURS * found.requests.class_a, "class_b": _HOURS * found.requests.class_b}
    return {
        "tables": len(load.tables),
        "rows": sum(each.num_rows for each in load.tables),
        "table_bytes": load.table_bytes,
        "rows_per_version": sum(map(load.rows_per_version, load.tables)),
        "seconds_between_versions": load.seconds,
        "snapshot_every": load.snapshot_every,
        "ranks": load.ranks,
        "predictors": load.predictors,
        "delta_bytes": found.delta.num_bytes,
        "snapshot_bytes": found.snapshot.num_bytes,
        "written_bytes": found.written_bytes,
        "read_bytes_per_predictor": found.read_bytes,
        "tracker_bytes": found.tracker_bytes,
        "publisher_bytes": found.publisher_bytes,
        "predictor_bytes": found.predictor_bytes,
        "start_bytes": starts,
        "start_seconds": {
            name: None if each is None or bandwidth is None else each / (bandwidth * _MB)
            for name, each in starts.items()
        },
        "versions_kept": found.entries,
        "stored_bytes": found.disk_bytes,
        "requests": {
            "publisher": asdict(found.publisher),
            "retention": asdict(found.retention),
            "predictor": asdict(found.predictor),
            "total": asdict(found.requests),
        },
        "bill": {
            name: {"requests_per_day": number, "cost_per_day": _cost(number, prices[name])}
            for name, number in per_day.items()
        },
    }


def _cost(num_requests: float, price: float | None) -> float | None:
    return None if price is None else price * num_requests / _MILLION


def _facts(found: dict[str, Any]) -> dict[str, str]:
    num_predictors, read = found["predictors"], found["read_bytes_per_predictor"]
    every, seconds = found["snapshot_every"], found["seconds_between_versions"]
    snapshots = f"every {plural(every, 'version')} ({duration(every * seconds)})" if every else "once, at the start"
    stored = f"{size(found['written_bytes'] * _HOURS)} more per day: nothing is deleted"
    if found["stored_bytes"] is not None:
        stored = f"at most {size(found['stored_bytes'])} in {plural(found['versions_kept'], 'version')}"
    start, wait = found["start_bytes"], found["start_seconds"]
    reads = "reads ever more, because there is only one snapshot"
    if start["average"] is not None:
        reads = f"reads {size(start['average'])} on average, at most {size(start['longest'])}"
    if wait["average"] is not None:
        reads += f": {duration(wait['average'])} and {duration(wait['longest'])}"
    return {
        "tables": f"{plural(found['tables'], 'table')}, {count(found['rows'])} rows, {size(found['table_bytes'])}",
        "delta": f"every {duration(seconds)}: {count(found['rows_per_version'])} rows, {size(found['delta_bytes'])}",
        "snapshot": f"{size(found['snapshot_bytes'])}, {snapshots}",
        "written": f"{size(found['written_bytes'])} per hour, by {plural(found['ranks'], 'rank')}",
        "read": f"{size(read)} per hour by a predictor, {size(read * num_predictors)} by {count(num_predictors)}",
        "trainer": f"at most {size(found['tracker_bytes'])} of a rank for the tracker, "
        f"{size(found['publisher_bytes'])} for a delta",
        "predictor": f"{size(found['predictor_bytes'])} for the tables, a snapshot and a delta",
        "start": reads,
        "stored": stored,
    }
