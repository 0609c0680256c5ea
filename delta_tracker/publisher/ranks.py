"""What the ranks of a publisher tell each other: small JSON messages over a gloo group, never rows, never pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from delta_tracker.distributed import DEFAULT_TIMEOUT, RankGroup, join, typed_errors
from delta_tracker.errors import RankLostError

CALL = "Publisher(...)"


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    Every method is a collective: all ranks call it, in the same order. Once a rank was lost the others may be out of
    step with each other, so every later call raises too.

    Args:
        timeout: how long to wait for the slowest rank; after it the call raises on every other one.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._group = join("messages", CALL, timeout)
        self.rank = 0 if self._group is None else self._group.rank
        # No other thread starts a collective on this group, whichever thread calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher-ranks")
        self._lost: RankLostError | None = None

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, by rank, the same everywhere.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        if self._lost is not None:
            raise self._lost
        if self._group is None:
            return [message]
        try:
            return self._thread.submit(self._all_gather, self._group, json.dumps(message)).result()
        except RankLostError as error:
            self._lost = error
            raise

    @staticmethod
    def _all_gather(group: RankGroup, text: str) -> list[dict[str, Any]]:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = group.all_gather(torch.tensor([len(data)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = group.all_gather(padded)
        return [json.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(gathered, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        self._thread.shutdown()
        if self._group is not None:
            self._group.close()
            self._group = None


class Flags:
    """Small numbers of which all ranks learn the largest, one call later, so that nobody waits for anybody.

    A collective as :class:`Ranks`: all ranks call :meth:`start` and :meth:`result` in turns.

    Args:
        timeout: as of :class:`Ranks`.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._group = join("flags", CALL, timeout)
        self._values: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, values: Sequence[int]) -> None:
        """Tell this rank's numbers; returns at once.

        Raises:
            RankLostError: if a rank died.
        """
        self._values = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            self._work = self._group.start_max(self._values)

    def result(self) -> list[int] | None:
        """The largest of what the ranks told last, None before anything was told or when it was asked for already.

        Raises:
            RankLostError: if a rank died or did not answer in time.
        """
        values, self._values = self._values, None
        work, self._work = self._work, None
        if work is not None:
            with typed_errors():
                work.wait()
        return None if values is None else [int(value) for value in values]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None
