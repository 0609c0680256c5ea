"""Gloo process groups that contain all ranks and carry the library's messages. One thread uses each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker.errors import RankLostError, unraised

DEFAULT_TIMEOUT = timedelta(minutes=5)
TORCH_TIMEOUT = timedelta(minutes=30)  # default of torch's gloo groups, for calls without a timeout argument

_GO = "go"
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.1
_INTERRUPT_PAUSE = timedelta(seconds=0.2)


class RankGroup:
    """Gloo group of all ranks of the default process group.

    If there is no default process group, the group contains only this process.

    The constructor, :meth:`start_all_gather`, :meth:`all_gather` and :meth:`add` are collectives: all ranks call them
    in the same order, from one thread. Groups with different names may be created in any order. All ranks wait for each
    other in the default group's store before the group is created. If a rank is missing, the others raise after
    ``timeout``. All ranks may then try again.

    After a rank is lost, every later operation of the group fails too, because the other ranks may have made different
    numbers of calls.

    The group is not created by ``torch.distributed.new_group``, because that function numbers the groups of each
    process separately. If only one rank created a group, the group could be connected to an unrelated group of another
    rank.

    Args:
        name: name of the group, the same on every rank.
        call: text of the call that every rank must make, for example ``Publisher(...)``. Used in error messages.
        timeout: maximum wait for the slowest rank, in the constructor and in each method.

    Raises:
        RankLostError: if a rank dies, or does not create the group in time.
    """

    def __init__(self, name: str, call: str, timeout: timedelta) -> None:
        self.rank, self.world_size = 0, 1
        self._gloo: Any = None  # the type stubs lack the methods of ProcessGroupGloo
        self._lost: RankLostError | None = None
        self._is_starting = False  # True after an interrupt: a collective may have been started
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        with self._typed_errors():
            store = _own_store(timeout)
            meeting = _Meeting(dist.PrefixStore(f"delta_tracker/{name}/", store), call, timeout)
            number = meeting.attend(self.rank, self.world_size)
            prefixed = dist.PrefixStore(f"delta_tracker/{name}/{number}/", store)
            self._gloo = dist.ProcessGroupGloo(prefixed, self.rank, self.world_size, timeout)
            options: Any = self._gloo.options
            options.group_name = f"delta_tracker/{name}/{number}"

    def start_all_gather(self, tensor: Tensor) -> Gathering:
        """Start an asynchronous all-gather and return its handle. All tensors must have the same shape and dtype.

        If a rank is lost, this method does not raise, but :meth:`Gathering.result` does.
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
        """Return the tensors of all ranks in rank order. All tensors must have the same shape and dtype.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        return self.start_all_gather(tensor).result()

    def add(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by the elementwise sum of the tensors of all ranks, in place.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self.world_size == 1:
            return
        with self._typed_errors():
            group = self._group
            self._is_starting = True
            work = group.allreduce([tensor], dist.ReduceOp.SUM)
        self._is_starting = False
        self.wait(work)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks on rank 0 in rank order, and nothing on other ranks. They send theirs only.

        All tensors must have the same shape and dtype. Ctrl-C takes effect when the wait ends.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == 0 else []
        with self._typed_errors():
            options: Any = dist.GatherOptions()
            options.rootRank = 0
            self._group.gather([tensors] if tensors else [], [tensor], options).wait()
        return tensors

    def send_all(self, tensor: Tensor) -> None:
        """Send ``tensor`` to all other ranks, which must call :meth:`receive` with the number of this rank.

        A rank that is lost does not keep the others from receiving it. Ctrl-C takes effect when the wait ends.

        Raises:
            RankLostError: if a rank died or did not receive it in time.
        """
        with self._typed_errors(), ExitStack() as waits:
            group = self._group
            for rank in range(self.world_size):
                if rank != self.rank:
                    waits.callback(group.send([tensor], rank, 0).wait)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``, which must call :meth:`receive` with the number of this rank.

        Ctrl-C takes effect when the wait ends: gloo closes the connection if a shorter wait times out.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        with self._typed_errors():
            self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill ``tensor`` with the tensor of the same shape and dtype that ``rank`` passes to :meth:`send`.

        Ctrl-C takes effect when the wait ends, as in :meth:`send`.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        with self._typed_errors():
            self._group.recv([tensor], rank, 0).wait()

    def wait(self, work: dist.Work | None, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for a collective of this group. Ctrl-C interrupts only the wait; the collective continues.

        Args:
            work: handle of the collective; None if it could not be started.
            meanwhile: called several times per second during the wait; None for no calls.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self._lost is not None:
            raise unraised(self._lost)
        assert work is not None, "no rank was lost when it was started"
        while not self._ends_soon(work):
            if meanwhile is not None:
                meanwhile()

    def _ends_soon(self, work: dist.Work) -> bool:
        """Wait briefly for a collective, because a wait without timeout blocks signal handlers."""
        with self._typed_errors():
            try:
                work.wait(_INTERRUPT_PAUSE)
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # raises the error, or returns after a success
        return True

    def close(self) -> None:
        """Wait until this rank's running collectives have ended, and leave the group. Not a collective."""
        self._gloo = None

    def leave(self, reason: str) -> None:
        """Make every later operation of this rank fail. Not a collective.

        Call this if this rank and the other ranks may have called different collectives, for example after an
        interrupt.

        Args:
            reason: reason in the :class:`~delta_tracker.errors.RankLostError` of later operations.
        """
        if self._lost is None:
            self._lost = RankLostError(reason)

    @property
    def lost(self) -> RankLostError | None:
        """Error of each later operation, because a rank was lost; None without it."""
        return None if self._lost is None else unraised(self._lost)

    @property
    def _group(self) -> Any:  # noqa: ANN401  the type stubs lack the methods of ProcessGroupGloo
        if self._is_starting:  # the collective may or may not have been started
            self.leave("this rank was interrupted while it started a collective")
        if self._lost is not None:
            raise unraised(self._lost)
        assert self._gloo is not None, "the group is closed"
        return self._gloo

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Context manager that raises ``RankLostError`` for a torch error, and saves a copy to raise in later calls."""
        try:
            yield
        except RankLostError as error:
            self._lost = unraised(error)
            raise
        except RuntimeError as error:  # base of DistError; gloo raises it directly
            self._lost = RankLostError(str(error).split("\n", maxsplit=1)[0])
            raise unraised(self._lost) from error


@dataclass(frozen=True, slots=True)
class Gathering:
    """Handle of an asynchronous all-gather.

    Args:
        group: group of the ranks.
        tensors: one tensor for each rank, filled by the collective.
        work: handle of the collective; None if it could not be started or if the world size is 1.
    """

    group: RankGroup
    tensors: list[Tensor]
    work: dist.Work | None = None

    def result(self, meanwhile: Callable[[], None] | None = None) -> list[Tensor]:
        """Wait for the tensors of all ranks and return them in rank order. May be called again after an interrupt.

        Args:
            meanwhile: called several times per second during the wait; None for no calls.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self.group.world_size > 1:
            self.group.wait(self.work, meanwhile)
        return self.tensors


