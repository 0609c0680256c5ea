"""Built-in metrics of the process: CPU, memory, threads, open files, and memory of CUDA devices.

On Linux, most metrics are read from ``/proc``. No third-party package is needed. Unavailable metrics are omitted.
"""

import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from delta_tracker.monitor.polled_stats import MetricSource, Passive, Readings
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.stat import Definition, Kind

_PROC = Path("/proc/self")


def cpu_seconds() -> Readings:
    """Return the CPU time of all threads in seconds, under the keys ``user`` and ``system``."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"user": usage.ru_utime, "system": usage.ru_stime}


def memory_bytes() -> Readings:
    """Return the memory of the process in bytes, under the keys ``resident`` and ``virtual``; None if unavailable."""
    text = _read("statm")
    if text is None:
        return None
    virtual, resident = text.split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return {"resident": int(resident) * page, "virtual": int(virtual) * page}


def num_threads() -> Readings:
    """Return the number of threads in the process; None if unavailable."""
    text = _read("stat")
    return None if text is None else int(text.rpartition(")")[2].split()[17])


def num_open_files() -> Readings:
    """Return the number of open file descriptors; None if unavailable."""
    try:
        return len(os.listdir(_PROC / "fd"))  # noqa: PTH208  faster than iterdir() for many files
    except OSError:
        return None


def start_time_seconds() -> Readings:
    """Return the Unix time at which the process started, in seconds; None if unavailable."""
    text, system = _read("stat"), _read("../stat")
    booted = [float(line.split()[1]) for line in (system or "").splitlines() if line.startswith("btime ")]
    if text is None or not booted:
        return None
    return booted[0] + int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def cuda_memory_bytes() -> Readings:
    """Return the memory of PyTorch's CUDA allocator in bytes, by device index and kind.

    The kinds are ``allocated``, ``reserved`` and ``peak``. Returns None until the program has initialized CUDA.
    """
    torch = sys.modules.get("torch")  # this module does not import it
    if torch is None or not torch.cuda.is_initialized():
        return None
    found: dict[str | tuple[str, ...], float] = {}
    for device in range(torch.cuda.device_count()):
        statistics: Mapping[str, int] = torch.cuda.memory_stats(device)
        for kind, key in (
            ("allocated", "allocated_bytes.all.current"),
            ("reserved", "reserved_bytes.all.current"),
            ("peak", "allocated_bytes.all.peak"),
        ):
            found[str(device), kind] = statistics.get(key, 0)
    return found


_METRICS: tuple[tuple[str, Kind, str, str, tuple[str, ...], Callable[[], Readings]], ...] = (
    ("process_cpu_seconds", Kind.COUNTER, "CPU time of all threads.", "seconds", ("mode",), cpu_seconds),
    ("process_memory_bytes", Kind.GAUGE, "Memory of the process.", "bytes", ("kind",), memory_bytes),
    ("process_threads", Kind.GAUGE, "Threads of the process.", "", (), num_threads),
    ("process_start_time_seconds", Kind.GAUGE, "Unix time of the start.", "seconds", (), start_time_seconds),
    ("process_open_files", Kind.GAUGE, "Open file descriptors.", "", (), num_open_files),
    ("cuda_memory_bytes", Kind.GAUGE, "Memory of torch's allocator.", "bytes", ("device", "kind"), cuda_memory_bytes),
)


class SystemMetrics(MetricSource):
    """Source that records CPU, memory, thread and file metrics of the process, and CUDA memory, at each collection."""

    name = "system"

    def __init__(self, registry: Registry) -> None:
        self._passives = [
            Passive(registry.define(Definition(name=name, kind=kind, help=text, unit=unit, labels=labels)), callback)
            for name, kind, text, unit, labels, callback in _METRICS
        ]

    def read(self, *, is_last: bool) -> None:
        """Record the current readings."""
        for passive in self._passives:
            passive.read(is_last=is_last)


def _read(name: str) -> str | None:
    try:
        return (_PROC / name).read_text()
    except OSError:
        return None
