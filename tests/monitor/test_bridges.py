"""The bridge from and to torch.monitor, and a machine with none of the optional packages."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.sinks.torch_monitor import TorchMonitorSink, TorchMonitorSource, translated
from tests.monitor.recording import Kept
from tests.monitor.sample import fill

_ROOT = Path(__file__).parent.parent.parent
_NOW = datetime.now(UTC)


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


def test_torch_monitor_events_come_in_and_do_not_go_round() -> None:
    monitor = Monitor()
    sink = Kept()
    source = TorchMonitorSource(monitor.events)
    monitor.registry.add_source(source)
    monitor.start([TorchMonitorSink(), sink], system=False)
    torch.monitor.log_event(torch.monitor.Event("torch.elastic.1", _NOW, {"a": 1}))
    stat = torch.monitor.Stat("s", [torch.monitor.Aggregation.SUM], timedelta(seconds=60))
    stat.add(3)
    del stat
    monitor.log("ours")
    for _ in range(3):
        assert monitor.flush()
    assert monitor.stop()
    names = [event.name for batch in sink.batches for event in batch.events]
    assert sorted(names) == ["ours", "torch.monitor.Stat", "torch.monitor.torch.elastic._1"]
    source.close()
    torch.monitor.log_event(torch.monitor.Event("late", _NOW, {}))
    assert source._queue.empty()


def test_the_bridge_from_torch_monitor_is_bounded() -> None:
    monitor = Monitor()
    source = TorchMonitorSource(monitor.events, capacity=3)
    for number in range(5):
        torch.monitor.log_event(torch.monitor.Event("e", _NOW, {"n": number}))
    source.read(is_last=True)
    assert (len(monitor.events.recent), source.num_dropped) == (3, 2)
    assert translated(torch.monitor.Event("a b-c.3", _NOW, {})).name == "torch.monitor.a_b_c._3"
    with pytest.raises(InvalidArgumentError, match="capacity"):
        TorchMonitorSource(monitor.events, capacity=0)


_BLOCKED = """
import sys
blocked = {"prometheus_client", "opentelemetry", "tensorboard", "mlflow", "pynvml", "torchmetrics"}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""


def test_without_any_optional_package(tmp_path) -> None:
    """Every sink that needs none works; every other one names its extra."""
    program = (
        _BLOCKED
        + f"""
from delta_tracker.errors import MissingExtraError
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.nvml import NvmlMetrics
from delta_tracker.monitor.sinks.chrome_trace import ChromeTraceSink
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.monitor.sinks.logs import LoggingSink
from delta_tracker.monitor.sinks.mlflow import MlflowSink
from delta_tracker.monitor.sinks.opentelemetry import OpenTelemetrySink
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink, PrometheusSink
from delta_tracker.monitor.sinks.tensorboard import TensorBoardSink
from delta_tracker.monitor.sinks.torch_monitor import TorchMonitorSink
from delta_tracker.monitor.device.torchmetric import TorchMetric

class Fake:
    _reductions = {{}}

refused = {{
    "prometheus": [lambda: PrometheusSink(0), lambda: PrometheusFileSink("x")],
    "opentelemetry": [OpenTelemetrySink],
    "tensorboard": [lambda: TensorBoardSink("x")],
    "mlflow": [lambda: MlflowSink("x")],
    "nvml": [lambda: NvmlMetrics(Monitor().registry)],
    "torchmetrics": [lambda: TorchMetric("x", Fake())],
}}
for extra, builds in refused.items():
    for build in builds:
        try:
            build()
        except MissingExtraError as error:
            assert error.extra == extra, (extra, error)
        else:
            raise AssertionError(extra)
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
assert set(refused) <= set(extras)
monitor = Monitor()
folder = {str(tmp_path)!r}
monitor.start([JsonlSink(folder + "/a"), ChromeTraceSink(folder + "/b"), LoggingSink(), TorchMonitorSink()])
monitor.counter("c").add(1)
monitor.log("e")
assert monitor.flush()
assert monitor.stop()
assert not [t for t in monitor.collect().totals if t.definition.name.endswith("outlet_errors")]
"""
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120, cwd=_ROOT)
    assert '"c"' in (tmp_path / "a").read_text()
