"""Child processes that send events as JSON lines; if one fails, all are stopped."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

LOG_TAIL_LINES = 15


class ProcessFailedError(Exception):
    """Raised when a child process fails, or when the children exceed the time limit."""


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[str]
    listener: threading.Thread
    log: Path


class Processes:
    """Context manager that starts child processes and yields their events. Running children are killed at exit.

    Args:
        logs: folder for the standard error of each child.
        limit_seconds: time limit for all children together.
    """

    def __init__(self, logs: Path, limit_seconds: float) -> None:
        self._logs = logs
        self._deadline = time.monotonic() + limit_seconds
        self._children: dict[str, _Child] = {}
        self._running: set[str] = set()
        self._lines: queue.Queue[tuple[str, str | None]] = queue.Queue()

    def start(self, name: str, *command: str) -> subprocess.Popen[str]:
        """Run ``python -m *command`` as a child with a name."""
        log = self._logs / f"{name.replace(' ', '-')}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert process.stdout is not None, "stdout is a pipe"
        listener = threading.Thread(target=self._listen, args=(name, process.stdout), daemon=True)
        self._children[name] = _Child(process, listener, log)
        self._running.add(name)
        listener.start()
        return process

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the children until all have succeeded.

        Raises:
            ProcessFailedError: if a child fails, with the end of its log, or at the time limit.
        """
        while self._running:
            try:
                name, line = self._lines.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                raise ProcessFailedError(f"{', '.join(sorted(self._running))} took too long") from None
            if line is None:
                self._ended(name)
            elif line.startswith('{"event"'):  # other lines are printed by libraries
                yield json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            child.listener.join()

    def _listen(self, name: str, stdout: TextIO) -> None:
        with stdout:
            for line in stdout:
                self._lines.put((name, line))
        self._lines.put((name, None))

    def _ended(self, name: str) -> None:
        child = self._children[name]
        code = child.process.wait()
        self._running.remove(name)
        if code != 0:
            tail = "".join(child.log.read_text().splitlines(keepends=True)[-LOG_TAIL_LINES:])
            raise ProcessFailedError(f"{name} ended with code {code}; the end of {child.log}:\n{tail}")
