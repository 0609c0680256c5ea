"""The trainer's side of each way to bring rows to a predictor, as its users write it.

All of them write files under another name first, or in one transaction, so that a reader never sees half of one.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec

from benchmarks.workloads import Trainer
from delta_tracker import Cadence, ModelDeltaTracker, Publisher
from delta_tracker.integrations.dcp import SavedTracker

_KEPT = 3  # whole tables on the disk
_PIECE = 10_000  # rows of a Redis pipeline


class Sender:
    """Sends the rows of the trainer's table; this one sends nothing.

    Args:
        trainer: the trainer, with one table.
        place: folder of the files, or url of the Redis server.
        interval: number of batches between two versions.

    Attributes:
        num_bytes: bytes that were written since :meth:`begin`.
    """

    def __init__(self, trainer: Trainer, place: str, interval: int) -> None:
        self.trainer = trainer
        self.place = place
        self.interval = interval
        self.num_bytes = 0
        (table,) = trainer.tables
        fqn = f"{trainer.fqn(table)}.weight"
        self.table: Tensor = trainer.model.state_dict()[fqn].local_tensor()

    def tracked(self) -> dict[str, Any]:
        """Return what a checkpoint has besides the model, by name."""
        return {}

    def restored(self, path: Path) -> dict[str, Any]:
        """Return the same objects, to load from a checkpoint."""
        del path
        return {}

    def begin(self) -> None:
        """Send all rows of a new trainer, or continue after a restart."""

    def trained(self, batch: int, ids: Tensor) -> None:
        """Send if it is time. Called after each batch, from number 1, with the changed rows ``ids``, ``[N]`` int64."""

    def close(self) -> None:
        """Finish what runs in the background."""


class DeltaTracker(Sender):
    """This library."""

    def __init__(self, trainer: Trainer, place: str, interval: int) -> None:
        super().__init__(trainer, place, interval)
        self._tracker = ModelDeltaTracker(trainer.model)
        self._publisher: Publisher | None = None

    def tracked(self) -> dict[str, Any]:
        """Return the tracker."""
        return {"tracker": self._tracker}

    def restored(self, path: Path) -> dict[str, Any]:
        """Return the tracker."""
        return {"tracker": SavedTracker(self._tracker, str(path))}

    def begin(self) -> None:
        """Publish a snapshot; after a restart, the publisher decides what it must send."""
        self._publisher = Publisher(self._tracker, self.place, cadence=Cadence(batches=self.interval))
        self._publisher.publish()
        self._before = _size(Path(self.place))

    def trained(self, batch: int, ids: Tensor) -> None:
        """Let the publisher decide."""
        del batch, ids
        assert self._publisher is not None
        self._tracker.step()
        self._publisher.step()

    def close(self) -> None:
        """Publish the last batches."""
        assert self._publisher is not None
        self._publisher.publish()
        self._publisher.close()
        self.num_bytes = _size(Path(self.place)) - self._before


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class _Whole(Sender, ABC):
    """Saves the whole table every interval, as numbered files or folders."""

    def begin(self) -> None:
        """Save the table."""
        Path(self.place).mkdir(exist_ok=True)
        self._number = max((int(path.name) for path in Path(self.place).glob("[0-9]*")), default=0)
        self._save()
        self.num_bytes = 0

    def trained(self, batch: int, ids: Tensor) -> None:
        """Save the table if it is time."""
        del ids
        if batch % self.interval == 0:
            self._save()

    def _next(self) -> Path:
        """Return the next path, and remove old ones."""
        self._number += 1
        old = Path(self.place) / f"{self._number - _KEPT:08d}"
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
        self.num_bytes += self.table.nbytes
        return Path(self.place) / f"{self._number:08d}"

    @abstractmethod
    def _save(self) -> None:
        """Save the table at the next path."""


class TorchSave(_Whole):
    """``torch.save`` of the table in the training thread."""

    def _save(self) -> None:
        path = self._next()
        draft = path.with_name("draft")
        torch.save({"table": self.table}, draft)
        draft.rename(path)


class AsyncSave(_Whole):
    """``dcp.async_save`` of the table; its folder is complete when it has the file ``.metadata``."""

    def __init__(self, trainer: Trainer, place: str, interval: int) -> None:
        super().__init__(trainer, place, interval)
        self._saving: Any = None

    def _save(self) -> None:
        self.close()
        self._saving = dcp.async_save({"table": self.table}, checkpoint_id=str(self._next()))

    def close(self) -> None:
        """Wait for the last checkpoint."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None


