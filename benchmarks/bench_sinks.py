"""Time and room that row stores take: ``python -m benchmarks.bench_sinks``. Needs redis-server.

A snapshot and then deltas are written to Redis, to LMDB and, for comparison, to a tensor. Rows that a reader looks up
are compared with those of the stream bit for bit. While the snapshot is written to Redis, another client times its own
``GET``; the same is timed while one ``MULTI`` writes the same rows, which is how the sink does not do it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import redis
import torch
from torch import Tensor, nn

from benchmarks.harness import Report, Sample, parser
from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.sinks.lmdb_rows import LmdbRows
from delta_tracker.sinks.redis import RedisSink
from delta_tracker.sinks.redis_rows import RedisRows
from tests.servers import free_ports, redis_server

_DIM = 64
_LOOKUP = 1000  # rows of a lookup


# Times its reads of one key until its standard input is closed, and prints them.
_CLIENT = """
import json, select, sys, time, redis
client, seconds = redis.Redis.from_url(sys.argv[1]), []
client.set("other", "value")
print("reads", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    begin = time.perf_counter()
    client.get("other")
    seconds.append(time.perf_counter() - begin)
print(json.dumps(seconds))
"""


class _Clock:
    """Another client, in a process of its own, that times its reads of one key until :meth:`close`."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603  this interpreter
            [sys.executable, "-c", _CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "reads\n"
        self.seconds: list[float] = []

    def close(self) -> None:
        """End the process, and keep its times."""
        self.seconds = json.loads(self._process.communicate()[0])


def _quantiles(seconds: list[float]) -> dict[str, float]:
    held = torch.tensor(seconds, dtype=torch.float64)
    return {"get p50": float(held.quantile(0.5)), "get p99": float(held.quantile(0.99)), "get max": float(held.max())}


def _write_at_once(url: str, rows: Tensor) -> None:
    """Write the rows with one MULTI."""
    with closing(redis.Redis.from_url(url)) as client:
        pipe = client.pipeline(transaction=True)
        for number, row in enumerate(rows):
            pipe.set(f"multi:{number}", row.numpy().tobytes())
        pipe.execute()


class _Stream:
    """A trained table and its stream."""

    def __init__(self, folder: Path, num_rows: int, num_changed: int) -> None:
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(num_rows, _DIM, sparse=True, mode="sum")
        self._model = nn.ModuleDict({"user": self.table})
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._tracker = ModelDeltaTracker(self._model)
        self.url = folder.as_uri()
        self._publisher = Publisher(self._tracker, self.url)
        self._num_changed = num_changed
        self._publisher.snapshot()

    def delta(self) -> None:
        """Change some rows, and publish them."""
        self._optimizer.zero_grad()
        ids = torch.randperm(self.table.num_embeddings)[: self._num_changed]
        self.table(ids[:, None]).sum().backward()
        self._optimizer.step()
        self._tracker.step()
        assert self._publisher.publish().num_rows == self._num_changed

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()


def _measure(
    stream: _Stream, predictor: Predictor, look_up: Callable[[Tensor], Tensor], num_deltas: int
) -> dict[str, list[float]]:
    """Apply the snapshot and deltas, and look rows up. All figures are in seconds per row."""
    begin = time.perf_counter()
    predictor.sync()
    found: dict[str, list[float]] = {"snapshot": [(time.perf_counter() - begin) / stream.table.num_embeddings]}
    found |= {"delta": [], "lookup": []}
    for _ in range(num_deltas):
        stream.delta()
        begin = time.perf_counter()
        predictor.sync()
        found["delta"].append((time.perf_counter() - begin) / stream._num_changed)  # noqa: SLF001
        ids = torch.randint(0, stream.table.num_embeddings, (_LOOKUP,))
        begin = time.perf_counter()
        rows = look_up(ids)
        found["lookup"].append((time.perf_counter() - begin) / _LOOKUP)
        assert torch.equal(rows, stream.table.weight[ids])
    return found


def _redis(stream: _Stream, num_deltas: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the figures of Redis, and those of other clients during one MULTI."""
    (port,) = free_ports(1)
    with redis_server(port) as url, closing(redis.Redis.from_url(url)) as client:
        before = int(client.info("memory")["used_memory"])
        sink, rows, clock = RedisSink(url), RedisRows(url), _Clock(url)
        found = _measure(stream, Predictor(sink, stream.url), lambda ids: rows.rows("user", ids).values, num_deltas)
        clock.close()
        used = int(client.info("memory")["used_memory"]) - before
        sink.close()
        found |= {name: [seconds] for name, seconds in _quantiles(clock.seconds).items()}
        found["bytes"] = [used / stream.table.num_embeddings]
        clock = _Clock(url)
        begin = time.perf_counter()
        _write_at_once(url, stream.table.weight.detach())
        whole = {"snapshot": [(time.perf_counter() - begin) / stream.table.num_embeddings]}
        clock.close()
        return found, whole | {name: [seconds] for name, seconds in _quantiles(clock.seconds).items()}


def _lmdb(stream: _Stream, folder: Path, num_deltas: int) -> dict[str, list[float]]:
    """Return the figures of LMDB. A process opens a file once, so a lookup includes closing and opening it."""
    sink = LmdbSink(str(folder))
    predictor = Predictor(sink, stream.url)

    def look_up(ids: Tensor) -> Tensor:
        sink.close()
        with closing(LmdbRows(str(folder))) as rows:
            found = rows.rows("user", ids).values
        sink.open()
        return found

    found = _measure(stream, predictor, look_up, num_deltas)
    sink.close()
    size = sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())
    return found | {"bytes": [size / stream.table.num_embeddings]}


def _tensor(stream: _Stream, num_deltas: int) -> dict[str, list[float]]:
    held = torch.zeros(stream.table.num_embeddings, _DIM)
    return _measure(stream, Predictor({"user": held}, stream.url), lambda ids: held[ids], num_deltas)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare the rows, and write the results."""
    options = parser("bench_sinks", __doc__ or "").parse_args(argv)
    torch.set_num_threads(1)
    num_rows, num_changed, num_deltas = (2000, 100, 2) if options.tiny else (300_000, 6_000, options.repeats or 5)
    report = Report(
        name="bench_sinks",
        settings={"rows": f"{num_rows} x {_DIM}", "rows of a delta": num_changed, "deltas": num_deltas},
        columns=("target", "snapshot, us/row", "delta, us/row", "lookup, us/row", "bytes/row", "GET of others, ms"),
    )
    cases: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for name in ("tensor", "LMDB", "Redis"):
            with closing(_Stream(Path(work) / f"stream-{name}", num_rows, num_changed)) as stream:
                if name == "tensor":
                    cases[name] = _tensor(stream, num_deltas)
                elif name == "LMDB":
                    cases[name] = _lmdb(stream, Path(work) / "rows", num_deltas)
                else:
                    cases[name], cases["one MULTI"] = _redis(stream, num_deltas)
    for name, found in cases.items():
        report.add(name, {figure: Sample(tuple(values)) for figure, values in found.items()})
        report.lines.append((name, *_cells(found)))
    longest, whole = cases["Redis"]["get max"][0], cases["one MULTI"]["get max"][0]
    if not options.tiny and longest > whole / 2:
        raise AssertionError(f"a GET waited {longest:.3f} s for the sink, and {whole:.3f} s for one MULTI")
    report.notes.append("GET of others: p50, p99 and maximum of another client's reads while all rows are written.")
    report.notes.append("A row has 256 bytes of values and 8 bytes with its version. A lookup has 1,000 rows.")
    report.finish(options.out)
    return 0


def _cells(found: dict[str, list[float]]) -> list[str]:
    def cell(name: str, scale: float, digits: int) -> str:
        return Sample(tuple(found[name])).text(scale, digits) if name in found else "-"

    waits: list[Any] = [found[name][0] * 1e3 for name in ("get p50", "get p99", "get max") if name in found]
    return [
        cell("snapshot", 1e6, 2),
        cell("delta", 1e6, 2),
        cell("lookup", 1e6, 2),
        f"{found['bytes'][0]:.0f}" if "bytes" in found else "-",
        " / ".join(f"{wait:.2f}" for wait in waits) or "-",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
