"""Each sink end to end: the receiver reads what was recorded."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import logging
import math
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delta_tracker import monitor as monitor_package
from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.monitor import Event, Monitor
from delta_tracker.monitor.buckets import SCALE
from delta_tracker.monitor.device.metrics import DeviceMean
from delta_tracker.monitor.event import Phase
from delta_tracker.monitor.sinks.chrome_trace import ChromeTraceSink
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.monitor.sinks.logs import LoggingSink
from delta_tracker.monitor.sinks.mlflow import MlflowSink, _key
from delta_tracker.monitor.sinks.opentelemetry import OpenTelemetrySink, metrics_data
from delta_tracker.monitor.sinks.prometheus import BUCKET_RATIO, PrometheusFileSink, PrometheusSink, _TotalsSink
from delta_tracker.monitor.sinks.tensorboard import TensorBoardSink
from delta_tracker.monitor.sinks.torch_monitor import TorchMonitorSink
from tests.monitor import fake_mlflow
from tests.monitor.sample import fill
from tests.sweeps import num_examples


def test_jsonl(tmp_path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    fill(JsonlSink(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line for line in lines if line["kind"] == "window" and line["name"] == "training.loss"]
    assert [(line["step"], line["values"]["mean"], line["count"]) for line in losses] == [(10, 11.0, 2), (20, 21.0, 2)]
    assert losses[0]["attributes"] == {"rank": "3"}
    events = {line["name"]: line for line in lines if line["kind"] == "event"}
    assert events["training.start"]["data"] == {"lr": 0.1, "name": "x", "nan": "nan"}
    assert events["inside"]["span"] == events["publish"]["span"]
    assert len(events["inside"]["id"]) == 16
    sums = [line["values"]["sum"] for line in lines if line.get("labels") == {"table": 'us"er'}]
    assert sums == [10, 20]
    assert not [line for line in lines if line["name"] == "empty"]


def test_logging(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="delta_tracker.metrics"):
        fill(LoggingSink())
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", "training.loss: mean=11 std=1.41421 of 2 records") in lines
    assert ("INFO", "training.start go lr=0.1 name=x nan=nan") in lines
    assert ("ERROR", "training.end  version=5") in lines
    assert any(text.startswith("apply: count=4") and "seconds of 4 records" in text for _, text in lines)


def test_chrome_trace(tmp_path) -> None:
    path = tmp_path / "trace.json"
    fill(ChromeTraceSink(path))
    lines = [line for line in json.loads(path.read_text()) if line]
    begin, end = ([line for line in lines if line["ph"] == phase] for phase in "be")
    assert [line["name"] for line in begin] == ["publish", "publish"]
    assert begin[0]["id"] == end[0]["id"]
    assert end[0]["ts"] - begin[0]["ts"] == pytest.approx(1e6)
    curves = [line["args"]["mean"] for line in lines if line["ph"] == "C" and line["name"] == "training.loss"]
    assert curves == [11.0, 21.0]


def test_a_chrome_trace_has_the_timestamps_of_the_profiler(tmp_path) -> None:
    """Ranges of both are nested in turn, with pauses between their ends."""
    monitor, pause_seconds = Monitor(), 0.01
    monitor.start([ChromeTraceSink(tmp_path / "ours.json")], system=False)
    ranges = [
        lambda: monitor.span("outer"),
        lambda: torch.profiler.record_function("middle"),
        lambda: monitor.span("inner"),
    ]
    # torch.profiler.profile() is this class with schedules, which import much more.
    with torch.autograd.profiler.profile(use_kineto=True) as profiler, contextlib.ExitStack() as stack:
        for each in ranges:
            stack.callback(time.sleep, pause_seconds)
            stack.enter_context(each())
            time.sleep(pause_seconds)
    assert monitor.stop()
    profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    events = json.loads((tmp_path / "ours.json").read_text())
    theirs = json.loads((tmp_path / "theirs.json").read_text())
    events += theirs["traceEvents"]
    ours = {(each["name"], each["ph"]): each["ts"] for each in events if each and each["ph"] in "be"}
    (middle,) = [each for each in events if each and each["name"] == "middle"]
    places = [ours["outer", "b"], middle["ts"], ours["inner", "b"]]
    places += [ours["inner", "e"], middle["ts"] + middle["dur"], ours["outer", "e"]]
    assert places == sorted(places)
    assert min(b - a for a, b in pairwise(places)) > pause_seconds * 1e6 / 2
    assert f"baseTimeNanoseconds={theirs['baseTimeNanoseconds']}" in (tmp_path / "ours.json").read_text()


def test_a_chrome_trace_of_a_killed_program_can_be_read(tmp_path) -> None:
    monitor = Monitor()
    path = tmp_path / "trace.json"
    sink = ChromeTraceSink(path)
    monitor.log("a")
    sink.deliver(monitor.collect())
    monitor.start([sink], system=False)
    monitor.log("b")
    monitor.flush()
    text = path.read_text()
    lines = json.loads(text.rstrip().rstrip(",") + "]")
    assert [line["name"] for line in lines if line["ph"] == "i"] == ["a", "b"]
    monitor.stop()


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


class _Scraping(PrometheusSink):
    """Sink that is scraped before it closes."""

    def close(self) -> None:
        self.text = _scrape(self.port)
        super().close()


def _samples(text: str) -> dict[str, float]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_is_scraped() -> None:
    pytest.importorskip("prometheus_client")
    sink = _Scraping(port=0)
    fill(sink)
    samples = _samples(sink.text)
    rank = ("rank", "3")
    assert samples[f"published_rows_total{sorted([('table', 'us' + chr(34) + 'er'), rank])}"] == 30
    assert samples[f"queue_depth{[rank]}"] == 10
    assert samples[f"training_loss_count{[rank]}"] == 4
    assert samples[f"training_loss_sum{[rank]}"] == 64
    counts = {
        bound: samples[f"apply_seconds_bucket{[('le', bound), rank]}"] for bound in ("0.25", "0.5", "4.0", "+Inf")
    }
    assert counts == {"0.25": 4, "0.5": 6, "4.0": 8, "+Inf": 8}
    assert samples[f"apply_seconds_sum{[rank]}"] == pytest.approx(9.1)
    assert "# HELP published_rows_total Rows." in sink.text
    assert "# TYPE apply_seconds histogram" in sink.text
    assert "empty" not in sink.text
    with pytest.raises(OSError, match="refused"):
        _scrape(sink.port)


def test_prometheus_before_the_first_collection_and_in_the_open_format() -> None:
    pytest.importorskip("prometheus_client")
    monitor = Monitor()
    sink = PrometheusSink(port=0)
    assert _scrape(sink.port) == ""
    monitor.histogram("h", unit="bytes", bounds=(6, 10)).add(100)
    monitor.counter("c").add(2)
    monitor.start([sink], system=True)
    monitor.flush()
    request = urllib.request.Request(
        f"http://127.0.0.1:{sink.port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["h_bytes"].unit == "bytes"
    assert {"process_cpu_seconds", "process_memory_bytes", "c"} <= set(families)
    monitor.stop()


def _families(text: str):
    """Return the metric families of an OpenMetrics text by name, read by a parser that enforces the specification."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def _open_metrics(collection) -> str:
    client = pytest.importorskip("prometheus_client.openmetrics.exposition")
    totals = _TotalsSink()
    totals.deliver(collection)
    return client.generate_latest(totals._registry).decode()


