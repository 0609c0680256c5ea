"""Prometheus' own tool reads the exported metrics. Skipped where it is not installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.sinks.prometheus import BUCKET_RATIO, PrometheusFileSink

_PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(_PROMTOOL is None, reason="promtool, of Debian's package prometheus, is not installed")


def test_promtool_accepts_the_built_in_metrics(tmp_path) -> None:
    path = tmp_path / "rank3.prom"
    monitor = Monitor()
    monitor.metrics.define(each.name for each in DEFINITIONS.values())
    for number, stat in enumerate(monitor.find()):
        stat.cell(**dict.fromkeys(stat.definition.labels, "label")).add(number)
    monitor.start([PrometheusFileSink(path)], attributes={"rank": "3"})
    monitor.stop()
    text = path.read_bytes()
    assert {name.encode() in text for name in DEFINITIONS} == {True}
    answer = subprocess.run([_PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (answer.returncode, answer.stderr.decode()) == (0, "")


def test_a_quantile_of_prometheus_is_right(tmp_path) -> None:
    """Run ``histogram_quantile`` of Prometheus itself. The values are in the middle of a power of two."""
    path = tmp_path / "rank3.prom"
    monitor = Monitor()
    histogram = monitor.histogram("wait", unit="seconds")
    values = [8.2 + 1.26 * number / 1000 for number in range(1000)]
    for value in values:
        histogram.add(value)
    monitor.start([PrometheusFileSink(path)], system=False)
    monitor.stop()
    lines = [line.rpartition(" ") for line in path.read_text().splitlines() if line.startswith("wait_seconds_bucket")]
    series = [{"series": name, "values": f"0 {value}"} for name, _, value in lines]
    for fraction in (0.5, 0.95, 0.99):
        exact = sorted(values)[int(fraction * len(values)) - 1]
        found = _evaluated(tmp_path, f"histogram_quantile({fraction}, increase(wait_seconds_bucket[2m]))", series)
        assert exact / BUCKET_RATIO < found < exact * BUCKET_RATIO


def _evaluated(folder, query: str, series) -> float:
    """Return the value of a query after a minute. The tool prints it, because the expected value is wrong."""
    case = {"expr": query, "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": -1}]}
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]
    path = folder / "query.yml"
    path.write_text(json.dumps({"tests": tests}))  # JSON is YAML
    answer = subprocess.run([_PROMTOOL, "test", "rules", path], capture_output=True, text=True, check=False)
    return float(re.search(r"got:.*?\{[^}]*\} ([-+.\deE]+)", answer.stdout + answer.stderr, re.DOTALL)[1])
