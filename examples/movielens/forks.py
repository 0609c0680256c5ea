"""Forked child processes that send events; if one fails, all are stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from delta_tracker.tracker.row_sets.numba import load_loops

LOG_TAIL_LINES = 15

Send = Callable[[dict[str, Any]], None]


class ProcessFailedError(Exception):
    """Raised when a child process fails, or when the children exceed the time limit."""


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    pid: int
    log: Path


class Forks:
    """Context manager that forks children and yields their events. Running children are killed at exit.

    Children need no imports of their own, so that they start at once. The parent must use no store, process group or
    thread before.

    Args:
        logs: folder for the standard error of each child.
        limit_seconds: time limit for all children together.
    """

    def __init__(self, logs: Path, limit_seconds: float) -> None:
        self._logs = logs
        self._deadline = time.monotonic() + limit_seconds
        self._running: dict[Connection, _Child] = {}

    def start(self, name: str, body: Callable[..., None], *arguments: object) -> None:
        """Fork a child that calls ``body(send, *arguments)``; ``send`` sends an event."""
        receiver, sender = Pipe(duplex=False)
        log = self._logs / f"{name.replace(' ', '-')}.log"
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _live(sender, log, body, arguments)
        sender.close()
        self._running[receiver] = _Child(name, pid, log)

    def kill(self, *names: str) -> None:
        """Kill children with SIGKILL, all at once; their remaining events are lost."""
        killed = {receiver: child for receiver, child in self._running.items() if child.name in names}
        for child in killed.values():
            os.kill(child.pid, signal.SIGKILL)
        for receiver, child in killed.items():
            os.waitpid(child.pid, 0)
            del self._running[receiver]
            receiver.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the children until all have succeeded.

        Raises:
            ProcessFailedError: if a child fails, with the end of its log, or at the time limit.
        """
        while self._running:
            ready = wait(list(self._running), max(0.0, self._deadline - time.monotonic()))
            if not ready:
                names = ", ".join(sorted(child.name for child in self._running.values()))
                raise ProcessFailedError(f"{names} took too long")
            for receiver in ready:
                if receiver in self._running:  # not killed by an event before
                    try:
                        event = receiver.recv()
                    except EOFError:
                        self._end(receiver)
                    else:
                        yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill(*[child.name for child in self._running.values()])

    def _end(self, receiver: Connection) -> None:
        child = self._running.pop(receiver)
        receiver.close()
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if code != 0:
            tail = "".join(child.log.read_text().splitlines(keepends=True)[-LOG_TAIL_LINES:])
            raise ProcessFailedError(f"{child.name} ended with code {code}; the end of {child.log}:\n{tail}")


def import_early() -> None:
    """Import and load what each child would import and load otherwise, which takes a second for each child."""
    load_loops()
    import_module("torch.distributed.optim")


def _live(sender: Connection, log: Path, body: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Call the body of a child, and end the child."""
    code = 1
    try:
        with log.open("w") as errors:
            os.dup2(errors.fileno(), 2)
        body(sender.send, *arguments)
        code = 0
    except BaseException:  # noqa: BLE001  the parent reads the log
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