def _own_store(timeout: timedelta) -> dist.Store:
    """Return a new connection to the default group's store.

    The connection has its own timeout. A blocking call on the new connection does not block other threads that use the
    default connection.
    """
    default: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name for it
    before = default.timeout
    default.set_timeout(timeout)  # clone() retries until this timeout if the rank that hosts the store is dead
    try:
        store: dist.Store = default.clone()
    finally:
        default.set_timeout(before)
    store.set_timeout(timeout)
    return store


class _Meeting:
    """Barrier of all ranks that is implemented with keys of a torch store.

    Attempts to pass the barrier are numbered. An attempt ends when the last rank arrives or when the first rank times
    out, with the same result on all ranks: ``go`` after a success, otherwise the reason for the failure. A rank skips
    attempts that ended before it arrived.

    Args:
        store: store with the keys of this barrier only.
        call: text of the call that every rank must make, for error messages.
        timeout: maximum wait for the other ranks.
    """

    def __init__(self, store: dist.Store, call: str, timeout: timedelta) -> None:
        self._store = store
        self._call = call
        self._timeout = timeout

    def attend(self, rank: int, world_size: int) -> int:
        """Wait for all ranks and return the number of the attempt, which is the same on every rank.

        Raises:
            RankLostError: if a rank does not arrive in time.
        """
        store = self._store
        number = store.add(f"attempts of rank {rank}", 1)
        while store.check([f"{number}/ended"]):
            number = store.add(f"attempts of rank {rank}", 1)
        ended = f"{number}/ended"
        try:
            store.set(f"{number}/{rank}", "here")
            if store.add(f"{number}/count", 1) == world_size:
                reason = self._end(ended, _GO)
            elif self._waits(ended):
                reason = store.get(ended).decode()
            else:
                missing = [str(each) for each in range(world_size) if not store.check([f"{number}/{each}"])]
                who = f"rank {', '.join(missing)}" if missing else "a rank"
                waited = f"within {self._timeout.total_seconds():g} s of rank {rank}"
                reason = self._end(ended, f"{who} did not call {self._call} {waited}")
        except BaseException:
            # The other ranks have counted this one. End the attempt, so that they do not continue without it.
            with suppress(RuntimeError):
                self._end(ended, f"rank {rank} was interrupted while it waited for the others")
            raise
        if reason != _GO:
            raise RankLostError(reason, f"Call {self._call} on every rank; if a rank died, restart the job")
        return number

    def _end(self, ended: str, reason: str) -> str:
        """End an attempt unless it has ended already, and return its result.

        Args:
            ended: key of the result in the store.
            reason: result to set if the attempt has not ended: ``go`` or the reason for the failure.
        """
        return self._store.compare_set(ended, "", reason).decode()

    def _waits(self, ended: str) -> bool:
        """Wait until the key ``ended`` exists in the store. Return True if it exists, False after the timeout."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _FIRST_PAUSE_SECONDS
        while not self._store.check([ended]):  # store.wait() blocks signal handlers
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; ``(0, 1)`` if no process group is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
