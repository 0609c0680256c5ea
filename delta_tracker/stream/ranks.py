"""What the ranks of a publisher tell each other: small JSON messages over a gloo group, never rows, never pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from delta_tracker.errors import RankLostError

DEFAULT_TIMEOUT = timedelta(minutes=5)


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    Every method is a collective: all ranks call it, in the same order. Once a rank was lost the others may be out of
    step with each other, so every later call raises too.

    Args:
        timeout: how long to wait for the slowest rank; after it the call raises on every other one.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_distributed else 0
        self.world_size = dist.get_world_size() if is_distributed else 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if is_distributed else None
        self._lost: RankLostError | None = None

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, by rank, the same everywhere.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self._lost is not None:
            raise self._lost
        text = json.dumps(message)
        if self._group is None:
            return [json.loads(text)]
        try:
            return self._all_gather(text)
        except RuntimeError as error:
            self._lost = _lost(error)
            raise self._lost from error

    def _all_gather(self, text: str) -> list[dict[str, Any]]:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return [json.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(gathered, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class Flags:
    """Small numbers of which all ranks learn the largest, one call later, so that nobody waits for anybody.

    A collective as :class:`Ranks`: all ranks call :meth:`start` and :meth:`result` in turns.

    Args:
        timeout: as of :class:`Ranks`.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if is_distributed else None
        self._values: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, values: Sequence[int]) -> None:
        """Tell this rank's numbers; returns at once.

        Raises:
            RankLostError: if a rank died.
        """
        self._values = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            try:
                self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group=self._group, async_op=True)
            except RuntimeError as error:
                raise _lost(error) from error

    def result(self) -> list[int] | None:
        """The largest of what the ranks told last, None before anything was told or when it was asked for already.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        values, self._values = self._values, None
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(error) from error
        return None if values is None else [int(value) for value in values]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _lost(error: RuntimeError) -> RankLostError:
    return RankLostError(str(error).split("\n", maxsplit=1)[0])
