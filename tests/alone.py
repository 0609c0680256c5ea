"""Run each test file by itself: ``python -m tests.alone [--collect] [WORD ...]``, the files whose paths have a word.

Each is a fork of this process, which has imported pytest and torch and nothing of ours, so that no file can rely on
what another one imported or left. With ``--collect`` the tests are found and not run. Exits with 1 if a file failed.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import torch

_ROOT = Path(__file__).parent.parent
_SECONDS_TO_END = 10


@dataclass(frozen=True)
class Run:
    """Outcome of a test file.

    Args:
        path: path of the file.
        status: exit status of pytest; None if the time was over before the file was complete.
        seconds: duration.
        output: output of pytest.
    """

    path: str
    status: int | None
    seconds: float
    output: str


@dataclass
class _Process:
    path: str
    pid: int
    output: IO[bytes]
    begin: float


def _start(path: str, arguments: Sequence[str]) -> _Process:
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the outcome
    pid = os.fork()
    if pid == 0:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
        torch.set_num_threads(1)
        status = pytest.main([path, "-q", "-p", "no:cacheprovider", *arguments])
        sys.stdout.flush()
        os._exit(int(status))
    os.setpgid(pid, pid)  # so that what a file leaves can be killed
    return _Process(path, pid, output, time.monotonic())


def _wait(processes: Iterable[_Process], seconds: float | None) -> list[_Process]:
    """Wait until one of some processes has ended; return those that have."""
    ends = {os.pidfd_open(process.pid): process for process in processes}
    ready, _, _ = select.select(list(ends), [], [], seconds)
    for end in ends:
        os.close(end)
    return [ends[end] for end in ready]


def _end(processes: Sequence[_Process]) -> None:
    """Interrupt files, so that their fixtures are closed, and kill what is left."""
    deadline = time.monotonic() + _SECONDS_TO_END
    running = list(processes)
    for process in running:
        os.kill(process.pid, signal.SIGINT)
    while running and (left := deadline - time.monotonic()) > 0:
        for process in _wait(running, left):
            running.remove(process)
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(process: _Process, *, is_complete: bool) -> Run:
    status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    seconds = time.monotonic() - process.begin
    with process.output as output:
        output.seek(0)
        return Run(process.path, status if is_complete else None, seconds, output.read().decode(errors="replace"))


def runs(
    paths: Iterable[str], arguments: Sequence[str] = (), *, num_processes: int = 1, seconds: float = math.inf
) -> Iterator[Run]:
    """Run test files, and yield their outcomes as they end.

    Args:
        paths: the files, in the order in which they start.
        arguments: further arguments of pytest.
        num_processes: number of files that run at the same time.
        seconds: time for all files. Those that run at its end are interrupted, and no other starts.
    """
    deadline = time.monotonic() + seconds
    waiting, running = list(paths), list[_Process]()
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < num_processes:
                running.append(_start(waiting.pop(0), arguments))
            left = deadline - time.monotonic()
            for process in _wait(running, None if math.isinf(left) else max(left, 0)):
                running.remove(process)
                yield _outcome(process, is_complete=True)
    finally:
        _end(running)
    yield from (_outcome(process, is_complete=False) for process in running)
    yield from (Run(path, None, 0, "") for path in waiting)


def main() -> int:
    """Run the files and print those that failed; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", action="store_true", help="find the tests, do not run them")
    parser.add_argument("words", nargs="*", help="only files whose path has one of these")
    options = parser.parse_args()
    paths = [path for path in sorted((_ROOT / "tests").rglob("test_*.py")) if "__pycache__" not in path.parts]
    names = [str(path) for path in paths if not options.words or any(word in str(path) for word in options.words)]
    failed = []
    for run in runs(names, ["--collect-only" if options.collect else "-x"]):
        print(run.output, end="", flush=True)
        failed += [run.path] if run.status else []
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n", flush=True)
    return 1 if failed or not names else 0


if __name__ == "__main__":
    sys.exit(main())
