"""Speed of applying rows in a predictor, and its effect on lookups: ``python -m benchmarks.bench_predict``.

All values of a version's rows equal its number, so a lookup whose columns differ has read a torn row. Lookups and
applying run in one process, as in a server, with one thread each.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Figures, Report, Sample, interleaved, parser, timed
from benchmarks.ids import distinct_ids, uniform_ids
from delta_tracker import ModelTarget, Predictor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.lock import TableLock
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.predictor.predictor_gauges import PredictorGauges
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.reading.runtime import REAL
from delta_tracker.stream.storage.storage import Storage
from tests.stream.streams import FQN, Writer

_DIM = 64
_LOOKUPS = 4096
_BAG = 8
_CHUNKS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
_NONE = "nothing is applied"
_PREDICTOR = "a predictor syncs, chunks of 4,096"

_Reading = Callable[[], AbstractContextManager[object]]


class _Stream:
    """A stream of a few deltas that can be applied repeatedly, and its table."""

    def __init__(self, root: Path, num_rows: int, num_changed: int, num_versions: int = 2) -> None:
        self.storage = Storage(root.as_uri(), create=True, fsync=False)
        self.table = torch.zeros(num_rows, _DIM).fill_(-1)
        self.num_changed = num_changed
        writer = Writer(self.storage, num_rows, _DIM)
        self._start = writer.claim.head
        generator = torch.Generator().manual_seed(0)
        block = Block(FQN, (0, num_rows), (0, _DIM), num_changed, "list", Encoding.F32)
        self.ids: list[Tensor] = []
        self.manifests: list[Manifest] = []
        for _ in range(num_versions):
            ids = distinct_ids(num_rows, num_changed, generator)
            values = torch.full((num_changed, _DIM), float(writer.claim.head.version + 1))
            self.ids.append(ids)
            self.manifests.append(writer.write("delta", [BlockRows.of(block, ids, values)]))
        assert StreamLog(self.storage).read(num_versions) is not None

    def predictor(self, chunk_rows: int = 4096) -> Predictor:
        """Return a predictor of the table, positioned before the first delta."""
        made = Predictor(ModelTarget({FQN: self.table}, chunk_rows=chunk_rows), self.storage)
        self.rewind(made)
        return made

    def writer(self, chunk_rows: int) -> ModelWriter:
        """Return a writer of the table."""
        gauges = PredictorGauges(Recorder("predictor", self), REAL)
        return ModelWriter(ModelTarget({FQN: self.table}, chunk_rows=chunk_rows), gauges, TableChoice(None))

    def rewind(self, predictor: Predictor) -> None:
        """Reset a predictor to the position before the first delta."""
        predictor.load_state_dict(Position.after(self._start).to_dict())

    def check(self, number: int) -> None:
        """Raise unless the table holds the rows of delta ``number``."""
        rows = self.table[self.ids[number]]
        assert bool((rows == self.manifests[number].version).all()), "rows that a version holds are missing"


def _apply_cases(stream: _Stream) -> dict[str, Callable[[], Figures]]:
    """Return cases without lookups: memcpy of the rows, applying a version in memory, and a complete sync."""
    source = np.ones((stream.num_changed, _DIM), dtype=np.float32)
    copy = np.zeros_like(source)
    writer = stream.writer(chunk_rows=4096)
    predictor = stream.predictor()
    versions = itertools.cycle(range(len(stream.manifests)))

    def apply() -> Figures:
        number = next(versions)
        contents = Contents(stream.storage, stream.manifests[number])
        receiver = writer.model.resolve(contents.manifest)
        figures = timed(lambda: writer.write_rows(receiver.placements(contents)))
        stream.check(number)
        return figures

    def sync() -> Figures:
        stream.rewind(predictor)
        figures = timed(lambda: predictor.sync(limit=1))
        stream.check(0)
        return figures

    return {"memcpy": lambda: timed(lambda: np.copyto(copy, source)), "apply": apply, "sync": sync}


class _Lookups:
    """A thread that repeatedly looks up rows, times each lookup and counts torn rows.

    Args:
        stream: stream of the table.
        reading: context manager around each lookup.
    """

    def __init__(self, stream: _Stream, reading: _Reading) -> None:
        generator = torch.Generator().manual_seed(1)
        held = torch.cat(stream.ids)  # rows that change
        self._batches = [held[uniform_ids(len(held), _LOOKUPS, generator)] for _ in range(64)]
        self._offsets = torch.arange(0, _LOOKUPS, _BAG)
        self._table, self._reading = stream.table, reading
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        self.num_torn = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        for ids in itertools.cycle(self._batches):
            if self._done.is_set():
                return
            begin = time.perf_counter()
            with self._reading():
                sums = functional.embedding_bag(ids, self._table, self._offsets, mode="sum")
            self.seconds.append(time.perf_counter() - begin)
            # The sum of rows with equal columns has equal columns; small integers are summed exactly.
            self.num_torn += int((sums != sums[:, :1]).any(1).sum())


def _lookup_case(stream: _Stream, reading: _Reading, apply: Callable[[], int] | None, seconds: float) -> Figures:
    """Run lookups for a time, while versions are applied continuously.

    Args:
        stream: stream of the table.
        reading: context manager around each lookup.
        apply: applies the next version and returns its index in the stream; None to apply nothing.
        seconds: duration.
    """
    num_versions = 0
    begin = time.perf_counter()
    with _Lookups(stream, reading) as lookups:
        while (spent := time.perf_counter() - begin) < seconds:
            if apply is None:
                time.sleep(min(0.05, seconds))
            else:
                number = apply()
                num_versions += 1
    if num_versions:
        stream.check(number)
    assert lookups.num_torn == 0, f"{lookups.num_torn} lookups saw torn rows"
    p50, p99 = np.percentile(lookups.seconds, [50, 99])
    return {
        "p50": float(p50),
        "p99": float(p99),
        "rows_per_second": num_versions * stream.num_changed / spent,
        "lookups": len(lookups.seconds),
        "torn": lookups.num_torn,
    }


def _lookup_cases(stream: _Stream, chunks: Sequence[int], seconds: float) -> dict[str, Callable[[], Figures]]:
    """Return cases with lookups: alone, during continuous writes in chunks, and during syncs of a predictor."""
    versions = itertools.cycle(range(len(stream.manifests)))
    contents = [Contents(stream.storage, manifest) for manifest in stream.manifests]
    predictor = stream.predictor()

    def writing(chunk_rows: int) -> Figures:
        writer = stream.writer(chunk_rows)
        receivers = [writer.model.resolve(manifest) for manifest in stream.manifests]

        def apply() -> int:
            number = next(versions)
            writer.write_rows(receivers[number].placements(contents[number]))
            return number

        return _lookup_case(stream, writer.lock.reading, apply, seconds)

    def syncing() -> Figures:
        def apply() -> int:
            if predictor.version == stream.manifests[-1].version:
                stream.rewind(predictor)
            applied = predictor.sync(limit=1)
            return [manifest.version for manifest in stream.manifests].index(applied)

        return _lookup_case(stream, predictor.reading, apply, seconds)

    return {
        _NONE: lambda: _lookup_case(stream, TableLock().reading, None, seconds),
        **{f"chunks of {rows:,}": partial(writing, rows) for rows in chunks},
        _PREDICTOR: syncing,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check that no lookup read a torn row and no row is missing, and write the results."""
    arguments = parser("bench_predict", __doc__ or "")
    arguments.add_argument("--rows", type=int, default=10_000_000, help="rows of the table, of 64 columns each")
    arguments.add_argument("--seconds", type=float, default=60.0, help="total time of lookups during applying")
    settings = arguments.parse_args(argv)
    num_rows, num_changed, chunks = (1000, 500, (64, 256)) if settings.tiny else (settings.rows, 1_000_000, _CHUNKS)
    repeats = settings.repeats or (1 if settings.tiny else 3)
    seconds = 0.05 if settings.tiny else settings.seconds / (repeats * (len(chunks) + 1))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=settings.work) as work:
        stream = _Stream(Path(work), num_rows, num_changed)
        report = Report(
            name="bench_predict",
            settings={"table": f"{num_rows} x {_DIM} float32", "rows in a version": num_changed, "repeats": repeats},
            columns=(
                "lookups while",
                "p50, ms",
                "p99, ms",
                "p99 of that without",
                "M rows/s applied",
                "lookups",
                "torn",
            ),
        )
        _report_apply(report, interleaved(_apply_cases(stream), repeats=max(repeats, 1 if settings.tiny else 9)))
        found = interleaved(_lookup_cases(stream, chunks, seconds), repeats=repeats, warmups=0)
    _report_lookups(report, found)
    report.finish(settings.out)
    if not settings.tiny:
        _plot(chunks, found, settings.out / "bench_predict.png")
    return 0


