"""Jobs of several ranks in one process: the ranks are threads, and their groups are simulated.

Training uses the groups of ``torch.testing``, whose worlds belong to threads. The groups of the library connect
processes by gloo, which waits outside Python; :class:`Group` takes their place.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from tests.simulation.threads import SCHEDULER, Process

_T = TypeVar("_T")
_R = TypeVar("_R")
_COUNTER = itertools.count(1)
_JOIN_SECONDS = 1000.0  # in which the calls of all ranks end


@dataclass
class _Connections:
    """What the ranks of one group share.

    Attributes:
        processes: process of each rank that has joined.
        closed: ranks that have left the group.
        slots: number of a collective to the tensor of each rank that has started it.
        mail: sent tensors that were not received, by sender and receiver.
    """

    processes: dict[int, Process] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    slots: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    mail: dict[tuple[int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def is_lost(self, rank: int) -> bool:
        """Return True if a rank can send nothing more."""
        return rank in self.closed or self.processes[rank].is_killed


_GROUPS: dict[str, _Connections] = defaultdict(_Connections)


@dataclass
class _Work:
    """Handle of a call of a group.

    Args:
        is_done: returns True if it is complete.
        is_lost: returns True if it cannot be completed.
        finish: stores the result, once.
        seconds: default for :meth:`wait`.
    """

    is_done: Callable[[], bool]
    is_lost: Callable[[], bool]
    finish: Callable[[], None]
    seconds: float
    has_finished: bool = False

    def is_completed(self) -> bool:
        return self.is_done() or self.is_lost()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        if not SCHEDULER.wait(self.is_completed, seconds):
            raise RuntimeError(f"Timed out waiting {seconds} s")
        if not self.is_done():
            raise RuntimeError("Connection closed by peer")
        if not self.has_finished:
            self.has_finished = True
            self.finish()
        return True


class Group:
    """Group of all ranks with the interface of ``torch.distributed.ProcessGroupGloo``."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        name = store.compare_set("simulated", "", str(next(_COUNTER))).decode()
        self._shared = shared = _GROUPS[name]
        self._rank, self._size, self._seconds = rank, size, timeout.total_seconds()
        self._num_started = 0
        self.options = SimpleNamespace(group_name="")
        shared.processes[rank] = SCHEDULER.process
        if not SCHEDULER.wait(lambda: len(shared.processes) == size, self._seconds):
            raise RuntimeError(f"only {len(shared.processes)} of {size} ranks connected")

    def __del__(self) -> None:
        self._shared.closed.add(self._rank)

    def alltoall_base(self, received: Tensor, sent: Tensor, _: list[int], __: list[int]) -> _Work:
        def finish(tensors: Sequence[Tensor]) -> None:
            received.copy_(torch.stack([each.view(self._size, -1)[self._rank] for each in tensors]).view_as(received))

        return self._started(sent, finish)

    def allreduce(self, tensors: Sequence[Tensor], _: object) -> _Work:
        return self._started(tensors[0], lambda all_of: tensors[0].copy_(torch.stack(tuple(all_of)).sum(0)))

    def gather(self, received: Sequence[Sequence[Tensor]], sent: Sequence[Tensor], _: object) -> _Work:
        def finish(tensors: Sequence[Tensor]) -> None:
            for to, each in zip(received[0], tensors, strict=True):
                to.copy_(each)

        if self._rank == 0:
            return self._started(sent[0], finish)
        self._started(sent[0], lambda _: None)
        return _done(self._seconds)

    def send(self, tensors: Sequence[Tensor], rank: int, _: int) -> _Work:
        if self._shared.is_lost(rank):
            raise RuntimeError("Connection closed by peer")
        self._shared.mail[self._rank, rank].append(tensors[0].clone())
        return _done(self._seconds)

    def recv(self, tensors: Sequence[Tensor], rank: int, _: int) -> _Work:
        mail = self._shared.mail[rank, self._rank]
        return _Work(
            is_done=lambda: bool(mail),
            is_lost=lambda: self._shared.is_lost(rank),
            finish=lambda: tensors[0].copy_(mail.popleft()),
            seconds=self._seconds,
        )

    def _started(self, sent: Tensor, finish: Callable[[Sequence[Tensor]], object]) -> _Work:
        SCHEDULER.pause()
        slot = self._shared.slots[self._num_started]
        self._num_started += 1
        slot[self._rank] = sent.clone()
        others = range(self._size)
        return _Work(
            is_done=lambda: len(slot) == self._size,
            is_lost=lambda: any(rank not in slot and self._shared.is_lost(rank) for rank in others),
            finish=lambda: finish([slot[rank] for rank in others]),
            seconds=self._seconds,
        )


