"""Bring each fault back in a copy of the package, and see its generator fail: ``python -m tests.reverts [WORD ...]``.

First, all reverts are checked: each function and each generator that they name exists. With words, run only the
reverts whose defects or generators contain one of them. With ``--daily``, run a part of them: CI runs another part on
each of a few days, to stay within its limit. Each copy runs in a fork of this process, two at a time: the forks share
the imports of pytest and torch, which take longer than most generators. Reverts without a mutation are only listed.
Exits with 1 if a revert does not fit the code, or if a generator passed, or failed for another reason than an
assertion.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch  # noqa: F401  imported once for all forks; pytest warns if its plugins are imported before it starts

from tests.reverts.every import all_reverts, apply, outdated
from tests.reverts.revert import Revert

_ROOT = Path(__file__).parent.parent.parent
_TESTS_FAILED = 1  # pytest's exit code; a usage or collection error has another one
_NUM_SHOWN = 30
_AT_ONCE = 2
_POLL_SECONDS = 0.05
_DAY_SECONDS = 86_400
_NUM_DAYS = 5  # days on which CI runs all reverts
_TIMEOUT_SECONDS = 300.0


class Trial:
    """Run of a generator on a copy of the package with a fault."""

    def __init__(self, generator: str, revert: Revert) -> None:
        self.name = f"{revert.defect} ({generator})"
        self._generator = generator
        self._begin = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="revert-", ignore_cleanup_errors=True)
        root = Path(self._folder.name)
        for name in ("delta_tracker", "tests", "examples", "benchmarks"):
            shutil.copytree(_ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(_ROOT / name, root / name)
        apply(revert, root)
        self._output = root / "output"
        self._pid = os.fork()
        if self._pid == 0:
            self._run(root)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def poll(self) -> bool:
        """Return True if the run has ended or has taken too long, and set :attr:`why`."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid and self.seconds < _TIMEOUT_SECONDS:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # also the ranks and servers that the tests have started
        code = os.waitstatus_to_exitcode(status)
        self.why: str | None = None
        """Reason why the defect was not found; None if its generator found it."""
        lines = self._output.read_text(errors="replace").splitlines()
        self.error = next((line for line in lines if line.startswith("E ")), "")
        """Error by which the generator found it. An error in a mutation shows here too."""
        if not pid:
            os.waitpid(self._pid, 0)
            self.why = f"no answer within {_TIMEOUT_SECONDS:.0f} s"
        elif code != _TESTS_FAILED:
            self.why = "\n".join([f"pytest exited with {code}", *lines[-_NUM_SHOWN:]])
        self._folder.cleanup()
        return True

    def _run(self, root: Path) -> None:
        """Run the generator in the fork, which then ends."""
        code = -1
        try:
            os.setsid()
            os.chdir(root)
            null, output = os.open(os.devnull, os.O_RDONLY), os.open(self._output, os.O_WRONLY | os.O_CREAT)
            for descriptor, target in ((null, 0), (output, 1), (output, 2)):
                os.dup2(descriptor, target)
            # Import the copy, not the modules of this program.
            for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "delta_tracker")]:
                del sys.modules[name]
            sys.path[0] = os.environ["PYTHONPATH"] = str(root)
            arguments = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=reverts"]
            code = pytest.main([*arguments, self._generator])
        except BaseException:  # noqa: BLE001  it must not reach the loop of the parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def main(words: Sequence[str]) -> int:
    """Run the chosen reverts; return 0 if every defect was found."""
    reverts = all_reverts()
    if problems := outdated(reverts, _ROOT):
        print(*problems, f"{len(problems)} reverts do not fit the code", sep="\n", flush=True)
        return 1
    chosen = [each for each in reverts if each[1].mutations]
    print(f"{len(reverts)} reverts, {len(reverts) - len(chosen)} of them only listed", flush=True)
    if list(words) == ["--daily"]:
        chosen = chosen[int(time.time() // _DAY_SECONDS) % _NUM_DAYS :: _NUM_DAYS]
    elif words:
        chosen = [each for each in chosen if any(word in each[1].defect + each[0] for word in words)]
    if not chosen:
        print(f"no revert with a mutation has one of these in its defect or generator: {', '.join(words)}", flush=True)
        return 1
    waiting, running = deque(chosen), list[Trial]()
    missed = list[Trial]()
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            running.append(Trial(*waiting.popleft()))
        time.sleep(_POLL_SECONDS)
        for trial in [each for each in running if each.poll()]:
            running.remove(trial)
            if trial.why:
                missed.append(trial)
            verdict = "NOT FOUND" if trial.why else "found"
            print(f"{verdict} in {trial.seconds:.0f} s: {trial.name}", flush=True)
            print(trial.why or trial.error, flush=True)
    for trial in missed:  # once more at the end, where a log that was cut off has them
        print(f"NOT FOUND: {trial.name}", flush=True)
    print(f"{len(chosen) - len(missed)} passed, {len(missed)} failed", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
