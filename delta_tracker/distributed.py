"""Gloo groups of all ranks, for the library's own messages. Only the training thread starts collectives on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker.errors import RankLostError

DEFAULT_TIMEOUT = timedelta(minutes=5)
TORCH_TIMEOUT = timedelta(minutes=30)  # of torch's own gloo groups; for calls without a timeout of their own

_GO = "go"
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.1
_INTERRUPT_PAUSE = timedelta(seconds=0.2)


class RankGroup:
    """All ranks of the default process group, joined in a gloo group of their own; a process without one is alone.

    Every method is a collective: all ranks call it in the same order, from one thread. Groups of different names may
    be built in any order. All ranks meet in the default group's store before the group is made, so that a rank that
    never comes costs ``timeout`` and leaves nothing behind: a later attempt of all ranks succeeds.

    Once a rank was lost the others may be out of step with each other, so every later call raises too.

    The group is not made by ``torch.distributed.new_group``: that one numbers the groups of each process, so that a
    group that one rank makes alone is connected to an unrelated group of another rank.

    Args:
        name: of the group, the same on every rank.
        call: what every rank has to call, as errors name it.
        timeout: how long to wait for the slowest rank, here and in each method.

    Raises:
        RankLostError: if a rank does not come in time or dies meanwhile.
    """

    def __init__(self, name: str, call: str, timeout: timedelta) -> None:
        self.rank, self.world_size = 0, 1
        self._gloo: Any = None  # The type stubs lack its methods.
        self._lost: RankLostError | None = None
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
        """Start to gather the tensors of all ranks, all of one shape and dtype; returns at once.

        It raises nothing: if a rank was lost, the result does.
        """
        if self.world_size == 1:
            return Gathering(self, [tensor])
        every = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            with self._typed_errors():
                return Gathering(self, every, self._group.allgather([every], [tensor]))
        except RankLostError:  # which the group remembers
            return Gathering(self, every)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank; all of one shape and dtype.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        return self.start_all_gather(tensor).result()

    def add(self, tensor: Tensor) -> None:
        """Replace the elements of ``tensor`` by their sums over all ranks.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self.world_size == 1:
            return
        with self._typed_errors():
            work = self._group.allreduce([tensor], dist.ReduceOp.SUM)
        self.wait(work)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to ``rank``, which calls :meth:`receive`.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        with self._typed_errors():
            self._group.send([tensor], rank, 0).wait()

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor with what ``rank`` sends.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        with self._typed_errors():
            self._group.recv([tensor], rank, 0).wait()

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective of this group, so that Ctrl-C ends the wait and not the collective.

        Args:
            work: the collective; None for one that could not be started.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self._lost is not None:
            raise self._lost
        assert work is not None, "no rank was lost when it was started"
        with self._typed_errors():
            while True:
                try:
                    work.wait(_INTERRUPT_PAUSE)  # without a timeout, Python would hear of no signal
                    break
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # it failed, or has just succeeded
                        break

    def close(self) -> None:
        """Leave the group. No collective; a collective of this rank that is under way is waited for."""
        self._gloo = None

    @property
    def _group(self) -> Any:  # noqa: ANN401  as above
        if self._lost is not None:
            raise self._lost
        assert self._gloo is not None, "the group is closed, or this process is alone"
        return self._gloo

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Raise :class:`~delta_tracker.errors.RankLostError` for what torch raises when a rank is lost."""
        try:
            yield
        except RankLostError as error:
            self._lost = error
            raise
        except RuntimeError as error:  # DistError is one; gloo raises it bare
            self._lost = RankLostError(str(error).split("\n", maxsplit=1)[0])
            raise self._lost from error


@dataclass(frozen=True, slots=True)
class Gathering:
    """The tensors of all ranks, on their way to this one.

    Args:
        group: the ranks.
        tensors: one for each rank, filled by the collective.
        work: the collective; None for one that could not be started, or of a process that is alone.
    """

    group: RankGroup
    tensors: list[Tensor]
    work: dist.Work | None = None

    def result(self) -> list[Tensor]:
        """Return the tensors, by rank, once all have come. Interrupted, it can be called again.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self.group.world_size > 1:
            self.group.wait(self.work)
        return self.tensors


def _own_store(timeout: timedelta) -> dist.Store:
    """Return a connection of its own to the default group's store.

    Its timeout is not shared, and a call that blocks in it does not block other threads' calls.
    """
    default: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name for it
    before = default.timeout
    default.set_timeout(timeout)  # as long clone() tries to reach the store of a dead rank
    try:
        store: dist.Store = default.clone()
    finally:
        default.set_timeout(before)
    store.set_timeout(timeout)
    return store


class _Meeting:
    """Waits in a store until every rank has come.

    Each attempt ends once, for all ranks alike: with ``go`` by the last rank that comes, or with the reason of the
    first one that waits no longer. A rank skips the attempts that ended before it came.

    Args:
        store: a store of this meeting's own keys.
        call: what every rank has to call.
        timeout: how long to wait.
    """

    def __init__(self, store: dist.Store, call: str, timeout: timedelta) -> None:
        self._store = store
        self._call = call
        self._timeout = timeout

    def attend(self, rank: int, world_size: int) -> int:
        """Return the number of the attempt, the same on every rank.

        Raises:
            RankLostError: if a rank does not come in time.
        """
        store = self._store
        number = store.add(f"attempts of rank {rank}", 1)
        while store.check([f"{number}/ended"]):
            number = store.add(f"attempts of rank {rank}", 1)
        ended = f"{number}/ended"
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
        if reason != _GO:
            raise RankLostError(reason, f"Call {self._call} on every rank; if a rank died, restart the job")
        return number

    def _end(self, ended: str, reason: str) -> str:
        """End an attempt unless it has ended; return how it ended."""
        return self._store.compare_set(ended, "", reason).decode()

    def _waits(self, ended: str) -> bool:
        """Wait for the end of an attempt; return whether it came in time."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = _FIRST_PAUSE_SECONDS
        while not self._store.check([ended]):  # wait() could not be interrupted
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True
