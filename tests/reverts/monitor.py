"""Fixes in the monitor."""

from __future__ import annotations

from tests.reverts.revert import Revert

_IN_TRAINING = "tests/monitor/test_device.py::test_a_metric_starts_no_collective_in_the_collector"
_METRIC = "delta_tracker/monitor/torchmetric.py"
_FORKS = "tests/monitor/test_forks.py::test_no_child_hangs_and_none_writes_for_its_parent"

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
        defect="a source that raises in a forked child leaves it with the locks of the parent",
        generator=_FORKS,
        edits={
            "delta_tracker/monitor/registry.py": [
                (
                    "            except Exception:  # noqa: BLE001  it is the user's code; the caller counts it\n",
                    "            except ImportError:\n",
                ),
            ]
        },
    ),
    Revert(
        defect="integers of a torchmetrics metric are rounded to floats",
        generator=_IN_TRAINING,
        edits={_METRIC: [("number.item() if isinstance(number, Tensor) else number", "float(number)")]},
    ),
]
