"""Processes forked from a server, which imports torch, torchrec and the package once, because that takes seconds.

The server starts at the first use and ends with this process. It has no threads, stores or process groups, so that it
can fork. Each process has its own environment, except for variables that torch reads when it is loaded.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

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
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, _READ_BY_TORCH | {"PYTHONPATH": path}):
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
            ensure_running()
        process = context.Process(target=_call, args=(dict(environ or os.environ), body, arguments), daemon=daemon)
        process.start()
    return process


class Program:
    """A program like ``python -W ignore -m MODULE ARGUMENTS``, with the methods of ``subprocess.Popen``.

    Args:
        module: name of the program, or path of a file of Python.
        arguments: its arguments.
        output: file for its standard output.
        errors: file for its standard error; may be ``output``.
        environ: its environment; None for that of the caller.
        namespace: file of the network namespace that it joins.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        output: Path,
        errors: Path,
        environ: Mapping[str, str] | None = None,
        namespace: Path | None = None,
    ) -> None:
        self._command = [module, *arguments]
        outputs = [str(output), str(errors)]
        for path in (output, errors):
            path.touch()
        self._process = start(_run, self._command, outputs, namespace, environ=environ, daemon=False)

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
    module: str, *arguments: str, timeout_seconds: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program like ``python -W ignore -m MODULE``; return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: if it did not end in time; it is killed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder) / name for name in ("output", "errors"))
        program = Program(module, *arguments, output=output, errors=errors, environ=environ)
        try:
            code = program.wait(timeout_seconds)
        finally:
            program.kill()
        return subprocess.CompletedProcess([module, *arguments], code, output.read_text(), errors.read_text())


def _call(environ: dict[str, str], body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # a collection would write to, and so copy, the memory that is shared with the server
    gc.enable()
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # the server may have asked for it in another environment
    body(*arguments)


def _run(command: list[str], outputs: list[str], namespace: Path | None) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    if namespace is not None:
        with namespace.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot join {namespace}")
    sys.argv = command
    warnings.simplefilter("ignore")
    if command[0].endswith(".py"):
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
