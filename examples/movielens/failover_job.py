"""Processes of the failover demo: ranks of trainers and standbys, the predictor, and a trainer without interruption."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from ctypes import c_int64
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import DataPosition, ModelDeltaTracker, Predictor, Publisher, Recovery, Standby, Takeover
from delta_tracker.errors import FencedError, NoSnapshotError, NotRecoverableError
from examples.movielens.data import Ratings
from examples.movielens.forks import Send
from examples.movielens.model import FactorizationMachine
from examples.movielens.settings import WORLD_SIZE, Settings
from examples.movielens.trainer import save_shards, sharded_model

POLL_SECONDS = 0.005
LOOK_SECONDS = 0.1
IDLE_SECONDS = 0.1
"""Seconds between two versions while the trainer waits for ratings."""


class Batches:
    """Numbers of the batches; its state is the next one."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < self._num_batches:
            self._next += 1
            yield self._next - 1

    def state_dict(self) -> dict[str, int]:
        """Return the position after the batch that was returned last."""
        return {"next": self._next}

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401  what state_dict() returned
        """Continue at a position."""
        self._next = state["next"]


class Learner:
    """The model on this rank, and a training step. Joins the process group of a job.

    Args:
        settings: settings of the demo.
        ratings: the ratings.
        job: name of the job.
        rank: this rank.
    """

    def __init__(self, settings: Settings, ratings: Ratings, job: str, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(WORLD_SIZE)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings.work / job}",
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=settings.patience_seconds),
        )
        self._ratings = ratings
        self.model: DistributedModelParallel = sharded_model(ratings, settings)
        self._share = settings.batch // WORLD_SIZE
        self._batch = settings.batch
        self._rank = rank
        self._logits = np.lib.format.open_memmap(logits_path(settings), mode="r+")

    def step(self, number: int) -> None:
        """Predict a batch, then train on it. A batch that is trained again replaces its predictions."""
        mine = slice(start := number * self._batch + self._rank * self._share, start + self._share)
        logits: Tensor = self.model(self.model.module.jagged(self._ratings.ids[:, mine]))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, self._ratings.labels[mine])
        loss.backward()  # type: ignore[no-untyped-call]  # the fused optimizer updates the rows here
        self._logits[mine] = logits.detach().numpy()

    def digest(self) -> str:
        """Return a hash of this rank's rows and optimizer states, which are read with TorchRec."""
        found = xxhash.xxh3_128()
        tensors = dict(self.model.state_dict())
        for table, states in self.model.fused_optimizer.state_dict()["state"].items():
            tensors |= {f"{table} {name}": state for name, state in states.items()}
        for name, tensor in sorted(tensors.items()):
            for shard in tensor.local_shards():
                found.update(f"{name} {shard.metadata.shard_offsets}".encode())
                found.update(shard.tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def live(send: Send, settings: Settings, ratings: Ratings, number: int, rank: int, arrived: c_int64) -> None:
    """Follow the stream until its trainer fails, then train and publish; one rank of job ``number``.

    Args:
        send: sends events to the parent.
        settings: settings of the demo.
        ratings: the ratings.
        number: number of the job.
        rank: this rank.
        arrived: number of batches whose ratings have arrived, in memory that all processes share.
    """
    tell: Send = send if rank == 0 else lambda _: None
    learner = Learner(settings, ratings, f"job-{number}", rank)
    position: DataPosition[int] = DataPosition(Batches(settings.num_batches))
    with ModelDeltaTracker(learner.model, consumers=["stream"]) as tracker:
        tracker.attach_data(position)
        taken = stand_by(tell, settings, learner, tracker, position, number)
        if taken is not None:
            num_batches = taken.restored.num_batches
            digests_path(settings, f"job-{number}", rank).write_text(json.dumps({num_batches: learner.digest()}))
            tell({"event": "taken", "job": number, "batches": num_batches})
        publisher = Publisher(
            tracker,
            settings.stream.as_uri() if taken is None else taken.recovery,
            recovery=Recovery(heartbeat_seconds=settings.silence_seconds / 4),
        )
        try:
            for batch in position:
                while not has_arrived(batch, arrived):
                    publisher.publish()
                    time.sleep(IDLE_SECONDS)
                learner.step(batch)
                tracker.step()
                if (batch + 1) % settings.every == 0:
                    publisher.publish()
                tell({"event": "trained", "job": number, "batches": batch + 1})
            publisher.publish()
        except FencedError:  # a false alarm
            tell({"event": "fenced", "job": number})
            return
        tell({"event": "ended", "job": number})
        publisher.close()
    digests_path(settings, f"end-{number}", rank).write_text(json.dumps({settings.num_batches: learner.digest()}))
    save_shards(learner.model, settings.work, rank)
    dist.destroy_process_group()


def stand_by(
    send: Send, settings: Settings, learner: Learner, tracker: ModelDeltaTracker, position: DataPosition[int], job: int
) -> Takeover | None:
    """Return the takeover, after the trainer has failed; None if the stream is empty: this is the first trainer."""
    with contextlib.closing(
        Standby(
            learner.model,
            settings.stream.as_uri(),
            tracker=tracker,
            data=position,
            name=f"job-{job}",
            look_seconds=LOOK_SECONDS,
        )
    ) as standby:
        send({"event": "following", "job": job})
        try:
            return standby.follow(silence=settings.silence_seconds)
        except NotRecoverableError as error:
            if error.version is not None:
                raise
            return None


def has_arrived(batch: int, arrived: c_int64) -> bool:
    """Return on all ranks whether rank 0 finds that the ratings of a batch have arrived."""
    num_batches = torch.tensor(arrived.value)
    dist.broadcast(num_batches, 0)
    return batch < int(num_batches)


def train_without_interruption(
    send: Send, settings: Settings, ratings: Ratings, cuts: Sequence[int], rank: int
) -> None:
    """Train without the library, and save the digests after some numbers of batches."""
    learner = Learner(settings, ratings, "without-interruption", rank)
    digests = {}
    for batch in range(settings.num_batches):
        if batch in cuts:
            digests[batch] = learner.digest()
        learner.step(batch)
    digests[settings.num_batches] = learner.digest()
    digests_path(settings, "without-interruption", rank).write_text(json.dumps(digests))
    send({"event": "compared"})
    dist.destroy_process_group()


def serve(send: Send, settings: Settings, ratings: Ratings) -> None:
    """Apply each version, and score with it the ratings up to the next one."""
    torch.set_num_threads(1)
    model = FactorizationMachine(ratings.table_rows, settings.dim, torch.device("cpu")).eval()
    predictor = Predictor(model, settings.stream.as_uri(), name="demo")
    logits = np.zeros(len(ratings.labels), np.float32)
    deadline, num_batches, version = time.monotonic() + settings.patience_seconds, 0, None
    while num_batches < settings.num_batches:
        with contextlib.suppress(NoSnapshotError):  # the first trainer is starting
            predictor.sync(limit=1)
        manifest = predictor.manifest
        if manifest is None or manifest.version == version:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no version after {version} came within {settings.patience_seconds} seconds")
            time.sleep(POLL_SECONDS)
            continue
        now, version = time.monotonic(), manifest.version
        deadline = now + settings.patience_seconds
        num_batches = manifest.batches[1]
        end = min((num_batches // settings.every + 1) * settings.every, settings.num_batches)
        stretch = slice(num_batches * settings.batch, end * settings.batch)
        if num_batches < end:
            with torch.no_grad():
                logits[stretch] = model(model.jagged(ratings.ids[:, stretch])).numpy()
        send(
            {
                "event": "applied",
                "version": version,
                "kind": manifest.kind,
                "batches": num_batches,
                "generation": manifest.generation,
                "at": now,
                "resyncs": predictor.status().resyncs,
            }
        )
    np.save(settings.work / "fresh-logits.npy", logits)
    for name, table in model.named_parameters():
        np.save(settings.work / f"predictor@{name.removesuffix('.weight')}.npy", table.detach().numpy())


def logits_path(settings: Settings) -> Path:
    """Return the file of the trainers' predictions, one for each rating."""
    return settings.work / "trainer-logits.npy"


def digests_path(settings: Settings, name: str, rank: int) -> Path:
    """Return the file of the digests that a job saved, by number of batches."""
    return settings.work / f"digests-{name}-{rank}.json"
