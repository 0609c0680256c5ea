"""System metrics need no code of the user."""

from __future__ import annotations

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.system import _METRICS


def test_system_metrics_need_no_user_code() -> None:
    monitor = Monitor()
    monitor.start(system=True)
    assert monitor.flush()
    totals = {(each.definition.name, *each.labels): each.figures for each in monitor.collect().totals}
    monitor.stop()
    assert {name for name, *_ in totals} >= {name for name, *_ in _METRICS} - {"cuda_memory_bytes"}
    assert totals["process_cpu_seconds", ("mode", "user")].total > 0
    resident, virtual = (totals["process_memory_bytes", ("kind", kind)].last for kind in ("resident", "virtual"))
    assert 2**20 < resident <= virtual
    assert totals["process_threads",].last >= 3
    assert totals["process_open_files",].last >= 3
