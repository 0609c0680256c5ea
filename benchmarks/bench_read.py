"""Cost of reads, and scaling of recording, reading and publishing: ``python -m benchmarks.bench_read``.

A tracker on a real table repeats a read by aborting it. Scaling is measured from 10^5 to 10^8 rows, of which 1 %
change, and extrapolated to 10^12 rows on 1,000 ranks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Figures, Report, Sample, interleaved, parser, timed
from benchmarks.ids import distinct_ids
from benchmarks.stores import Ours, lookups
from benchmarks.workloads import Trainer, one_rank, tables
from delta_tracker import Delta, ModelDeltaTracker, Publisher, TopK, TrackingMode
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.storage.storage import Storage

_DIM = 64
_NARROW = 4  # columns of the tables in the scaling test, so that 10^8 rows fit in memory
_CHANGED = 0.01
_MIN_IDS = 200_000  # minimum number of ids per measurement; smaller batches are repeated
_RANKS = 1000
_NOTES = (
    "Medians (smallest-largest). memcpy: one thread, as many bytes as the rows, into reused memory.",
    "Every read is checked: its ids are those of the training batch, its values those of the table.",
)


class _Reads:
    """A table with changed rows, and reads that leave the rows pending.

    Args:
        trainer: trainer of the table.
        mode: tracking mode.
        num_changed: number of changed rows.
    """

    def __init__(self, trainer: Trainer, mode: TrackingMode, num_changed: int) -> None:
        (self._table,) = trainer.tables
        self._fqn = trainer.fqn(self._table)
        self.tracker = ModelDeltaTracker(trainer.model, mode=mode)
        self._ids = distinct_ids(self._table.num_rows, num_changed, torch.Generator().manual_seed(0))
        trainer.train(self._ids, self.tracker)

    def read(self, *, with_values: bool, top_k: TopK | None = None) -> Figures:
        """Time and check one read."""
        read: list[Delta] = []
        figures = timed(lambda: read.append(self.tracker.get_delta(commit=False, with_values=with_values, top_k=top_k)))
        (delta,) = read
        rows = delta[self._fqn]
        left = len(delta.left_out[self._fqn]) if self._fqn in delta.left_out else 0
        assert len(rows) + left == len(self._ids)
        if top_k is None:
            assert torch.equal(rows.ids, self._ids), "other rows"
        if rows.values is not None:
            (view,) = self.tracker.live.column_views(self._fqn)
            for begin in range(0, len(rows), 65_536):
                chunk = slice(begin, begin + 65_536)
                assert torch.equal(rows.values[chunk], view[rows.ids[chunk]]), "other values"
        self.tracker.abort(delta)
        return figures


def _memcpy(num_bytes: int) -> Callable[[], Figures]:
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    copy = np.zeros_like(source)
    return lambda: timed(lambda: np.copyto(copy, source))


def _reads(report: Report, num_rows: int, num_changed: int, repeats: int) -> None:
    trainer = Trainer(tables(1, num_rows, _DIM))
    cases: dict[str, Callable[[], Figures]] = {"memcpy of the rows": _memcpy(num_changed * _DIM * 4)}
    ids_only = _Reads(trainer, TrackingMode.ID_ONLY, num_changed)
    cases["ID_ONLY: ids"] = partial(ids_only.read, with_values=False)
    cases["ID_ONLY: ids and values"] = partial(ids_only.read, with_values=True)
    embedding = _Reads(trainer, TrackingMode.EMBEDDING, num_changed)
    for values in (False, True):
        name = f"EMBEDDING: old rows{' and values' if values else ''}"
        cases[name] = partial(embedding.read, with_values=values)
        cases[f"{name}, top 10 %"] = partial(embedding.read, with_values=values, top_k=TopK(fraction=0.1))
    found = interleaved(cases, repeats=repeats)
    memcpy = found["memcpy of the rows"]
    for name, samples in found.items():
        report.add(name, samples)
        without = found[name.removesuffix(", top 10 %")]
        report.lines.append(
            (
                name,
                samples["seconds"].text(1e3),
                samples["processor"].text(1e3),
                _ratio(memcpy, samples),
                _ratio(samples, without) if without is not samples else "",
            )
        )
    for reads in (ids_only, embedding):
        reads.tracker.detach()


def _ratio(one: Mapping[str, Sample], other: Mapping[str, Sample]) -> str:
    return f"{one['seconds'].median / other['seconds'].median:.2f}"


def _record_and_read(num_rows: int, num_ids: int, repeats: int) -> dict[str, Sample]:
    """Measure the seconds to record a batch, to read it, and to read a single row, which scans the table's bits."""
    store = Ours({"t": num_rows})
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(num_rows, generator=generator)[:num_ids]  # in random order, like lookups
    batch, single, again = lookups({"t": chosen}), lookups({"t": chosen[:1]}), max(1, _MIN_IDS // num_ids)

    def cycle() -> Figures:
        spent = {"record": 0.0, "read": 0.0, "scan": 0.0}
        for _ in range(again):
            spent["record"] += timed(partial(store.record, batch))["seconds"]
            spent["read"] += timed(store.read)["seconds"]
            store.record(single)
            spent["scan"] += timed(store.read)["seconds"]
        return {"record": spent["record"] / again, "read": spent["read"] / again, "scan": spent["scan"] / again}

    store.record(batch)
    assert torch.equal(store.read()["t"][0], chosen.sort()[0]), "other rows"
    return interleaved({"growth": cycle}, repeats=repeats)["growth"]


def _publish(num_rows: int, num_ids: int, repeats: int) -> Sample:
    """Measure the seconds from the call to a committed version, without fsync."""
    trainer = Trainer(tables(1, num_rows, _NARROW))
    tracker = ModelDeltaTracker(trainer.model)
    generator = torch.Generator().manual_seed(2)
    with tempfile.TemporaryDirectory() as work:
        storage = Storage(Path(work).as_uri(), create=True, fsync=False)
        publisher = Publisher(tracker, storage, "default", cadence=Cadence(batches=1))
        publisher.snapshot()

        def publish() -> Figures:
            trainer.train(distinct_ids(num_rows, num_ids, generator), tracker)

            def rest() -> None:
                publisher.step()
                publisher.flush()

            before = publisher.version
            figures = timed(rest)
            assert publisher.version == before + 1
            return figures

        found = interleaved({"publish": publish}, repeats=repeats)["publish"]["seconds"]
        publisher.close()
    tracker.detach()
    return found


def _growth(report: Report, sizes: Sequence[int], repeats: int) -> list[str]:
    """Measure the scaling and return its table."""
    lines = [
        "",
        f"Growth: 1 in {round(1 / _CHANGED)} rows changes, tables of {_NARROW} columns, no fsync:",
        "",
        "| rows | ids | record, ms | ns an id | read, ms | ns a row | read of one row, ms | publish, ms | MB/s |",
        f"| ---: |{' ---: |' * 8}",
    ]
    for num_rows in sizes:
        num_ids = max(1, round(num_rows * _CHANGED))
        found = {**_record_and_read(num_rows, num_ids, repeats), "publish": _publish(num_rows, num_ids, repeats)}
        report.add(f"growth {num_rows}", found)
        record, read, scan, publish = (found[name].median for name in ("record", "read", "scan", "publish"))
        lines.append(
            f"| {num_rows:,} | {num_ids:,} | {record * 1e3:.3f} | {record / num_ids * 1e9:.1f} | {read * 1e3:.3f} |"
            f" {read / num_ids * 1e9:.1f} | {scan * 1e3:.3f} | {publish * 1e3:.1f} |"
            f" {num_ids * (_NARROW * 4 + 8) / publish / 1e6:.0f} |"
        )
    return lines


def _model(report: Report, largest: int) -> list[str]:
    """Extrapolate the figures of the largest measured table to 10^12 rows on 1,000 ranks."""

    def median(case: str, figure: str) -> float:
        values = report.figures[case]
        assert isinstance(values, dict)
        return Sample(values[figure]).median

    growth, num_ids = f"growth {largest}", round(largest * _CHANGED)
    values = median("ID_ONLY: ids and values", "seconds") - median("ID_ONLY: ids", "seconds")
    num_changed = int(str(report.settings["changed"]))
    row_bytes = _DIM * 4 + 8
    publish = median(growth, "publish") / (num_ids * (_NARROW * 4 + 8))
    said = (
        f"Extrapolated, not measured: {_RANKS:,} ranks like this machine, rows of {_DIM} fp32, 1 in"
        f" {round(1 / _CHANGED)} changed between two versions, one reader. Each rank works on its own rows without"
        " waiting for others. Times and memory are per rank, bytes of a version are those of all ranks. Recording is"
        " linear in ids, reading in changed rows plus a scan of all bits, gathering and publishing in bytes."
    )
    columns = (
        *("rows", "rows on a rank", "bits of a rank, MB", "record 65,536 ids, ms", "scan, ms", "read, s", "gather, s"),
        *("publish, s", "a version, GB"),
    )
    lines = ["", said, "", f"| {' | '.join(columns)} |", f"| ---: |{' ---: |' * 8}"]
    for power in (9, 10, 11, 12):
        per_rank = 10**power / _RANKS
        changed = per_rank * _CHANGED
        scan = median(growth, "scan") * per_rank / largest
        lines.append(
            f"| 10^{power} | {per_rank:,.0f} | {2 * per_rank / 8 * 1.01 / 1e6:,.1f} |"
            f" {median(growth, 'record') / num_ids * 65_536 * 1e3:.2f} | {scan * 1e3:,.2f} |"
            f" {median(growth, 'read') / num_ids * changed + scan:,.3f} | {values / num_changed * changed:,.3f} |"
            f" {publish * changed * row_bytes:,.2f} | {changed * row_bytes * _RANKS / 1e9:,.0f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check every read, and write the results."""
    settings = parser("bench_read", __doc__ or "").parse_args(argv)
    num_rows, num_changed = (1000, 100) if settings.tiny else (10_000_000, 1_000_000)
    sizes = (1000, 10_000) if settings.tiny else (10**5, 10**6, 10**7, 10**8)
    repeats = settings.repeats or (1 if settings.tiny else 7)
    report = Report(
        name="bench_read",
        settings={"rows": num_rows, "changed": num_changed, "columns": _DIM, "repeats": repeats},
        columns=("read", "ms", "processor, ms", "of memcpy", "against without top-k"),
        notes=[*_NOTES],
    )
    with one_rank():
        _reads(report, num_rows, num_changed, repeats)
        report.below = [*_growth(report, sizes, min(repeats, 3)), *_model(report, sizes[-1])]
    report.finish(settings.out)
    if not settings.tiny:
        _plot(report, sizes, settings.out / "bench_read.png")
    return 0


def _plot(report: Report, sizes: Sequence[int], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  slow to import, only needed here

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  as above

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, label), color in zip(
        {"record": "record", "read": "read", "scan": "read of one row", "publish": "publish"}.items(),
        itertools.count(),
        strict=False,
    ):
        medians = [Sample(report.figures[f"growth {size}"][name]).median * 1e3 for size in sizes]  # type: ignore[index]
        axes.plot(sizes, medians, f"C{color}-o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="rows, of which 1 in 100 changed", ylabel="ms")
    axes.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
