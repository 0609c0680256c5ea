"""Export of metrics, spans and log records to an OTLP endpoint over HTTP.

The sink uses the data model and exporters of the OpenTelemetry SDK. It does not use the instruments of the SDK, which
are many times slower.

Histograms are exported as exponential histograms with the buckets of :mod:`delta_tracker.monitor.buckets`. The
specification requires that the counts of the buckets add up to the total count. If this is not true for a stat, the
stat is exported as a histogram with a single bucket. If the records have weights, the count is the sum of the weights,
rounded to an integer of at least 1, and the sum is the mean times the count.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, assert_never

from delta_tracker.errors import import_optional
from delta_tracker.monitor.aggregate import Aggregate
from delta_tracker.monitor.buckets import LOWEST, SCALE
from delta_tracker.monitor.clock import NS
from delta_tracker.monitor.collection_report import CollectionReport, TotalReport
from delta_tracker.monitor.event import Event, Phase, Severity
from delta_tracker.monitor.sinks.base_sink import Sink
from delta_tracker.monitor.stat import Definition, Kind

_SCOPE = "delta_tracker"
_EXPORTERS = "opentelemetry.exporter.otlp.proto.http"
_INT64 = 2**63
# OpenTelemetry uses UCUM units: https://opentelemetry.io/docs/specs/semconv/general/metrics/#instrument-units
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "joules": "J", "watts": "W"}
# https://opentelemetry.io/docs/specs/otel/logs/data-model/#field-severitynumber
_SEVERITIES = {Severity.DEBUG: 5, Severity.INFO: 9, Severity.WARNING: 13, Severity.ERROR: 17, Severity.CRITICAL: 21}


class OpenTelemetrySink(Sink):
    """Sink that sends each collection to an OpenTelemetry collector.

    Totals are sent as metrics, completed spans as spans, and events with ``Phase.INSTANT`` as log records.

    Args:
        endpoint: URL of the OpenTelemetry collector. The paths ``/v1/metrics``, ``/v1/traces`` and ``/v1/logs`` are
            appended.
        service: value of the resource attribute ``service.name``. The monitor's attributes are also sent.
        headers: HTTP headers of each request.
        timeout_seconds: time limit for a request including its retries. It should be less than the monitor's deadline.

    Raises:
        MissingExtraError: if the OpenTelemetry SDK or the OTLP exporter is not installed.
    """

    def __init__(
        self,
        endpoint: str = "http://127.0.0.1:4318",
        *,
        service: str = "delta_tracker",
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 3,
    ) -> None:
        logs, metrics, traces = (
            import_optional(f"{_EXPORTERS}.{name}", "opentelemetry-exporter-otlp-proto-http", "opentelemetry")
            for name in ("_log_exporter", "metric_exporter", "trace_exporter")
        )
        base = endpoint.rstrip("/")
        options: dict[str, Any] = {"headers": dict(headers or {}), "timeout": timeout_seconds}
        self._service = service
        self._metrics = metrics.OTLPMetricExporter(f"{base}/v1/metrics", **options)
        self._spans = traces.OTLPSpanExporter(f"{base}/v1/traces", **options)
        self._logs = logs.OTLPLogExporter(f"{base}/v1/logs", **options)

    def deliver(self, collection: CollectionReport) -> None:
        """Send ``collection`` to the OpenTelemetry collector. Raise ConnectionError if any data is not accepted."""
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

        resource = Resource({"service.name": self._service, **collection.attributes})
        ended = [event for event in collection.events if event.phase is Phase.END]
        instants = [event for event in collection.events if event.phase is Phase.INSTANT]
        sent: list[Any] = []
        if collection.totals:
            sent.append(self._metrics.export(metrics_data(collection, resource)))
        if ended:
            sent.append(self._spans.export([_span(event, resource) for event in ended]))
        if instants:
            sent.append(self._logs.export([_log_record(event, resource) for event in instants]))
        if any(result.name != "SUCCESS" for result in sent):
            raise ConnectionError("the OpenTelemetry collector did not accept the collection")

    def close(self) -> None:
        """Close the connections to the OpenTelemetry collector."""
        for exporter in (self._metrics, self._spans, self._logs):
            exporter.shutdown()


def metrics_data(collection: CollectionReport, resource: Any) -> Any:  # noqa: ANN401  the SDK's classes
    """Convert the totals of a collection to the SDK's ``MetricsData``. ``resource`` is a ``Resource`` of the SDK."""
    from opentelemetry.sdk.metrics import export as sdk  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

    metrics = [
        _metric(sdk, definition, list(reports), collection)
        for definition, reports in groupby(collection.totals, key=lambda report: report.definition)
    ]
    scope = sdk.ScopeMetrics(InstrumentationScope(_SCOPE), metrics, "")
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])


