"""Prometheus' own tool reads the exported metrics, and runs the alert rules. Skipped where it is not installed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import delta_tracker.monitor
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink
from tests.monitor import alert_cases
from tests.monitor.panels import dashboard
from tests.servers import installed

_RULES = Path(delta_tracker.monitor.__file__).with_name("alerts.yml")


@pytest.fixture(autouse=True, scope="module")
def promtool() -> str:
    """Return the path of promtool, of Debian's package prometheus."""
    return installed("promtool")


def test_promtool_accepts_the_built_in_metrics(tmp_path) -> None:
    path = tmp_path / "rank3.prom"
    monitor = Monitor()
    for definition in DEFINITIONS.values():
        monitor.registry.define(definition)
    for number, stat in enumerate(monitor.find()):
        stat.cell(**dict.fromkeys(stat.definition.labels, "label")).add(number)
    monitor.start([PrometheusFileSink(path)], attributes={"rank": "3"})
    monitor.stop()
    text = path.read_bytes()
    assert {name.encode() in text for name in DEFINITIONS} == {True}
    answer = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (answer.returncode, answer.stderr.decode()) == (0, "")


_SPREAD = [8.2 + 1.26 * number / 1000 for number in range(1000)]
_EQUAL = [1.001] * 1000  # right above the bound of a bucket: the worst case


@pytest.mark.parametrize(("values", "bound"), [(_SPREAD, 0.05), (_EQUAL, 0.091)], ids=["spread", "equal"])
def test_a_quantile_of_prometheus_is_right(tmp_path: Path, values: list[float], bound: float) -> None:
    """Run ``histogram_quantile`` of Prometheus itself."""
    path = tmp_path / "rank3.prom"
    monitor = Monitor()
    histogram = monitor.histogram("wait", unit="seconds")
    for value in values:
        histogram.add(value)
    monitor.start([PrometheusFileSink(path)], system=False)
    monitor.stop()
    lines = [line.rpartition(" ") for line in path.read_text().splitlines() if line.startswith("wait_seconds_bucket")]
    series = [{"series": name, "values": f"0 {value}"} for name, _, value in lines]
    for fraction in (0.5, 0.95, 0.99):
        exact = sorted(values)[int(fraction * len(values)) - 1]
        found = _evaluated(tmp_path, f"histogram_quantile({fraction}, increase(wait_seconds_bucket[2m]))", series)
        assert abs(found / exact - 1) < bound


def test_prometheus_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, which ``promtool`` checks. The interval of a rate is a variable of Grafana."""
    board = json.loads(dashboard())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    chosen = [query.replace("$__rate_interval", "1m") for query in queries]
    rules = [{"record": f"query:number{number}", "expr": query} for number, query in enumerate(chosen)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_no_alert_fires_in_an_hour_of_healthy_load(tmp_path) -> None:
    """Meanwhile a predictor is restarted, and one poll fails."""
    assert _failures(tmp_path, [alert_cases.healthy_hour(1)]) == ""


def test_each_fault_fires_its_alerts_and_no_others(tmp_path) -> None:
    assert _failures(tmp_path, [alert_cases.unit_test_of(case) for case in alert_cases.CASES]) == ""


def test_the_cases_of_alerts_have_every_series_that_the_rules_read() -> None:
    series = {name for name, _ in alert_cases.healthy(5, 1)}
    read = set(re.findall(r"[a-z_]+_(?:seconds|total|ratio|versions?|batches|info)|\bup\b", _RULES.read_text()))
    assert {name for name in read if name.startswith(("delta_tracker_", "up", "process_"))} <= series


def _failures(folder, tests) -> str:
    """Return what ``promtool test rules`` reports on the shipped rules; empty if all tests pass."""
    path = folder / "alerts.json"
    path.write_text(alert_cases.unit_tests(_RULES, tests))
    answer = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    return "" if answer.returncode == 0 else answer.stdout + answer.stderr


def _evaluated(folder, query: str, series) -> float:
    """Return the value of a query after a minute. The tool prints it, because the expected value is wrong."""
    case = {"expr": query, "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": -1}]}
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]
    path = folder / "query.yml"
    path.write_text(json.dumps({"tests": tests}))  # JSON is YAML
    answer = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    return float(re.search(r"got:.*?\{[^}]*\} ([-+.\deE]+)", answer.stdout + answer.stderr, re.DOTALL)[1])
