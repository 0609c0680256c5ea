"""Time from training a row to serving it: ``python -m benchmarks.bench_freshness``.

A trainer with its publishers runs in one process, and a predictor that follows by polling in another. Both read the
host's clock, ``time.monotonic``. The predictor's rows are compared with the trainer's after every version.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from benchmarks.harness import Figures, Report, Sample, interleaved, parser, provide_pages, timed
from benchmarks.ids import distinct_ids
from benchmarks.workloads import Trainer, one_rank, tables
from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.stream.format.codec import decode_rows, encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage

_DIM = 64
_POLL_SECONDS = 0.0005
_PATIENCE_SECONDS = 60.0
_CASES = tuple(itertools.product((Encoding.F32, Encoding.F16, Encoding.INT8), (False, True)))
# Milliseconds of a prototype with fsync, measured earlier: from commit and from start to applied, 10k and 1 M rows.
_PROTOTYPE = {
    ("F32", 10_000): (3.4, 17),
    ("F32", 1_000_000): (116, 731),
    ("F16", 10_000): (3.9, 8.9),
    ("F16", 1_000_000): (120, 410),
    ("INT8", 10_000): (2.4, 6.6),
    ("INT8", 1_000_000): (67, 228),
}
_NOTES = (
    (
        "Medians (smallest-largest). Start: the call of publish() on the training thread. Commit: the beginning of the"
        " write of the version's entry, after its parts. Applied: the predictor reports the version. One torch thread"
        " in each process."
    ),
    "The prototype was measured earlier, with fsync.",
    (
        "Before each case a file as large as the fp32 rows is written and removed. It provides free pages for new"
        " files, which the host of this virtual machine otherwise reclaims and returns slowly."
    ),
)
_TARGETS = {10_000: (3, 15, 15), 1_000_000: (100, 300, 600)}
"""Rows to milliseconds: commit to applied; start to applied without fsync and with."""


class _Stamped(Storage):
    """Storage that stores the time before the last commit of an entry."""

    committed = 0.0

    def create(self, name: str, data: bytes) -> bool:
        self.committed = time.monotonic()
        return super().create(name, data)


def _name(encoding: Encoding, fsync: bool) -> str:  # noqa: FBT001  one of two names
    return f"{encoding}{' fsync' if fsync else ''}"


def _digest(rows: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(rows.contiguous().numpy().data)


def _ids(num_rows: int, count: int, seed: int) -> Tensor:
    """Return the ids of a round, equal in both processes."""
    return distinct_ids(num_rows, count, torch.Generator().manual_seed(seed))


def _trainer_process(orders: Connection, root: Path, num_rows: int) -> None:
    """Serve orders: ``(count, seed)`` trains, a stream's name publishes and replies with the times, None ends."""
    torch.set_num_threads(1)
    with one_rank():
        trainer = Trainer(tables(1, num_rows, _DIM))
        (table,) = trainer.tables
        with ModelDeltaTracker(trainer.model, [_name(*case) for case in _CASES]) as tracker:
            (view,) = tracker.live.column_views(trainer.fqn(table))
            streams: dict[str, tuple[_Stamped, Publisher, Encoding]] = {}
            starts = {}
            for encoding, fsync in _CASES:
                name = _name(encoding, fsync)
                storage = _Stamped((root / name).as_uri(), create=True, fsync=fsync)
                publisher = Publisher(tracker, storage, name, encoding=encoding)
                head = publisher.snapshot()
                shutil.rmtree(root / name / "parts")  # the predictor starts after the snapshot
                streams[name] = storage, publisher, encoding
                starts[name] = Position.after(head).to_dict()
            orders.send((trainer.fqn(table), starts))
            ids = torch.empty(0, dtype=torch.int64)
            while (order := orders.recv()) is not None:
                if isinstance(order, tuple):
                    ids = _ids(num_rows, *order)
                    trainer.train(ids, tracker)
                    orders.send(None)
                    continue
                storage, publisher, encoding = streams[order]
                begin = time.monotonic()
                manifest = publisher.publish()
                assert manifest.num_rows == len(ids), "the version holds other rows"
                orders.send((begin, storage.committed))
                orders.recv()  # applied by the predictor; the rest is not timed
                wanted = decode_rows(encode_rows(view[ids], encoding), encoding, _DIM, view.dtype)
                orders.send(_digest(wanted))
            for _, publisher, _ in streams.values():
                publisher.close()