def _histogram_quantile(fraction: float, cumulative: list[tuple[float, float]]) -> float:
    """Return what Prometheus' function of this name returns for pairs of an upper bound and a cumulative count."""
    rank = fraction * cumulative[-1][1]
    place = next(index for index, (_, count) in enumerate(cumulative) if count >= rank)
    if place == len(cumulative) - 1:
        return cumulative[-2][0]
    lower, below = cumulative[place - 1] if place else (0.0, 0.0)
    upper, count = cumulative[place]
    return lower + (upper - lower) * (rank - below) / (count - below)


def _exposed_buckets(values) -> list[tuple[float, float]]:
    monitor = Monitor()
    histogram = monitor.histogram("h")
    for value in values:
        histogram.add(value)
    samples = _families(_open_metrics(monitor.collect()))["h"].samples
    return [(float(each.labels["le"]), each.value) for each in samples if each.name == "h_bucket"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1.001 * 2.0**-14, 2.0**10), min_size=1, max_size=50),
    st.floats(0.01, 1),
)
@example(values=[8 + number / 1000 for number in range(1000, 1420)], fraction=0.95)
def test_a_quantile_of_prometheus_is_off_by_the_stated_fraction_at_most(values, fraction) -> None:
    exact = sorted(values)[math.ceil(fraction * len(values)) - 1]
    found = _histogram_quantile(fraction, _exposed_buckets(values))
    assert abs(found / exact - 1) <= BUCKET_RATIO - 1 + 1e-9


