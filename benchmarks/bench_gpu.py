"""Speed on a GPU: ``python -m benchmarks.bench_gpu``, as ``make bench-gpu`` does.

The parts without FBGEMM use tables of plain torch (:mod:`benchmarks.plain_torchrec`), whose lookups and updates take
another time than FBGEMM's, so that only differences between two lines mean something. The parts with FBGEMM run only
if FBGEMM's kernels do. With ``--device simulated`` all parts run with few rows on the CPU, to test the
program; their times mean nothing. Every part checks its result. If a part fails, the others still run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_results
from benchmarks.gpu_kernels import row_sets
from benchmarks.gpu_needs import fbgemm_obstacle
from benchmarks.harness import Report, Sample, parser
from benchmarks.plain_torchrec import PlainModel, installed
from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, TrackingMode

_MODES = (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING)
_DIM = 64
_REPEATS = 20
_FQN = "ec.embeddings.t"


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, sizes and results of a run, which all parts use.

    Args:
        device: device of the tables.
        is_tiny: True for few rows and one repeat.
        repeats: number of timed calls of each case.
        report: takes the results.
        directory: directory for streams.
        copy_bytes: bytes per second of a copy on the device, reads and writes counted.
        pinned_bytes: bytes per second of a copy from the device to pinned memory.
    """

    device: torch.device
    is_tiny: bool
    repeats: int
    report: Report
    directory: Path
    copy_bytes: float
    pinned_bytes: float

    @property
    def engines(self) -> list[str]:
        """Engines of row sets on the device."""
        return ["torch", "triton"] if self.device.type == "cuda" and find_spec("triton") else ["torch"]

    def size(self, full: int) -> int:
        """Return a number of rows or ids: ``full``, or a small part of it."""
        return max(full // 10_000, 64) if self.is_tiny else full

    def seconds(self, work: Callable[[], object]) -> Sample:
        """Return the times of ``work``, each with a wait for the device at its end, after two uncounted calls."""
        found = []
        for repeat in range(-1 if self.is_tiny else -2, 1 if self.is_tiny else self.repeats):
            wait(self.device)
            begin = time.perf_counter()
            work()
            wait(self.device)
            if repeat >= 0:
                found.append(time.perf_counter() - begin)
        return Sample(tuple(found))

    def add(self, name: str, sample: Sample, bound: float | None = None, of: str = "") -> None:
        """Add a line with the median and the range of a case.

        Args:
            name: the case.
            sample: its times in seconds.
            bound: time in seconds with which the median is compared; None for none.
            of: description of ``bound``.
        """
        self.report.add(name, {"seconds": sample})
        share = "" if not bound else f"{sample.median / bound:.2f}"
        limit = "" if bound is None else f"{bound * 1e3:.3f} {of}"
        self.report.lines.append((name, sample.text(1e3, 3), limit, share))
        times = {
            "median_ms": sample.median * 1e3,
            "min_ms": min(sample.values) * 1e3,
            "max_ms": max(sample.values) * 1e3,
        }
        limits = {} if bound is None else {"bound_ms": bound * 1e3, "of": of}
        gpu_results.append("case", name=name, repeats=len(sample.values), **times, **limits)


def wait(device: torch.device) -> None:
    """Wait for the device. No-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ids(num_rows: int, num_ids: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_rows, (num_ids,), generator=generator).to(device)


def _unique(ids: Tensor) -> Tensor:
    found: Tensor = torch.unique(ids)
    return found


def steps(bench: Bench) -> None:
    """Training steps of 1, 26 and 200 plain tables, batch 65,536, without a tracker and with each mode and engine."""
    for count, full_rows in ((1, 1_000_000), (26, 1_000_000), (200, 100_000)):
        num_rows, num_ids = bench.size(full_rows), bench.size(65_536)
        tables = {f"t{number}": (num_rows, 32) for number in range(count)}
        ids = {name: _ids(num_rows, num_ids, bench.device, seed) for seed, name in enumerate(tables)}
        model = PlainModel(tables, bench.device)
        without = bench.seconds(lambda: model.train_on(ids))  # noqa: B023
        bench.add(f"step of {count} plain tables, no tracker", without)
        for mode in _MODES:
            for engine in bench.engines:
                with ModelDeltaTracker(model, mode=mode, engine=engine) as tracker:

                    def step() -> None:
                        model.train_on(ids)  # noqa: B023
                        tracker.step()

                    name = f"step of {count} plain tables, {mode.value}, {engine}"
                    bench.add(name, bench.seconds(step), without.median, "without a tracker")
                    read = tracker.get_delta()
                    assert all(len(rows) == len(_unique(ids[fqn.rpartition(".")[2]])) for fqn, rows in read.items())


@contextmanager
def _published(
    bench: Bench, num_rows: int, cadence: Cadence, name: str
) -> Iterator[tuple[PlainModel, ModelDeltaTracker, Publisher]]:
    """Context manager for a model of one table, its tracker and its publisher, after the first snapshot."""
    model = PlainModel({"t": (num_rows, _DIM)}, bench.device)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, f"file://{bench.directory}/{name}", cadence=cadence)
        publisher.snapshot()
        yield model, tracker, publisher
        publisher.snapshot()
        served = torch.zeros(num_rows, _DIM)
        Predictor({_FQN: served}, f"file://{bench.directory}/{name}").sync()
        assert torch.equal(served, model.weights()[_FQN].cpu()), "the last version has other rows"
        publisher.close()
    shutil.rmtree(bench.directory / name)


def publishing(bench: Bench) -> None:
    """Publish 10,000 to 10 M rows: the whole time, and the stall of the training thread against a pinned copy."""
    for full in (10_000, 100_000, 1_000_000, 10_000_000):
        num_rows = bench.size(full)
        stalls, totals = [], []
        with _published(bench, num_rows, Cadence(batches=1), f"publish{full}") as (model, tracker, publisher):
            ids = {"t": torch.arange(num_rows, device=bench.device)}
            for repeat in range(-1, 1 if bench.is_tiny or full > 1_000_000 else 3):  # noqa: PLR2004  gigabytes
                model.train_on(ids)
                wait(bench.device)
                begin, head, stall = time.perf_counter(), publisher.version, 0.0
                while publisher.version == head:  # one call votes, a later one cuts, the last one commits
                    tracker.step()
                    call = time.perf_counter()
                    publisher.step()
                    stall = max(stall, time.perf_counter() - call)
                    assert publisher.error is None, publisher.error
                    time.sleep(1e-4)
                if repeat >= 0:
                    stalls.append(stall)
                    totals.append(time.perf_counter() - begin)
        floor = num_rows * (_DIM * 4 + 8) / bench.pinned_bytes
        bench.add(f"publish {num_rows:,} rows: to the commit", Sample(tuple(totals)), floor, "pinned copy")
        bench.add(f"publish {num_rows:,} rows: longest stall", Sample(tuple(stalls)), floor, "pinned copy")


def snapshots(bench: Bench) -> None:
    """Training steps while snapshots of 10 M rows are copied: median and 99th percentile against quiet steps."""
    num_rows, num_ids = bench.size(10_000_000), bench.size(65_536)
    cadence = Cadence(batches=1, snapshot_every=1)
    quiet: list[float] = []
    busy: list[float] = []
    with _published(bench, num_rows, cadence, "snapshots") as (model, tracker, publisher):
        ids = {"t": _ids(num_rows, num_ids, bench.device)}
        last = publisher.version + (1 if bench.is_tiny else 3)
        while publisher.version < last or len(quiet) < (3 if bench.is_tiny else 200):
            is_quiet = publisher.version >= last
            begin = time.perf_counter()
            model.train_on(ids)
            tracker.step()
            if not is_quiet:
                publisher.step()
            wait(bench.device)
            (quiet if is_quiet else busy).append(time.perf_counter() - begin)
            assert publisher.error is None, publisher.error
    _add_tail(bench, f"step during snapshots of {num_rows:,} rows", busy, quiet)


def _add_tail(bench: Bench, name: str, busy: Sequence[float], quiet: Sequence[float]) -> None:
    """Add the median and the 99th percentile of ``busy``, each against that of ``quiet``."""
    for title, share in (("p50", 0.5), ("p99", 0.99)):
        values = [sorted(each)[min(int(share * len(each)), len(each) - 1)] for each in (busy, quiet)]
        bench.add(f"{name}: {title}", Sample((values[0],)), values[1], "without")


def applying(bench: Bench) -> None:
    """Lookups of 4,096 rows while versions of 1 M rows are applied: median and 99th percentile against quiet ones."""
    num_rows = bench.size(10_000_000)
    changed = torch.arange(0, num_rows, 10, device=bench.device)
    with _published(bench, num_rows, Cadence(batches=1), "apply") as (model, tracker, publisher):
        table = torch.zeros(num_rows, _DIM, device=bench.device)
        predictor = Predictor({_FQN: table}, f"file://{bench.directory}/apply")
        predictor.sync()
        ids = _ids(num_rows, bench.size(4096), bench.device)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        is_busy, ends = threading.Event(), threading.Event()

        def look_up() -> None:
            while not ends.is_set():
                begin, state = time.perf_counter(), is_busy.is_set()
                with predictor.reading():
                    found = table.index_select(0, ids)
                    found[-1:].cpu()
                seconds[state].append(time.perf_counter() - begin)

        thread = threading.Thread(target=look_up)
        thread.start()
        try:
            time.sleep(0.01 if bench.is_tiny else 1)
            applied = []
            for _ in range(1 if bench.is_tiny else 3):
                model.train_on({"t": changed})
                tracker.step()
                publisher.publish()
                is_busy.set()
                begin = time.perf_counter()
                predictor.sync()
                wait(bench.device)
                applied.append(time.perf_counter() - begin)
                while not seconds[True]:
                    time.sleep(1e-4)
                is_busy.clear()
        finally:
            ends.set()
            thread.join()
        assert torch.equal(table, model.weights()[_FQN])
    floor = len(changed) * (_DIM * 4 + 8) / bench.pinned_bytes
    bench.add(f"apply {len(changed):,} rows", Sample(tuple(applied)), floor, "pinned copy")
    _add_tail(bench, f"lookup of {len(ids):,} rows during it", seconds[True], seconds[False])


def first_step(engine: str) -> float:
    """Return the seconds from the start of a tracker to the end of the first step, with an empty Triton cache."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with installed():
        model = PlainModel({"t": (10_000, _DIM)}, device)
        ids = {"t": torch.arange(5_000, device=device)}
        model.train_on(ids)
        wait(device)
        begin = time.perf_counter()
        with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, engine=engine) as tracker:
            model.train_on(ids)
            tracker.step()
            wait(device)
            seconds = time.perf_counter() - begin
            assert len(tracker.get_delta()[_FQN]) == len(ids["t"])
    return seconds


