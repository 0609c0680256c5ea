"""Triton's row sets fulfil their contract in Triton's interpreter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parent.parent.parent
_RUNS_DIRECTLY = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(_RUNS_DIRECTLY, reason="the contract runs on this engine directly")
def test_triton_keeps_the_contract_in_its_interpreter() -> None:
    # Triton chooses the interpreter at its import, and another test may have imported it in this process.
    engine = "triton and not missing and not refused"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", engine]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command.append("tests/contract/test_row_sets.py")
    done = subprocess.run(command, check=False, env=env, cwd=_ROOT, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