_parts = st.sampled_from(["x", "total", "created", "bucket", "sum", "count", "seconds", "_total"])


@settings(max_examples=num_examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["counter", "gauge", "stat", "histogram"]),
            st.builds("x{}{}".format, st.sampled_from("._"), _parts) | _parts,
            st.sampled_from(["", "seconds", "total"]),
        ),
        min_size=5,  # so that names collide in most examples
        max_size=20,
    )
)
def test_every_accepted_stat_reaches_prometheus(definitions) -> None:
    monitor = Monitor()
    accepted = []
    for kind, name, unit in definitions:
        with contextlib.suppress(InvalidArgumentError):
            stat = getattr(monitor, kind)(name, unit=unit, help=str(len(accepted)))
            accepted.append((stat, len(accepted) + 1))
            stat.add(len(accepted))
    families = _families(_open_metrics(monitor.collect()))
    assert len(families) == len(accepted)
    for stat, value in accepted:
        family = families[stat.definition.family]
        suffix = {"counter": "_total", "gauge": ""}.get(stat.definition.kind, "_sum")
        assert [s.value for s in family.samples if s.name == family.name + suffix] == [value]
        assert family.unit == stat.definition.unit


def test_prometheus_by_file(tmp_path) -> None:
    pytest.importorskip("prometheus_client")
    path = tmp_path / "rank3.prom"
    fill(PrometheusFileSink(path))
    assert _samples(path.read_text())["queue_depth[('rank', '3')]"] == 10
    assert [each.name for each in tmp_path.iterdir()] == ["rank3.prom"]