def _metric(sdk: Any, definition: Definition, reports: Sequence[TotalReport], collection: CollectionReport) -> Any:  # noqa: ANN401
    totals = [report.figures for report in reports]
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    data: Any
    match definition.kind:
        case Kind.COUNTER:
            points = [_number(sdk, report, report.figures.total, collection) for report in reports]
            data = sdk.Sum(points, cumulative, is_monotonic=True)
        case Kind.GAUGE:
            data = sdk.Gauge([_number(sdk, report, report.figures.last, collection) for report in reports])
        case Kind.STAT | Kind.HISTOGRAM:
            if all(figures.buckets is not None and figures.buckets.count == figures.count for figures in totals):
                points = [_exponential(sdk, report, collection) for report in reports]
                data = sdk.ExponentialHistogram(points, cumulative)
            else:
                data = sdk.Histogram([_single_bucket(sdk, report, collection) for report in reports], cumulative)
        case _:
            assert_never(definition.kind)
    return sdk.Metric(definition.name, definition.help, _UNITS.get(definition.unit, definition.unit), data)


def _number(sdk: Any, report: TotalReport, value: float, collection: CollectionReport) -> Any:  # noqa: ANN401
    exported = value if -_INT64 <= value < _INT64 else float(value)
    return sdk.NumberDataPoint(dict(report.labels), collection.begin_ns, collection.time_ns, exported)


def _exponential(sdk: Any, report: TotalReport, collection: CollectionReport) -> Any:  # noqa: ANN401
    """Return the data point of a cell whose buckets count all its records.

    The bucket at :data:`LOWEST` also counts smaller magnitudes. Its counts are added to the zero count, which the
    specification defines as the number of values that round to zero.
    """
    counted = report.figures.buckets
    assert counted is not None, "checked by the caller"
    return sdk.ExponentialHistogramDataPoint(
        **_common(report, collection),
        scale=SCALE,
        zero_count=counted.zero + counted.positive[LOWEST] + counted.negative[LOWEST],
        positive=_dense(sdk, counted.positive),
        negative=_dense(sdk, counted.negative),
        flags=0,
    )


def _single_bucket(sdk: Any, report: TotalReport, collection: CollectionReport) -> Any:  # noqa: ANN401
    common = _common(report, collection)
    figures = report.figures
    if figures.weight != figures.count:
        common["count"] = max(1, round(figures.weight)) if figures.weight > 0 else 0
        if common["sum"] is not None:
            common["sum"] = figures.total / figures.weight * common["count"] if common["count"] else 0.0
    return sdk.HistogramDataPoint(**common, bucket_counts=[common["count"]], explicit_bounds=[])


def _common(report: TotalReport, collection: CollectionReport) -> dict[str, Any]:
    """Return the fields that both kinds of histograms contain. Optional fields that are None are not sent.

    The sum is None if a record is negative, because receivers interpret a decrease of the sum as a restart.
    """
    figures: Aggregate = report.figures
    return {
        "attributes": dict(report.labels),
        "start_time_unix_nano": collection.begin_ns,
        "time_unix_nano": collection.time_ns,
        "count": figures.count,
        "sum": None if figures.min < 0 else figures.total,
        "min": None if math.isnan(figures.min) else figures.min,
        "max": None if math.isnan(figures.max) else figures.max,
    }


def _dense(sdk: Any, counts: Mapping[int, int]) -> Any:  # noqa: ANN401
    places = counts.keys() - {LOWEST}
    if not places:
        return sdk.Buckets(0, [])
    first, last = min(places), max(places)
    return sdk.Buckets(first, [counts.get(index, 0) for index in range(first, last + 1)])


def _span(event: Event, resource: Any) -> Any:  # noqa: ANN401
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

    end_ns = _time_ns(event)
    return ReadableSpan(
        event.name,
        context=_context(event, event.span),
        parent=_context(event, event.parent) if event.parent else None,
        resource=resource,
        attributes=dict(event.data),
        status=Status(StatusCode.ERROR if event.severity >= Severity.ERROR else StatusCode.UNSET),
        start_time=max(0, end_ns - _duration_ns(event)),
        end_time=end_ns,
        instrumentation_scope=InstrumentationScope(_SCOPE),
    )


def _log_record(event: Event, resource: Any) -> Any:  # noqa: ANN401
    from opentelemetry._logs import LogRecord, SeverityNumber  # noqa: PLC0415
    from opentelemetry.sdk._logs import ReadableLogRecord  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context  # noqa: PLC0415

    place = _context(event, event.span if event.trace else 0)
    record = LogRecord(
        timestamp=_time_ns(event),
        observed_timestamp=_time_ns(event),
        context=set_span_in_context(NonRecordingSpan(place)),
        severity_text=event.severity.name,
        severity_number=SeverityNumber(_SEVERITIES[event.severity]),
        body=event.message,
        attributes={**event.data, "event.id": f"{event.id:016x}"},
        event_name=event.name,
    )
    return ReadableLogRecord(record, resource, InstrumentationScope(_SCOPE))


def _context(event: Event, span: int) -> Any:  # noqa: ANN401
    """Return the ``SpanContext`` of the span with id ``span`` in the event's trace."""
    from opentelemetry.trace import SpanContext, TraceFlags  # noqa: PLC0415

    return SpanContext(event.trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _time_ns(event: Event) -> int:
    """Return the time of an event, clipped to the range of the protocol."""
    return min(max(0, event.time_ns), 2**64 - 1)


def _duration_ns(event: Event) -> int:
    """Return the duration of the span that the event ended; 0 if the event does not contain a valid duration."""
    seconds = event.data.get("seconds", 0.0)
    if not isinstance(seconds, float) or not 0 < seconds < math.inf:
        return 0
    return round(seconds / NS)