class ByHand(Sender):
    """TorchRec's own tracker, and a numbered safetensors file for each delta."""

    def __init__(self, trainer: Trainer, place: str, interval: int) -> None:
        super().__init__(trainer, place, interval)
        self._tracker = ModelDeltaTrackerTrec(trainer.model)

    def begin(self) -> None:
        """Write all rows if there is no file yet."""
        Path(self.place).mkdir(exist_ok=True)
        self._number = max((int(path.name) for path in Path(self.place).glob("[0-9]*")), default=0)
        if not self._number:
            self._write(torch.arange(len(self.table)))
            self.num_bytes = 0

    def trained(self, batch: int, ids: Tensor) -> None:
        """Write the rows that the tracker returns if it is time."""
        del ids
        if batch % self.interval == 0:
            (found,) = self._tracker.get_unique().values()  # before step(): a read after it loses the next batch
            self._write(found.ids)
        self._tracker.step()

    def _write(self, ids: Tensor) -> None:
        self._number += 1
        draft = Path(self.place) / "draft"
        safetensors.torch.save_file({"ids": ids, "rows": self.table[ids]}, draft)
        self.num_bytes += draft.stat().st_size
        draft.rename(Path(self.place) / f"{self._number:08d}")


class ToRedis(Sender):
    """The trainer collects the ids of its batches, and sets their rows in Redis in one transaction."""

    def __init__(self, trainer: Trainer, place: str, interval: int) -> None:
        super().__init__(trainer, place, interval)
        self._client = redis.Redis.from_url(place)
        self._ids: list[Tensor] = []

    def begin(self) -> None:
        """Set all rows if there are none yet."""
        if not self._client.dbsize():
            for ids in torch.split(torch.arange(len(self.table)), _PIECE):
                self._set(ids)
            self.num_bytes = 0
        self._sent = self._received()

    def trained(self, batch: int, ids: Tensor) -> None:
        """Set the rows if it is time."""
        self._ids.append(ids)
        if batch % self.interval == 0:
            self._set(torch.unique(torch.cat(self._ids)))
            self._ids = []

    def _set(self, ids: Tensor) -> None:
        rows = self.table[ids].numpy()
        with self._client.pipeline(transaction=True) as pipe:
            for number, row in zip(ids.tolist(), rows, strict=True):
                pipe.set(number, row.tobytes())
            pipe.execute()

    def _received(self) -> int:
        return int(self._client.info("stats")["total_net_input_bytes"])

    def close(self) -> None:
        """Ask Redis how many bytes it received."""
        self.num_bytes = self._received() - self._sent
        self._client.close()


SENDERS: dict[str, Callable[[Trainer, str, int], Sender]] = {
    "no tracking": Sender,
    "delta_tracker": DeltaTracker,
    "torch.save": TorchSave,
    "dcp.async_save": AsyncSave,
    "TorchRec's tracker and files": ByHand,
    "rows to Redis": ToRedis,
}
"""Name of each way to its trainer's side."""


class Clock:
    """When each batch was trained, in a file that both processes map. A kill of the trainer loses nothing of it.

    Args:
        path: path of the file.
        num_batches: most batches of a run; 0 to open the file of another process.
    """

    def __init__(self, path: Path, num_batches: int = 0) -> None:
        if num_batches:
            np.zeros((num_batches + 1, 2)).tofile(path)
        size = path.stat().st_size // 16
        self.times = np.memmap(path, dtype=np.float64, mode="r+", shape=(size, 2))
        """``[batches + 1, 2]``: monotonic seconds at the end of each batch, and the value of the marked row."""

    @property
    def batch(self) -> int:
        """Number of the newest batch; -1 before the first record."""
        return int((self.times[:, 0] > 0).sum()) - 1