def first_steps(bench: Bench) -> None:
    """Seconds of the first step of a process, for which Triton compiles its kernels."""
    for engine in bench.engines:
        if bench.is_tiny:
            bench.add(f"first step, {engine}", Sample((first_step(engine),)))
            continue
        with tempfile.TemporaryDirectory() as cache:
            program = f"from benchmarks.bench_gpu import first_step; print(first_step({engine!r}))"
            done = subprocess.run(  # noqa: S603  our own program
                [sys.executable, "-W", "ignore", "-c", program],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TRITON_CACHE_DIR": cache},
            )
        bench.add(f"first step, {engine}, cold cache", Sample((float(done.stdout.split()[-1]),)))


def fbgemm_steps(bench: Bench) -> None:
    """Training steps of 1, 26 and 200 tables of FBGEMM, with no tracker, with each mode and engine, and TorchRec's."""
    from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec  # noqa: PLC0415

    from benchmarks import workloads  # noqa: PLC0415  it needs torchrec
    from benchmarks.stores import lookups  # noqa: PLC0415

    with workloads.one_rank():
        for count, full_rows in ((1, 1_000_000), (26, 1_000_000), (200, 100_000)):
            if bench.is_tiny and count > 1:
                continue
            num_rows, num_ids = bench.size(full_rows), bench.size(65_536)
            trainer = workloads.Trainer(workloads.tables(count, num_rows, 32), bench.device)
            found = {table.name: _ids(num_rows, num_ids, bench.device, n) for n, table in enumerate(trainer.tables)}
            features = lookups(found)
            collection = trainer.model.module["ebc"]

            def step() -> None:
                collection(features).values().sum().backward()  # noqa: B023

            name = f"step of {count} FBGEMM tables"
            without = bench.seconds(step)
            bench.add(f"{name}, no tracker", without)
            for mode in _MODES:
                for engine in bench.engines:
                    with ModelDeltaTracker(trainer.model, mode=mode, engine=engine) as tracker:

                        def tracked(tracker: Any = tracker) -> None:  # noqa: ANN401  TorchRec's or ours
                            step()
                            tracker.step()

                        bench.add(
                            f"{name}, {mode.value}, {engine}", bench.seconds(tracked), without.median, "no tracker"
                        )
                        read = tracker.get_delta()
                        assert all(len(rows) == len(_unique(found[t.rpartition(".")[2]])) for t, rows in read.items())
            theirs = ModelDeltaTrackerTrec(trainer.model)

            def tracked_by_torchrec() -> None:
                theirs.step()  # noqa: B023
                step()

            seconds = bench.seconds(tracked_by_torchrec)
            bench.add(f"{name}, TorchRec's tracker", seconds, without.median, "no tracker")
            read_ids = theirs.get_unique_ids()
            assert all(len(each) == len(_unique(found[t.rpartition(".")[2]])) for t, each in read_ids.items())
            for module in theirs.tracked_modules.values():
                module.post_lookup_tracker_fn = None


