"""Cost of recording and reading changed rows, compared with TorchRec's store: ``python -m benchmarks.bench_store``.

The stores of a case are kept across cycles, as in training. A cycle records batches, compacts and reads. After every
cycle all stores must return the same rows. The peak of memory is measured on Linux only.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Figures, Report, Sample, interleaved, parser, timed
from benchmarks.ids import uniform_ids, zipf_ids
from benchmarks.stores import Found, Ours, Store, Theirs, assert_same, lookups
from delta_tracker.buffers import MEMORY

_DIM = 64
_FRACTIONS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5)
_BATCHES = 20  # batches of a sweep's cycle, as many as a read covers in bench_step
_FEW = 1 << 16  # cycles with fewer ids are too short to time once and are repeated
_MANY = 1 << 24  # with this many ids, no cache keeps data until the next cycle
_MAX_REPEATS = 1000
_MIB = 1 << 20
_OURS, _THEIRS, _COMPACTING = "delta_tracker", "TorchRec", "TorchRec, auto-compaction"
_NOTES = (
    (
        "Medians (smallest-largest) of cycles: record the lookups of each batch, compact, read and clear. The stores"
        " take turns. Each turn begins with an uncounted cycle to fill the caches, which the other store has evicted;"
        " in training there is only one store."
    ),
    (
        "Peak of memory: resident memory that recording and reading add to that of the tables. TorchRec records a row"
        " as a copy of the lookup's output; the lookup itself is not counted. This library copies a row from the table"
        " before its first change."
    ),
    (
        "Bytes per row: the largest size of the log, without the ids of the write in progress, while all readers have"
        " different positions and one has an uncommitted read. The promise for bits is (1 + readers + uncommitted"
        " reads) / 8, plus 1 %."
    ),
)


class _Cycle:
    """One store and its timed cycle.

    Args:
        name: name of the store.
        store: the store.
        batches: batches to record in a cycle.
        found: receives the last read, for the comparison of the stores.
    """

    def __init__(self, name: str, store: Store, batches: Sequence[KeyedJaggedTensor], found: dict[str, Found]) -> None:
        self._name, self._store, self._batches, self._found = name, store, batches, found
        num_ids = sum(batch.values().numel() for batch in batches)
        self._times = max(1, min(_MAX_REPEATS, _FEW // max(1, num_ids)))
        self._has_lead = num_ids < _MANY

    def __call__(self) -> Figures:
        if self._has_lead:
            self._run(1)
        figures = timed(partial(self._run, self._times))
        return {name: value / self._times for name, value in figures.items()}

    def _run(self, times: int) -> None:
        for _ in range(times):
            for batch in self._batches:
                self._store.record(batch)
            self._found[self._name] = self._store.read()


def _compare(
    batches: Sequence[KeyedJaggedTensor], stores: Mapping[str, Store], repeats: int
) -> dict[str, dict[str, Sample]]:
    """Time all stores on the same batches, and check after each round that they agree."""
    found: dict[str, Found] = {}

    def check() -> None:
        for rows in found.values():
            assert_same(found[_OURS], rows)

    cases = {name: _Cycle(name, store, batches, found) for name, store in stores.items()}
    samples = interleaved(cases, repeats=repeats, before_round=check)
    check()
    return samples


def _ids_only(report: Report, tiny: bool, repeats: int) -> None:  # noqa: FBT001
    """Measure ID_ONLY on the sets of tables."""
    generator = torch.Generator().manual_seed(0)
    divide = 1000 if tiny else 1
    sizes = (
        ("10 M rows, 100 x 65,536 Zipf ids", 1, 10_000_000, 100, 65_536, zipf_ids),
        ("8 tables x 1 M rows, 20 x 4,096 Zipf ids", 8, 1_000_000, 20, 4096, zipf_ids),
        ("100 M rows, 20 x 5,000 uniform ids", 1, 100_000_000, 20, 5000, uniform_ids),
        ("100 M rows, 1 x 100,000 uniform ids", 1, 100_000_000, 1, 100_000, uniform_ids),
    )
    for label, num_tables, num_rows, num_batches, num_ids, draw in sizes:
        tables = {f"t{number}": num_rows // divide for number in range(num_tables)}
        batches = [
            lookups({name: draw(rows, max(1, num_ids // divide), generator) for name, rows in tables.items()})
            for _ in range(num_batches)
        ]
        stores: dict[str, Store] = {_OURS: Ours(tables), _THEIRS: Theirs(tables)}
        if num_batches > 1:
            stores[_COMPACTING] = Theirs(tables, auto_compact=True)
        found = _compare(batches, stores, repeats)
        for name, samples in found.items():
            report.add(f"{label}: {name}", samples)
        _line(report, label, found, "seconds", 1e3, "ms")


def _line(
    report: Report, label: str, found: Mapping[str, Mapping[str, Sample]], figure: str, scale: float, unit: str
) -> None:
    ours = found[_OURS][figure]
    cells = [f"{label}, {unit}", ours.text(scale, 2)]
    for name in (_THEIRS, _COMPACTING):
        cells += [found[name][figure].text(scale, 2), _ratio(found[name][figure], ours)] if name in found else ["", ""]
    report.lines.append(cells)


def _ratio(theirs: Sample, ours: Sample) -> str:
    return f"{theirs.median / ours.median:.2f}x" if ours.median else ""  # a tiny run may allocate no new memory


def _sweep(report: Report, tiny: bool, repeats: int) -> list[str]:  # noqa: FBT001
    """Return a table of TorchRec's time relative to ours, by table size and touched fraction."""
    sizes = (1000, 10_000) if tiny else (10**5, 10**6, 10**7, 10**8)
    lines = [
        "",
        f"TorchRec's time by ours, by the part of the rows that {_BATCHES} batches of uniform ids touch:",
        "",
    ]
    lines += [
        f"| rows | {' | '.join(f'{fraction:g}' for fraction in _FRACTIONS)} |",
        f"| ---: |{' ---: |' * len(_FRACTIONS)}",
    ]
    for num_rows in sizes:
        ratios = []
        for fraction in _FRACTIONS:
            generator = torch.Generator().manual_seed(1)
            num_ids = max(1, round(-math.log1p(-fraction) * num_rows))  # number of draws that touch this fraction
            batches = [lookups({"t": ids}) for ids in uniform_ids(num_rows, num_ids, generator).chunk(_BATCHES)]
            found = _compare(batches, {_OURS: Ours({"t": num_rows}), _THEIRS: Theirs(["t"])}, repeats)
            for name, samples in found.items():
                report.add(f"sweep {num_rows} {fraction:g}: {name}", samples)
            ratios.append(_ratio(found[_THEIRS]["seconds"], found[_OURS]["seconds"]))
        lines.append(f"| {num_rows:,} | {' | '.join(ratios)} |")
    return lines