class _Follower:
    """One predictor per stream, all on the same table. Only one follows at a time."""

    def __init__(self, orders: Connection, root: Path, num_rows: int) -> None:
        self._orders = orders
        self._root = root
        self._table = torch.zeros(num_rows, _DIM).fill_(-1)
        self._ids = torch.empty(0, dtype=torch.int64)
        self._seeds = itertools.count()
        fqn, starts = orders.recv()
        self._predictors = {}
        for name, start in starts.items():
            predictor = Predictor({fqn: self._table}, Storage((root / name).as_uri()))
            predictor.load_state_dict(start)
            self._predictors[name] = predictor

    def train(self, count: int) -> None:
        """Train a batch that changes ``count`` rows."""
        seed = next(self._seeds)
        self._ids = _ids(len(self._table), count, seed)
        self._orders.send((count, seed))
        self._orders.recv()

    def case(self, name: str) -> Figures:
        """Publish the changed rows to a stream, and wait until its predictor has applied them."""
        predictor = self._predictors[name]
        before = predictor.version
        assert before is not None
        predictor.follow(_POLL_SECONDS)
        self._orders.send(name)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while predictor.version == before:
            assert time.monotonic() < deadline, f"nothing was applied: {predictor.error}"
            time.sleep(max(1e-4, len(self._ids) * 1e-9))  # leaves the processor to the follower
        applied = time.monotonic()
        begin, committed = self._orders.recv()
        predictor.stop()
        self._orders.send(None)
        assert _digest(self._table[self._ids]) == self._orders.recv(), "the predictor holds other values"
        shutil.rmtree(self._root / name / "parts")
        return {"commit to applied": applied - committed, "start to applied": applied - begin}


def _limits(root: Path, num_bytes: int) -> dict[str, Callable[[], Figures]]:
    """Return cases that copy as many bytes, and that write them to a file and read them back, in one thread."""
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    copy = np.zeros_like(source)

    def through_a_file() -> None:
        path = root / "plain"
        source.tofile(path)
        with path.open("rb", buffering=0) as file:
            file.readinto(copy.data)

    return {
        "memcpy": lambda: timed(lambda: np.copyto(copy, source)),
        "file": lambda: timed(through_a_file),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare the predictor's rows with the trainer's, and write the results."""
    arguments = parser("bench_freshness", __doc__ or "")
    arguments.add_argument("--rows", type=int, default=4_000_000, help="rows of the table, of 64 columns each")
    settings = arguments.parse_args(argv)
    num_rows, counts = (1000, (10, 100)) if settings.tiny else (settings.rows, tuple(_TARGETS))
    repeats = settings.repeats or (1 if settings.tiny else 9)
    torch.set_num_threads(1)
    report = Report(
        name="bench_freshness",
        settings={"table": f"{num_rows} x {_DIM} float32", "poll": f"{_POLL_SECONDS * 1e3} ms", "repeats": repeats},
        columns=(
            "rows, encoding",
            "commit to applied, ms",
            "target",
            "prototype",
            "start to applied, ms",
            "target",
            "prototype",
        ),
        notes=[*_NOTES],
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=settings.work) as work:
        root = Path(work)
        ours, theirs = context.Pipe()
        process = context.Process(target=_trainer_process, args=(theirs, root, num_rows), daemon=True)
        process.start()
        theirs.close()
        follower = _Follower(ours, root, num_rows)
        for count in counts:
            cases: dict[str, Callable[[], Figures]] = {
                _name(*case): lambda case=case: follower.case(_name(*case))  # type: ignore[misc]
                for case in _CASES
            }
            cases |= _limits(root, count * (_DIM * 4 + 8))
            found = interleaved(
                cases,
                repeats=repeats,
                before_round=lambda count=count: follower.train(count),  # type: ignore[misc]
                before_case=lambda count=count: provide_pages(root, count * (_DIM * 4 + 8)),  # type: ignore[misc]
            )
            _report(report, count, found)
        ours.send(None)
        process.join()
    report.finish(settings.out)
    return 0


def _report(report: Report, count: int, found: Mapping[str, Mapping[str, Sample]]) -> None:
    for name, sample in found.items():
        report.add(f"{count} {name}", sample)
    targets = _TARGETS.get(count)
    for encoding, fsync in _CASES:
        sample = found[_name(encoding, fsync)]
        prototype = _PROTOTYPE.get((str(encoding), count)) if fsync else None
        report.lines.append(
            (
                f"{count:,} {_name(encoding, fsync)}",
                sample["commit to applied"].text(1e3),
                "" if targets is None else str(targets[0]),
                "" if prototype is None else str(prototype[0]),
                sample["start to applied"].text(1e3),
                "" if targets is None else str(targets[2 if fsync else 1]),
                "" if prototype is None else str(prototype[1]),
            )
        )
    memcpy, file = found["memcpy"]["seconds"], found["file"]["seconds"]
    report.notes.append(
        f"Limits for the bytes of {count:,} fp32 rows and ids, one thread, ms: memcpy {memcpy.text(1e3)}; write to a"
        f" file without fsync, then read: {file.text(1e3)}."
    )


if __name__ == "__main__":
    raise SystemExit(main())
