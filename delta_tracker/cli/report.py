"""``report``: write one self-contained HTML page about a stream."""

import secrets
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from msgspec import to_builtins

from delta_tracker.cli.attention import Notice, clock_notices, predictor_notices, publisher_notices, sort_notices
from delta_tracker.cli.entries import Amount, contiguous, total
from delta_tracker.cli.history import Bin, History
from delta_tracker.cli.movement import Movement, TableMovement
from delta_tracker.cli.page import Figures, render
from delta_tracker.cli.predictors import Skews, hosts_of, read_predictors
from delta_tracker.cli.stream_command import Stream, os_errors_of, stream_command
from delta_tracker.cli.text import duration, plural, size
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MissingExtraError,
    StreamError,
    import_optional,
)
from delta_tracker.monitor.buckets import LogBuckets
from delta_tracker.stream.format.manifest import DTYPE_NAMES, entry_name
from delta_tracker.stream.format.table_choice import mirrored_tables
from delta_tracker.stream.pin import Pin, newest_pin
from delta_tracker.stream.store_clock import StoreClock

MAX_TABLES = 40
_HOT_ROWS = 10
_SUMS = ("deltas", "snapshots", "restarts", "delta_bytes", "snapshot_bytes", "full_bytes")
_BIN_FIELDS = [each.name for each in fields(Bin) if each.name != "tables"]

_HELP = """Write one self-contained HTML page about a stream: delta size over time, hottest rows, how far rows move,
freshness, bytes saved.

The page needs no network and loads no third-party scripts. By default the report reads the newest 10,000 versions, and
the rows of the newest 1 GB of them; the page states these ranges. Memory stays below 1 GB for a stream of any size.
Exit code 1 if the stream is damaged; the page is still written and lists the faults.

\b
Examples:
  delta-tracker report file:///streams/ctr
  delta-tracker report s3://bucket/ctr --out ctr.html --versions 500
  delta-tracker report s3://bucket/ctr --json | jq .bytes
"""


@click.command("report", help=_HELP)
@click.option(
    "--out", "path", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: report.html]"
)
@click.option(
    "--versions", default=10_000, metavar="N", type=click.IntRange(1), help="Number of newest versions to read."
)
@click.option(
    "--read",
    "megabytes",
    default=1000,
    metavar="MB",
    type=click.IntRange(0),
    help="Read the rows of the newest of them, up to this many MB.",
)
@stream_command
def command(stream: Stream, path: Path | None, versions: int, megabytes: int) -> int:
    """Write the HTML page. With ``--json``, print its data, and write the page only if ``--out`` is given."""
    if path is not None and not path.absolute().parent.is_dir():  # check before reading, which may take hours
        raise InvalidArgumentError("--out", str(path), "Name a file in a directory that exists")
    figures = read_figures(stream, versions, megabytes * 1_000_000)
    stream.out.json(figures)
    if path is not None or not stream.out.is_json:
        page = (path or Path("report.html")).absolute()
        _write(page, render(figures))
        stream.out.line(f"{page}: {size(page.stat().st_size)}")
        if num_faults := len(figures["faults"]):
            stream.out.line(f"{plural(num_faults, 'finding')}, listed in the page", "bold red")
    return 1 if figures["faults"] else 0


def _write(page: Path, text: str) -> None:
    """Write ``text`` to ``page`` atomically: write a temporary file and rename it."""
    draft = page.with_name(f".{page.name}.{secrets.token_hex(8)}")
    with os_errors_of("--out", str(page)):
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(page)
        finally:
            draft.unlink(missing_ok=True)


