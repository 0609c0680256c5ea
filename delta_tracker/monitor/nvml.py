"""Metrics of NVIDIA devices, read from NVML: utilization, memory, power and energy.

To record these metrics, call
``monitor.registry.add_source(NvmlMetrics(monitor.registry, grams_per_kilowatt_hour=380))``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from delta_tracker.errors import InvalidArgumentError, import_optional
from delta_tracker.monitor.polled_stats import MetricSource, Passive, Readings
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.stat import Definition, Kind

_MILLIJOULES_PER_KILOWATT_HOUR = 3_600_000_000


class NvmlMetrics(MetricSource):
    """Source that records metrics of all NVIDIA devices that NVML reports, once per collection.

    Energy is counted since the driver was loaded, and includes the energy used for other processes.

    Args:
        grams_per_kilowatt_hour: grams of carbon dioxide per kilowatt-hour of energy; None to omit the emissions metric.

    Raises:
        InvalidArgumentError: if ``grams_per_kilowatt_hour`` is negative.
        MissingExtraError: if the package ``nvidia-ml-py`` is not installed.
        pynvml.NVMLError: if no driver is available.
    """

    name = "nvml"

    def __init__(self, registry: Registry, *, grams_per_kilowatt_hour: float | None = None) -> None:
        if grams_per_kilowatt_hour is not None and not grams_per_kilowatt_hour >= 0:
            raise InvalidArgumentError("grams_per_kilowatt_hour", grams_per_kilowatt_hour, "Pass 0 or more, or None")
        self._nvml = pynvml = import_optional("pynvml", "nvidia-ml-py", "nvml")
        pynvml.nvmlInit()
        self._devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        rates, memory = pynvml.nvmlDeviceGetUtilizationRates, pynvml.nvmlDeviceGetMemoryInfo
        power, energy = pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetTotalEnergyConsumption
        gauge, counter = Kind.GAUGE, Kind.COUNTER
        metrics: list[tuple[Kind, str, str, Callable[[Any], float]]] = [
            (
                gauge,
                "gpu_utilisation_ratio",
                "Fraction of time in which a kernel ran.",
                lambda gpu: rates(gpu).gpu / 100,
            ),
            (gauge, "gpu_memory_used_bytes", "Memory used by all processes.", lambda gpu: memory(gpu).used),
            (gauge, "gpu_power_watts", "Power draw.", lambda gpu: power(gpu) / 1000),
            (counter, "gpu_energy_joules", "Energy used since the driver was loaded.", lambda gpu: energy(gpu) / 1000),
        ]
        if grams_per_kilowatt_hour is not None:
            grams = grams_per_kilowatt_hour / _MILLIJOULES_PER_KILOWATT_HOUR
            text = "Carbon dioxide of the energy used."
            metrics.append((counter, "gpu_emissions_grams", text, lambda gpu: energy(gpu) * grams))
        self._passives = [
            Passive(
                registry.define(
                    Definition(name=name, kind=kind, help=text, unit=name.rpartition("_")[2], labels=("device",))
                ),
                partial(self._each, read),
            )
            for kind, name, text, read in metrics
        ]

    def read(self, *, is_last: bool) -> None:
        """Record the current readings of all devices."""
        for passive in self._passives:
            passive.read(is_last=is_last)

    def _each(self, read: Callable[[Any], float]) -> Readings:
        """Call ``read`` for each device and return the results by index. Omits devices that do not support the call."""
        found: dict[str | tuple[str, ...], float] = {}
        for index, device in enumerate(self._devices):
            try:
                found[str(index)] = read(device)
            except self._nvml.NVMLError_NotSupported:
                continue
        return found
