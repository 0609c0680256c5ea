"""Every Python block of the README is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent
_PYTHON = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_python_blocks_run() -> None:
    """One after another in one program, as a reader would paste them."""
    program = "\n".join(f"print('block {number} begins')\n{block}" for number, block in enumerate(_PYTHON))
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, cwd=_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"block {len(_PYTHON) - 1} begins" in done.stdout