class _Embeddings:
    """EMBEDDING mode: looks up, records and changes rows batch by batch. Only recording and reading are timed.

    Args:
        num_rows: number of rows of the table.
        batches: ids of each batch.
        found: receives the rows that were read.
        is_ours: True for this library's store, False for TorchRec's.
    """

    def __init__(self, num_rows: int, batches: Sequence[Tensor], found: dict[str, Found], *, is_ours: bool) -> None:
        self._num_rows, self._batches, self._found, self._is_ours = num_rows, batches, found, is_ours
        self._change = torch.ones(len(batches[0]), _DIM)
        self._rows = torch.empty(num_rows, _DIM)

    def time(self) -> Figures:
        """Time the second of two cycles, as :class:`_Cycle` does."""
        self._cycle()
        return self._cycle()

    def _cycle(self) -> Figures:
        store, rows = self._start()
        record: dict[str, float] = {"seconds": 0.0, "processor": 0.0}
        for ids in self._batches:
            for name, value in self._step(store, rows, ids).items():
                record[name] += value
        found: list[Found] = []
        read = timed(lambda: found.append(store.read()))
        (self._found[_OURS if self._is_ours else _THEIRS],) = found
        total = {name: record[name] + read[name] for name in read}
        return {**total, "record": record["seconds"], "read": read["seconds"]}

    def peak(self) -> Figures:
        """Measure the peak of memory of a cycle."""
        store, rows = self._start()
        MEMORY.release_free()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _peak()
        for ids in self._batches:
            self._step(store, rows, ids)
        store.read()
        return {"bytes": _peak() - before}

    def _start(self) -> tuple[Store, Tensor]:
        rows = self._rows
        torch.arange(rows.numel(), out=rows.view(-1))
        if self._is_ours:
            return Ours({"t": self._num_rows}, weights={"t": rows}), rows
        return Theirs(["t"], is_embedding=True), rows

    def _step(self, store: Store, rows: Tensor, ids: Tensor) -> Figures:
        features, looked_up = lookups({"t": ids}), None if self._is_ours else rows[ids]
        figures = timed(partial(store.record, features, looked_up))
        rows.index_add_(0, ids, self._change)
        return figures


