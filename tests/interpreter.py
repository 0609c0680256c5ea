"""Programs in forks of a process that has imported only some packages, because an import of torch takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_SERVER = """
import importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    program, output, path = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    opened = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    sys.path[:0] = path
    exec(program, {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(0)  # an exit that frees all modules takes a second
"""


@dataclass(frozen=True)
class Interpreter:
    """Runs programs as ``python -W ignore -c PROGRAM`` does, except that some packages are imported already."""

    _server: subprocess.Popen[str]

    def run(self, program: str, path: Sequence[Path] = ()) -> str:
        """Run a program, which has to exit with 0; return what it printed.

        Args:
            program: the program.
            path: folders from which it imports first.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            self._server.stdin.write(json.dumps([program, output.name, [*map(str, path)]]) + "\n")
            self._server.stdin.flush()
            code = self._server.stdout.readline().strip()
            printed = output.read()
        assert code == "0", f"exit code {code}:\n{printed}"
        return printed


@contextmanager
def interpreter(*packages: str) -> Iterator[Interpreter]:
    """Start a process that imports some packages; yield what runs programs in forks of it."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVER, *packages]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield Interpreter(server)
        finally:
            server.kill()