def flushes(bench: Bench) -> None:
    """Flush of a cache of 10 % of 10 M rows in unified memory, against a pinned copy of the cache."""
    if bench.device.type != "cuda":
        return
    from benchmarks import workloads  # noqa: PLC0415  it needs torchrec

    with workloads.one_rank():
        num_rows = bench.size(10_000_000)
        trainer = workloads.Trainer(workloads.tables(1, num_rows), bench.device, kernel="fused_uvm_caching")
        (lookup,) = trainer.model.module["ebc"]._lookups  # noqa: SLF001  no public attribute has it
        kernel = getattr(lookup, "module", lookup)._emb_modules[0]  # noqa: SLF001
        with ModelDeltaTracker(trainer.model) as tracker:
            ids = _ids(num_rows, bench.size(1_000_000), bench.device)
            trainer.train(ids, tracker)
            (rows,) = tracker.get_delta().values()
            assert torch.equal(rows.ids, _unique(ids))
        num_bytes = num_rows // 10 * _DIM * 4
        bench.add("flush of a cache", bench.seconds(kernel.flush), num_bytes / bench.pinned_bytes, "pinned copy")


PARTS: Mapping[str, tuple[Callable[[Bench], None], bool]] = {
    "row-sets": (row_sets, False),
    "steps": (steps, False),
    "publishing": (publishing, False),
    "snapshots": (snapshots, False),
    "applying": (applying, False),
    "first-steps": (first_steps, False),
    "fbgemm-steps": (fbgemm_steps, True),
    "flushes": (flushes, True),
}
"""Name of a part to its function, and whether it needs torchrec and fbgemm."""


