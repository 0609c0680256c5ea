"""Processes forked from a server, which imports torch, torchrec and the package once, because that takes seconds.

The server starts at the first use and ends with this process; the workers of pytest-xdist share one. It has no threads,
stores or process groups, so that it can fork. Each process has its own environment, except for variables that torch
reads when it is loaded, and writes to the outputs of the process that starts it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

_ROOT = Path(__file__).parent.parent
# What most of the processes import; a name that is not installed is left out.
_PRELOAD = [
    "tests.paused_collection",
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.profiler",
    "torchmetrics",
    "torchrec.distributed.mc_embedding",
    "torchrec.distributed.model_parallel",
    "delta_tracker.tracker.row_sets.numba_loops",
    "delta_tracker.predictor.predictor",
    "delta_tracker.publisher.publisher",
    "delta_tracker.recovery.restore",
    "delta_tracker.sharding.inference_tables",
    "tests.models",
]
_OWN = {path.parent.name for path in _ROOT.glob("*/__init__.py")}
_SERVER: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
_REACHED_BY = {"_forkserver_address", "_forkserver_authkey"}  # the key is of Python 3.14
_READ_BY_TORCH = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def start(
    body: Callable[..., None],
    *arguments: Any,
    environ: Mapping[str, str] | None = None,
    daemon: bool = True,
) -> BaseProcess:
    """Fork a process that calls a function of a module; return it.

    With a GPU, the process starts from nothing, because a fork of a process that counted the devices cannot use them.

    Args:
        body: the function, which is pickled by its name.
        arguments: its arguments, which are pickled.
        environ: environment of the process; None for that of the caller.
        daemon: True to end the process with its parent. It then cannot start processes by ``multiprocessing``.
    """
    import torch  # noqa: PLC0415  a process that only serves needs none

    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    with _environ():
        if context.get_start_method() == "forkserver":
            _ensure_running()
        inherited = (_Descriptor(1), _Descriptor(2), dict(environ or os.environ))
        process = context.Process(target=_call, args=(*inherited, body, arguments), daemon=daemon)
        process.start()
    return process


def serve() -> dict[str, Any]:
    """Start the server; return how other processes reach it by :func:`join`. It ends with this process."""
    with _environ():
        _ensure_running()
    return {name: value for name, value in vars(_SERVER).items() if name in _REACHED_BY}


def join(server: Mapping[str, Any]) -> None:
    """Use the server of another process, which outlives this one."""
    vars(_SERVER).update(server, ensure_running=lambda: None, _forkserver_alive_fd=os.open(os.devnull, os.O_WRONLY))


def _environ() -> Any:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return mock.patch.dict(os.environ, _READ_BY_TORCH | {"PYTHONPATH": path})


def _ensure_running() -> None:
    _SERVER.set_forkserver_preload(_PRELOAD)
    _SERVER.ensure_running()


class Program:
    """A program like ``python -W ignore -m MODULE ARGUMENTS``, with the methods of ``subprocess.Popen``.

    Args:
        module: name of the program, or path of a file of Python.
        arguments: its arguments.
        output: file for its standard output.
        errors: file for its standard error; may be ``output``.
        environ: its environment; None for that of the caller.
        namespace: file of the network namespace that it joins.
        root: folder from which it imports the packages of this repository again; None to use those of the server.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        output: Path,
        errors: Path,
        environ: Mapping[str, str] | None = None,
        namespace: Path | None = None,
        root: Path | None = None,
    ) -> None:
        self._command = [module, *arguments]
        outputs = [str(output), str(errors)]
        for path in (output, errors):
            path.touch()
        self._process = start(_run, self._command, outputs, namespace, root, environ=environ, daemon=False)

    def poll(self) -> int | None:
        """Return the exit code; None if it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Return the exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: if it does not end in time.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(
    module: str,
    *arguments: str,
    timeout_seconds: float,
    environ: Mapping[str, str] | None = None,
    root: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program like ``python -W ignore -m MODULE``, see :class:`Program`; return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: if it did not end in time; it is killed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder) / name for name in ("output", "errors"))
        program = Program(module, *arguments, output=output, errors=errors, environ=environ, root=root)
        try:
            code = program.wait(timeout_seconds)
        finally:
            program.kill()
        return subprocess.CompletedProcess([module, *arguments], code, output.read_text(), errors.read_text())


class _Descriptor:
    """A file descriptor of this process, which a process that gets it has open, too."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _duplicate, (reduction.DupFd(self._number), self._number)


def _duplicate(received: Any, number: int) -> None:
    descriptor = received.detach()
    os.dup2(descriptor, number)
    os.close(descriptor)


def _call(_: None, __: None, environ: dict[str, str], body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # a collection would write to, and so copy, the memory that is shared with the server
    gc.enable()
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # the server may have asked for it in another environment
    body(*arguments)


def _run(command: list[str], outputs: list[str], namespace: Path | None, root: Path | None) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    if namespace is not None:
        with namespace.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot join {namespace}")
    if root is not None:
        os.chdir(root)
        sys.path.insert(0, str(root))
        for name in [each for each in sys.modules if each.partition(".")[0] in _OWN]:
            del sys.modules[name]
    sys.argv = command
    warnings.simplefilter("ignore")
    if command[0].endswith(".py"):
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
