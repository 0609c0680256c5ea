"""Metrics of NVIDIA devices, read from NVML: utilization, memory, power and energy.

To record these metrics, call
``monitor.registry.add_source(NvmlMetrics(monitor.registry, grams_per_kilowatt_hour=380))``.
"""

from typing import Any

from delta_tracker.errors import InvalidArgumentError, import_optional
from delta_tracker.monitor.polled_stats import MetricSource, Passive, Readings
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.stat import Definition, Kind

_MILLI = 1e-3
_JOULES_PER_KILOWATT_HOUR = 3_600_000


class NvmlMetrics(MetricSource):
    """Source that records metrics of all NVIDIA devices known to the driver, once per collection.

    The energy is the total that each device has consumed, in all processes, since the driver was loaded.

    Args:
        grams_per_kilowatt_hour: carbon dioxide emissions per kilowatt-hour; None to omit the metric of emissions.

    Raises:
        InvalidArgumentError: for a negative ``grams_per_kilowatt_hour``.
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
        self._intensity = grams_per_kilowatt_hour
        gauges = (
            ("gpu_utilisation_ratio", "Fraction of time in which a kernel ran.", "ratio", self._utilisation),
            ("gpu_memory_used_bytes", "Memory used by all processes.", "bytes", self._memory),
            ("gpu_power_watts", "Power draw.", "watts", self._power),
        )
        counters = [("gpu_energy_joules", "Energy used since the driver was loaded.", "joules", self._energy)]
        if self._intensity is not None:
            counters.append(("gpu_emissions_grams", "Carbon dioxide of the energy used.", "grams", self._emissions))
        self._passives = [
            Passive(registry.define(Definition(name=name, kind=kind, help=text, unit=unit, labels=("device",))), read)
            for kind, group in ((Kind.GAUGE, gauges), (Kind.COUNTER, counters))
            for name, text, unit, read in group
        ]

    def read(self, *, is_last: bool) -> None:
        """Record the current readings of all devices."""
        for passive in self._passives:
            passive.read(is_last=is_last)

    def _utilisation(self) -> Readings:
        return self._each(lambda device: self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)

    def _memory(self) -> Readings:
        return self._each(lambda device: self._nvml.nvmlDeviceGetMemoryInfo(device).used)

    def _power(self) -> Readings:
        return self._each(lambda device: self._nvml.nvmlDeviceGetPowerUsage(device) * _MILLI)

    def _energy(self) -> Readings:
        return self._each(lambda device: self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) * _MILLI)

    def _emissions(self) -> Readings:
        assert self._intensity is not None, "emissions are registered only with an intensity"
        grams_per_joule = self._intensity / _JOULES_PER_KILOWATT_HOUR
        return self._each(
            lambda device: self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) * _MILLI * grams_per_joule
        )

    def _each(self, read: Any) -> Readings:  # noqa: ANN401
        """Call ``read`` for each device and return the results by index. Omits devices that do not support the call."""
        found: dict[str | tuple[str, ...], float] = {}
        for index, device in enumerate(self._devices):
            try:
                found[str(index)] = read(device)
            except self._nvml.NVMLError_NotSupported:
                continue
        return found
