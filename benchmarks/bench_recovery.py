"""Checkpoints through a stream and with DCP: ``python -m benchmarks.bench_recovery``.

Two ranks train two equal models on the same batches in turns: one is saved by ``dcp.save`` and ``dcp.async_save``, the
other by a publisher with the states of the optimizers. Both are restored and must be equal after one more batch. A
second, smaller model is published a thousand times to two streams, one of which is compacted; some of the versions are
restored from both, and every table is compared with what was published.

The overhead of a checkpoint is the training time that it costs until it is complete, above that of as many steps
without one. The interval at 1 % is this time divided by what tracking leaves of 1 % of a step.
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

from benchmarks.harness import Report, Sample, parser
from benchmarks.recovery_ranks import Found, Size, run_rank

_WORLD_SIZE = 2
_FIXED = Size(
    num_tables=8,
    num_rows=1_000_000,
    batch_size=4096,
    intervals=(10, 100),
    repeats=5,
    shrink=50,
    num_versions=1000,
    compact_every=50,
    num_restored=20,
)
_TINY = Size(
    num_tables=2,
    num_rows=100,
    batch_size=8,
    intervals=(2, 3),
    repeats=1,
    shrink=2,
    num_versions=6,
    compact_every=3,
    num_restored=3,
)
_SHARE = 0.01
_NOTES = (
    "Medians (smallest-largest) of the slowest rank. Every store is a local directory with fsync.",
    (
        "Overhead: training time until the checkpoint is complete, less that of as many steps without one. Shortest"
        " interval: at which overhead and tracking take 1 % of the training time; none if tracking alone takes more."
    ),
    (
        "Tracking: time in the tracker, as in `bench_step`. Ratio of steps: of the tracked model to the other one, on"
        " the same batches; two equal models differ, too."
    ),
    (
        "The interval of the stream is the shortest measured one that keeps the 1 %, or the overhead at the longest"
        " measured one, which has the most rows, divided by what tracking leaves."
    ),
    "Resume: until the first batch after the restore is trained, from the page cache.",
)


def shortest_intervals(found: Found, intervals: Sequence[int]) -> dict[str, float]:
    """Return the shortest interval in seconds at which each kind of checkpoint costs 1 % of the training time.

    It is infinite for a stream if tracking alone costs more.
    """
    step = statistics.median(found["no checkpoint"]["seconds"])
    shortest = {case: statistics.median(found[case]["excess"]) / _SHARE for case in ("dcp.save", "dcp.async_save")}
    needed = float("inf")
    for interval in intervals:
        case = found[f"delta_tracker every {interval}"]
        left = _SHARE - statistics.median(case["tracking"])
        needed = statistics.median(case["excess"]) / left if left > 0 else float("inf")
        if needed <= interval * step:
            return shortest | {"delta_tracker": interval * step}
    return shortest | {"delta_tracker": needed}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check all restored tables, and write the results."""
    settings = parser("bench_recovery", __doc__ or "").parse_args(argv)
    size = _TINY if settings.tiny else _FIXED
    size = replace(size, repeats=settings.repeats or size.repeats)
    report = Report(
        name="bench_recovery",
        settings={
            "tables": f"{size.num_tables} x {size.num_rows} x 64 float32, row-wise",
            "optimizer": "row-wise Adagrad",
            "batch": f"{size.batch_size} on {_WORLD_SIZE} ranks, one Zipf id per table and sample",
            "repeats": size.repeats,
        },
        columns=(
            "checkpoint",
            "MB",
            "overhead, ms",
            "tracking, % of a step",
            "ratio of steps",
            "shortest interval, s",
            "resume, s",
        ),
        notes=[*_NOTES],
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=settings.work) as work:
        results = context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(rank, _WORLD_SIZE, Path(work), size, results), daemon=True)
            for rank in range(_WORLD_SIZE)
        ]
        for rank in ranks:
            rank.start()
        found = _result(results, ranks)
        for rank in ranks:
            rank.join()
    _report(report, found, size)
    report.finish(settings.out)
    return 0


def _result(results: Queue[Found], ranks: Sequence[BaseProcess]) -> Found:
    """Return what rank 0 measured.

    Raises:
        AssertionError: if a rank has ended with an error.
    """
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            assert not any(rank.exitcode for rank in ranks), "a rank failed"


def _report(report: Report, found: Found, size: Size) -> None:
    shortest = shortest_intervals(found, size.intervals)
    for case, figures in found.items():
        report.add(case, {figure: Sample(tuple(values)) for figure, values in figures.items()})
    for case, seconds in shortest.items():
        report.add(f"shortest interval: {case}", {"per_hour": Sample((3600 / max(seconds, 1e-9),))})
    for case in ("dcp.save", "dcp.async_save", *(f"delta_tracker every {each}" for each in size.intervals)):
        samples = {figure: Sample(tuple(values)) for figure, values in found[case].items()}
        name = case.partition(" every ")[0]
        resume = found[name].get("resume")
        report.lines.append(
            (
                case + (" batches" if name != case else ""),
                samples["bytes"].text(1e-6),
                samples["excess"].text(1e3, 0),
                samples["tracking"].text(100, 2) if "tracking" in samples else "",
                samples["ratio"].text(1, 3) if "ratio" in samples else "",
                f"{shortest[name]:.1f}",
                Sample(tuple(resume)).text(1, 2) if resume else "",
            )
        )
    _report_recoveries(report, found, size)


def _report_recoveries(report: Report, found: Found, size: Size) -> None:
    report.below += [
        "",
        (
            f"{size.num_restored} of {size.num_versions} versions with {size.batch_size // size.shrink} samples each,"
            f" of tables of {size.num_rows // size.shrink} rows, restored:"
        ),
        "",
        "| stream | MB | recovery, ms |",
        "| --- | ---: | ---: |",
    ]
    names = {"naive": "snapshot and every delta", "compacted": f"compacted every {size.compact_every} versions"}
    for name, text in names.items():
        seconds = Sample(tuple(found[name]["seconds"]))
        report.below.append(f"| {text} | {found[name]['bytes'][0] / 1e6:.1f} | {seconds.text(1e3)} |")


if __name__ == "__main__":
    raise SystemExit(main())
