"""The library's own metrics: names, dashboard and alerts agree with what is exposed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import delta_tracker.monitor
from delta_tracker.monitor import Monitor, metrics
from delta_tracker.monitor.library import DEFINITIONS, LibraryMetrics
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink
from delta_tracker.monitor.stat import Kind
from tests.monitor.clocks import ManualClock
from tests.monitor.panels import ALERTS, PANELS, alerts, dashboard, exposed_name

_FOLDER = Path(delta_tracker.monitor.__file__).parent

# https://prometheus.io/docs/practices/naming/#base-units, and units of counts
_BASE_UNITS = {"seconds", "bytes", "ratio", ""}


def _filled() -> Monitor:
    """Return a monitor in which every metric of the library has data of two windows."""
    clock = ManualClock()
    monitor = Monitor(clock)
    stats = [monitor.registry.define(each) for each in DEFINITIONS.values()]
    cells = [stat.cell(**{label: f"some_{label}" for label in stat.definition.labels}) for stat in stats]
    for _ in range(2):
        clock.go(5)
        for cell in cells:
            cell.add(2)
        monitor.flush()
    return monitor


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return each sample name's labels, as Prometheus reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    path = tmp_path_factory.mktemp("exposition") / "library.prom"
    PrometheusFileSink(path).deliver(_filled().collect())
    text = path.read_text()
    found: dict[str, set[str]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("key", DEFINITIONS)
def test_names_follow_the_rules(key) -> None:
    definition = DEFINITIONS[key]
    assert re.fullmatch(r"delta_tracker_[a-z][a-z_]*[a-z]", definition.name)
    assert definition.help.endswith(".")
    assert definition.unit in _BASE_UNITS
    assert not definition.name.endswith(("_total", "_count", "_sum", "_bucket"))
    if definition.unit and definition.kind is not Kind.COUNTER:
        assert definition.name.endswith(f"_{definition.unit}")
    assert not definition.is_logical or definition.kind is Kind.COUNTER


def test_attributes_are_the_definitions() -> None:
    own = LibraryMetrics(Registry())
    for name, definition in DEFINITIONS.items():
        assert getattr(own, name).definition == definition
        assert getattr(own, name) is getattr(own, name)
    with pytest.raises(AttributeError, match="nothing"):
        own.nothing  # noqa: B018
    assert isinstance(metrics, LibraryMetrics)


def test_the_required_metrics_exist() -> None:
    groups = {
        "volume": "lookups touched_rows pending_rows pending_ratio published_rows published_bytes",
        "cost": "record read encode write commit apply",
        "freshness": "consumer_lag_batches consumer_lag_seconds predictor_lag_versions predictor_lag_seconds",
        "age": "oldest_pending_seconds state_bytes",
        "health": "resyncs fences refused_parts dropped_events hook_errors",
    }
    names = {name for text in groups.values() for name in text.split()}
    names = {f"{name}_seconds" if name in groups["cost"].split() else name for name in names}
    assert names <= set(DEFINITIONS)


@pytest.mark.parametrize("key", DEFINITIONS)
def test_exposed_names_are_those_of_the_endpoint(exposition, key) -> None:
    assert exposed_name(key) in exposition
    assert set(DEFINITIONS[key].labels) <= exposition[exposed_name(key)]


def test_counters_are_exposed_as_zero_before_they_count() -> None:
    monitor = Monitor()
    monitor.metrics.fences.cell(publisher="p")
    monitor.metrics.resyncs.cell(predictor="p", reason="gap")
    totals = {(each.definition.name, each.labels): each.figures.total for each in monitor.collect().totals}
    assert totals["delta_tracker_fences", (("publisher", "p"),)] == 0
    assert totals["delta_tracker_resyncs", (("predictor", "p"), ("reason", "gap"))] == 0


def _used(text: str) -> set[str]:
    return set(re.findall(r"\bdelta_tracker_\w+", text))


def test_the_shipped_dashboard_is_current_and_uses_exposed_names(exposition) -> None:
    text = (_FOLDER / "dashboard.json").read_text()
    assert text == dashboard(), "run: python -m tests.monitor.panels delta_tracker/monitor"
    board = json.loads(text)
    graphs = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    queries = [target["expr"] for panel in graphs for target in panel["targets"]]
    assert set().union(*map(_used, queries)) <= set(exposition)
    assert {panel.metric for panel in PANELS} >= set(DEFINITIONS) - {
        "muted_deliveries",
        "rejected_values",
        "lost_windows",
        "label_overflows",
        "publisher_info",
        "predictor_info",
    }, "add a Panel to tests/monitor/panels.py, and run: python -m tests.monitor.panels delta_tracker/monitor"
    for panel, graph in zip(PANELS, graphs, strict=True):
        assert set(panel.by) <= set(DEFINITIONS[panel.metric].labels)
        for target in graph["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == {"instance", *panel.by}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(cells) == len(board["panels"]), "no panel on top of another"
    numbers = [panel for panel in board["panels"] if panel["type"] == "stat"]
    assert {panel["gridPos"]["y"] for panel in numbers} == {0}
    assert set().union(*(_used(panel["targets"][0]["expr"]) for panel in numbers)) <= set(exposition)


def test_each_variable_of_the_dashboard_limits_the_next_one_and_every_query() -> None:
    board = json.loads(dashboard())
    source, stream, job, instance = board["templating"]["list"]
    assert [source["name"], stream["name"], job["name"], instance["name"]] == ["source", "stream", "job", "instance"]
    assert 'stream=~"$stream"' in job["query"]["query"]
    assert 'job=~"$job"' in instance["query"]["query"]
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert [query for query in queries if query.count('{job=~"$job", instance=~"$instance"}') != query.count("{")] == []


def test_the_shipped_alerts_are_current_and_use_exposed_names(exposition) -> None:
    text = (_FOLDER / "alerts.yml").read_text()
    assert text == alerts(), "run: python -m tests.monitor.panels delta_tracker/monitor"
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(text)["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert rule["expr"] == alert.expression
        assert rule["annotations"] == {"summary": alert.summary, "description": alert.action}
        assert rule["for"] == f"{alert.minutes}m"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert _used(alert.expression)
        assert _used(alert.expression) <= set(exposition)


def test_the_stalled_publisher_alert_covers_only_ranks_that_count_versions() -> None:
    """Every rank trains, but only one counts versions; the alert ignores ranks without a series of versions."""
    (alert,) = (each for each in ALERTS if each.name == "DeltaTrackerPublisherStalled")
    assert "unless" not in alert.expression
    versions, is_open, training = re.split(r" and on \([a-z, ]+\) ", alert.expression)
    assert exposed_name("published_versions") in versions
    assert versions.endswith("== 0")
    assert is_open == exposed_name("published_version")
    assert exposed_name("consumer_lag_batches") in training, "plain tables count no lookups"
    assert training.endswith("> 0")
