"""A pool of real ranks: processes joined in one gloo group that run many test cases, because starting them is slow.

A case is a function ``case(rank, world_size, **kwargs)`` named ``"module:function"``; its arguments and result are
JSON. If a rank raises, :meth:`RankPool.run` raises with its traceback. Ranks that hang are killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
# A case whose ranks wait for each other fails after the first; the second ends what hangs elsewhere. It includes the
# start of the ranks, whose imports took a minute where ten other processes were busy on two cores.
_GROUP_TIMEOUT_SECONDS = 20
_ANSWER_SECONDS = 200


class RankFailureError(AssertionError):
    """A case failed on a rank."""


class RankPool:
    """``world_size`` processes that wait for cases on their standard input, joined in a group of ``backend``."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._backend = backend
        self._ranks: list[subprocess.Popen[bytes]] = []

    def run(self, case: str, *, timeout_seconds: float = _ANSWER_SECONDS, **kwargs: Any) -> list[Any]:
        """Run a case on every rank; return the results by rank."""
        if not self._ranks:
            self._start()
        order = json.dumps({"case": case, "kwargs": kwargs}).encode() + b"\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(order)
            rank.stdin.flush()
        try:
            answers = self._answers(time.monotonic() + timeout_seconds)
        except BaseException:
            self.stop()
            raise
        errors = [f"rank {rank}:\n{answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if errors:
            self.stop()  # the group may be out of step
            raise RankFailureError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def stop(self) -> None:
        """Kill all ranks; the next :meth:`run` starts new ones."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._ranks = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ranks", self._backend],
                    cwd=_ROOT,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=None,
                )
            )

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, index)
            while len(answers) < self.world_size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(self.world_size)) - set(answers))
                    said = "\n".join(str(answer.get("error")) for answer in answers.values())
                    raise RankFailureError(f"ranks {missing} did not answer in time; the others said:\n{said}")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise RankFailureError(f"rank {key.data} died")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[index] for index in range(self.world_size)]


def _serve(backend: str) -> None:
    """Join the group and answer each line of standard input with a line on the original standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be read as an answer
    import torch  # noqa: PLC0415  the pool itself needs no torch
    from torch import distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=_GROUP_TIMEOUT_SECONDS))
    for line in sys.stdin:
        order = json.loads(line)
        module, function = order["case"].split(":")
        try:
            case = getattr(importlib.import_module(module), function)
            answer = {"result": case(dist.get_rank(), dist.get_world_size(), **order["kwargs"])}
        except Exception:  # noqa: BLE001  it goes to the test
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
