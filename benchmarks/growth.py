"""Time and memory of operations as their input grows, with fitted exponents: ``python -m benchmarks.growth``.

- Logs of 10^2 to 10^5 versions, in a directory and in an S3 server (needs ``weed``): the start of a publisher, the
  start of a predictor, a sync that finds nothing and looks for a gap, and a retention pass of a publisher that deletes
  nothing. None of them has more work in a longer log, so the exponent should be 0.
- Tables of 10^5 to 10^9 rows, without the rows themselves: 10,000 rows are marked and read, which is the same work in
  every table; and 10,000 rows are marked while one in 256 is pending, all of which are read, so that the time to read
  and the memory should have an exponent of at most 1.
- 1 to 1,000 tables: 10,000 rows of all tables together are marked and read, and one row of each table is published.
  The work is that per table, so the exponent should be at most 1.
- 1 to 16 ranks on gloo, with 1,000 rows and 100 lookups each: a publish. All ranks share the cores of one machine, so
  the elapsed time should have an exponent of at most 1, and the processor time of a rank one of 0.

A log has a snapshot every 100 versions, and ends with a claim and a delta. It begins with versions of a real publisher;
the entries and parts after them are copies with other names and links.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
import xxhash
from torch import Tensor, nn

from benchmarks.harness import Figures, Report, Sample, interleaved, parser
from benchmarks.ids import uniform_ids
from benchmarks.stores import Ours, lookups
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Retention
from delta_tracker.stream.format.manifest import Kind, Link, entry_name
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.maintenance.upkeep import Upkeep, UpkeepThread
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.url import local_directory
from tests.ranks import RankPool
from tests.servers import s3_server

T = TypeVar("T")
Found = dict[str, dict[str, Sample]]
"""Case with its size to figure to sample."""

_NUM_ROWS = 100
_DIM = 4
_SNAPSHOT_EVERY = 100
_UPLOADS = 16  # concurrent ones
_DEADLINE_SECONDS = 600.0  # of a retention pass
_MAX_BYTES = 1 << 20
_NUM_IDS = 10_000  # changed rows of a step
OPERATIONS = ("publisher start", "predictor start", "gap check", "gap check at a claim", "retention pass")
SIZES: dict[str, list[int]] = {
    "directory": [10**2, 10**3, 10**4, 10**5],
    "S3": [10**2, 10**3, 10**4],
    "rows": [10**5, 10**6, 10**7, 10**8, 10**9],
    "tables": [1, 10, 100, 1000],
    "ranks": [1, 2, 4, 8, 16],
}
"""Sizes by default: versions of logs in a directory and in S3, rows of a table, tables, and ranks."""
TINY_SIZES: dict[str, list[int]] = {
    "directory": [10, 100],
    "S3": [],
    "rows": [100, 1000],
    "tables": [1, 3],
    "ranks": [],
}


class Log:
    """Long log, and the operations on it.

    Args:
        storage: empty store.
        num_versions: number of versions of the log at first.
    """

    def __init__(self, storage: Storage, num_versions: int) -> None:
        torch.manual_seed(0)
        self._storage = storage
        self._table = nn.EmbeddingBag(_NUM_ROWS, _DIM, sparse=True, mode="sum")
        self._model = nn.ModuleDict({"user": self._table})
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._tracker = ModelDeltaTracker(self._model)
        publisher = Publisher(self._tracker, storage)
        publisher.snapshot()
        self._finish(publisher)
        _extend(storage, num_versions)
        self._publish()
        self._served = nn.ModuleDict({"user": nn.EmbeddingBag(_NUM_ROWS, _DIM, mode="sum")})
        self._predictor = Predictor(self._served, storage)
        self._sync()
        self._upkeep: UpkeepThread | None = None
        self._num_passes = 0
        self.traces_memory = False
        self._done = threading.Event()

    def publisher_start(self) -> Figures:
        """Time the construction of a publisher, which claims the stream. Then publish."""
        figures, publisher = self._measured(lambda: Publisher(self._tracker, self._storage))
        self._finish(publisher)
        return figures

    def predictor_start(self) -> Figures:
        """Time the construction of a predictor and its first sync."""
        served = nn.ModuleDict({"user": nn.EmbeddingBag(_NUM_ROWS, _DIM, mode="sum")})

        def start() -> Predictor:
            predictor = Predictor(served, self._storage)
            predictor.sync()
            return predictor

        figures, predictor = self._measured(start)
        assert torch.equal(_weight(served), self._table.weight)
        predictor.stop()
        return figures

    def gap_check(self) -> Figures:
        """Time a sync of a predictor that has applied the newest version."""
        self._sync()
        before = self._predictor.version
        figures, version = self._measured(self._predictor.sync)
        assert version == before
        return figures

    def gap_check_at_a_claim(self) -> Figures:
        """Time a sync of a predictor that has applied the newest entry, which is the claim of an idle publisher."""
        publisher = Publisher(self._tracker, self._storage)
        self._sync()
        figures, version = self._measured(self._predictor.sync)
        assert version == publisher.version
        self._finish(publisher)
        return figures

    def retention_pass(self) -> Figures:
        """Time a retention pass of a running publisher, for which nothing is to delete."""
        if self._upkeep is None:
            self._upkeep = UpkeepThread(
                self._storage,
                Upkeep(retention=Retention(versions=1 << 40)),
                retain_every=1,
                on_pass=lambda *_: self._done.set(),
                close_seconds=0,
            )
            self._pass()
        before = len(self._storage.names("log"))
        self._publish()
        figures, _ = self._measured(self._pass)
        assert len(self._storage.names("log")) == before + 3  # a claim and two versions
        return figures

    def close(self) -> None:
        """Stop what runs."""
        self._predictor.stop()
        if self._upkeep is not None:
            self._upkeep.close()

    def _measured(self, work: Callable[[], T]) -> tuple[Figures, T]:
        """Return the elapsed seconds of one call, or the bytes that it allocated at most, and its result."""
        if self.traces_memory:
            tracemalloc.start()
        begin = time.perf_counter()
        result = work()
        figures = {"seconds": time.perf_counter() - begin}
        if self.traces_memory:
            figures = {"bytes": float(tracemalloc.get_traced_memory()[1])}
            tracemalloc.stop()
        return figures, result

    def _pass(self) -> None:
        assert self._upkeep is not None
        self._num_passes += 1
        self._done.clear()
        self._upkeep.after(self._num_passes)
        assert self._done.wait(_DEADLINE_SECONDS)
        assert self._upkeep.error is None

    def _publish(self) -> None:
        """Start a publisher, and let it publish."""
        self._finish(Publisher(self._tracker, self._storage))

    def _finish(self, publisher: Publisher) -> None:
        """Publish two versions with a changed row, and close the publisher, which writes the pointer.

        Retention keeps the version before a claim. With more than one version between claims, a reader needs few
        requests to see that nothing was deleted behind a claim, as in a stream that is not only claimed.
        """
        for _ in range(2):
            self._optimizer.zero_grad()
            self._table(torch.randint(0, _NUM_ROWS, (1, 1))).sum().backward()
            self._optimizer.step()
            self._tracker.step()
            publisher.publish()
        publisher.close()

    def _sync(self) -> None:
        """Apply all versions, and check the rows."""
        before = None
        while before != (before := self._predictor.sync()):
            pass
        assert torch.equal(_weight(self._served), self._table.weight)


def _extend(storage: Storage, num_versions: int) -> None:
    """Append copies of the last delta and of the snapshot to a log until it has ``num_versions`` versions."""
    log = StreamLog(storage)
    head = log.head()
    assert head is not None
    assert head.snapshot is not None
    snapshot = log.read(head.snapshot)
    assert snapshot is not None
    sources = {"delta": head, "snapshot": snapshot}
    data = {kind: _bytes(storage, source.parts[0].name) for kind, source in sources.items()}

    def objects() -> Iterator[tuple[str, bytes]]:
        link, newest = head.link, head.snapshot
        for version in range(head.version + 1, num_versions):
            kind: Kind = "snapshot" if version % _SNAPSHOT_EVERY == 0 else "delta"
            newest = version if kind == "snapshot" else newest
            source = sources[kind]
            part = replace(source.parts[0], name=part_name(version, source.generation, "r0"))
            entry = replace(source, version=version, parent=link, snapshot=newest, parts=(part,)).to_json()
            link = Link(version, xxhash.xxh3_128_hexdigest(entry))
            yield part.name, data[kind]
            yield entry_name(version), entry

    directory = local_directory(storage.url)
    if directory is not None:
        for name, content in objects():
            (directory / name).write_bytes(content)
        return
    with ThreadPoolExecutor(_UPLOADS) as pool:
        for batch in _batches(objects()):
            list(pool.map(lambda each: storage.put(each[0], [memoryview(each[1])]), batch))


def _weight(model: nn.ModuleDict) -> Tensor:
    found = model["user"].weight
    assert isinstance(found, Tensor)
    return found


def _bytes(storage: Storage, name: str) -> bytes:
    found = storage.read(name, max_bytes=_MAX_BYTES)
    assert found is not None
    return found.tobytes()


def _batches(objects: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the objects in lists, so that not all are in memory."""
    remaining = iter(objects)
    while batch := list(islice(remaining, 100 * _UPLOADS)):
        yield batch


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best: the slope of the logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(each) for each in values]).slope


