"""Execution of cases in separate processes, to isolate crashes and hangs.

Every rank of every case is a fork of this process, which imports torchrec once and has no threads.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.faults.registry import CASES, RIGHT, Case, WrongError

CASE_MODULES = ("benchmarks.faults.row_cases", "benchmarks.faults.mode_cases", "benchmarks.faults.consumer_cases")

_IMPORTS = [
    "torch.distributed.optim",  # it compiles programs of TorchScript, and torchrec imports it late
    "torchrec.distributed.mc_embedding",
    "torchrec.distributed.model_tracker.model_delta_tracker",
    "torchrec.distributed.sharding_plan",
    "delta_tracker.tracker.row_sets.numba_loops",  # importing numba takes a second
    "delta_tracker.tracker.tracker",
]
_GROUP_TIMEOUT = timedelta(seconds=10)
_START_SECONDS = 60.0
_CASE_SECONDS = 60.0
_MAX_TEXT = 70

Job = tuple[str, str]  # name of a case, name of a tracker


def load_cases() -> dict[str, Case]:
    """Return name to case, sorted by fault."""
    for module in CASE_MODULES:
        import_module(module)
    return dict(sorted(CASES.items(), key=lambda item: item[1].fault))


def run_all(jobs: Iterable[Job], num_parallel: int) -> Iterator[tuple[Job, str]]:
    """Run cases concurrently. Yield each with its verdict when it ends: ``right``, or a short error."""
    with _silenced():
        for name in _IMPORTS:
            import_module(name)
    waiting, running = deque(jobs), list[_Run]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                with _silenced():  # ranks inherit standard output and error
                    while waiting and len(running) < num_parallel:
                        running.append(_Run(waiting.popleft(), Path(folder) / str(len(waiting))))
                wait([pipe for run in running for pipe in run.pipes.values()], timeout=1)
                for run in [run for run in running if run.is_over()]:
                    running.remove(run)
                    yield run.job, run.verdict()
        finally:
            for run in running:
                run.stop()


class _Run:
    """The ranks of one case.

    Args:
        job: case and tracker.
        rendezvous: path of a file that does not exist yet, for the rendezvous of the ranks.
    """

    def __init__(self, job: Job, rendezvous: Path) -> None:
        self.job = job
        self.pipes: dict[int, Connection] = {}
        self._answers: dict[int, str] = {}
        self._deadline = time.monotonic() + _START_SECONDS
        context = multiprocessing.get_context("fork")
        self._ranks = []
        for rank in range(CASES[job[0]].num_ranks):
            self.pipes[rank], theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, job, rank, str(rendezvous)), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(process)

    def is_over(self) -> bool:
        """Receive answers. If all have arrived or the time is up, end the processes and return True."""
        for rank, pipe in list(self.pipes.items()):
            if pipe.poll():
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = "the process dies"
                if answer is None:  # the rank starts the case
                    self._deadline = time.monotonic() + _CASE_SECONDS
                    continue
                self._answers[rank] = answer
                del self.pipes[rank]
        if self.pipes and time.monotonic() < self._deadline:
            return False
        for rank in self.pipes:
            self._answers[rank] = "hangs"
        self.stop()
        return True

    def stop(self) -> None:
        """Kill all ranks."""
        for process in self._ranks:
            process.kill()
            process.join()

    def verdict(self) -> str:
        """Return the combined answers of all ranks."""
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        if len(set(answers)) == 1:
            return answers[0]
        return ", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer != RIGHT)


def _rank(pipe: Connection, job: Job, rank: int, rendezvous: str) -> None:
    """Run a rank: join the group, send None, run the case, send the result."""
    gc.freeze()  # a collection would copy the memory that is shared with the parent
    torch, dist = import_module("torch"), import_module("torch.distributed")
    name, tracker = job
    num_ranks = load_cases()[name].num_ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks, timeout=_GROUP_TIMEOUT
    )
    make = import_module("benchmarks.faults.trackers").TRACKERS[tracker]
    pipe.send(None)
    try:
        CASES[name].run(make)
        answer = RIGHT
    except WrongError as wrong:
        answer = str(wrong)
    except Exception as error:  # noqa: BLE001  any exception is the result
        answer = describe(error)
    pipe.send(answer)
    os._exit(0)  # skips the shutdown of the group, which could wait for a dead peer


def describe(error: Exception) -> str:
    """Return a short description of an exception that is equal in every run."""
    text = str(error).strip().partition("\n")[0]
    if "gloo" in text.lower() or "Connection" in text:
        return "waits for a dead peer"
    kind = type(error).__name__
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT].rstrip()}…"
    return f"{kind}: {text}" if text else kind


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Redirect standard output and error to the null device: torchrec logs much, and tracebacks are expected."""
    kept = [os.dup(1), os.dup(2)]
    with Path(os.devnull).open("w") as nothing:
        try:
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
            yield
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
