"""Time of a record in the monitor, compared with other libraries: ``python -m benchmarks.bench_monitor``.

It compares the monitor's stats with a list, ``torch.monitor``, ``prometheus_client`` and OpenTelemetry, in one process
and in turns. A record of the monitor includes its share of the aggregation, which the recording thread does once in
1024 records. Every total is checked. Times are the best of several rounds and include the empty loop.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from torch import monitor as torch_monitor

from delta_tracker.monitor import Monitor

_NS = 1e9
PER_CALL = "a cached counter cell under 1.5 times torch.monitor's Stat.add, a disabled one under 50 ns above the loop"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to record a number.

    Args:
        name: name in the table.
        record: records a number.
        check: takes a number of records of 1.0 and returns whether they all arrived.
    """

    name: str
    record: Callable[[float], object]
    check: Callable[[int], bool]


def ours() -> list[Case]:
    """Return cases of the monitor's stats."""
    monitor = Monitor()
    labeled = monitor.counter("labeled", labels=["table"])
    plain = monitor.counter("plain")
    stat = monitor.stat("stat")
    spread = monitor.stat("spread", aggregations=("mean", "std"))
    histogram = monitor.histogram("histogram")
    disabled = monitor.counter("disabled", enabled=False)

    def total(name: str) -> float:
        return sum(each.figures.total for each in monitor.collect().totals if each.definition.name == name)

    def timed(value: float) -> None:
        del value
        with timer:
            pass

    timer = monitor.stat("timed").time()
    return [
        Case("monitor: cached counter cell", labeled.cell(table="user").add, lambda n: total("labeled") == n),
        Case("monitor: counter without labels", plain.add, lambda n: total("plain") == n),
        Case("monitor: counter, disabled", disabled.cell().add, lambda n: n > 0 and total("disabled") == 0),
        Case("monitor: stat (mean, min, max)", stat.add, lambda n: total("stat") == n),
        Case("monitor: stat (std)", spread.add, lambda n: total("spread") == n),
        Case("monitor: histogram (p50, p95, p99)", histogram.add, lambda n: total("histogram") == n),
        Case("monitor: timer, with a body of pass", timed, lambda n: n > 0 and total("timed") > 0),
    ]


def others() -> list[Case]:
    """Return cases of other libraries, if they are installed."""
    items: list[float] = []
    ring: deque[float] = deque(maxlen=1024)
    kinds = [torch_monitor.Aggregation.SUM, torch_monitor.Aggregation.COUNT]
    stat = torch_monitor.Stat("bench", kinds, dt.timedelta(hours=1))  # type: ignore[arg-type]  # its stub is wrong
    cases = [
        Case("list.append", items.append, lambda n: len(items) == n),
        Case("deque.append, bounded", ring.append, lambda n: len(ring) == min(n, 1024)),
        Case("torch.monitor Stat.add", stat.add, lambda n: stat.count == n),
    ]
    if _is_importable("prometheus_client"):
        import prometheus_client  # noqa: PLC0415  optional

        registry = prometheus_client.CollectorRegistry()
        counter = prometheus_client.Counter("c", "c", ["table"], registry=registry).labels("user")
        histogram = prometheus_client.Histogram("h", "h", registry=registry)
        cases += [
            Case(
                "prometheus_client: counter, cached child",
                counter.inc,
                lambda n: registry.get_sample_value("c_total", {"table": "user"}) == n,
            ),
            Case(
                "prometheus_client: histogram",
                histogram.observe,
                lambda n: registry.get_sample_value("h_count") == n,
            ),
        ]
    if _is_importable("opentelemetry.sdk"):
        cases += _opentelemetry()
    return cases


def _opentelemetry() -> list[Case]:
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415  optional
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: PLC0415

    reader = InMemoryMetricReader()
    meter = MeterProvider(metric_readers=[reader]).get_meter("bench")
    counter, histogram = meter.create_counter("counter"), meter.create_histogram("histogram")
    labels = {"table": "user"}

    def total(name: str) -> float:
        for resource in reader.get_metrics_data().resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                if metric.name == name:
                    (point,) = metric.data.data_points
                    return float(point.value if name == "counter" else point.count)
        return 0.0

    return [
        Case("OpenTelemetry: counter", lambda value: counter.add(value, labels), lambda n: total("counter") == n),
        Case("OpenTelemetry: histogram", histogram.record, lambda n: total("histogram") == n),
    ]


def nanoseconds(record: Callable[[float], object], num_records: int) -> float:
    """Return the time of one call in nanoseconds, including the loop."""
    numbers = range(num_records)
    begin = time.perf_counter()
    for _ in numbers:
        record(1.0)
    return (time.perf_counter() - begin) / num_records * _NS


def measure(cases: Sequence[Case], num_records: int, num_rounds: int) -> dict[str, float]:
    """Return the best nanoseconds per record by name. The cases take turns, so that other load affects them equally."""
    best = {case.name: float("inf") for case in cases}
    for _ in range(num_rounds):
        for case in cases:
            best[case.name] = min(best[case.name], nanoseconds(case.record, num_records))
    for case in cases:
        assert case.check(num_records * num_rounds), f"{case.name}: not every record arrived"
    return best


def _loop(num_records: int, num_rounds: int) -> float:
    """Return the nanoseconds of one iteration of the empty loop."""
    best = float("inf")
    for _ in range(num_rounds):
        begin = time.perf_counter()
        for _ in range(num_records):
            pass
        best = min(best, (time.perf_counter() - begin) / num_records * _NS)
    return best


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def _versions() -> str:
    names = ("torch", "prometheus_client", "opentelemetry-sdk")
    found = [f"{name} {metadata.version(name)}" for name in names if _is_installed(name)]
    return f"Python {platform.python_version()}, {', '.join(found)}; {platform.machine()}, {dt.date.today()}"  # noqa: DTZ011


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. With ``--check``, return 1 if the promised bounds do not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000, help="records of each case per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help=f"fail unless {PER_CALL}")
    chosen = parser.parse_args(argv)
    found = measure([*others(), *ours()], chosen.records, chosen.rounds)
    loop = _loop(chosen.records, chosen.rounds)
    base = found["torch.monitor Stat.add"]
    print(f"{_versions()}\n\n| one record | ns | x torch.monitor |\n|---|---|---|")  # noqa: T201
    for name, best in {"(the empty loop)": loop, **found}.items():
        print(f"| {name} | {best:.0f} | {best / base:.2f} |")  # noqa: T201
    cell, disabled = found["monitor: cached counter cell"], found["monitor: counter, disabled"]
    holds = cell < 1.5 * base and disabled - loop < 50  # noqa: PLR2004  the promise
    return 1 if chosen.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
