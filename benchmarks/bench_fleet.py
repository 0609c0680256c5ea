"""Many predictors behind two tiers of HTTP caches: ``python -m benchmarks.bench_fleet``.

A trainer publishes to SeaweedFS. An nginx is in front of it, a second one in front of the first, with a TCP proxy
between them that can delay and cut. The readers are predictors that follow over HTTP with their default interval,
several in each of some processes. At the end of each phase, the rows of every reader are compared with the trainer's.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from benchmarks.harness import Report, parser
from benchmarks.ids import distinct_ids
from benchmarks.workloads import Trainer, one_rank, tables
from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import StreamError
from delta_tracker.stream.storage.storage import Storage
from tests.servers import TcpProxy, cache_conf, free_ports, nginx, s3_server

_DIM = 64
_WATCH_SECONDS = 0.005
_PATIENCE_SECONDS = 60.0
_MAX_BUSY = 0.8
_LOG = "log_format origin '$upstream_addr $upstream_bytes_received $body_bytes_sent';"


@dataclass(frozen=True)
class Counts:
    """What a tier did: requests and bytes that it answered, and those that it sent on."""

    requests: int
    num_bytes: int
    sent_on: int
    upstream_bytes: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.requests - other.requests,
            self.num_bytes - other.num_bytes,
            self.sent_on - other.sent_on,
            self.upstream_bytes - other.upstream_bytes,
        )


class Tier:
    """An nginx cache that can be killed and started again."""

    def __init__(self, name: str, upstream: int, directory: Path) -> None:
        self.name, self._upstream, self._directory = name, upstream, directory
        (self.port,) = free_ports(1)
        self._log = directory / f"{name}.log"
        self._log.touch()
        self._running = ExitStack()
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start the server, with the files that it has cached before."""
        self._starts += 1
        run = self._directory / f"{self.name}-{self._starts}"
        run.mkdir()
        conf = cache_conf(self.name, self.port, self._upstream, self._directory)
        conf = conf.replace("gzip off;", f"access_log {self._log} origin; gzip off;")
        self._running.enter_context(nginx(f"{_LOG}\n{conf}", self.port, run))

    def kill(self) -> None:
        """Kill the server."""
        self._running.close()

    def counts(self) -> Counts:
        """Return what it did so far."""
        requests = num_bytes = sent_on = upstream_bytes = 0
        for line in self._log.read_text().splitlines():
            address, received, sent = line.rsplit(" ", 2)
            requests += 1
            num_bytes += int(sent)
            if address != "-":
                sent_on += 1
                upstream_bytes += int(received) if received != "-" else 0
        return Counts(requests, num_bytes, sent_on, upstream_bytes)


