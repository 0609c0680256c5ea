"""The predictor's side of each way to bring rows to a predictor, as its users write it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from delta_tracker import Predictor

_PIECE = 10_000  # rows of a Redis request


class Receiver:
    """Serves a table that follows the trainer.

    Args:
        place: folder of the files, or url of the Redis server.
        fqn: name of the table.
        num_rows: number of its rows, R.
        dim: number of its columns, D.
    """

    def __init__(self, place: str, fqn: str, num_rows: int, dim: int) -> None:
        del fqn
        self.place = place
        self.served = torch.zeros(num_rows, dim)

    def look(self) -> None:
        """Apply what is new. A follower in the background does this by itself."""

    def value(self, row: int) -> float:
        """Return the first value of a row, as it is served."""
        return float(self.served[row, 0])

    def table(self) -> Tensor:
        """Return all served rows, ``[R, D]``."""
        return self.served

    def close(self) -> None:
        """Stop following."""


class FromStream(Receiver):
    """This library, with a thread that follows."""

    def __init__(self, place: str, fqn: str, num_rows: int, dim: int) -> None:
        super().__init__(place, fqn, num_rows, dim)
        self._predictor = Predictor({fqn: self.served}, place)
        self._predictor.follow(poll_seconds=0.001)

    def close(self) -> None:
        """Stop the thread."""
        self._predictor.stop()


class _Files(Receiver):
    """Reads numbered files."""

    def __init__(self, place: str, fqn: str, num_rows: int, dim: int) -> None:
        super().__init__(place, fqn, num_rows, dim)
        self._number = 0

    def _next(self) -> list[Path]:
        """Return the new paths in order."""
        paths = sorted(path for path in Path(self.place).glob("[0-9]*") if int(path.name) > self._number)
        return [path for path in paths if self._is_complete(path)]

    def _is_complete(self, path: Path) -> bool:
        return path.is_file()


class FromTorchSave(_Files):
    """Loads the newest whole table."""

    def look(self) -> None:
        """Load the newest file."""
        if paths := self._next():
            loaded = torch.load(paths[-1], weights_only=True, mmap=True)
            self.served.copy_(loaded["table"])
            self._number = int(paths[-1].name)


class FromCheckpoints(_Files):
    """Loads the newest complete checkpoint into the table."""

    def look(self) -> None:
        """Load the newest folder."""
        if paths := self._next():
            dcp.load({"table": self.served}, checkpoint_id=str(paths[-1]), no_dist=True)
            self._number = int(paths[-1].name)

    def _is_complete(self, path: Path) -> bool:
        return (path / ".metadata").exists()


class FromFiles(_Files):
    """Applies each safetensors file in order."""

    def look(self) -> None:
        """Apply the new files."""
        for path in self._next():
            delta = safetensors.torch.load_file(path)
            self.served[delta["ids"]] = delta["rows"]
            self._number = int(path.name)


class FromRedis(Receiver):
    """Reads rows from Redis when they are looked up."""

    def __init__(self, place: str, fqn: str, num_rows: int, dim: int) -> None:
        super().__init__(place, fqn, num_rows, dim)
        self._client: Any = redis.Redis.from_url(place)

    def value(self, row: int) -> float:
        """Ask Redis."""
        found = self._client.get(str(row))
        return 0.0 if found is None else float(np.frombuffer(found, np.float32)[0])

    def table(self) -> Tensor:
        """Ask Redis for all rows."""
        for ids in torch.split(torch.arange(len(self.served)), _PIECE):
            rows = b"".join(self._client.mget([str(number) for number in ids.tolist()]))
            self.served[ids] = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(len(ids), -1)
        return self.served

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


RECEIVERS: dict[str, Callable[[str, str, int, int], Receiver]] = {
    "delta_tracker": FromStream,
    "torch.save": FromTorchSave,
    "dcp.async_save": FromCheckpoints,
    "TorchRec's tracker and files": FromFiles,
    "rows to Redis": FromRedis,
}
"""Name of each way to its predictor's side."""


def remove(place: str) -> None:
    """Remove the files of a way."""
    shutil.rmtree(place, ignore_errors=True)