def _report_apply(report: Report, found: Mapping[str, Mapping[str, Sample]]) -> None:
    for name, sample in found.items():
        report.add(name, sample)
    memcpy, apply, sync = (found[name]["seconds"] for name in ("memcpy", "apply", "sync"))
    processor = {name: found[name]["processor"].median for name in found}
    report.notes += [
        (
            f"Without lookups, in chunks of 4,096, ms: apply {apply.text(1e3)}, memcpy of the rows {memcpy.text(1e3)};"
            f" that is {memcpy.median / apply.median:.2f} of memcpy; by processor time"
            f" {processor['memcpy'] / processor['apply']:.2f}. A complete sync, which also reads the entry and checks"
            f" the hash: {sync.text(1e3)}, of processor time {processor['sync'] * 1e3:.1f}."
        ),
        (
            f"A lookup is an embedding_bag of {_LOOKUPS} ids in bags of {_BAG}. Rows are written continuously; the"
            " predictor in the last line also reads and checks each version in the same thread. Medians"
            " (smallest-largest) of the repeats."
        ),
    ]


def _report_lookups(report: Report, found: Mapping[str, Mapping[str, Sample]]) -> None:
    without = found[_NONE]["p99"].median
    for name, sample in found.items():
        report.add(name, sample)
        report.lines.append(
            (
                name,
                sample["p50"].text(1e3, 2),
                sample["p99"].text(1e3, 2),
                f"{sample['p99'].median / without:.1f}",
                f"{sample['rows_per_second'].median / 1e6:.2f}",
                f"{math.fsum(sample['lookups'].values):,.0f}",
                f"{math.fsum(sample['torn'].values):.0f}",
            )
        )


def _plot(chunks: Sequence[int], found: Mapping[str, Mapping[str, Sample]], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  slow to import, only needed here

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  as above

    figure, left = plt.subplots(figsize=(7, 4.5), layout="constrained")
    right = left.twinx()
    samples = [found[f"chunks of {rows:,}"] for rows in chunks]
    for name, style in (("p50", "--"), ("p99", "-")):
        left.plot(chunks, [each[name].median * 1e3 for each in samples], f"C0{style}o", label=f"{name} while applying")
        left.axhline(found[_NONE][name].median * 1e3, color="C2", linestyle=style, label=f"{name} without")
    right.plot(chunks, [each["rows_per_second"].median / 1e6 for each in samples], "C1-s", label="rows applied")
    left.set(xscale="log", yscale="log", xlabel="rows written under one hold of the lock", ylabel="lookup, ms")
    right.set(ylabel="million rows per second", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
