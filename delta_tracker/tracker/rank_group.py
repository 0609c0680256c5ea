"""Gloo process groups of all ranks, for messages of this library. Each group must be used by one thread only."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker.errors import RankLostError, without_traceback

_logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT = timedelta(minutes=5)
TORCH_TIMEOUT = timedelta(minutes=30)  # default of torch's gloo groups, for calls without a timeout argument

_GO = "go"
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.1
_INTERRUPT_PAUSE = timedelta(seconds=0.2)
_QUIET_SECONDS = 5.0  # after which a wait for other ranks is logged
_ANSWER_SECONDS = 3.0  # after a timeout, for the store's last answers
_LEAVING_SECONDS = 0.5  # in which an interrupted rank ends its attempt, before the interrupt is raised
_TRYING_SECONDS = 1.0  # after which a rank fails to connect later than others
_STORE = "the store of the default process group"


class RankGroup:
    """Gloo group of all ranks of the default process group, for messages of this library.

    If there is no default process group, the group contains only this process.

    The constructor, :meth:`start_all_gather`, :meth:`all_gather`, :meth:`gather` and :meth:`add` are collectives: all
    ranks must call them in the same order, from one thread. Groups with different names may be created in any order.
    The constructor waits for all ranks, using the default group's store, and logs missing ranks after a few seconds. It
    raises an error if ``timeout`` passes before all ranks have joined. All ranks may then try again.

    After a rank is lost, every later operation raises RankLostError. Unlike ``torch.distributed.new_group``, the
    constructor never connects a rank to an unrelated group of another rank.

    Args:
        name: name of the group, the same on every rank.
        call: name of the call that every rank must make, for example ``Publisher(...)``. Used in error messages.
        timeout: maximum time to wait for the slowest rank, in the constructor and in each method.

    Raises:
        RankLostError: if a rank dies, or does not create the group in time.
    """

    def __init__(self, name: str, call: str, timeout: timedelta) -> None:
        self.rank, self.world_size = rank_and_world_size()
        self._gloo: Any = None  # the type stubs lack the methods of ProcessGroupGloo
        self._lost: RankLostError | None = None
        self._is_starting = False  # True after an interrupt: a collective may have been started
        if self.world_size > 1:
            with self._typed_errors():
                self._gloo = _Rendezvous(name, call, timeout, self.rank, self.world_size).group()

    def start_all_gather(self, tensor: Tensor) -> "Gathering":
        """Start an asynchronous all-gather and return its handle. All tensors must have the same shape and dtype.

        If a rank is lost, :meth:`Gathering.result` raises the error, not this method.
        """
        if self.world_size == 1:
            return Gathering(self, [tensor])
        # gloo's all-gather passes the tensors through all ranks in turn, and each step waits for the one before. Its
        # all-to-all sends the same number of messages at once: 8 instead of 33 ms with 16 ranks on two cores.
        sent = tensor.expand(self.world_size, *tensor.shape).contiguous()
        received = torch.empty_like(sent)
        every = list(received.unbind())
        try:
            with self._typed_errors():
                group = self._group
                self._is_starting = True
                gathering = Gathering(self, every, group.alltoall_base(received, sent, [], []))
        except RankLostError:  # kept in self._lost
            gathering = Gathering(self, every)
        self._is_starting = False
        return gathering

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order. All tensors must have the same shape and dtype."""
        return self.start_all_gather(tensor).result()

    def add(self, tensor: Tensor) -> None:
        """Replace ``tensor`` in place with the elementwise sum of the tensors of all ranks."""
        if self.world_size == 1:
            return
        with self._typed_errors():
            group = self._group
            self._is_starting = True
            work = group.allreduce([tensor], dist.ReduceOp.SUM)
        self._is_starting = False
        self.wait(work)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order on rank 0, and an empty list on other ranks.

        All tensors must have the same shape and dtype. Ctrl-C takes effect only after the call.
        """
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else []
        with self._typed_errors():
            options: Any = dist.GatherOptions()
            options.rootRank = 0
            self._group.gather([tensors] if tensors else [], [tensor], options).wait()
        return tensors

    def send_all(self, tensor: Tensor) -> None:
        """Send ``tensor`` to all other ranks (see :meth:`send`). If a rank is lost, the others still receive it."""
        with self._typed_errors(), ExitStack() as waits:
            group = self._group
            for rank in range(self.world_size):
                if rank != self.rank:
                    waits.callback(group.send([tensor], rank, 0).wait)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to the rank ``rank``, which must call :meth:`receive` with this rank's number.

        Ctrl-C takes effect only after the call.
        """
        with self._typed_errors():
            self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Receive a tensor from ``rank`` and write it to ``tensor``, which must have the same shape and dtype."""
        with self._typed_errors():
            self._group.recv([tensor], rank, 0).wait()

    def wait(self, work: dist.Work | None, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for a collective of this group. Ctrl-C interrupts only the wait: the collective continues.

        ``work`` is the handle of the collective, or None if it could not be started. ``meanwhile`` is called several
        times per second during the wait.
        """
        if self._lost is not None:
            raise without_traceback(self._lost)
        assert work is not None, "no rank was lost when it was started"
        while not self._ends_soon(work):
            if meanwhile is not None:
                meanwhile()

    def _ends_soon(self, work: dist.Work) -> bool:
        """Wait briefly for a collective, so that signal handlers can run. Return True if the collective has ended."""
        with self._typed_errors():
            try:
                work.wait(_INTERRUPT_PAUSE)
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # raises the error, or returns after a success
        return True

    def close(self) -> None:
        """Wait for this rank's running collectives, then destroy the group on this rank. Not a collective."""
        self._gloo = None

    def leave(self, reason: str) -> None:
        """Make every later operation on this rank raise RankLostError with ``reason``. Not a collective.

        Call it if the ranks may have called different collectives, for example after an interrupt.
        """
        if self._lost is None:
            self._lost = RankLostError(reason)

    @property
    def lost(self) -> RankLostError | None:
        """Error that every later operation raises because a rank was lost; None if no rank was lost."""
        return None if self._lost is None else without_traceback(self._lost)

    @property
    def _group(self) -> Any:  # noqa: ANN401  the type stubs lack the methods of ProcessGroupGloo
        if self._is_starting:  # the collective may or may not have been started
            self.leave("this rank was interrupted while it started a collective")
        if self._lost is not None:
            raise without_traceback(self._lost)
        assert self._gloo is not None, "the group is closed"
        return self._gloo

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Convert a torch error to ``RankLostError``. All later calls then raise this error too."""
        try:
            yield
        except RankLostError as error:
            self._lost = without_traceback(error)
            raise
        except RuntimeError as error:  # base of DistError; gloo raises it directly
            self._lost = RankLostError(str(error).split("\n", maxsplit=1)[0])
            raise without_traceback(self._lost) from error


@dataclass(frozen=True, slots=True)
class Gathering:
    """Handle of an asynchronous all-gather, returned by :meth:`RankGroup.start_all_gather`.

    Args:
        group: group of the ranks.
        tensors: one tensor for each rank, filled by the collective.
        work: handle of the collective; None if it could not be started or if the world size is 1.
    """

    group: RankGroup
    tensors: list[Tensor]
    work: dist.Work | None = None

    def result(self, meanwhile: Callable[[], None] | None = None) -> list[Tensor]:
        """Wait for the tensors of all ranks and return them in rank order. An interrupted call can be repeated.

        ``meanwhile`` is called several times per second during the wait.
        """
        if self.group.world_size > 1:
            self.group.wait(self.work, meanwhile)
        return self.tensors


class _Rendezvous:
    """Rendezvous of all ranks that creates one gloo group. The ranks find each other in the default group's store.

    Attempts are numbered. An attempt ends when the last rank joins it or when the first rank times out, with the same
    result on all ranks: ``go`` after a success, otherwise the reason for the failure. A rank skips attempts that have
    already ended.

    A thread calls the store, because the calls block without a timeout while the process that hosts the store is
    stopped. If the caller times out first, the thread ends its attempt as soon as the store responds.
    """

    def __init__(self, name: str, call: str, timeout: timedelta, rank: int, world_size: int) -> None:
        self._name = f"delta_tracker/{name}"
        self._call = call
        self._timeout = timeout
        self._rank = rank
        self._world_size = world_size
        default: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name for it
        self._default, self._default_timeout = default, default.timeout
        self._begin = time.monotonic()
        self._deadline = self._begin + timeout.total_seconds()
        self._silent = self._awaited = _STORE  # for the error, if there is no answer, and for the log
        self._has_left = threading.Event()
        self._has_ended = threading.Event()  # Thread.join() believes that the thread has ended if it is interrupted
        self._result: Any = None  # the group, or the error for the caller

    def group(self) -> Any:  # noqa: ANN401  the type stubs lack the methods of ProcessGroupGloo
        """Wait for all ranks and return their group. Call it once."""
        try:
            # clone() retries until this timeout if the process that hosts the store is dead.
            self._default.set_timeout(self._timeout)
            thread = threading.Thread(target=self._run, name="delta_tracker-meeting", daemon=True)
            thread.start()
            self._wait()
            thread.join()
        except BaseException:
            self._has_left.set()
            self._default.set_timeout(self._default_timeout)
            self._has_ended.wait(_LEAVING_SECONDS)
            raise
        if isinstance(self._result, Exception):
            raise without_traceback(self._result)
        return self._result

    def _wait(self) -> None:
        """Wait for the thread in steps, because Python may miss a signal that arrives just as a wait begins."""
        logged, late_seconds, step_seconds = None, 0.0, _INTERRUPT_PAUSE.total_seconds()
        while not self._has_ended.wait(step_seconds):
            now = time.monotonic()
            # Steps, not the clock, count after the deadline: while this process was stopped, no answer could arrive.
            late_seconds = late_seconds + step_seconds if now >= self._deadline else 0.0
            if late_seconds >= _ANSWER_SECONDS:
                raise RankLostError(
                    f"{self._silent} did not answer rank {self._rank} within {self._timeout.total_seconds():g} s",
                    "Check the process that hosts the store, rank 0 or its launcher; if it died, restart the job",
                )
            if now >= self._begin + _QUIET_SECONDS and self._awaited not in ("", logged):
                logged = self._awaited
                _logger.warning("%s waits for %s: rank=%d", self._call, logged, self._rank)

    def _run(self) -> None:
        try:
            self._result = self._create()
        except Exception as error:  # noqa: BLE001  raised by group()
            is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, RankLostError)
            self._result = RuntimeError(f"{self._silent} failed: {error}") if is_of_torch else without_traceback(error)
        finally:
            self._has_ended.set()

    def _create(self) -> Any:  # noqa: ANN401
        # A connection of its own has its own timeout, and does not block other threads that use the default one.
        try:
            store: dist.Store = self._default.clone()
        finally:
            self._default.set_timeout(self._default_timeout)
        store.set_timeout(self._timeout)
        self._awaited = ""
        keys = dist.PrefixStore(f"{self._name}/", store)
        number = self._join(keys)
        self._deadline = time.monotonic() + self._timeout.total_seconds()
        self._silent = self._awaited = f"another rank or {_STORE}"
        prefixed = dist.PrefixStore(f"{self._name}/{number}/", store)
        try:
            # Also if the caller has left: the others find the connections closed, and do not wait for this rank.
            group: Any = dist.ProcessGroupGloo(prefixed, self._rank, self._world_size, self._timeout)
        except RuntimeError as error:
            keys.set(f"{number}/tried/{self._rank}", "")
            self._has_left.wait(_TRYING_SECONDS)
            who = self._missing(keys, f"{number}/tried") or "a rank"
            raise RuntimeError(f"{who} did not connect to rank {self._rank}: {error}") from error
        keys.set(f"{number}/tried/{self._rank}", "")
        group.options.group_name = f"{self._name}/{number}"
        return group

    def _join(self, store: dist.Store) -> int:
        number = 0
        while number == 0 or store.check([f"{number}/ended"]):
            if self._has_left.is_set():
                raise RankLostError(f"rank {self._rank} has left")  # not seen by a caller
            number = store.add(f"attempts of rank {self._rank}", 1)
        # Sets the result of the attempt unless it has one, and returns it.
        result = store.compare_set(f"{number}/ended", "", self._wait_for_ranks(store, number)).decode()
        if result != _GO:
            raise RankLostError(result, f"Call {self._call} on every rank; if a rank died, restart the job")
        return number

    def _wait_for_ranks(self, store: dist.Store, number: int) -> str:
        """Join an attempt. Wait until it ends or this rank must end it. Return the attempt's result, to be stored."""
        has_left = self._has_left.is_set
        store.set(f"{number}/{self._rank}", "here")
        if not has_left() and store.add(f"{number}/count", 1) == self._world_size and not has_left():
            return _GO
        num_known, pause = 0, _FIRST_PAUSE_SECONDS
        while not self._has_left.wait(pause):  # store.wait() cannot be ended
            if store.check([f"{number}/ended"]):
                return _GO  # not set
            now = time.monotonic()
            if now >= self._deadline:
                who, seconds = self._missing(store, number) or "a rank", self._timeout.total_seconds()
                return f"{who} did not call {self._call} within {seconds:g} s of rank {self._rank}"
            if now >= self._begin + _QUIET_SECONDS:
                num_missing = self._world_size - store.add(f"{number}/count", 0)
                if 0 < num_missing != num_known:
                    first = self._missing(store, number) if num_known == 0 else ""
                    self._awaited = first or f"{num_missing} of {self._world_size} ranks"
                    num_known = num_missing
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return f"rank {self._rank} was interrupted or gave up while it waited for the others"

    def _missing(self, store: dist.Store, number: int | str) -> str:
        """Return the ranks without a key ``{number}/{rank}`` as text such as ``rank 1, 3``; empty if all have one."""
        missing = []
        for rank in range(self._world_size):
            if not store.check([f"{number}/{rank}"]):
                missing.append(str(rank))
            self._deadline = max(self._deadline, time.monotonic())  # the store answers
        return f"rank {', '.join(missing)}" if missing else ""


def warn_if_alone(call: str) -> None:
    """Log a warning if torchrun started several ranks but no process group exists. ``call`` is the caller's name."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and ranks != "1" and not (dist.is_available() and dist.is_initialized()):
        text = (
            "%s is a call of one process alone: WORLD_SIZE=%s, but torch.distributed has no process group. Call "
            "torch.distributed.init_process_group() before, and wrap or shard the model"
        )
        _logger.warning(text, call, ranks)


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the world size. Return ``(0, 1)`` if no process group is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