def _bandwidths(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Return the bytes per second of a copy on the device, reads and writes counted, and of one to pinned memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def fastest(copy: Callable[[], object]) -> float:
        found = []
        for _ in range(5):
            wait(device)
            begin = time.perf_counter()
            copy()
            wait(device)
            found.append(time.perf_counter() - begin)
        return min(found)

    on_device = 2 * num_bytes / fastest(lambda: target.copy_(source))
    return on_device, num_bytes / fastest(lambda: pinned.copy_(source, non_blocking=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check every result, and write the results."""
    made = parser("bench_gpu", __doc__ or "")
    made.add_argument("--device", choices=("cuda", "simulated"), default="cuda", help="simulated: tiny, on the CPU")
    made.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="run only these")
    settings = made.parse_args(argv)
    is_cuda = settings.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        made.error("no CUDA device: pass --device simulated to test the program")
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    copy_bytes, pinned_bytes = _bandwidths(device, 1 << 30 if is_cuda else 1 << 20)
    gpu_results.append("device", device=settings.device, copy_bytes=copy_bytes, pinned_bytes=pinned_bytes)
    report = Report(
        name="bench_gpu",
        settings={
            "device": torch.cuda.get_device_name(device) if is_cuda else "none, times mean nothing",
            "copy on the device, GB/s": round(copy_bytes / 1e9),
            "copy to pinned memory, GB/s": round(pinned_bytes / 1e9, 1),
        },
        columns=("work", "ms", "bound, ms", "of the bound"),
    )
    for package in ("triton", "fbgemm-gpu"):
        with suppress(PackageNotFoundError):
            report.environment[package] = version(package)
    skipped = [name for name in settings.parts if PARTS[name][1]]
    obstacle = fbgemm_obstacle(settings.device) if skipped else ""
    if obstacle:
        report.notes.append(f"Not run: {', '.join(skipped)} ({obstacle.strip().splitlines()[-1]}).")
    failed: list[str] = []
    with tempfile.TemporaryDirectory(dir=settings.work) as directory:
        bench = Bench(
            device,
            settings.tiny or not is_cuda,
            settings.repeats or _REPEATS,
            report,
            Path(directory),
            copy_bytes,
            pinned_bytes,
        )
        for name in settings.parts:
            part, needs_fbgemm = PARTS[name]
            if needs_fbgemm and obstacle:
                continue
            try:
                with nullcontext() if needs_fbgemm else installed():
                    part(bench)
            except Exception:  # noqa: BLE001  the times of the other parts are not lost
                traceback.print_exc()
                failed.append(name)
            gpu_results.append("part", name=name, outcome="failed" if name in failed else "passed")
    if failed:
        report.notes.append(f"FAILED: {', '.join(failed)}.")
    report.finish(settings.out if is_cuda else None)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