def read_figures(stream: Stream, max_versions: int, max_bytes: int) -> Figures:
    """Read a stream, and return the data of its report as a JSON object.

    Times are Unix seconds according to the store's clock.

    Args:
        stream: stream to read.
        max_versions: maximum number of log entries to read, beginning with the newest one.
        max_bytes: maximum total size of the parts to read, in bytes, beginning with the newest version.
    """
    head = stream.head()
    listed = [version for version in stream.log.versions() if version <= head.version]
    chosen = listed[-max_versions:]
    history, skews, faulty = History(len(chosen)), Skews(), _gap(stream, listed)
    sizes: list[tuple[int, int]] = []  # version and bytes of each entry
    for _, entry in stream.entries(chosen):
        if isinstance(entry, MalformedError):
            faulty.append(entry)
        else:
            history.add(entry)
            skews.add(entry)
            sizes.append((entry.version, entry.num_bytes))
    totals = total(each.tables for each in history.bins)
    names = sorted(history.tables, key=lambda fqn: (-totals[fqn].num_bytes, fqn))
    movement = Movement({fqn: history.tables[fqn] for fqn in names[:MAX_TABLES]})
    unread: list[Notice] = []
    try:
        read = _read_rows(stream, movement, _newest(sizes, max_bytes), faulty)
    except MissingExtraError as error:
        read, unread = [], [Notice("note", f"The rows of the versions were not read: {error.problem}", error.remedy)]
    clock = StoreClock()
    clock.observe("log", [(history.newest or head).committed], began=clock.reader_time())
    order = newest_pin(stream.storage)
    pin = order if order is not None and order.kind == "pin" and order.stream == head.stream else None
    predictors, num_gone = read_predictors(stream.storage, head, clock, order=order)
    problems = skews.problems(predictors, clock)
    described = [version for version in history.lost if any(entry_name(version) in each.problem for each in faulty)]
    notices = [
        *(Notice("fault", each.problem, each.remedy) for each in faulty),
        *publisher_notices(history, head, clock.now(), described),
        *predictor_notices(predictors),
        *([] if pin is None else [_pinned(pin, clock.now())]),
        *clock_notices(problems),
        *unread,
    ]
    sums = {name: sum(getattr(each, name) for each in history.bins) for name in _SUMS}
    others = total({"": totals[fqn]} for fqn in names[MAX_TABLES:])[""]
    return {
        "url": stream.storage.url,
        "stream": head.stream,
        "time": clock.now(),
        "head": {name: getattr(head, name) for name in ("version", "created", "committed", "generation")},
        "versions": _versions(history, sums) | {"older": len(listed) - len(chosen)},
        "rows_read": {
            "first": read[0][0] if read else None,
            "last": read[-1][0] if read else None,
            "versions": len(read),
            "num_bytes": sum(num_bytes for _, num_bytes in read),
        },
        "bytes": _bytes(sums),
        "delta_bytes": _quantiles(history.sizes),
        "cadence_seconds": _quantiles(history.gaps),
        "commit_seconds": _quantiles(history.delays),
        "bins": [{name: getattr(each, name) for name in _BIN_FIELDS} for each in history.bins],
        "tables": [_table(history.bins, totals[fqn], movement.tables[fqn]) for fqn in names[:MAX_TABLES]],
        "other_tables": to_builtins(others) | {"tables": len(names[MAX_TABLES:])},
        "predictors": [predictor.to_dict() for predictor in predictors],
        "predictors_gone": num_gone,
        "hosts": hosts_of(predictors),
        "pin": to_builtins(pin),
        "skews": problems,
        "faults": [each.problem for each in faulty],
        "notices": to_builtins(sort_notices(notices)),
    }


def _newest(sizes: Sequence[tuple[int, int]], max_bytes: int) -> list[tuple[int, int]]:
    """Return the newest pairs (version, bytes) of ``sizes``, up to ``max_bytes`` in total. Omits pairs with 0 bytes."""
    left, found = max_bytes, []
    for version, num_bytes in reversed(sizes):
        left -= num_bytes
        if left < 0:
            break
        if num_bytes:  # else a claim
            found.append((version, num_bytes))
    return found[::-1]


def _pinned(pin: Pin, now: float) -> Notice:
    reason = f": {pin.reason}" if pin.reason else ""
    what = f"Pinned to version {pin.version} for {duration(max(0.0, now - pin.time))}{reason}"
    step = "Retention keeps all later versions meanwhile. Publish a good snapshot, then run delta-tracker release"
    return Notice("note", what, step)


