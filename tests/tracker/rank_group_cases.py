"""Groups whose ranks are stopped, late or interrupted, or give up, while the group is created."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from delta_tracker.errors import RankLostError
from delta_tracker.tracker.rank_group import RankGroup
from tests.publisher.publishing_cases import is_interrupted
from tests.waiting import eventually

_LONG = timedelta(seconds=60)
_STOPPED_SECONDS = 20.0  # after which a stopped rank continues, so that a wait without bound ends


def stopped(
    rank: int, world_size: int, folder: str, victim: int, phase: str, seconds: float, interrupts: bool = False
) -> dict[str, Any]:
    """Stop ``victim`` while the others create a group, and continue it when they gave up; then create one on all ranks.

    Args:
        rank: number of this rank.
        world_size: number of ranks.
        folder: empty folder.
        victim: rank that is stopped.
        phase: ``before`` the creation, during ``call N`` of the store, or ``created`` if all ranks met.
        seconds: timeout of the group.
        interrupts: True to interrupt the wait of the others by Ctrl-C.
    """
    pid = _pids(world_size)[victim]
    driver = max(each for each in range(world_size) if each != victim)
    result = {"message": "", "seconds": 0.0}

    def create() -> None:
        begin = time.monotonic()
        if not interrupts or rank == victim:
            result.update(_outcome(timedelta(seconds=seconds)))
        elif is_interrupted(lambda: _outcome(timedelta(seconds=seconds))):
            result.update(message="interrupted", seconds=time.monotonic() - begin)

    with ExitStack() as context:
        if rank == driver:
            context.enter_context(_continued(pid, Path(folder), world_size - 1))
        elif rank != victim:
            context.enter_context(_recorded(Path(folder), rank))
        _create_with(create, phase, pid, signal.SIGSTOP, sends=rank == driver)
    eventually(lambda: len(list(Path(folder).iterdir())) == world_size - 1)
    return result | _created_again()


def killed(rank: int, world_size: int, port: int, folder: str, victim: int, phase: str) -> None:
    """Join a group of its own, kill ``victim``, and write the outcome of each other rank to a file of ``folder``."""
    signal.alarm(90)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=_LONG)
    pid = _pids(world_size)[victim]
    driver = max(each for each in range(world_size) if each != victim)

    def create() -> None:
        (Path(folder) / str(rank)).write_text(json.dumps(_outcome(timedelta(seconds=1))))

    _create_with(create, phase, pid, signal.SIGKILL, sends=rank == driver)
    eventually(lambda: len(list(Path(folder).iterdir())) == world_size - 1)
    os._exit(0)  # skips the end of the group, which would wait for the victim


def paused(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All ranks stand still for longer than the timeout and the last answers of the store, as on a paused machine."""

    def pause() -> None:
        (Path(folder) / str(rank)).touch()
        eventually(lambda: len(list(Path(folder).iterdir())) == world_size)
        process = subprocess.Popen(["sh", "-c", f"sleep 5.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        process.wait()

    with _before_creation(pause):
        return _outcome(timedelta(seconds=2))


def late(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Ranks 0 and 2 wait; rank 3 joins them once both have logged that, and rank 1 when all have given up."""
    logged: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            (Path(folder) / f"logged-{rank}").touch()

    handler = Heard()
    logging.getLogger("delta_tracker").addHandler(handler)
    try:
        if rank == 3:
            eventually(lambda: len(list(Path(folder).iterdir())) == 2)
        result = {"message": "", "seconds": 0.0} if rank == 1 else _outcome(timedelta(seconds=9))
    finally:
        logging.getLogger("delta_tracker").removeHandler(handler)
    dist.barrier()
    return result | {"logged": logged} | _created_again()


def attempts(rank: int, world_size: int, seed: int, num_rounds: int) -> list[dict[str, Any]]:
    """In each round, ranks make attempts that give up or are interrupted at random; then all create a group."""
    draw = random.Random(f"{seed} {rank}")
    results = []
    for _ in range(num_rounds):
        outcomes = [_drawn(draw) for _ in range(3)]
        dist.barrier()
        results.append({"outcomes": outcomes} | _created_again())
        dist.barrier()
    return results


def _drawn(draw: random.Random) -> str:
    """Create a group, late, briefly or with an interrupt; return the outcome."""
    time.sleep(draw.choice([0, 0, 0.01, 0.1]))
    timeout = timedelta(seconds=draw.choice([0.05, 0.2, 1]))
    timer = threading.Timer(draw.choice([0.0, 0.002, 0.02, 0.2]), signal.raise_signal, (signal.SIGUSR1,))
    before = signal.signal(signal.SIGUSR1, _interrupt)
    begin = time.monotonic()
    try:
        try:
            if draw.random() < 0.3:
                timer.start()
            with closing(_group(timeout)) as group:
                outcome = _sum(group)
        finally:
            timer.cancel()
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    except RankLostError:
        outcome = "lost"
    except KeyboardInterrupt:
        outcome = "interrupted"
    signal.signal(signal.SIGUSR1, before)
    seconds = time.monotonic() - begin
    assert seconds < 2 * timeout.total_seconds() + 15, f"{outcome} after {seconds} s"
    return outcome


def _create_with(create: Callable[[], None], phase: str, pid: int, number: int, *, sends: bool) -> None:
    """Call ``create`` on this rank, while the rank with this ``pid`` gets a signal in a phase; see :func:`stopped`."""

    def send() -> None:
        os.kill(pid, number)

    name, _, call = phase.partition(" ")
    if os.getpid() == pid:
        if name == "created":
            with _before_creation(send):
                create()
        else:
            while number == signal.SIGKILL:
                signal.pause()
        return
    if name == "before" and sends:
        send()
    if name == "before":
        eventually(lambda: _has_halted(pid))
    with _before_call(int(call) if call and sends else -1, send):
        create()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _group(timeout: timedelta) -> RankGroup:
    return RankGroup("cases", "create()", timeout)


def _sum(group: RankGroup) -> str:
    total = torch.ones(1)
    group.add(total)
    return f"{total.item():g} ranks"


def _outcome(timeout: timedelta) -> dict[str, Any]:
    """Return how the creation of a group ended, and after how many seconds."""
    begin = time.monotonic()
    try:
        _group(timeout).close()
        message = "created"
    except RankLostError as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - begin}


def _created_again() -> dict[str, Any]:
    """Create a group on all ranks. The first attempts may meet the end of an earlier attempt."""
    begin = time.monotonic()
    for _ in range(3):
        with suppress(RankLostError), closing(_group(_LONG)) as group:
            return {"again": _sum(group), "again_seconds": time.monotonic() - begin}
    return {"again": "never", "again_seconds": time.monotonic() - begin}


def _pids(world_size: int) -> list[int]:
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    return pids


def _has_halted(pid: int) -> bool:
    """Return True if a process is stopped or dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state.startswith(("T", "Z", "X"))


@contextmanager
def _recorded(folder: Path, rank: int) -> Iterator[None]:
    """Context manager that creates a file at its end."""
    try:
        yield
    finally:
        (folder / f"rank-{rank}").touch()


@contextmanager
def _continued(pid: int, folder: Path, num_ranks: int) -> Iterator[None]:
    """Context manager that continues a stopped process when this rank and the others have recorded their ends."""
    watchdog = threading.Timer(_STOPPED_SECONDS, os.kill, (pid, signal.SIGCONT))
    watchdog.start()
    try:
        with _recorded(folder, -1):
            yield
        eventually(lambda: len(list(folder.iterdir())) == num_ranks)
    finally:
        watchdog.cancel()
        os.kill(pid, signal.SIGCONT)


@contextmanager
def _before_creation(action: Callable[[], None]) -> Iterator[None]:
    """Context manager that calls ``action`` before torch creates a gloo group."""
    real = dist.ProcessGroupGloo

    def create(*arguments: Any) -> Any:
        action()
        return real(*arguments)

    with mock.patch.object(dist, "ProcessGroupGloo", create):
        yield


@contextmanager
def _before_call(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Context manager that calls ``action`` before the ``number``-th call of a store, from 0."""
    left = number

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(dist.PrefixStore, name)

        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                action()
            return real(*arguments)

        return call

    methods = {name: counted(name) for name in ("add", "check", "compare_set", "set")}
    with mock.patch.object(dist, "PrefixStore", type("Counted", (dist.PrefixStore,), methods)):
        yield