class _OtlpCollector:
    """OTLP receiver over HTTP, which decodes requests with the protocol's definitions."""

    def __init__(self) -> None:
        got = self.got = defaultdict(list)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                got[self.path].append((dict(self.headers), body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def otlp():
    collector = _OtlpCollector()
    yield collector
    collector.stop()


def _value(attribute):
    kind = attribute.value.WhichOneof("value")
    return getattr(attribute.value, kind)


def test_opentelemetry_reaches_a_collector(otlp) -> None:
    pytest.importorskip("opentelemetry.sdk")
    logs_proto, metrics_proto, traces_proto = (
        importlib.import_module(f"opentelemetry.proto.collector.{kind}.v1.{kind}_service_pb2")
        for kind in ("logs", "metrics", "trace")
    )
    fill(OpenTelemetrySink(f"http://127.0.0.1:{otlp.server.server_port}/", headers={"x-key": "k"}))
    headers, body = otlp.got["/v1/metrics"][-1]
    assert headers["x-key"] == "k"
    (resource,) = metrics_proto.ExportMetricsServiceRequest.FromString(body).resource_metrics
    assert {each.key: _value(each) for each in resource.resource.attributes}["rank"] == "3"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    rows = metrics["published_rows"].sum
    assert rows.is_monotonic
    assert {_value(point.attributes[0]): point.as_int for point in rows.data_points} == {'us"er': 30, "item": 2}
    assert metrics["queue.depth"].gauge.data_points[0].as_double == 10.0
    assert (metrics["apply"].unit, metrics["apply"].description) == ("s", "Apply.")
    (point,) = metrics["apply"].exponential_histogram.data_points
    assert (point.count, point.scale, point.zero_count, point.max) == (8, SCALE, 2, 4.0)
    assert point.sum == pytest.approx(9.1)
    places = {point.positive.offset + i: count for i, count in enumerate(point.positive.bucket_counts) if count}
    assert sum(places.values()) == 6
    # 0.25 is an upper bound, and bounds belong to the bucket below: (2 ** (-65 / 32), 2 ** (-64 / 32)].
    assert places[-2 * 32 - 1] == 2
    assert places[2 * 32 - 1] == 2
    spans = [
        span
        for _, body in otlp.got["/v1/traces"]
        for span in traces_proto.ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    ]
    assert [span.name for span in spans] == ["publish", "publish"]
    assert spans[0].end_time_unix_nano - spans[0].start_time_unix_nano == 10**9
    assert len({span.trace_id for span in spans}) == 1
    records = {
        record.event_name: record
        for _, body in otlp.got["/v1/logs"]
        for record in logs_proto.ExportLogsServiceRequest.FromString(body).resource_logs[0].scope_logs[0].log_records
    }
    assert set(records) == {"training.start", "training.end", "inside"}
    assert records["inside"].body.string_value == "in a span"
    assert records["inside"].span_id == spans[1].span_id
    assert records["training.end"].severity_text == "ERROR"


def test_otlp_trace_ids_are_valid(otlp) -> None:
    pytest.importorskip("opentelemetry.sdk")
    logs_proto, traces_proto = (
        importlib.import_module(f"opentelemetry.proto.collector.{kind}.v1.{kind}_service_pb2")
        for kind in ("logs", "trace")
    )
    monitor = Monitor()
    monitor.start([OpenTelemetrySink(f"http://127.0.0.1:{otlp.server.server_port}")], system=False)
    with monitor.span("zero", trace=0), monitor.span("child"):
        monitor.log("inside")
    monitor.log("outside")
    with monitor.span("none"):
        pass
    assert monitor.stop()
    ((_, body),) = otlp.got["/v1/traces"]
    (scope,) = traces_proto.ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans
    spans = {span.name: span for span in scope.spans}
    assert all(len(s.trace_id) == 16 and any(s.trace_id) and len(s.span_id) == 8 for s in spans.values())
    assert spans["zero"].trace_id == spans["child"].trace_id != spans["none"].trace_id
    assert (spans["child"].parent_span_id, spans["zero"].parent_span_id) == (spans["zero"].span_id, b"")
    ((_, body),) = otlp.got["/v1/logs"]
    (scope,) = logs_proto.ExportLogsServiceRequest.FromString(body).resource_logs[0].scope_logs
    records = {record.event_name: record for record in scope.log_records}
    assert records["inside"].trace_id == spans["zero"].trace_id
    assert records["inside"].span_id == spans["child"].span_id
    assert (records["outside"].trace_id, records["outside"].span_id) == (b"", b"")


def test_otlp_spans_that_are_made_by_hand_do_not_block_the_sink(otlp) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monitor = Monitor()
    monitor.start([OpenTelemetrySink(f"http://127.0.0.1:{otlp.server.server_port}")], system=False)
    for data in ({}, {"seconds": "x"}, {"seconds": float("nan")}, {"seconds": -1}, {"seconds": 1e30}):
        monitor.emit(Event("e", data=data, phase=Phase.END, span=1, trace=1))
    monitor.emit(Event("e", time_ns=-1))
    assert monitor.stop()
    assert not [cell.labels for cell in monitor.metrics.outlet_errors.cells]
    assert set(otlp.got) == {"/v1/traces", "/v1/logs"}


def _otlp_metrics(monitor: Monitor):
    """Return the metrics of a collection by name, decoded from the bytes that the exporter sends."""
    sdk = pytest.importorskip("opentelemetry.sdk.resources")
    encoder = importlib.import_module("opentelemetry.exporter.otlp.proto.common.metrics_encoder")
    proto = importlib.import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    body = encoder.encode_metrics(metrics_data(monitor.collect(), sdk.Resource({}))).SerializeToString()
    (resource,) = proto.ExportMetricsServiceRequest.FromString(body).resource_metrics
    return {metric.name: metric for metric in resource.scope_metrics[0].metrics}


def _place(magnitude: float) -> int:
    """Return the index of a magnitude in an exponential histogram, by the formula of the specification."""
    return math.ceil(math.log2(magnitude) * 2**SCALE) - 1


# Numbers in the middle of a bucket, on a bound, beyond all buckets, and 0.
_samples_of_all_sizes = st.builds(
    lambda sign, magnitude: sign * magnitude,
    st.sampled_from([-1, 1]),
    st.integers(-1200, 1800).map(lambda place: 2.0 ** ((place + 0.5) / 32))
    | st.integers(-30, 30).map(lambda exponent: 2.0**exponent)
    | st.sampled_from([0.0, 1e-20, 5e-324]),
)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["stat", "histogram"]),
    st.sampled_from([("mean",), ("p50",), ("count", "histogram")]),
    st.lists(_samples_of_all_sizes, min_size=1, max_size=30),
    st.lists(_samples_of_all_sizes, max_size=5),
)
@example("histogram", ("p50",), [1e-20, -1e-20, 0.0, 1.0, -1.0], [])
@example("histogram", ("p50",), [1.0], [1.0])
def test_otlp_histograms_follow_the_specification(kind, aggregations, values, earlier) -> None:
    """See ``opentelemetry/proto/metrics/v1/metrics.proto``."""
    monitor = Monitor()
    stat = getattr(monitor, kind)("x", aggregations=("mean",))
    for value in earlier:
        stat.add(value)
    monitor.configure("x", aggregations=aggregations)
    for value in values:
        stat.add(value)
    values = [*earlier, *values]
    metric = _otlp_metrics(monitor)["x"]
    (point,) = getattr(metric, metric.WhichOneof("data")).data_points
    assert (point.count, point.min, point.max) == (len(values), min(values), max(values))
    # A sum of negative numbers is not monotonic, and a receiver would take each decrease for a restart.
    assert point.HasField("sum") == (min(values) >= 0)
    assert not point.HasField("sum") or point.sum == pytest.approx(sum(values))
    if metric.WhichOneof("data") == "histogram":
        assert aggregations == ("mean",) or earlier
        assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([len(values)], [])
        return
    assert point.count == point.zero_count + sum(point.positive.bucket_counts) + sum(point.negative.bucket_counts)
    for sign, buckets in ((1, point.positive), (-1, point.negative)):
        found = {buckets.offset + number: count for number, count in enumerate(buckets.bucket_counts) if count}
        assert found == Counter(_place(sign * value) for value in values if sign * value > 2.0**-39)
    assert point.zero_count == sum(abs(value) <= 2.0**-39 for value in values)
    assert point.scale == SCALE


