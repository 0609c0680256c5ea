"""Fixes in the monitor."""

from __future__ import annotations

from tests.reverts.revert import Revert

_IN_TRAINING = "tests/monitor/test_device.py::test_a_metric_starts_no_collective_in_the_collector"
_METRIC = "delta_tracker/monitor/torchmetric.py"

REVERTS = [
    Revert(
        defect="a torchmetrics metric synchronizes in the collector's thread",
        generator=_IN_TRAINING,
        edits={
            _METRIC: [
                (
                    "host.sync_on_compute = host.dist_sync_on_step = host._to_sync = False",
                    "host.sync_on_compute = False",
                ),
                ("    host.distributed_available_fn = _is_not_distributed\n", ""),
                ("metric.dist_sync_fn, metric.distributed_available_fn)", "metric.dist_sync_fn)"),
            ]
        },
    ),
    Revert(
        defect="integers of a torchmetrics metric are rounded to floats",
        generator=_IN_TRAINING,
        edits={_METRIC: [("number.item() if isinstance(number, Tensor) else number", "float(number)")]},
    ),
]
