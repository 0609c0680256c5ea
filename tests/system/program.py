"""The command line as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class _Program(subprocess.Popen[str]):
    def __exit__(self, *error: object) -> None:
        self.kill()  # a failed test would wait for it for ever
        super().__exit__(*error)


def program(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "delta_tracker.cli", *map(str, arguments)]
    return _Program(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb"},
    )
