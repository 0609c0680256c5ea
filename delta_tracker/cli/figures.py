"""Data of a report as JSON values, for ``--json`` and for the HTML page."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from delta_tracker.cli.attention import Notice, of_clocks, of_predictors, of_publishers, sort_notices
from delta_tracker.cli.entries import read_all
from delta_tracker.cli.followers import hosts_of, read_followers
from delta_tracker.cli.history import History
from delta_tracker.cli.movement import Movement, TableMovement
from delta_tracker.cli.stream_command import Stream
from delta_tracker.cli.survey import contiguous
from delta_tracker.cli.text import duration, several
from delta_tracker.errors import CorruptPartError, MalformedError, StreamError
from delta_tracker.monitor.buckets import PER_OCTAVE, LogBuckets, upper_bound
from delta_tracker.stream.fleet import STATES
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import DTYPE_NAMES, Manifest
from delta_tracker.stream.log import entry_name
from delta_tracker.stream.pin import Pin, newest_pin
from delta_tracker.stream.store_clock import StoreClock

Figures = dict[str, Any]

MAX_TABLES = 40
_HOT_ROWS = 10
_MAX_BARS = 48
_MAX_FAULTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the data that a report reads. The newest versions within the limits are read.

    Args:
        versions: maximum number of log entries.
        num_bytes: maximum total size of the parts, in bytes.
    """

    versions: int
    num_bytes: int


@dataclass(slots=True)
class _Reading:
    """Range and size of the versions whose rows were read.

    Args:
        first: first of these versions; None if no rows were read.
        last: last of these versions; None if no rows were read.
        versions: number of these versions.
        num_bytes: total bytes of the parts of these versions.
    """

    first: int | None = None
    last: int | None = None
    versions: int = 0
    num_bytes: int = 0


def gather(stream: Stream, limits: Limits) -> Figures:
    """Read a stream and return the data of its report as JSON values.

    Times are Unix seconds by the store's clock.

    Raises:
        InvalidArgumentError: if there is no stream.
        MalformedError: if the newest entry is malformed.
        StorageError: if the store cannot be read.
    """
    head = stream.head()
    history, faulty, sizes, older = _read_log(stream, head, limits)
    has_snapshot = head.kind == "snapshot" or head.snapshot is not None
    names = sorted(history.tables, key=lambda fqn: (-history.totals[fqn].num_bytes, fqn))
    movement = Movement({fqn: history.tables[fqn] for fqn in names[:MAX_TABLES]})
    reading = _read_rows(stream, movement, sizes, faulty)
    clock = StoreClock()
    clock.saw("log", [(history.newest or head).committed], began=clock.reader_time())
    order = newest_pin(stream.storage)
    pin = order if order is not None and order.kind == "pin" and order.stream == head.stream else None
    followers, num_gone = read_followers(stream.storage, head, clock, order=order)
    skews = history.skews.problems(followers, clock)
    described = [version for version in history.lost if any(entry_name(version) in each.problem for each in faulty)]
    notices = [
        *_notices(faulty),
        *of_publishers(history, head, clock.now(), described, has_snapshot=has_snapshot),
        *of_predictors(followers),
        *([] if pin is None else [_pinned(pin, clock.now())]),
        *of_clocks(skews),
    ]
    followers.sort(key=lambda each: (STATES.index(each.health), each.beat.version or 0, each.beat.name))
    return {
        "url": stream.storage.url,
        "stream": head.stream,
        "time": clock.now(),
        "head": {
            "version": head.version,
            "created": head.created,
            "committed": head.committed,
            "generation": head.generation,
        },
        "versions": _versions(history) | {"older": older},
        "rows_read": asdict(reading),
        "bytes": _bytes(history),
        "delta_bytes": _quantiles(history.sizes),
        "cadence_seconds": _quantiles(history.gaps),
        "commit_seconds": _quantiles(history.delays),
        "bins": [{key: value for key, value in asdict(each).items() if key != "tables"} for each in history.bins],
        "tables": [_table(history, movement.tables[fqn]) for fqn in names[:MAX_TABLES]],
        "other_tables": {
            "tables": len(names[MAX_TABLES:]),
            "rows": sum(history.totals[fqn].rows for fqn in names[MAX_TABLES:]),
            "bytes": sum(history.totals[fqn].num_bytes for fqn in names[MAX_TABLES:]),
        },
        "predictors": [follower.to_dict() | {"behind": follower.behind} for follower in followers],
        "predictors_gone": num_gone,
        "hosts": hosts_of([(each.beat, each.health) for each in followers]),
        "pin": None if pin is None else asdict(pin),
        "skews": skews,
        "faults": [each.problem for each in faulty[:_MAX_FAULTS]],
        "more_faults": len(faulty[_MAX_FAULTS:]),
        "notices": [each.to_dict() for each in sort_notices(notices)],
        "axis": "time" if history.is_timed else "versions",
    }


