"""What the ranks of a publisher tell each other: small JSON messages over a gloo group, never rows, never pickles."""

from __future__ import annotations

import json
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
            self._lost = RankLostError(str(error).split("\n", maxsplit=1)[0])
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
