"""One scenario of the system-call sweep; all of them: ``python -m tests.system.syscall_sweep``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.servers import installed


@pytest.mark.promise("atomic")
@pytest.mark.timeout(300)
def test_every_system_call_of_a_delta(tmp_path: Path) -> None:
    installed("strace")
    run = forked.run("tests.system.syscall_sweep", "delta", "--faults", "KILL", "EIO", timeout_seconds=290)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["points"]["delta"] > 40
    assert found["outcomes"]["killed"] * 2 == found["points"]["delta"]
    assert found["outcomes"]["StorageError"] > 10