def _peak() -> int:
    """Return the peak of resident memory in bytes since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def _embeddings(report: Report, tiny: bool, repeats: int) -> None:  # noqa: FBT001
    num_rows, num_batches, num_ids = (1000, 5, 16) if tiny else (1_000_000, 60, 16_384)
    generator = torch.Generator().manual_seed(2)
    batches = [zipf_ids(num_rows, num_ids, generator) for _ in range(num_batches)]
    found: dict[str, Found] = {}

    def check() -> None:
        if found:
            assert_same(found[_OURS], found[_THEIRS])
            found.clear()

    stores = {name: _Embeddings(num_rows, batches, found, is_ours=name == _OURS) for name in (_OURS, _THEIRS)}
    samples = interleaved({name: store.time for name, store in stores.items()}, repeats=repeats, before_round=check)
    check()
    peaks = interleaved({name: store.peak for name, store in stores.items()}, repeats=min(repeats, 3), warmups=0)
    for name in stores:
        report.add(f"EMBEDDING: {name}", samples[name])
        report.add(f"EMBEDDING, peak: {name}", peaks[name])
    label = f"EMBEDDING, 1 M rows x {_DIM}, 60 x 16,384 Zipf ids"
    for figure, part in (("seconds", ""), ("record", ": record"), ("read", ": read")):
        _line(report, f"{label}{part}", samples, figure, 1e3, "ms")
    _line(report, f"{label}: peak of memory", peaks, "bytes", 1 / _MIB, "MiB")


def _memory(report: Report, tiny: bool) -> list[str]:  # noqa: FBT001
    """Return a table of bytes per row, by CPU engine and number of readers."""
    num_rows = 10_000 if tiny else 10_000_000
    lines = [
        "",
        "| engine | readers | uncommitted reads | bytes per row | promised for bits |",
        "|---|---:|---:|---:|---:|",
    ]
    for engine, num_readers, num_open in itertools.product(("numba", "torch"), (1, 2, 4), (0, 1)):
        most = _most_bytes(engine, num_rows, num_readers, num_open) / num_rows
        promised = (1 + num_readers + num_open) / 8 * 1.01
        report.figures[f"memory {engine} {num_readers} {num_open}"] = {"bytes_per_row": (most,)}
        assert engine == "torch" or most <= promised + 512 / num_rows, (engine, num_readers, num_open, most)
        lines.append(f"| {engine} | {num_readers} | {num_open} | {most:.3f} | {promised:.3f} |")
    return lines


def _most_bytes(engine: str, num_rows: int, num_readers: int, num_open: int) -> int:
    """Return the largest log size while readers take turns and every 100th row changes between reads."""
    store = Ours({"t": num_rows}, engine)
    for number in range(1, num_readers):
        store.log.consumers.add(f"reader {number}")
    most = 0
    for turn in range(3 * num_readers):
        reader = store.log.consumers.names[turn % num_readers]
        for _ in range(1 + num_open):
            store.record(lookups({"t": torch.arange(0, num_rows, 100)}))
            most = max(most, store.log.segments.memory().log_bytes)
            store.read(reader, commit=False)
            most = max(most, store.log.segments.memory().log_bytes)
        store.read(reader)
    return most


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check that all stores agree, and write the results."""
    settings = parser("bench_store", __doc__ or "").parse_args(argv)
    repeats = settings.repeats or (1 if settings.tiny else 5)
    report = Report(
        name="bench_store",
        settings={"repeats": repeats, "tiny": settings.tiny},
        columns=("work", _OURS, _THEIRS, "ratio", _COMPACTING, "ratio"),
        notes=[*_NOTES],
    )
    _ids_only(report, settings.tiny, repeats)
    _embeddings(report, settings.tiny, repeats)
    report.below = [*_sweep(report, settings.tiny, min(repeats, 3)), *_memory(report, settings.tiny)]
    report.finish(settings.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