def _logs(stores: Mapping[str, Mapping[int, Storage]], repeats: int, found: Found) -> None:
    """Measure the operations on logs."""
    with ExitStack() as stack:
        logs = {
            (place, size): Log(storage, size)
            for place, storages in stores.items()
            for size, storage in storages.items()
        }
        for log in logs.values():
            stack.callback(log.close)
        cases: dict[str, Callable[[], Figures]] = {
            f"{operation}, {place}, {size}": getattr(log, operation.replace(" ", "_"))
            for (place, size), log in logs.items()
            for operation in OPERATIONS
        }
        found |= interleaved(cases, repeats=repeats)
        for log in logs.values():
            log.traces_memory = True
        for name, figures in interleaved(cases, repeats=1, warmups=0).items():
            found[name] |= figures


def _changes(num_rows: Mapping[str, int], num_ids: int) -> Callable[[], Figures]:
    """Return a function that marks and reads ``num_ids`` rows of the tables, and returns the bytes of the log."""
    store, generator = Ours(num_rows), torch.Generator().manual_seed(0)
    share = min(max(1, num_ids // len(num_rows)), *num_rows.values())
    ids = {
        name: torch.arange(share) * (count // share) + uniform_ids(count // share, share, generator)
        for name, count in num_rows.items()
    }
    batch = lookups({name: each[torch.randperm(len(each), generator=generator)] for name, each in ids.items()})

    def cycle() -> Figures:
        begin = time.perf_counter()
        store.record(batch)
        marked = time.perf_counter()
        num_bytes = store.log.segments.memory().log_bytes
        again = time.perf_counter()
        rows = store.read()
        ended = time.perf_counter()
        assert all(torch.equal(rows[name][0], each) for name, each in ids.items())
        return {"mark": marked - begin, "read": ended - again, "bytes": float(num_bytes)}

    return cycle


def _bits(num_rows: int, num_ids: int) -> Callable[[], Figures]:
    """Return a function that marks ``num_ids`` rows of a table of which one in 256 is pending, and reads all of these.

    A log with fewer changes has no bits, but a list of ids.
    """
    store, generator = Ours({"t": num_rows}), torch.Generator().manual_seed(0)
    pending = torch.arange(0, num_rows, 256)
    store.record(lookups({"t": pending}))
    batch = lookups({"t": pending[uniform_ids(len(pending), num_ids, generator)]})

    def cycle() -> Figures:
        begin = time.perf_counter()
        store.record(batch)
        marked = time.perf_counter()
        num_bytes = store.log.segments.memory().log_bytes
        again = time.perf_counter()
        rows = store.read(commit=False)
        ended = time.perf_counter()
        assert torch.equal(rows["t"][0], pending)
        return {"mark": marked - begin, "read": ended - again, "bytes": float(num_bytes)}

    return cycle


def _publishes(stack: ExitStack, directory: Path, num_tables: int) -> Callable[[], Figures]:
    """Return a function that publishes one row of each table."""
    model = nn.ModuleDict(
        {f"t{number}": nn.EmbeddingBag(_NUM_ROWS, _DIM, sparse=True, mode="sum") for number in range(num_tables)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    publisher = stack.enter_context(Publisher(tracker, Storage(directory, create=True)))
    publisher.snapshot()

    def publish() -> Figures:
        optimizer.zero_grad()
        ids = torch.randint(0, _NUM_ROWS, (1, 1))
        torch.cat([table(ids) for table in model.values()]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        tracker.step()
        begin = time.perf_counter()
        delta = publisher.publish()
        figures = {"publish": time.perf_counter() - begin}
        assert delta.num_rows == num_tables
        return figures

    return publish


def _ranks(directory: Path, world_sizes: Sequence[int], repeats: int, found: Found) -> None:
    """Measure publishes of several ranks."""
    for world_size in world_sizes:
        pool = RankPool(world_size)
        try:
            each = pool.run(
                "benchmarks.growth_ranks:publish",
                directory=str(directory / f"ranks-{world_size}"),
                num_versions=repeats + 1,
            )
        finally:
            pool.stop()
        found[f"publish of ranks, {world_size}"] = {
            "seconds": Sample(tuple(max(times) for times in zip(*(one["seconds"][1:] for one in each), strict=True))),
            "processor": Sample(
                tuple(statistics.mean(times) for times in zip(*(one["processor"][1:] for one in each), strict=True))
            ),
        }


def _line(found: Found, label: str, case: str, figure: str, sizes: Sequence[int]) -> list[str]:
    """Return the cells of a line: the medians of a figure at all sizes, in ms or MB, and the exponent."""
    medians = [found[f"{case}, {size}"][figure].median for size in sizes]
    scale = 1e-6 if figure == "bytes" else 1e3
    unit = "MB" if figure == "bytes" else "ms"
    slope = f"{exponent(sizes, medians):.2f}" if len(sizes) > 1 else ""
    return [f"{label}, {unit}", *(f"{median * scale:.2f}" for median in medians), slope]


def _columns(title: str, sizes: Sequence[int]) -> list[str]:
    return [title, *(f"{size:,}" for size in sizes), "exponent"]


def _log_lines(found: Found, place: str, sizes: Sequence[int]) -> list[list[str]]:
    return [
        _line(found, operation, f"{operation}, {place}", figure, sizes)
        for figure in ("seconds", "bytes")
        for operation in OPERATIONS
    ]


def _tables(found: Found, sizes: Mapping[str, Sequence[int]]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the columns and the lines of each table that has sizes, except that of the logs in a directory."""
    if sizes["S3"]:
        yield _columns("log in S3, by versions", sizes["S3"]), _log_lines(found, "S3", sizes["S3"])
    if sizes["rows"]:
        lines = [
            _line(found, f"{label} {figure}", case, figure, sizes["rows"])
            for label, case in (("10,000 rows:", "rows"), ("1 in 256 pending:", "bits"))
            for figure in ("mark", "read", "bytes")
        ]
        yield _columns("changes of one table, by its rows", sizes["rows"]), lines
    if sizes["tables"]:
        lines = [_line(found, figure, "tables", figure, sizes["tables"]) for figure in ("mark", "read", "bytes")]
        lines.append(_line(found, "publish a row of each", "published tables", "publish", sizes["tables"]))
        yield _columns("changes, by tables", sizes["tables"]), lines
    if sizes["ranks"]:
        lines = [
            _line(found, label, "publish of ranks", figure, sizes["ranks"])
            for label, figure in (("publish", "seconds"), ("processor time of a rank", "processor"))
        ]
        yield _columns("publish, by ranks", sizes["ranks"]), lines


def _measure(work: Path, sizes: Mapping[str, Sequence[int]], repeats: int, stack: ExitStack) -> Found:
    """Measure all operations."""
    found: Found = {}
    stores = {"directory": {size: Storage(work / f"log-{size}", create=True) for size in sizes["directory"]}}
    if sizes["S3"]:
        s3 = stack.enter_context(s3_server())
        stores["S3"] = {size: Storage(f"{s3.url}/log-{size}", options=s3.options) for size in sizes["S3"]}
    _logs(stores, repeats, found)
    for rows in sizes["rows"]:
        found |= interleaved({f"rows, {rows}": _changes({"t": rows}, _NUM_IDS)}, repeats=3 * repeats)
        found |= interleaved({f"bits, {rows}": _bits(rows, _NUM_IDS)}, repeats=repeats)
    for count in sizes["tables"]:
        cases = {
            f"tables, {count}": _changes({f"t{number}": _NUM_IDS for number in range(count)}, _NUM_IDS),
            f"published tables, {count}": _publishes(stack, work / f"tables-{count}", count),
        }
        found |= interleaved(cases, repeats=repeats)
    _ranks(work, sizes["ranks"], repeats, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if all checks passed."""
    arguments = parser("growth", __doc__ or "")
    for name, sizes in SIZES.items():
        arguments.add_argument(f"--{name.lower()}", type=int, nargs="*", default=sizes, dest=name, metavar="SIZE")
    chosen = arguments.parse_args(argv)
    repeats = 1 if chosen.tiny else chosen.repeats or 7
    used = TINY_SIZES if chosen.tiny else {name: sorted(getattr(chosen, name)) for name in SIZES}
    report = Report(
        name="growth",
        settings={"repeats": repeats, "changed rows": _NUM_IDS},
        columns=_columns("log in a directory, by versions", used["directory"]),
        notes=[
            "Medians. The memory of an operation on a log is the peak of what Python allocates meanwhile.",
            "The memory of changes is that of the change log.",
            "The exponent is the slope of the logarithms. Constant work: 0; work that is proportional to the size: 1.",
        ],
    )
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=chosen.work)))
        found = _measure(work, used, repeats, stack)
    for name, figures in found.items():
        report.add(name, figures)
    report.lines = [tuple(line) for line in _log_lines(found, "directory", used["directory"])]
    for columns, lines in _tables(found, used):
        rule = ["---", *("---:" for _ in columns[1:])]
        report.below += ["", *(f"| {' | '.join(cells)} |" for cells in (columns, rule, *lines))]
    report.finish(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
