"""The program under test: one run for a state, or a run that follows the stream."""

from __future__ import annotations

import io
import os
import queue
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Protocol

_NULL = Path(os.devnull)
SECONDS = 60.0  # for one run, and for each step of a run that follows
MEMORY_MIB = 1024  # for one run

Main = Callable[[Sequence[str], IO[str], IO[str], IO[str]], int]
"""Arguments, stdin, stdout and stderr to exit status."""


class Following(Protocol):
    """A run with ``--follow``."""

    def line(self) -> str | None:
        """Return the next line of stdout; None if there is none within the time limit, or if the run ended."""

    def paused(self) -> AbstractContextManager[object]:
        """Return a context manager that stops a process meanwhile."""

    def end(self) -> int | None:
        """Close stdin and return the exit status; None if the run does not end within the time limit."""


class Program(Protocol):
    """A program that follows the contract of ``README.md``."""

    def run(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        """Return the exit status and what was written to stderr; None and the reason if the run took too much."""

    def follow(self, arguments: Sequence[str]) -> Following:
        """Start a run that follows."""


class _Lines:
    """Lines of a stream, which a thread reads."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stream = stream
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                self._lines.put(line.strip())
        self._lines.put(None)

    def next(self) -> str | None:
        with suppress(queue.Empty):
            return self._lines.get(timeout=SECONDS)
        return None


class Command:
    """A program that is started for each run.

    Args:
        command: the program and its first arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._peak = 0

    def run(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        with subprocess.Popen(
            [*self._command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                _, errors = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, f"did not end within {SECONDS:.0f} s"
        peak, before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10, self._peak
        self._peak = max(peak, before)  # of all runs so far
        # Linux counts the memory of this process as the program's, until the program is loaded.
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        if peak > max(MEMORY_MIB, before, own):
            return None, f"took {peak} MiB of memory, must take at most {MEMORY_MIB}"
        return process.returncode, errors

    def follow(self, arguments: Sequence[str]) -> Following:
        return _FollowingProcess([*self._command, *arguments])


class _FollowingProcess:
    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._lines = _Lines(self._process.stdout)

    def line(self) -> str | None:
        return self._lines.next()

    @contextmanager
    def paused(self) -> Iterator[None]:
        os.killpg(self._process.pid, signal.SIGSTOP)
        yield
        os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> int | None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return None


class InProcess:
    """A program in Python that runs in this process.

    Args:
        main: its main function.
    """

    def __init__(self, main: Main) -> None:
        self._main = main

    def run(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        errors = io.StringIO()
        with _NULL.open("r+") as null:
            return self._main(arguments, null, null, errors), errors.getvalue()

    def follow(self, arguments: Sequence[str]) -> Following:
        return _FollowingThread(self._main, arguments)


class _FollowingThread:
    def __init__(self, main: Main, arguments: Sequence[str]) -> None:
        (stdin, self._stdin), (stdout, written) = os.pipe(), os.pipe()
        self._lines = _Lines(os.fdopen(stdout))
        self._status: int | None = None

        def run() -> None:
            with os.fdopen(stdin) as lines, os.fdopen(written, "w") as output, _NULL.open("w") as null:
                self._status = main(arguments, lines, output, null)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def line(self) -> str | None:
        return self._lines.next()

    def paused(self) -> AbstractContextManager[object]:
        return nullcontext()  # a thread cannot be stopped

    def end(self) -> int | None:
        os.close(self._stdin)
        self._thread.join(SECONDS)
        return self._status