def test_otlp_leaves_out_what_is_not_known(monitor) -> None:
    loss = DeviceMean("loss", monitor=monitor)
    for value in (1.0, 3.0):
        loss.update(torch.tensor(value))
    monitor.counter("large").add(2**70)
    metrics = _otlp_metrics(monitor)
    (point,) = metrics["loss"].histogram.data_points
    assert (point.count, point.sum) == (2, 4.0)
    assert not (point.HasField("min"))
    assert not (point.HasField("max"))
    assert metrics["large"].sum.data_points[0].as_double == 2.0**70


@pytest.mark.parametrize(("weight", "otlp_count"), [(32, 128), (0.25, 1), (0.3, 1), (1, 4)])
def test_the_ratio_of_an_exported_sum_and_count_is_the_weighted_mean(monitor, weight: float, otlp_count: int) -> None:
    pytest.importorskip("prometheus_client")
    loss = DeviceMean("loss", monitor=monitor)
    for _ in range(4):
        loss.update(torch.tensor(0.5), weight=weight)
    totals = _TotalsSink()
    totals.deliver(monitor.collect())
    (metric,) = [found for found in totals.collect() if found.name == "loss"]
    samples = {sample.name: sample.value for sample in metric.samples}
    assert samples == pytest.approx({"loss_sum": 2 * weight, "loss_count": 4 * weight})
    (point,) = _otlp_metrics(monitor)["loss"].histogram.data_points
    assert (point.count, list(point.bucket_counts)) == (otlp_count, [otlp_count])
    assert point.sum / point.count == pytest.approx(0.5)


def test_an_unreachable_collector_is_an_error_of_the_sink() -> None:
    pytest.importorskip("opentelemetry.sdk")
    monitor = Monitor()
    monitor.counter("c").add(1)
    collection = monitor.collect()
    with pytest.raises(ConnectionError):
        OpenTelemetrySink("http://127.0.0.1:9", timeout_seconds=0.2).deliver(collection)


_SURROGATE = "a\udc80"  # a byte of a file name that is not UTF-8
_ESCAPED = "a\\udc80"


def _with_surrogates(sink) -> Monitor:
    """Deliver data with surrogates to a sink. If the sink raises, the monitor counts an error."""
    monitor = Monitor()
    monitor.counter("c", labels=["path"]).cell(path=_SURROGATE).add(3)
    monitor.start([sink], attributes={"host": _SURROGATE}, system=False)
    with monitor.span("s", path=_SURROGATE):
        monitor.emit(Event("e", _SURROGATE, {_SURROGATE: _SURROGATE}))
    assert monitor.stop()
    return monitor


