"""One scenario of the system-call sweep; all of them: ``python -m tests.system.syscall_sweep``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import installed

_ROOT = Path(__file__).parent.parent.parent


@pytest.mark.promise("atomic")
@pytest.mark.timeout(300)
def test_every_system_call_of_a_delta(tmp_path: Path) -> None:
    installed("strace")
    command = [sys.executable, "-W", "ignore", "-m", "tests.system.syscall_sweep", "delta", "--faults", "KILL", "EIO"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=290, cwd=_ROOT, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["points"]["delta"] > 40
    assert found["outcomes"]["killed"] * 2 == found["points"]["delta"]
    assert found["outcomes"]["StorageError"] > 10
