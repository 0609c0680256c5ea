"""Targets for speed and memory, and how they are computed from the results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_OURS, _THEIRS, _COMPACTING = "delta_tracker", "TorchRec", "TorchRec, auto-compaction"


class Results:
    """Figures of the benchmarks.

    Args:
        directory: folder of the JSON files of results.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = cache(self._load)

    def median(self, benchmark: str, case: str, figure: str = "seconds") -> float:
        """Return the median of all repeats of a figure.

        Raises:
            LookupError: if it was not measured.
        """
        return float(statistics.median(self._read(benchmark)[case][figure]))

    def median_ratio(self, benchmark: str, over: str, under: str, figure: str = "seconds") -> float:
        """Return the median of the ratios of two cases in the same repeat.

        Raises:
            LookupError: if one was not measured.
        """
        found = self._read(benchmark)
        pairs = zip(found[over][figure], found[under][figure], strict=True)
        return float(statistics.median(one / other for one, other in pairs))

    def total(self, benchmark: str, case: str, figure: str = "seconds") -> float:
        """Return the sum of all repeats of a figure.

        Raises:
            LookupError: if it was not measured.
        """
        return float(sum(self._read(benchmark)[case][figure]))

    def cases(self, benchmark: str, start: str) -> Iterator[str]:
        """Yield the cases whose names start with ``start``.

        Raises:
            LookupError: if there is no such case.
        """
        names = [name for name in self._read(benchmark) if name.startswith(start)]
        if not names:
            raise LookupError(start)
        yield from names

    def _load(self, benchmark: str) -> dict[str, dict[str, list[float]]]:
        path = self._directory / f"{benchmark}.json"
        if not path.exists():
            raise LookupError(benchmark)
        figures: dict[str, dict[str, list[float]]] = json.loads(path.read_text())["figures"]
        return figures


@dataclass(frozen=True, slots=True)
class Target:
    """One target.

    Args:
        work: description of the measurement.
        bound: target figure.
        is_least: True if the bound is a minimum, False if it is a maximum.
        measure: computes the figure from the results.
        text: format string of the figures.
    """

    work: str
    bound: float
    is_least: bool
    measure: Callable[[Results], float]
    text: str = "{:.2f}"

    def is_met(self, figure: float) -> bool:
        """Return whether a figure meets the target."""
        return figure >= self.bound if self.is_least else figure <= self.bound


def _ratio(benchmark: str, over: str, under: str, figure: str = "seconds") -> Callable[[Results], float]:
    return lambda results: results.median(benchmark, over, figure) / results.median(benchmark, under, figure)


def _store(work: str, theirs: str = _THEIRS, figure: str = "seconds") -> Callable[[Results], float]:
    return _ratio("bench_store", f"{work}: {theirs}", f"{work}: {_OURS}", figure)


def _median(benchmark: str, case: str, figure: str, scale: float = 1.0) -> Callable[[Results], float]:
    return lambda results: results.median(benchmark, case, figure) * scale


def _worst_of_sweep(results: Results) -> float:
    names = [name for name in results.cases("bench_store", "sweep ") if name.endswith(f": {_OURS}")]
    return min(_store(name.removesuffix(f": {_OURS}"))(results) for name in names)


def _worst_memory(results: Results) -> float:
    """Return the largest measured memory as a fraction of the target for bits."""
    parts = []
    for name in results.cases("bench_store", "memory numba "):
        num_readers, num_open = map(int, name.split()[2:])
        parts.append(results.median("bench_store", name, "bytes_per_row") / ((1 + num_readers + num_open) / 8 * 1.01))
    return max(parts)


def _p99_beside_writes(results: Results) -> float:
    """Return the ratio of p99 with and without writes, for the best chunk size with a million rows per second."""
    without = results.median("bench_predict", "nothing is applied", "p99")
    fast = [
        results.median("bench_predict", name, "p99") / without
        for name in results.cases("bench_predict", "chunks of ")
        if results.median("bench_predict", name, "rows_per_second") >= 1e6  # noqa: PLR2004  a million
    ]
    return min(fast, default=float("inf"))


def _bytes_for_quality(results: Results) -> float:
    """Return the largest reduction of bytes, relative to snapshots, within 0.1 % of the fresh log loss."""
    return max(
        results.median("bench_quality", name, "times fewer")
        for name in results.cases("bench_quality", "")
        if results.median("bench_quality", name, "over fresh") <= 0.001  # noqa: PLR2004  a thousandth
    )