def _notices(faulty: list[StreamError]) -> list[Notice]:
    found = [Notice("fault", each.problem, each.remedy) for each in faulty[:_MAX_FAULTS]]
    if len(faulty) > _MAX_FAULTS:
        what = f"{several(len(faulty) - _MAX_FAULTS, 'other fault')} in objects of the stream"
        found.append(Notice("fault", what, "Run delta-tracker verify, which lists all of them"))
    return found


def _pinned(pin: Pin, now: float) -> Notice:
    reason = f": {pin.reason}" if pin.reason else ""
    what = f"Pinned to version {pin.version} for {duration(max(0.0, now - pin.time))}{reason}"
    step = "Retention keeps all later versions meanwhile. Publish a good snapshot, then run delta-tracker release"
    return Notice("note", what, step)


def _read_log(
    stream: Stream, head: Manifest, limits: Limits
) -> tuple[History, list[StreamError], list[tuple[int, int]], int]:
    """Read the newest entries of the log, at most ``limits.versions``.

    Returns:
        The history; errors of missing or malformed entries; a list of ``(version, bytes)`` for the newest
        entries, up to ``limits.num_bytes`` in total; the number of older entries that were not read.
    """
    listed = [version for version in stream.log.versions() if version <= head.version]
    chosen = listed[-limits.versions :]
    history, faults = History(), _gap(stream, listed)
    sizes: deque[tuple[int, int]] = deque()
    total = 0
    with stream.out.progress("reading the log", len(chosen)) as progress:
        for _, entry in read_all(chosen, stream.log.read, lambda manifest: manifest):
            progress.advance()
            if isinstance(entry, MalformedError):
                faults.append(entry)
            elif entry is not None:  # None if retention deleted it after the listing
                history.add(entry)
                sizes.append((entry.version, entry.num_bytes))
                total += entry.num_bytes
                while total > limits.num_bytes:
                    total -= sizes.popleft()[1]
    return history, faults, list(sizes), len(listed) - len(chosen)


def _gap(stream: Stream, listed: list[int]) -> list[StreamError]:
    """Return a list with the error of a missing entry after the newest snapshot; empty if none is missing.

    If such an entry is missing, a new predictor cannot reach the newest version. Missing entries before the snapshot
    are not a fault, because retention deletes them.

    Args:
        stream: the stream.
        listed: versions in the log, ascending.
    """
    try:
        snapshot = stream.log.newest_snapshot()
    except MalformedError:  # reported when the entry itself is read
        return []
    if snapshot is None or not listed or (first := listed[contiguous(listed)]) <= snapshot.version + 1:
        return []
    problem = f"{entry_name(first - 1)}: it is missing, and the newest snapshot is below it"
    return [StreamError(problem, "Call Publisher.snapshot() on the trainer: predictors continue from it")]


