"""Export to Prometheus through an HTTP endpoint, or through a text file for node_exporter's textfile collector.

``prometheus_client`` provides the data model and the exposition format. This module converts totals to the metric
families of ``prometheus_client``.
"""

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_tracker.arguments import check_path
from delta_tracker.errors import InvalidArgumentError, import_optional
from delta_tracker.monitor.collection_report import CollectionReport, TotalReport
from delta_tracker.monitor.sinks.base_sink import Sink
from delta_tracker.monitor.stat import Definition, Kind

if TYPE_CHECKING:
    from prometheus_client.core import Metric
# Must divide buckets.PER_OCTAVE, so that the counts are exact. A histogram with the default bounds has 196 series.
_BOUNDS_PER_OCTAVE = 8
_MAX_PORT = 65_535
BUCKET_RATIO = 2 ** (1 / _BOUNDS_PER_OCTAVE)
"""Ratio of successive bucket bounds, 1.09. Quantiles computed by Prometheus have a relative error of at most 9 %."""


class _TotalsSink(Sink):
    """Sink that stores the newest collection and provides its totals to ``prometheus_client``."""

    def __init__(self) -> None:
        self._client = import_optional("prometheus_client", "prometheus_client", "prometheus")
        self._collection: CollectionReport | None = None
        self._registry: Any = self._client.CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def deliver(self, collection: CollectionReport) -> None:
        self._collection = collection

    def collect(self) -> Iterator["Metric"]:
        """Yield the metric family of each stat in the newest collection."""
        collection = self._collection
        if collection is None:
            return
        for definition, reports in groupby(collection.totals, key=lambda report: report.definition):
            yield family(definition, list(reports), tuple(collection.attributes.items()))


class PrometheusSink(_TotalsSink):
    """Sink that serves the totals of the newest collection over HTTP at ``/metrics``.

    A scrape does not trigger a collection, so collect at least as often as Prometheus scrapes. Only gauges that have a
    function (:meth:`~delta_tracker.monitor.stat.Gauge.set_function`) are also read at each scrape.

    Counters, summaries and histograms cover all records since the process started. The value of a gauge is its newest
    reading. Stats of kind ``STAT`` are exported as summaries. The count of a summary is the number of records, or the
    sum of the weights of weighted records. The unit is appended to each name, and ``_total`` to the names of counters.

    A histogram has eight buckets per power of two between the ``bounds`` of its definition. Between these bounds, the
    relative error of a quantile in PromQL is at most 9 % (:data:`BUCKET_RATIO`), and less than 5 % if the values near
    the quantile are evenly distributed. With the default bounds, each cell has 196 series.

    Args:
        port: port to listen on; 0 for any free port, see :attr:`port`.
        host: address to listen on. The default is not reachable from other machines.

    Raises:
        InvalidArgumentError: if the port is not an integer from 0 to 65535.
        MissingExtraError: if the package ``prometheus_client`` is not installed.
        OSError: if the port is in use.
    """

    def __init__(self, port: int = 9464, host: str = "127.0.0.1") -> None:
        if type(port) is not int or not 0 <= port <= _MAX_PORT:
            raise InvalidArgumentError("port", port, f"Pass an integer up to {_MAX_PORT}, or 0 for any free port")
        super().__init__()
        self._server: Any
        self._thread: threading.Thread
        try:
            self._server, self._thread = self._client.start_http_server(port, host, self._registry)
        except OSError as error:
            error.add_note(f"PrometheusSink cannot listen on {host}:{port}. Pass another port, or 0 for any free one.")
            raise

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        port: int = self._server.server_port
        return port

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def after_fork(self) -> None:
        """Close the inherited socket, so that the child does not keep the port in use. Called in a forked child."""
        self._server.socket.close()


class PrometheusFileSink(_TotalsSink):
    """Sink that writes the totals to a text file at each collection. The file is replaced atomically.

    Args:
        path: path of the file, which must end in ``.prom`` for node_exporter.

    Raises:
        InvalidArgumentError: if ``path`` has a scheme or begins with ``~``.
        MissingExtraError: if the package ``prometheus_client`` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = check_path("path", path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def deliver(self, collection: CollectionReport) -> None:
        """Replace the file with the totals of the collection."""
        super().deliver(collection)
        self._client.write_to_textfile(str(self._path), self._registry)


def family(definition: Definition, reports: Sequence[TotalReport], attributes: Sequence[tuple[str, str]]) -> "Metric":
    """Return the metric family of a stat. ``reports`` contains the totals of the stat's cells.

    ``attributes`` are added to each sample as labels. An attribute is omitted if the stat has a label of that name.
    """
    from prometheus_client import core  # noqa: PLC0415  optional

    extra = [(key, value) for key, value in attributes if key not in definition.labels]
    names = [*definition.labels, *(key for key, _ in extra)]
    made: Any = {
        Kind.COUNTER: core.CounterMetricFamily,
        Kind.GAUGE: core.GaugeMetricFamily,
        Kind.STAT: core.SummaryMetricFamily,
        Kind.HISTOGRAM: core.HistogramMetricFamily,
    }[definition.kind](definition.family, definition.help or definition.name, labels=names, unit=definition.unit)
    for report in reports:
        values = [*(value for _, value in report.labels), *(value for _, value in extra)]
        figures = report.figures
        if definition.kind is Kind.COUNTER:
            made.add_metric(values, figures.total)
        elif definition.kind is Kind.GAUGE:
            reading = figures.last if report.function is None else report.function()
            if reading is not None:
                made.add_metric(values, reading)
        elif definition.kind is Kind.STAT:
            made.add_metric(values, figures.weight, figures.total)
        else:
            made.add_metric(values, _buckets(definition, report), figures.total)
    result: Metric = made
    return result


def _buckets(definition: Definition, report: TotalReport) -> list[tuple[str, float]]:
    """Return the upper bound of each bucket, and the number of values up to this bound. The last bound is infinity."""
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415  optional

    low, high = definition.bounds
    exponents = range(low * _BOUNDS_PER_OCTAVE, high * _BOUNDS_PER_OCTAVE + 1)
    bounds = [2.0 ** (exponent / _BOUNDS_PER_OCTAVE) for exponent in exponents]
    buckets = report.figures.buckets
    counts = [] if buckets is None else buckets.cumulative(bounds)
    pairs = [(str(floatToGoString(bound)), float(count)) for bound, count in zip(bounds, counts, strict=False)]
    return [*pairs, ("+Inf", float(report.figures.count))]
