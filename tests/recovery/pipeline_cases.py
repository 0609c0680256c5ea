"""A job with a pipeline that fetches batches ahead, killed and resumed; runs on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tests.models
from delta_tracker import DataPosition, ModelDeltaTracker, Publisher, Recovery
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.recovery.restore import restore
from tests.models import Spec, Table, ordinary_optimizer, shard

_NUM_STEPS, _NUM_PUBLISHED = 8, 4


class _Model(tests.models.Model):
    """Model with running statistics and random numbers, that also returns its batch."""

    def __init__(self, spec: Spec, device: str) -> None:
        super().__init__(spec, device)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, KeyedJaggedTensor]:  # type: ignore[override]
        rows = self.ec(features)["row"].values()
        return self.dense(self.dropout(self.norm(rows))).sum(), features


class _Loader:
    """Loader of batches that are drawn by their number and the rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while True:
            self.next += 1
            yield _batch(100 * self.next + self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["next"]


@dataclass
class _Job:
    model: DistributedModelParallel
    optimizer: KeyedOptimizerWrapper
    scheduler: torch.optim.lr_scheduler.StepLR
    data: DataPosition[KeyedJaggedTensor]

    def train(self, tracker: ModelDeltaTracker, num_steps: int, publisher: Publisher | None) -> list[list[int]]:
        """Return the ids of each batch. Publish the first versions."""
        pipeline = TrainPipelineSparseDist(self.model, self.optimizer, torch.device("cpu"))
        batches, trained = iter(self.data), []
        for step in range(num_steps):
            trained.append(pipeline.progress(batches).values().tolist())
            self.scheduler.step()
            tracker.step()
            if publisher is not None and step < _NUM_PUBLISHED:
                publisher.publish()
        return trained

    @property
    def state(self) -> list[Any]:
        tensors = [
            *dict(self.model.named_parameters()).values(),
            *dict(self.model.module.norm.named_buffers()).values(),
        ]
        numbers = [self.scheduler.get_last_lr(), self.scheduler.last_epoch, self.data.num_batches]
        return [*(tensor.tolist() for tensor in tensors), *numbers, torch.rand(1).item()]


def _batch(seed: int) -> KeyedJaggedTensor:
    ids = torch.randint(0, 30, (6,), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(keys=["row"], values=ids, lengths=torch.tensor([6]))


def _job(rank: int, seed: int) -> _Job:
    """Return a job after two batches of warm-up, with random generators of another seed."""
    plain = tests.models.Model
    tests.models.Model = _Model  # type: ignore[misc]
    try:
        model = shard(Spec([Table("row", 30, "row")]))
    finally:
        tests.models.Model = plain  # type: ignore[misc]
    torch.manual_seed(seed)
    optimizer = ordinary_optimizer(model, "Adam", lr=0.05)
    optimizer.save_param_groups(True)
    for number in range(2):
        optimizer.zero_grad()
        model(_batch(number))[0].backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer._optimizer, step_size=3, gamma=0.7)
    return _Job(model, optimizer, scheduler, DataPosition(_Loader(rank)))


def resumed(rank: int, world_size: int, url: str) -> list[list[int]]:
    """Resume a job of which two batches were fetched and not trained; compare with the job that was not killed."""
    job = _job(rank, seed=rank)
    objects: dict[str, Any] = {"optimizer": job.optimizer, "scheduler": job.scheduler}
    with ModelDeltaTracker(job.model) as tracker:
        tracker.attach_data(job.data)
        states = {"random": RandomStates()}
        publisher = Publisher(tracker, url, recovery=Recovery(training_state=objects, rank_state=states))
        trained = job.train(tracker, _NUM_STEPS, publisher)
        publisher.close()
    expected = job.state

    again = _job(rank, seed=100 + rank)
    objects = {"optimizer": again.optimizer, "scheduler": again.scheduler}
    with ModelDeltaTracker(again.model) as tracker:
        tracker.attach_data(again.data)
        states = {"random": RandomStates()}
        recovery = Recovery(training_state=objects, rank_state=states)
        restored = restore(again.model, url, tracker=tracker, recovery=recovery, data=again.data)
        assert restored.num_batches == again.data.num_batches == _NUM_PUBLISHED
        rest = again.train(tracker, _NUM_STEPS - _NUM_PUBLISHED, None)
    assert trained[_NUM_PUBLISHED:] == rest
    assert again.state == expected
    return rest
