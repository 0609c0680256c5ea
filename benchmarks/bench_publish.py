"""Speed of publishing changed rows to a stream: ``python -m benchmarks.bench_publish``.

It runs publishers on a trainer of one rank. All cases of a round publish the same rows, each to its own stream.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Figures, Report, Sample, interleaved, parser, provide_pages, timed
from benchmarks.ids import distinct_ids
from benchmarks.workloads import Trainer, one_rank, tables
from delta_tracker import ModelDeltaTracker, Publisher
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.format.codec import decode_rows, encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage

# MB/s of a prototype, on another day.
_PROTOTYPE = 2879
_DIM = 64
_ENCODINGS = (Encoding.F32, Encoding.F16, Encoding.INT8, Encoding.INT4)
_NOTES = (
    (
        "Medians (smallest-largest). Training waits from the call to the end of the gather; total is the time until the"
        " version is committed. MB count the stored rows and 8 bytes per id."
    ),
    (
        "Plain write: os.write of as many bytes in pieces of 4 MiB to a new file, with fsync if the publisher uses it;"
        " memcpy: one thread, into reused memory. Both run in the same rounds."
    ),
    (
        "Before each case a file as large as the fp32 rows is written and removed. It provides free pages for new"
        " files, which the host of this virtual machine otherwise reclaims and returns slowly."
    ),
    f"A prototype without fsync wrote gathered fp32 rows and their hash at {_PROTOTYPE} MB/s.",
)
_CASES = tuple(itertools.product(_ENCODINGS, (False, True)))
_CHUNK_BYTES = 4 << 20


class _Stream:
    """A publisher with its stream."""

    def __init__(
        self,
        trainer: Trainer,
        tracker: ModelDeltaTracker,
        root: Path,
        encoding: Encoding,
        fsync: bool,  # noqa: FBT001  one caller
    ) -> None:
        self.name = _name(encoding, fsync)
        self._directory = root / self.name
        self._trainer, self._tracker, self._encoding = trainer, tracker, encoding
        self._storage = Storage(self._directory.as_uri(), create=True, fsync=fsync)
        self.publisher = Publisher(tracker, self._storage, self.name, encoding=encoding, cadence=Cadence(batches=1))
        self.publisher.snapshot()
        self._forget()

    def publish(self, ids: Tensor) -> Figures:
        """Publish the rows, and check that the version holds exactly these rows."""
        cut = timed(self.publisher.step)
        rest = timed(self.publisher.flush)
        self._check(ids)
        self._forget()
        return {"wait": cut["seconds"], **{name: cut[name] + rest[name] for name in cut}}

    def _check(self, ids: Tensor) -> None:
        manifest = StreamLog(self._storage).read(self.publisher.version)
        assert manifest is not None
        assert manifest.kind == "delta"
        (rows,) = Contents(self._storage, manifest).listed
        assert rows.ids is not None
        assert torch.equal(rows.ids, ids), "the version holds other rows"
        (table,) = self._trainer.tables
        (view,) = self._tracker.live.column_views(self._trainer.fqn(table))
        for first in range(0, len(ids), 65_536):
            values = view[ids[first : first + 65_536]]
            wanted = decode_rows(encode_rows(values, self._encoding), self._encoding, table.dim, values.dtype)
            assert torch.equal(rows.read(first, first + len(values)), wanted), "the version holds other values"

    def _forget(self) -> None:
        """Remove the parts, which are not read again, to free disk space."""
        shutil.rmtree(self._directory / "parts")


def _name(encoding: Encoding, fsync: bool) -> str:  # noqa: FBT001  one of two names
    return f"{encoding}{' fsync' if fsync else ''}"


def _write(path: Path, data: memoryview, *, fsync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for begin in range(0, len(data), _CHUNK_BYTES):
        os.write(descriptor, data[begin : begin + _CHUNK_BYTES])
    if fsync:
        os.fsync(descriptor)
    os.close(descriptor)


def _limits(root: Path, num_bytes: int) -> dict[str, Callable[[], Figures]]:
    """Return cases that only copy or write as many bytes."""
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    copy = np.zeros_like(source)

    def write(*, fsync: bool) -> Figures:
        path = root / "plain"
        figures = timed(lambda: _write(path, source.data, fsync=fsync))
        path.unlink()
        return figures

    return {
        "memcpy": lambda: timed(lambda: np.copyto(copy, source)),
        "write": partial(write, fsync=False),
        "write fsync": partial(write, fsync=True),
    }


class _Rounds:
    """Trains rounds of a given number of rows and publishes them to every stream."""

    def __init__(self, root: Path, num_rows: int) -> None:
        self._root = root
        self._trainer = Trainer(tables(1, num_rows, _DIM))
        self._tracker = ModelDeltaTracker(self._trainer.model, [_name(*case) for case in _CASES])
        self._streams = {case: _Stream(self._trainer, self._tracker, root, *case) for case in _CASES}
        self._generator = torch.Generator().manual_seed(1)
        self._ids = torch.empty(0, dtype=torch.int64)

    def run(self, count: int, repeats: int) -> dict[str, dict[str, Sample]]:
        """Time all cases and, for each encoding, its limits."""
        (table,) = self._trainer.tables

        def train() -> None:
            self._ids = distinct_ids(table.num_rows, count, self._generator)
            self._trainer.train(self._ids, self._tracker)

        cases: dict[str, Callable[[], Figures]] = {}
        for case, stream in self._streams.items():
            cases[_name(*case)] = lambda stream=stream: stream.publish(self._ids)  # type: ignore[misc]
        for encoding in _ENCODINGS:
            for limit, run in _limits(self._root, count * (_row_bytes(encoding))).items():
                cases[f"{encoding} limit {limit}"] = run
        return interleaved(
            cases,
            repeats=repeats,
            before_round=train,
            before_case=lambda: provide_pages(self._root, count * _row_bytes(Encoding.F32)),
        )

    def close(self) -> None:
        """Close the publishers and detach the tracker."""
        for stream in self._streams.values():
            stream.publisher.close()
        self._tracker.detach()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check all versions, and write the results."""
    arguments = parser("bench_publish", __doc__ or "")
    arguments.add_argument("--rows", type=int, default=10_000_000, help="rows of the table, of 64 columns each")
    settings = arguments.parse_args(argv)
    num_rows, counts = (1000, (10, 100)) if settings.tiny else (settings.rows, (10_000, 1_000_000))
    repeats = settings.repeats or (1 if settings.tiny else 7)
    report = Report(
        name="bench_publish",
        settings={"table": f"{num_rows} x 64 float32", "repeats": repeats},
        columns=(
            "rows, encoding",
            "training waits, ms",
            "total, ms",
            "processor, ms",
            "M rows/s",
            "MB/s",
            "of plain write",
            "its processor time",
            "of memcpy",
        ),
        notes=[*_NOTES],
    )
    with tempfile.TemporaryDirectory(dir=settings.work) as work, one_rank():
        rounds = _Rounds(Path(work), num_rows)
        for count in counts:
            _report(report, count, rounds.run(count, repeats))
        rounds.close()
    report.finish(settings.out)
    return 0