def _journey(events: int, kind: str) -> str:
    return f"{events:,}: {kind}"


def _of_cadences(pick: Callable[[Iterable[float]], float], kind: str, figure: str) -> Callable[[Results], float]:
    """Return the least or largest figure of the three cadences of ``bench_journey``."""
    names = [_journey(events, kind) for events in (5_000, 20_000, 60_000)]
    return lambda results: pick(results.median("bench_journey", name, figure) for name in names)


def _bytes_for_journey(results: Results) -> float:
    """Return the largest reduction of bytes, relative to full versions, that loses at most 0.1 % of log loss."""
    return max(
        results.median("bench_journey", name, "times fewer")
        for name in results.cases("bench_journey", _journey(5_000, ""))
        if results.median("bench_journey", name, "lost") <= 0.001  # noqa: PLR2004  a thousandth
    )


def _of_chain(results: Results) -> float:
    kept, chain = (results.median("bench_journey", _journey(5_000, "F32"), figure) for figure in ("kept", "chain"))
    return kept / chain


def _frequency(results: Results) -> float:
    """Return how many times as often a stream can be a checkpoint than DCP's better way, at 1 % overhead."""
    ours, *theirs = (
        results.median("bench_recovery", f"shortest interval: {case}", "per_hour")
        for case in (_OURS, "dcp.save", "dcp.async_save")
    )
    return ours / max(theirs)


def _recovery(results: Results) -> float:
    """Return the time to recover all chosen versions from a naive chain, relative to a compacted stream."""
    naive, compacted = (results.total("bench_recovery", case, "seconds") for case in ("naive", "compacted"))
    return naive / compacted


def _longer_log(results: Results) -> float:
    """Return the time with the longest log, relative to that with the shortest, of the worst operation."""
    names = [each.removesuffix(", 100") for each in results.cases("growth", "") if each.endswith(", directory, 100")]
    return max(_ratio("growth", f"{name}, 100000", f"{name}, 100")(results) for name in names)


_TIMES, _MS = "{:.1f}x", "{:.1f} ms"
_ZIPF = "10 M rows, 100 x 65,536 Zipf ids"
_TABLES = "8 tables x 1 M rows, 20 x 4,096 Zipf ids"
_SPARSE = "100 M rows, 20 x 5,000 uniform ids"
_AT_ONCE = "100 M rows, 1 x 100,000 uniform ids"
_READ = "ID_ONLY: ids and values"

