"""Processes forked from a server, which imports torch, torchrec and the package once, because that takes seconds.

The server starts at the first use and ends with this process. It has no threads, stores or process groups, so that it
can fork. Each process has its own environment, except for variables that torch reads when it is loaded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
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


def run(
    module: str, *arguments: str, timeout_seconds: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program like ``python -W ignore -m MODULE``; return its exit code and output.

    Args:
        module: name of the program.
        arguments: its arguments.
        timeout_seconds: time after which it is killed.
        environ: its environment; None for that of the caller.

    Raises:
        subprocess.TimeoutExpired: if it did not end in time.
    """
    command = [module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("output", "errors")]
        for path in paths:
            path.touch()
        process = start(_run, command, list(map(str, paths)), environ=environ, daemon=False)
        process.join(timeout_seconds)
        is_late = process.is_alive()
        process.kill()
        process.join()
        said, errors = (path.read_text() for path in paths)
    if is_late:
        raise subprocess.TimeoutExpired(command, timeout_seconds, said, errors)
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode, said, errors)


def _call(environ: dict[str, str], body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # a collection would write to, and so copy, the memory that is shared with the server
    os.environ.clear()
    os.environ.update(environ)
    body(*arguments)


def _run(command: list[str], outputs: list[str]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = command
    warnings.simplefilter("ignore")
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
