"""The benchmarks run at a tiny size and check their results; their times are not tested."""

from __future__ import annotations

import pytest

from benchmarks import bench_monitor, bench_step_metrics


def test_cost_of_a_record(capsys) -> None:
    assert bench_monitor.main(["--records", "2500", "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    for name in ("list.append", "torch.monitor Stat.add", "monitor: cached counter cell", "monitor: counter, disabled"):
        assert f"| {name} |" in said


@pytest.mark.parametrize("num_classes", [5, 1000])
def test_metrics_of_a_training_step(capsys, num_classes) -> None:
    """Torchmetrics waits for the device in every step, the monitor never; both return the same values."""
    assert bench_step_metrics.main(["--steps", "3", "--classes", str(num_classes)]) == 0
    said = capsys.readouterr().out
    rows = {
        line.split("|")[1].strip(): line.split("|")[2].strip() for line in said.splitlines() if line.count("|") == 4
    }
    assert float(rows["torchmetrics"]) >= 5
    assert float(rows["monitor"]) == 0
    assert "the same at the end: loss" in said