def _read_rows(stream: Stream, movement: Movement, sizes: list[tuple[int, int]], faults: list[StreamError]) -> _Reading:
    reading = _Reading()
    with stream.out.progress("reading rows", sum(num_bytes for _, num_bytes in sizes)) as progress:
        for version, num_bytes in sizes:
            progress.advance(num_bytes)
            if num_bytes == 0:  # a claim
                continue
            try:
                manifest = stream.log.read(version)
                if manifest is None:
                    continue
                movement.add(Contents(stream.storage, manifest))
            except (CorruptPartError, MalformedError) as error:
                there = stream.log.read(version)
                # Not a fault if retention deleted the parts. It keeps their entry only if the next entry is a claim.
                if there is not None and not stream.log.precedes_claim(there):
                    faults.append(StreamError(f"version {version}: {error.problem}", error.remedy))
                continue
            reading.first = version if reading.first is None else reading.first
            reading.last = version
            reading.versions += 1
            reading.num_bytes += num_bytes
    return reading


def _versions(history: History) -> dict[str, Any]:
    bins = history.bins
    return {
        "first": bins[0].first if bins else None,
        "last": bins[-1].last if bins else None,
        "begin": bins[0].begin if bins else None,
        "end": bins[-1].end if bins else None,
        "deltas": sum(each.deltas for each in bins),
        "snapshots": sum(each.snapshots for each in bins),
        "restarts": sum(each.restarts for each in bins),
        "missing": history.missing,
    }


def _bytes(history: History) -> dict[str, Any]:
    deltas = sum(each.delta_bytes for each in history.bins)
    snapshots = sum(each.snapshot_bytes for each in history.bins)
    full = sum(each.full_bytes for each in history.bins)
    return {
        "deltas": deltas,
        "snapshots": snapshots,
        "full_snapshots": full,
        "saved": full - deltas - snapshots,
        "saved_ratio": 1 - (deltas + snapshots) / full if full else None,
    }


def _table(history: History, moved: TableMovement) -> dict[str, Any]:
    spec = moved.spec
    total = history.totals[spec.fqn]
    hottest = moved.counts.top(_HOT_ROWS)
    return {
        "name": spec.fqn,
        "num_rows": spec.num_rows,
        "dim": spec.dim,
        "dtype": DTYPE_NAMES[spec.dtype],
        "rows": total.rows,
        "bytes": total.num_bytes,
        "bin_bytes": [each.tables[spec.fqn].num_bytes if spec.fqn in each.tables else 0 for each in history.bins],
        "hottest": [{"row": row, "deltas": deltas} for row, deltas in hottest],
        "hottest_error": moved.counts.error,
        "deltas_read": moved.num_deltas,
        "moves": _quantiles(moved.moves) | {"unmoved": moved.unmoved, "one_row_in": moved.stride},
        "histogram": _histogram(moved.moves),
    }


def _quantiles(buckets: LogBuckets) -> dict[str, Any]:
    """Return ``count``, the number of values; the quantiles ``p50``, ``p90`` and ``p99``; and the maximum, ``max``.

    The quantiles and the maximum have a relative error of at most 1.1 %. They are None if there are no values.
    """
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: buckets.quantile(fraction) if buckets.count else None for name, fraction in names.items()}
    return {"count": buckets.count} | found


def _histogram(buckets: LogBuckets) -> list[dict[str, float]]:
    """Return the bars of a histogram: bounds ``above`` and ``to``, and the ``count`` of values between them.

    All bars cover the same number of buckets: the smallest power of two for which ``to`` is at least ``2 ** (1 / 8)``
    times ``above`` and there are at most ``_MAX_BARS`` bars. The list is empty if there are no positive values.
    """
    if not buckets.positive:
        return []
    low, high, width = min(buckets.positive), max(buckets.positive), 1
    while high // width - low // width >= _MAX_BARS or width < PER_OCTAVE // 8:
        width *= 2
    bars = dict.fromkeys(range(low // width, high // width + 1), 0)
    for index, count in buckets.positive.items():
        bars[index // width] += count
    return [
        {"above": upper_bound(place * width - 1), "to": upper_bound((place + 1) * width - 1), "count": count}
        for place, count in bars.items()
    ]
