"""Fixtures; with DELTA_TRACKER_NO_EXTRAS=1 the tests run as if no optional package were installed."""

from __future__ import annotations

import os
import sys

import pytest

from delta_tracker.monitor import Monitor
from tests.monitor.clocks import ManualClock

_EXTRAS = frozenset({"mlflow", "opentelemetry", "prometheus_client", "pynvml", "tensorboard", "yaml"})


class _Absent:
    """Import finder that hides the optional packages."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in _EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if os.environ.get("DELTA_TRACKER_NO_EXTRAS") == "1":
    sys.meta_path.insert(0, _Absent())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def monitor(clock: ManualClock) -> Monitor:
    return Monitor(clock)