TARGETS = (
    Target(f"record, compact, read ids: {_ZIPF}; TorchRec's time / ours", 30, True, _store(_ZIPF), _TIMES),
    Target("the same, TorchRec with auto-compaction", 100, True, _store(_ZIPF, _COMPACTING), _TIMES),
    Target(f"the same: {_TABLES}", 5, True, _store(_TABLES), _TIMES),
    Target(f"the same: {_SPARSE}", 1.3, True, _store(_SPARSE), "{:.2f}x"),
    Target(f"the same: {_AT_ONCE}", 1.3, True, _store(_AT_ONCE), "{:.2f}x"),
    Target(
        "the same, worst cell of a sweep: 10^5 to 10^8 rows, 1e-5 to 0.5 of them touched",
        1,
        True,
        _worst_of_sweep,
        "{:.2f}x",
    ),
    Target("EMBEDDING, record and read: 1 M rows x 64, 60 x 16,384 Zipf ids", 10, True, _store("EMBEDDING"), _TIMES),
    Target("the same, peak memory: TorchRec's / ours", 5, True, _store("EMBEDDING, peak", figure="bytes"), _TIMES),
    Target(
        "bit engine: bytes per row / ((1 + consumers + uncommitted reads) / 8, plus 1 %)",
        1,
        False,
        _worst_memory,
    ),
    *(
        Target(
            f"training step of {milliseconds} ms, {mode}, a read every 20 steps: time / time without a tracker",
            bound,
            False,
            _median("bench_step", f"{mode}, batch {batch}", "ratio"),
            "{:.3f}",
        )
        for batch, milliseconds in ((4096, 330), (1024, 80), (256, 20))
        for mode, bound in (("ID_ONLY", 1.01), ("EMBEDDING", 1.03), ("EMBEDDING, top 10 %", 1.03))
    ),
    *(
        Target(
            f"the reads of ids of a step of {milliseconds} ms: TorchRec's time / ours",
            10,
            True,
            _ratio("bench_step", f"TorchRec, ID_ONLY, batch {batch}", f"ID_ONLY, batch {batch}", "read"),
            _TIMES,
        )
        for batch, milliseconds in ((4096, 330), (1024, 80), (256, 20))
    ),
    Target(
        "device syncs in the step, on a simulated device",
        0,
        False,
        _median("bench_step", "EMBEDDING: syncs", "count"),
        "{:.0f}",
    ),
    Target(
        "read with values, ID_ONLY, 1 M changed of 10 M x 64: memcpy's time / ours",
        0.5,
        True,
        _ratio("bench_read", "memcpy of the rows", _READ),
    ),
    Target(
        "top-k over 1 M changed rows, with values: time / time without top-k",
        2,
        False,
        _ratio("bench_read", "EMBEDDING: old rows and values, top 10 %", "EMBEDDING: old rows and values"),
    ),
    Target(
        "publish 1 M x 64 fp32 with fsync: time of write and fsync / ours",
        0.8,
        True,
        _ratio("bench_publish", "1000000 F32 limit write fsync", "1000000 F32 fsync"),
    ),
    Target("apply 1 M x 64 into 10 M: memcpy's time / ours", 0.4, True, _ratio("bench_predict", "memcpy", "apply")),
    Target(
        "lookup p99 while 1 M rows/s are applied, best chunk size: p99 / p99 without",
        3,
        False,
        _p99_beside_writes,
        "{:.1f}",
    ),
    Target(
        "commit to applied, 10,000 rows, fp32, no fsync",
        3,
        False,
        _median("bench_freshness", "10000 F32", "commit to applied", 1e3),
        _MS,
    ),
    Target(
        "commit to applied, 1 M rows",
        100,
        False,
        _median("bench_freshness", "1000000 F32", "commit to applied", 1e3),
        _MS,
    ),
    Target(
        "start of publish to applied, 10,000 rows",
        15,
        False,
        _median("bench_freshness", "10000 F32", "start to applied", 1e3),
        _MS,
    ),
    Target(
        "start of publish to applied, 1 M rows",
        300,
        False,
        _median("bench_freshness", "1000000 F32", "start to applied", 1e3),
        _MS,
    ),
    Target(
        "the same, with fsync",
        600,
        False,
        _median("bench_freshness", "1000000 F32 fsync", "start to applied", 1e3),
        _MS,
    ),
    Target("bytes within 0.1 % of the fresh log loss: snapshots' / ours", 13, True, _bytes_for_quality, _TIMES),
    Target(
        "a year of purchases, worst of every 5,000, 20,000, 60,000: bytes of full versions / INT8 deltas",
        6,
        True,
        _of_cadences(min, "INT8", "times fewer"),
        _TIMES,
    ),
    Target(
        "the same, F32 deltas: bytes / bytes of the rows that occurred",
        1.1,
        False,
        _of_cadences(max, "F32", "over limit"),
    ),
    Target(
        "the same, 8 versions kept: full / compacted INT8 deltas",
        2.5,
        True,
        _of_cadences(min, "INT8", "times less kept"),
        _TIMES,
    ),
    Target("the same, every 5,000, F32: 8 versions kept, compacted / all deltas", 0.4, False, _of_chain),
    Target(
        "the same, bytes within 0.1 % of the log loss: full versions' / ours",
        13,
        True,
        _bytes_for_journey,
        _TIMES,
    ),
    Target(
        "checkpoint every 100 batches of 4,096, 8 tables x 1 M x 64, row-wise Adagrad: bytes of dcp.save / ours",
        6,
        True,
        _ratio("bench_recovery", "dcp.save", "delta_tracker every 100", "bytes"),
        _TIMES,
    ),
    Target("the same, checkpoints per hour at 1 % overhead: ours / DCP's", 12, True, _frequency, _TIMES),
    Target(
        "recovery of 20 of 1,000 versions: snapshot and every delta / with compaction every 50",
        6.6,
        True,
        _recovery,
        _TIMES,
    ),
    Target(
        "log of 100,000 versions, worst of start, gap check and retention pass that deletes nothing: time / with 100",
        2,
        False,
        _longer_log,
        _TIMES,
    ),
    Target(
        "publish on 16 ranks: time / on one rank",
        16,
        False,
        _ratio("growth", "publish of ranks, 16", "publish of ranks, 1"),
        _TIMES,
    ),
)
"""In the order of the table."""