def _report(report: Report, count: int, found: Mapping[str, Mapping[str, Sample]]) -> None:
    for name, sample in found.items():
        report.add(f"{count} {name}", sample)
    for encoding, fsync in _CASES:
        sample = found[_name(encoding, fsync)]
        seconds, processor = sample["seconds"].median, sample["processor"].median
        write = found[f"{encoding} limit write{' fsync' if fsync else ''}"]
        memcpy = found[f"{encoding} limit memcpy"]["seconds"].median
        num_bytes = count * _row_bytes(encoding)
        report.lines.append(
            (
                f"{count:,} {_name(encoding, fsync)}",
                sample["wait"].text(1e3),
                sample["seconds"].text(1e3),
                sample["processor"].text(1e3),
                f"{count / seconds / 1e6:.2f}",
                f"{num_bytes / seconds / 1e6:.0f}",
                f"{write['seconds'].median / seconds:.2f}",
                f"{write['processor'].median / processor:.2f}",
                f"{memcpy / seconds:.2f}",
            )
        )


def _row_bytes(encoding: Encoding) -> int:
    """Return the bytes of an encoded row and of its id in a list of ids."""
    return encoding.width(_DIM) * encoding.dtype.itemsize + 8


if __name__ == "__main__":
    raise SystemExit(main())