def _gap(stream: Stream, listed: list[int]) -> list[StreamError]:
    """Return a list with one error if an entry after the newest snapshot is missing, otherwise an empty list.

    Without this entry, a new predictor cannot reach the newest version. Missing entries before the snapshot are not
    reported, because retention deletes such entries. ``listed`` contains the versions in the log in ascending order.
    """
    try:
        snapshot = stream.log.newest_snapshot()
    except MalformedError:  # reported when the entry itself is read
        return []
    if snapshot is None or not listed or (first := listed[contiguous(listed)]) <= snapshot.version + 1:
        return []
    problem = f"{entry_name(first - 1)}: it is missing, and the newest snapshot is below it"
    return [StreamError(problem, "Call Publisher.snapshot() on the trainer: predictors continue from it")]


def _read_rows(
    stream: Stream, movement: Movement, sizes: Sequence[tuple[int, int]], faults: list[StreamError]
) -> list[tuple[int, int]]:
    """Add the rows of versions to ``movement``, and errors of damaged versions to ``faults``.

    Returns:
        The versions that were read, each with its bytes as in ``sizes``.
    """
    import_optional("torch", "torch", "torch")
    from delta_tracker.stream.format.part_reader import Contents  # noqa: PLC0415  it imports torch

    found, choice = [], mirrored_tables(stream.storage)
    with stream.out.progress("reading rows", sum(num_bytes for _, num_bytes in sizes)) as advance:
        for version, num_bytes in sizes:
            advance(num_bytes)
            try:
                manifest = stream.log.read(version)
                if manifest is not None:
                    movement.add(Contents(stream.storage, manifest.narrowed(choice.takes)))
                    found.append((version, num_bytes))
            except (CorruptPartError, MalformedError) as error:
                there = stream.log.read(version)
                # Not a fault if retention deleted the parts. It keeps their entry only if the next entry is a claim.
                if there is not None and not stream.log.precedes_claim(there):
                    faults.append(StreamError(f"version {version}: {error.problem}", error.remedy))
    return found


def _versions(history: History, sums: dict[str, int]) -> dict[str, Any]:
    bins = history.bins
    return {
        "first": bins[0].first if bins else None,
        "last": bins[-1].last if bins else None,
        "begin": bins[0].begin if bins else None,
        "end": bins[-1].end if bins else None,
        "missing": history.num_missing,
    } | {name: sums[name] for name in ("deltas", "snapshots", "restarts")}


def _bytes(sums: dict[str, int]) -> dict[str, Any]:
    deltas, snapshots, full = sums["delta_bytes"], sums["snapshot_bytes"], sums["full_bytes"]
    return {
        "deltas": deltas,
        "snapshots": snapshots,
        "full_snapshots": full,
        "saved": full - deltas - snapshots,
        "saved_ratio": 1 - (deltas + snapshots) / full if full else None,
    }


def _table(bins: Sequence[Bin], sent: Amount, moved: TableMovement) -> dict[str, Any]:
    spec = moved.spec
    return {
        "name": spec.fqn,
        "num_rows": spec.num_rows,
        "dim": spec.dim,
        "dtype": DTYPE_NAMES[spec.dtype_name],
        **to_builtins(sent),
        "bin_bytes": [each.tables[spec.fqn].num_bytes if spec.fqn in each.tables else 0 for each in bins],
        "hottest": [{"row": row, "deltas": deltas} for row, deltas in moved.counts.top(_HOT_ROWS)],
        "hottest_error": moved.counts.error,
        "deltas_read": moved.num_deltas,
        "moves": _quantiles(moved.moves) | {"unmoved": moved.unmoved, "one_row_in": moved.stride},
    }


def _quantiles(buckets: LogBuckets) -> dict[str, Any]:
    """Return the number of values (``count``), the quantiles ``p50``, ``p90`` and ``p99``, and the maximum ``max``.

    The relative error of the quantiles and the maximum is at most 1.1 %. Both are None if there are no values.
    """
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: buckets.quantile(fraction) if buckets.count else None for name, fraction in names.items()}
    return {"count": buckets.count} | found
