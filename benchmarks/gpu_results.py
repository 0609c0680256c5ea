"""Results of the tests and benchmarks for GPUs: one JSON line each, appended at once, so that a stopped run keeps them.

The environment variable ``DELTA_TRACKER_RESULTS`` names the file; without it, nothing is written. pytest appends the
outcome of each test with ``-p benchmarks.gpu_results``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

RESULTS = "DELTA_TRACKER_RESULTS"
"""Name of the environment variable with the path of the file."""

_NUM_SHOWN = 2000  # characters of the text of a failure


def append(kind: str, **fields: object) -> None:
    """Append a line with the time, ``kind`` and ``fields``."""
    if not (name := os.environ.get(RESULTS)):
        return
    line = json.dumps({"time": round(time.time(), 1), "kind": kind, **fields}, default=str)
    with Path(name).open("a") as file:
        file.write(f"{line}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome of a test, and the end of its text if it failed or was skipped."""
    if report.when != "call" and report.passed:
        return
    fields = {} if report.passed else {"text": report.longreprtext[-_NUM_SHOWN:]}
    append("test", name=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **fields)