@pytest.mark.parametrize("kind", ["prometheus", "file", "otlp", "tensorboard", "jsonl", "chrome", "torch"])
def test_text_that_is_not_utf8_reaches_every_sink(kind, tmp_path, otlp) -> None:
    makers = {
        "prometheus": lambda: _Scraping(port=0),
        "file": lambda: PrometheusFileSink(tmp_path / "m.prom"),
        "otlp": lambda: OpenTelemetrySink(f"http://127.0.0.1:{otlp.server.server_port}"),
        "tensorboard": lambda: TensorBoardSink(tmp_path),
        "jsonl": lambda: JsonlSink(tmp_path / "m.jsonl"),
        "chrome": lambda: ChromeTraceSink(tmp_path / "m.json"),
        "torch": TorchMonitorSink,
    }
    try:
        sink = makers[kind]()
    except MissingExtraError as error:
        pytest.skip(str(error))
    monitor = _with_surrogates(sink)
    assert not [cell.labels for cell in monitor.metrics.outlet_errors.cells]
    if kind == "prometheus":
        labels = sorted({"path": _ESCAPED, "host": _ESCAPED}.items())
        assert _samples(sink.text)[f"c_total{labels}"] == 3
    elif kind != "torch":
        written = b"".join(path.read_bytes() for path in tmp_path.iterdir()) or str(otlp.got).encode()
        assert b"udc80" in written


def test_a_help_text_that_is_not_utf8_is_rejected(monitor) -> None:
    with pytest.raises(InvalidArgumentError, match="help"):
        monitor.counter("c", _SURROGATE)


