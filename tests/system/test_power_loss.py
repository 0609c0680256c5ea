"""Some states after a power loss; all of them: ``python -m tests.system.power_loss``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import installed
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.system.power_loss import check_all, faults, traced

_EVERY = 1 if SWEEPS_ARE_WHOLE else 3


@pytest.fixture(autouse=True)
def strace() -> None:
    installed("strace")


@pytest.mark.sweep("long")
@pytest.mark.promise("atomic")
def test_a_power_loss_at_any_call_loses_no_acknowledged_version(tmp_path: Path) -> None:
    traces = traced(tmp_path)
    assert len(faults(tmp_path, traces[0])) > 100
    assert check_all(tmp_path, traces, num_random=int(SWEEPS_ARE_WHOLE), every=_EVERY) > 15


@pytest.mark.sweep("long")
@pytest.mark.promise("atomic")
def test_a_power_loss_after_a_failed_sync_loses_no_acknowledged_version(tmp_path: Path) -> None:
    """The sync of the log fails when the first delta is committed."""
    traces = traced(tmp_path, "fsync:error=EIO:when=21")
    failed = [line for line in traces[0].splitlines() if "INJECTED" in line]
    assert len(failed) == 1
    assert "/stream/log>" in failed[0]
    assert check_all(tmp_path, traces, stop=None if SWEEPS_ARE_WHOLE else 6) > 5