def _digest(rows: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(rows.contiguous().numpy().data)


def _note_versions(predictors: Sequence[Predictor], seen: Sequence[dict[int, float]]) -> None:
    """Add the time now for each predictor whose version is new."""
    for predictor, times in zip(predictors, seen, strict=True):
        if (version := predictor.version) is not None:
            times.setdefault(version, time.monotonic())


def _readers(orders: Connection, url: str, fqn: str, num_rows: int, count: int) -> None:
    """Follow with ``count`` predictors until an order arrives; then answer with times, digests and resyncs."""
    torch.set_num_threads(1)
    models = [{fqn: torch.zeros(num_rows, _DIM)} for _ in range(count)]
    predictors = [Predictor(model, Storage(url)) for model in models]
    for predictor in predictors:
        predictor.follow()
    seen: list[dict[int, float]] = [{} for _ in range(count)]
    while True:
        _note_versions(predictors, seen)
        if not orders.poll(_WATCH_SECONDS):
            continue
        if orders.recv() == "stop":
            break
        rows = []
        for predictor, model in zip(predictors, models, strict=True):
            with predictor.reading() as view:
                rows.append((view.version, _digest(model[fqn])))
                _note_versions([predictor], [seen[len(rows) - 1]])  # it may be newer than the last look
        statuses = [predictor.status() for predictor in predictors]
        errors = {status.error for status in statuses} - {None}
        orders.send((seen, rows, [status.resyncs for status in statuses], errors))
    for predictor in predictors:
        try:
            predictor.stop()
        except StreamError:
            continue  # an error of the last attempt, which the next phase would retry


class Fleet:
    """Processes of readers."""

    def __init__(self, url: str, fqn: str, num_rows: int, num_processes: int, per_process: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._members = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, url, fqn, num_rows, per_process)
            process = context.Process(target=_readers, args=arguments, daemon=True)
            process.start()
            self._members.append((process, ours))

    def ask(self) -> tuple[list[dict[int, float]], list[tuple[int | None, str]], int, set[str]]:
        """Return the times of versions, versions and digests of each reader, the number of resyncs, and errors."""
        for _, pipe in self._members:
            pipe.send("tell")
        answers = [pipe.recv() for _, pipe in self._members]
        times = [each for answer in answers for each in answer[0]]
        rows = [each for answer in answers for each in answer[1]]
        errors = {error for answer in answers for error in answer[3]}
        return times, rows, sum(sum(answer[2]) for answer in answers), errors

    def wait(self, version: int, digest: str) -> float:
        """Wait until all readers have a version, compare their rows, and return when the last one had it."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            times, rows, resyncs, errors = self.ask()
            if all(held == version for held, _ in rows):
                assert all(found == digest for _, found in rows), "a reader holds other rows"
                assert resyncs == 0, f"{resyncs} resyncs"
                return max(each[version] for each in times)
            assert time.monotonic() < deadline, f"not version {version}: {[held for held, _ in rows]} {errors}"
            time.sleep(0.2)

    def stop(self) -> None:
        """End all processes."""
        for _, pipe in self._members:
            pipe.send("stop")
        for process, _ in self._members:
            process.join(_PATIENCE_SECONDS)


class Source:
    """A trainer and its publisher."""

    def __init__(self, trainer: Trainer, tracker: ModelDeltaTracker, storage: Storage, num_changed: int) -> None:
        self._trainer, self._tracker, self._num_changed = trainer, tracker, num_changed
        (table,) = trainer.tables
        self.fqn = trainer.fqn(table)
        self._num_rows = table.num_rows
        self._generator = torch.Generator().manual_seed(0)
        self.publisher = Publisher(tracker, storage)
        self.publisher.snapshot()

    def publish(self) -> tuple[int, float]:
        """Train, publish a version, and return its number and the time of its commit."""
        ids = distinct_ids(self._num_rows, self._num_changed, self._generator)
        self._trainer.train(ids, self._tracker)
        manifest = self.publisher.publish()
        return manifest.version, time.monotonic()

    @property
    def digest(self) -> str:
        """Digest of the trainer's rows."""
        (view,) = self._tracker.live.column_views(self.fqn)
        return _digest(view)


@contextmanager
def _busy() -> Iterator[list[float]]:
    """Append the share of processor time that all processors were busy inside the ``with`` statement."""

    def times() -> tuple[int, int]:
        fields = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return sum(fields) - fields[3] - fields[4], sum(fields)

    found: list[float] = []
    before = times()
    yield found
    after = times()
    found.append((after[0] - before[0]) / max(1, after[1] - before[1]))


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Phase:
    """Figures of one phase."""

    name: str
    versions: int
    latencies: list[float]
    fresh: float | None
    first: Counts
    second: Counts
    seconds: float
    busy: float
    num_readers: int

    def line(self) -> list[str]:
        """Return the row of the table."""
        per_reader = self.second.num_bytes / self.num_readers
        is_timed = self.busy <= _MAX_BUSY
        shown = "busy"
        if not self.latencies:
            shown = "-"
        elif is_timed:
            shown = f"{statistics.median(self.latencies):.2f} / {_percentile(self.latencies, 0.99):.2f}"
        return [
            self.name,
            str(self.versions),
            shown,
            "-" if self.fresh is None else f"{self.fresh:.1f}" if is_timed else "busy",
            f"{self.first.upstream_bytes / 1e6:.1f}",
            f"{self.first.upstream_bytes / per_reader:.2f}" if self.versions else "-",
            f"{self.first.sent_on / self.seconds:.2f}",
            f"{self.second.requests / self.seconds / self.num_readers:.2f}",
            f"{100 * self.busy:.0f} %",
        ]

    def figures(self) -> dict[str, tuple[float, ...]]:
        """Return the figures for the JSON file."""
        return {
            "commit to applied": tuple(self.latencies) or (0.0,),
            "until the last is fresh": (self.fresh or 0.0,),
            "origin bytes": (float(self.first.upstream_bytes),),
            "bytes of one reader": (self.second.num_bytes / self.num_readers,),
            "origin requests": (float(self.first.sent_on),),
            "requests of all readers": (float(self.second.requests),),
            "seconds": (self.seconds,),
            "busy": (self.busy,),
        }


class Course:
    """The phases of one run."""

    def __init__(self, source: Source, tiers: tuple[Tier, Tier], num_readers: int) -> None:
        self._source, self._tiers, self._num_readers = source, tiers, num_readers
        self.phases: list[Phase] = []

    def phase(self, name: str, fleet: Fleet, num_versions: int, pause: float, *, kills: bool = False) -> None:
        """Publish versions with pauses, wait until all readers have the last one, and compare their rows."""
        before, begin, commits = [tier.counts() for tier in self._tiers], time.monotonic(), {}
        with _busy() as busy:
            for number in range(num_versions):
                version, committed = self._source.publish()
                commits[version] = committed
                if kills and number == num_versions // 2:
                    self._tiers[0].kill()
                    time.sleep(pause)
                    self._tiers[0].start()
                time.sleep(pause)
            if num_versions:
                fleet.wait(version, self._source.digest)
        times = fleet.ask()[0]
        latencies = [each[at] - commits[at] for each in times for at in commits if at in each]
        self._add(name, num_versions, latencies, None, before, begin, busy[0])

    def rest(self, seconds: float) -> None:
        """Publish nothing."""
        before, begin = [tier.counts() for tier in self._tiers], time.monotonic()
        with _busy() as busy:
            time.sleep(seconds)
        self._add("at rest", 0, [], None, before, begin, busy[0])

    def start(self, name: str, fleet: Fleet, version: int, begin: float, before: list[Counts]) -> None:
        """Wait until all readers have started and have a version."""
        with _busy() as busy:
            fresh = fleet.wait(version, self._source.digest) - begin
        self._add(name, 1, [], fresh, before, begin, busy[0])

    def _add(
        self,
        name: str,
        num_versions: int,
        latencies: list[float],
        fresh: float | None,
        before: list[Counts],
        begin: float,
        busy: float,
    ) -> None:
        seconds = time.monotonic() - begin
        first, second = (tier.counts() - each for tier, each in zip(self._tiers, before, strict=True))
        self.phases.append(Phase(name, num_versions, latencies, fresh, first, second, seconds, busy, self._num_readers))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare the rows of all readers with the trainer's, and write the results."""
    arguments = parser("bench_fleet", __doc__ or "")
    arguments.add_argument("--processes", type=int, default=2, help="processes of readers")
    arguments.add_argument("--readers", type=int, default=15, help="readers in each process")
    settings = arguments.parse_args(argv)
    num_rows, num_changed, num_versions, pause = (2000, 50, 2, 0.5) if settings.tiny else (50_000, 2_000, 15, 3.0)
    num_processes, per_process = (1, 3) if settings.tiny else (settings.processes, settings.readers)
    num_readers = num_processes * per_process
    torch.set_num_threads(1)
    report = Report(
        name="bench_fleet",
        settings={
            "readers": f"{num_readers} in {num_processes} processes",
            "table": f"{num_rows} x {_DIM} float32",
            "rows of a version": num_changed,
            "seconds between versions": pause,
        },
        columns=(
            "phase",
            "versions",
            "commit to applied, s: p50 / p99",
            "last reader fresh, s",
            "origin sent, MB",
            "that / bytes of one reader",
            "requests/s to the origin",
            "requests/s of a reader",
            "processors busy",
        ),
        notes=[
            "Readers poll every second, the default. Origin: what the first nginx got from SeaweedFS, with headers.",
            "With faults, the proxy between the caches delays each 64 KiB by 50 ms and cuts 2 % of them.",
            f"Latencies are left out if the processors were busy for more than {100 * _MAX_BUSY:.0f} % of a phase.",
            "No reader resynced, and all held the trainer's rows bit for bit after each phase.",
        ],
    )
    with tempfile.TemporaryDirectory(dir=settings.work) as name, s3_server() as s3, one_rank(), ExitStack() as stack:
        directory = Path(name)
        first = Tier("first", s3.port, directory)
        stack.callback(first.kill)
        proxy = TcpProxy(first.port)
        stack.callback(proxy.close)
        second = Tier("second", proxy.port, directory)
        stack.callback(second.kill)
        trainer = Trainer(tables(1, num_rows, _DIM))
        tracker = stack.enter_context(ModelDeltaTracker(trainer.model))
        source = Source(trainer, tracker, Storage(f"{s3.url}/fleet", options=s3.options), num_changed)
        stack.callback(source.publisher.close)
        time.sleep(1.5)  # the pointer is written within a second
        url = f"http://127.0.0.1:{second.port}/tests/fleet"
        course = Course(source, (first, second), num_readers)

        def started(name: str) -> Fleet:
            version = source.publisher.version
            assert version is not None
            before, begin = [first.counts(), second.counts()], time.monotonic()
            fleet = Fleet(url, source.fqn, num_rows, num_processes, per_process)
            course.start(name, fleet, version, begin, before)
            return fleet

        fleet = started("all readers start")
        course.phase("versions", fleet, num_versions, pause)
        time.sleep(0 if settings.tiny else 10)  # the back-off of idle readers
        course.rest(1 if settings.tiny else 20)
        course.phase("first cache killed and started again", fleet, num_versions, pause, kills=True)
        proxy.delay_seconds, proxy.cut_chance = 0.05, 0.02
        course.phase("delays and cuts between the caches", fleet, num_versions, pause)
        proxy.delay_seconds = proxy.cut_chance = 0.0
        fleet.stop()
        for _ in range(num_versions):
            source.publish()
        time.sleep(1.5)
        fleet = started("all readers start again")
        fleet.stop()
    for phase in course.phases:
        report.lines.append(phase.line())
        report.figures[phase.name] = phase.figures()
    report.finish(settings.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