def _accumulated(folder):
    name = "tensorboard.backend.event_processing.event_accumulator"
    found = importlib.import_module(name).EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_has_the_step_on_the_x_axis(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    fill(TensorBoardSink(tmp_path))
    found = _accumulated(tmp_path)
    assert [(each.step, each.value) for each in found.Scalars("training/loss/mean")] == [(10, 11.0), (20, 21.0)]
    assert [each.step for each in found.Scalars("published_rows/table=item/sum")] == [10, 20]
    assert found.Scalars("training/loss/mean")[0].wall_time == pytest.approx(1_700_000_001)
    histogram = found.Histograms("apply/histogram")[0].histogram_value
    assert (histogram.num, sum(histogram.bucket)) == (4, 4)
    assert "training.start/text_summary" in found.Tags()["tensors"]


def test_tensorboard_draws_each_value_where_it_is(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    values = [-4.0] * 4 + [-0.3, -0.25] + [0.0] * 3 + [0.25, 0.3] + [4.0] * 5
    monitor = Monitor()
    histogram = monitor.histogram("h")
    for value in values:
        histogram.add(value)
    monitor.start([TensorBoardSink(tmp_path)], system=False)
    monitor.stop()
    (event,) = _accumulated(tmp_path).Histograms("h/histogram")
    found = event.histogram_value
    assert (found.num, found.sum) == (16, sum(values))
    # Like TensorBoard (data_compat.py): each bucket begins at the limit of the previous one.
    lefts, rights = [found.min, *found.bucket_limit[:-1]], [*found.bucket_limit[:-1], found.max]
    for left, right, count in zip(lefts, rights, found.bucket, strict=True):
        if count:
            assert right - left <= max(abs(left), abs(right)) * (2 ** (1 / 2**SCALE) - 1) + 1e-9
            assert count == sum(left <= value <= right for value in values)


def test_tensorboard_counts_windows_without_steps(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    monitor = Monitor()
    gauge = monitor.gauge("g")
    monitor.start([TensorBoardSink(tmp_path)], system=False)
    for value in (1, 2, 3):
        gauge.set(value)
        monitor.flush()
    monitor.stop()
    found = _accumulated(tmp_path)
    assert [(each.step, each.value) for each in found.Scalars("g/value")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.fixture(params=["fake", "mlflow"])
def mlflow(request, monkeypatch):
    """Return the module, or a fake one that refuses what it refuses."""
    if request.param == "fake":
        for name, module in fake_mlflow.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return pytest.importorskip("mlflow", reason="100 MB: not among the pinned packages")


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_parameters_at_the_start_and_the_version_at_the_end(tmp_path, mlflow) -> None:
    uri = f"file:{tmp_path}"
    sink = MlflowSink("news", run_name="r", parameters={"seed": 1}, tracking_uri=uri)
    fill(sink)
    client = mlflow.MlflowClient(uri)
    run = client.get_run(sink.run_id)
    assert run.data.params == {"seed": "1", "lr": "0.1", "name": "x", "nan": "nan"}
    assert run.data.tags["version"] == "5"
    assert run.info.status == "FAILED"
    history = client.get_metric_history(sink.run_id, "training.loss.mean")
    assert [(each.step, each.value) for each in history] == [(10, 11.0), (20, 21.0)]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_loses_only_what_it_refuses(tmp_path, mlflow, caplog) -> None:
    uri = f"file:{tmp_path}"
    sink = MlflowSink("news", parameters={"seed": 1}, tracking_uri=uri)
    monitor = Monitor()
    monitor.start([sink], system=False)
    gauge = monitor.gauge("g", labels=["path"])
    for number in range(3):
        monitor.log("training.start", seed=number, **{"a//b": 1, f"new_{number}": number})
        for path in ("y" * 300, "y" * 301, "short"):
            gauge.set(number, path=path)
        assert monitor.flush()
    monitor.log("training.end", version=5, long="x" * 100_000)
    assert monitor.stop()
    assert not [cell.labels for cell in monitor.metrics.outlet_errors.cells]
    client = mlflow.MlflowClient(uri)
    run = client.get_run(sink.run_id)
    assert run.data.params == {"seed": "1", "new_0": "0", "new_1": "1", "new_2": "2"}
    assert run.data.tags["version"] == "5"
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert sorted(("seed" in line, "a//b" in line) for line in lines) == [(False, True), (True, False)]
    keys = [_key(f"g.path_{path}.value") for path in ("y" * 300, "y" * 301, "short")]
    assert len(set(keys)) == 3
    for key in keys:
        assert [each.value for each in client.get_metric_history(sink.run_id, key)] == [0, 1, 2]


def test_mlflow_tries_again_what_was_not_refused(mlflow, tmp_path, caplog) -> None:
    client = mlflow.MlflowClient
    if not hasattr(client, "is_reachable"):
        pytest.skip("needs a server that does not answer")
    sink = MlflowSink("news", tracking_uri=f"file:{tmp_path}")
    monitor = Monitor()
    gauge = monitor.gauge("g", labels=["n"], max_cells=1100)
    for number in range(1100):
        gauge.set(number, n=number)
    collection = monitor.collect()
    client.is_reachable = False
    with pytest.raises(mlflow.exceptions.MlflowException, match="no answer"):
        sink.deliver(collection)
    assert client.num_requests == 2
    client.is_reachable = True
    client.runs.info.lifecycle_stage = "deleted"
    with pytest.raises(mlflow.exceptions.MlflowException, match="refused"):
        sink.deliver(collection)
    assert client.num_requests == 4
    client.runs.info.lifecycle_stage = "active"
    sink.deliver(collection)
    assert client.num_requests == 6
    assert len(client.history) == 1100
    assert not caplog.records
    client.refused_key = "g.n_7.value"
    for number, num_requests in ((1, range(10, 50)), (2, range(2, 3))):
        client.num_requests = 0
        for cell in gauge.cells:
            cell.add(number)
        sink.deliver(monitor.collect())
        assert client.num_requests in num_requests
    assert ["g.n_7.value" in record.getMessage() for record in caplog.records] == [True]
    assert [each.value for each in client.history["g.n_7.value"]] == [7]
    assert [each.value for each in client.history["g.n_8.value"]] == [8, 1, 2]


def test_torch_monitor_gets_events_and_windows() -> None:
    got = []
    handle = torch.monitor.register_event_handler(got.append)
    try:
        fill(TorchMonitorSink())
    finally:
        torch.monitor.unregister_event_handler(handle)
    stats = [event.data for event in got if event.name == "torch.monitor.Stat" and "training.loss.mean" in event.data]
    assert [data["training.loss.mean"] for data in stats] == [11.0, 21.0]
    assert [event.data["message"] for event in got if event.name == "training.start"] == ["go"]
    assert got[0].timestamp.timestamp() == pytest.approx(1_700_000_001, abs=10)


_NAMES = "ChromeTrace Jsonl Logging Mlflow OpenTelemetry PrometheusFile Prometheus TensorBoard TorchMonitor"


@pytest.mark.parametrize("name", _NAMES.split())
def test_sinks_can_be_imported_from_the_monitor(name: str) -> None:
    kind = getattr(monitor_package, f"{name}Sink")
    assert issubclass(kind, monitor_package.Sink)
    assert kind.__name__ == f"{name}Sink"
