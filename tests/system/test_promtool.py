"""Prometheus' own tool reads the exported metrics. Skipped where it is not installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink

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
