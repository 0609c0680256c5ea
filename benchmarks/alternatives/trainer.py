"""The trainer's process: ``python -m benchmarks.alternatives.trainer SETTINGS``, with :class:`Settings` as JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.alternatives.senders import SENDERS, Clock
from benchmarks.ids import zipf_ids
from benchmarks.workloads import Trainer, one_rank, tables

_WORK = 256  # rows and columns of the matrices that stand for a dense model


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run of the trainer does.

    Args:
        way: name of the way to bring the rows to a predictor.
        place: folder of the files, or url of the Redis server.
        folder: folder of the clock, the checkpoint and the final table.
        num_rows: rows of the table; the last one is marked, and only it has a known value after each batch.
        dim: columns of the table.
        num_ids: lookups of a batch.
        products: matrix products of a batch, which stand for a dense model.
        interval: batches between two versions.
        first: first batch, from 1; later ones continue from the checkpoint.
        last: last batch.
        attempt: number of restarts, which changes the ids that are trained.
        checkpoint_at: batch after which a checkpoint is saved; 0 for none.
    """

    way: str
    place: str
    folder: str
    num_rows: int
    dim: int
    num_ids: int
    products: int
    interval: int
    last: int
    first: int = 1
    attempt: int = 0
    checkpoint_at: int = 0

    @property
    def clock(self) -> Path:
        """Path of the clock of this attempt."""
        return Path(self.folder) / f"clock-{self.attempt}"

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint."""
        return Path(self.folder) / "checkpoint"

    @property
    def table(self) -> Path:
        """Path of the final table of this attempt."""
        return Path(self.folder) / f"table-{self.attempt}.npy"

    def text(self) -> str:
        """Return the argument of the program."""
        return json.dumps(asdict(self))


def ids_of(settings: Settings, batch: int) -> Tensor:
    """Return the ids of a batch, ``[num_ids + 1]`` int64; the last one is the marked row."""
    generator = torch.Generator().manual_seed(batch + 1_000_000 * settings.attempt)
    found = zipf_ids(settings.num_rows - 1, settings.num_ids, generator)
    return torch.cat([found, torch.tensor([settings.num_rows - 1])])


def train(trainer: Trainer, settings: Settings, batch: int) -> Tensor:
    """Train a batch, the same for each call with the same arguments. Return its ids."""
    ids = ids_of(settings, batch)
    (table,) = trainer.tables
    pooled = trainer.model.module["ebc"](KeyedJaggedTensor([table.name], ids, lengths=torch.ones_like(ids))).values()
    gradient = torch.rand(pooled.shape, generator=torch.Generator().manual_seed(batch))
    gradient[-1] = 1  # so that the marked row descends by the learning rate
    pooled.backward(gradient)
    return ids


def main(argv: list[str]) -> None:
    """Train, and print ``ready`` before the first batch, the seconds per batch and the number of bytes at the end."""
    settings = Settings(**json.loads(argv[0]))
    torch.set_num_threads(1)
    with one_rank():
        trainer = Trainer(tables(1, settings.num_rows, settings.dim))
        sender = SENDERS[settings.way](trainer, settings.place, settings.interval)
        if settings.first > 1:
            dcp.load(
                {"model": trainer.model, **sender.restored(settings.checkpoint)},
                checkpoint_id=str(settings.checkpoint),
            )
        clock = Clock(settings.clock, settings.last)
        matrix = torch.rand(_WORK, _WORK)

        def record(batch: int) -> None:
            clock.times[batch] = time.monotonic(), float(sender.table[-1, 0])

        sender.begin()
        record(settings.first - 1)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        begin = time.perf_counter()
        for batch in range(settings.first, settings.last + 1):
            for _ in range(settings.products):
                matrix @ matrix
            ids = train(trainer, settings, batch)
            record(batch)
            sender.trained(batch, ids)
            if batch == settings.checkpoint_at:
                dcp.save({"model": trainer.model, **sender.tracked()}, checkpoint_id=str(settings.checkpoint))
        seconds = (time.perf_counter() - begin) / (settings.last + 1 - settings.first)
        sender.close()
        np.save(settings.table, sender.table.numpy())
        sys.stdout.write(json.dumps({"step": seconds, "bytes": sender.num_bytes}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
