"""A pool of real ranks: processes joined in one group that run many test cases, because starting them is slow.

A case is a function ``case(rank, world_size, **kwargs)`` named ``"module:function"``; its arguments and result are
JSON. If a rank raises, :meth:`RankPool.run` raises with its traceback. Ranks that hang are killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import time
import traceback
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests import forked

# A case whose ranks wait for each other fails after the first; the second ends what hangs elsewhere. It includes the
# start of the ranks, whose imports took a minute where ten other processes were busy on two cores.
_GROUP_TIMEOUT_SECONDS = 100
_ANSWER_SECONDS = 200
_SECONDS_AFTER_AN_ERROR = 5.0  # in which the other ranks may answer; most wait for the one that raised


class RankFailureError(AssertionError):
    """A case failed on a rank."""


class RankPool:
    """``world_size`` processes that wait for cases, joined in a group of ``backend``."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._backend = backend
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(
        self, case: str, *, timeout_seconds: float = _ANSWER_SECONDS, dies: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run a case on every rank; return the results by rank, None for a rank that ``dies``."""
        if not self._ranks:
            self._start()
        order = json.dumps({"case": case, "kwargs": kwargs}).encode()
        for _, pipe in self._ranks:
            pipe.send_bytes(order)
        try:
            answers = self._answers(time.monotonic() + timeout_seconds, dies)
        except BaseException:
            self.stop()
            raise
        if dies is not None:
            self.stop()
        errors = [f"rank {rank}:\n{answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if errors:
            self.stop()  # the group may be out of step
            raise RankFailureError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def stop(self) -> None:
        """Kill all ranks; the next :meth:`run` starts new ones."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            environ = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            pipe, theirs = Pipe()
            self._ranks.append((forked.start(_serve, theirs, self._backend, environ=environ), pipe))
            theirs.close()

    def _answers(self, deadline: float, dies: int | None) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while pipes:
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                said = "\n".join(str(answer.get("error")) for answer in answers.values())
                missing = sorted(pipes.values())
                raise RankFailureError(f"ranks {missing} did not answer in time; the others said:\n{said}")
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    answer = answers[rank] = json.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError) as error:
                    if rank != dies:
                        raise RankFailureError(f"rank {rank} died") from error
                    answer = answers[rank] = {"result": None}
                if "error" in answer:
                    deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_AN_ERROR)
        return [answers[rank] for rank in range(self.world_size)]


def _serve(pipe: Connection, backend: str) -> None:
    """Join the group, and answer each order until the pool closes its end."""
    import torch  # noqa: PLC0415  the pool itself needs no torch
    from torch import distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=_GROUP_TIMEOUT_SECONDS))
    with contextlib.suppress(EOFError):
        while True:
            order = json.loads(pipe.recv_bytes())
            module, function = order["case"].split(":")
            try:
                case = getattr(importlib.import_module(module), function)
                answer = {"result": case(dist.get_rank(), dist.get_world_size(), **order["kwargs"])}
            except Exception:  # noqa: BLE001  it goes to the test
                answer = {"error": traceback.format_exc()}
            pipe.send_bytes(json.dumps(answer).encode())
    os._exit(0)  # skips the end of the group, which could wait for a rank that was killed
