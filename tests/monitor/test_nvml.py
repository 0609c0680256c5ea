"""GPU metrics from a fake driver."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor


def test_gpu_metrics_from_a_fake_driver(monkeypatch) -> None:
    """Read GPU metrics from a fake driver, and from the real one if there is one."""
    pynvml = pytest.importorskip("pynvml")
    from delta_tracker.monitor.nvml import NvmlMetrics  # noqa: PLC0415

    energy = iter([1000, 1000, 4000, 4000])
    not_supported = pynvml.NVMLError_NotSupported

    def no_power(device):
        raise not_supported

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda device: type("Rates", (), {"gpu": 40}),
        "nvmlDeviceGetMemoryInfo": lambda device: type("Memory", (), {"used": 2**30}),
        "nvmlDeviceGetPowerUsage": no_power,
        "nvmlDeviceGetTotalEnergyConsumption": lambda device: next(energy),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monitor = Monitor()
    with pytest.raises(InvalidArgumentError, match="grams"):
        NvmlMetrics(monitor.registry, grams_per_kilowatt_hour=-1)
    monitor.registry.add_source(NvmlMetrics(monitor.registry, grams_per_kilowatt_hour=3_600_000))
    for _ in range(2):
        collection = monitor.collect()
    totals = {each.definition.name: each.figures for each in collection.totals}
    assert totals["gpu_utilisation_ratio"].last == 0.4
    assert totals["gpu_memory_used_bytes"].last == 2**30
    assert "gpu_power_watts" not in totals, "what a device does not offer is no data"
    assert totals["gpu_energy_joules"].total == 4.0
    assert totals["gpu_emissions_grams"].total == 4.0