def _done(seconds: float) -> _Work:
    return _Work(lambda: True, lambda: False, lambda: None, seconds)


@cache
def install() -> None:
    """Replace the groups of this process by simulated ones."""
    dist.ProcessGroupGloo = Group  # type: ignore[misc, assignment]
    for module in (multi_threaded_pg, dist.distributed_c10d):
        module._store_based_barrier = lambda *_, **__: None
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]


class Job(Generic[_T]):
    """Ranks that make the same calls.

    Args:
        name: name for messages.
        size: number of ranks.
        make: called with the number of the rank, in its thread and process group. Returns what the rank works with.
    """

    def __init__(self, name: str, size: int, make: Callable[[int], _T]) -> None:
        install()
        self._store = dist.HashStore()
        self.size = size
        self._processes = [Process(f"{name}, rank {rank}", is_mortal=True) for rank in range(size)]
        self._calls: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(size)]
        self._made: dict[int, _T] = {}
        for rank, process in enumerate(self._processes):
            with SCHEDULER.inside(process):
                Thread(target=self._run, args=(rank, size, make), name=process.name, daemon=True).start()
        SCHEDULER.wait(lambda: len(self._made) == size, _JOIN_SECONDS)

    def call(self, action: Callable[[_T], _R]) -> list[_R]:
        """Call ``action`` on each rank. Return the results, or raise the error of the first rank that failed."""
        futures = [Future[_R]() for _ in self._processes]
        for rank, future in enumerate(futures):
            self._calls[rank].put(lambda rank=rank, future=future: _complete(future, action, self._made[rank]))

        def has_ended() -> bool:
            return all(each.done() or of.is_killed for each, of in zip(futures, self._processes, strict=True))

        if not SCHEDULER.wait(has_ended, _JOIN_SECONDS):
            errors = [each.exception() for each in futures if each.done()]
            raise TimeoutError(f"a rank did not end within {_JOIN_SECONDS:.0f} s, and the others raised {errors}")
        if any(not each.done() for each in futures):
            errors = [each.exception() for each in futures if each.done()]
            raise ChildProcessError(f"a rank has died, and the others raised {errors}")
        return [each.result() for each in futures]

    @property
    def is_whole(self) -> bool:
        """True unless a rank was killed."""
        return not any(each.is_killed for each in self._processes)

    def end(self) -> None:
        """End all ranks, after their calls have ended."""
        for calls in self._calls:
            calls.put(None)
        SCHEDULER.wait(lambda: not any(map(SCHEDULER.has_threads, self._processes)), _JOIN_SECONDS)

    def kill(self) -> None:
        """Kill all ranks."""
        for process in self._processes:
            SCHEDULER.kill(process)

    def _run(self, rank: int, size: int, make: Callable[[int], _T]) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=self._store)
        self._made[rank] = make(rank)
        while (call := self._calls[rank].get()) is not None:
            call()
        del self._made[rank]
        dist.destroy_process_group()


def _complete(future: Future[_R], action: Callable[[_T], _R], made: _T) -> None:
    try:
        future.set_result(action(made))
    except Exception as error:  # noqa: BLE001  raised by Job.call
        future.set_exception(error)
