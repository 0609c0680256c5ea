"""Take each fix out of a copy of the package, and see its generator fail: ``python -m tests.reverts [WORD ...]``.

With words, only the defects whose descriptions or generators contain one of them. Each copy runs in a process of its
own, two at a time. Exits with 1 if a generator passed without the fix, or failed for another reason than an assertion.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.reverts.every import all_reverts, apply
from tests.reverts.revert import Revert

_ROOT = Path(__file__).parent.parent.parent
_TESTS_FAILED = 1  # pytest's exit code; a usage or collection error has another one
_NUM_SHOWN = 30


def survives(revert: Revert) -> str | None:
    """Return why the defect was not found, None if its generator found it."""
    with tempfile.TemporaryDirectory(prefix="revert-") as folder:
        root = Path(folder)
        for name in ("delta_tracker", "tests", "examples", "benchmarks"):
            shutil.copytree(_ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(_ROOT / name, root / name)
        apply(revert, root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", revert.generator]
        with subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as run:
            try:
                output, _ = run.communicate(timeout=revert.timeout_seconds)
            except subprocess.TimeoutExpired:
                return None if revert.hangs else f"no answer within {revert.timeout_seconds} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)  # also the ranks and servers that the tests have started
    if run.returncode == _TESTS_FAILED:
        return None
    return "\n".join([f"pytest exited with {run.returncode}", *output.splitlines()[-_NUM_SHOWN:]])


def main(words: Sequence[str]) -> int:
    """Run all reverts that match; return 0 if every defect was found."""
    chosen = [each for each in all_reverts() if not words or any(w in each.defect + each.generator for w in words)]

    def timed(revert: Revert) -> tuple[str | None, float]:
        begin = time.monotonic()
        return survives(revert), time.monotonic() - begin

    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for revert, (why, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            print(
                f"{'NOT FOUND' if why else 'found'} in {seconds:.0f} s: {revert.defect} ({revert.generator})",
                flush=True,
            )
            if why:
                failed += 1
                print(why, flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed", flush=True)
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
