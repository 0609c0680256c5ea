"""Cases for the position in the training data under TorchRec's pipelines; each runs on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import DataPosition, ModelDeltaTracker
from delta_tracker.errors import InvalidArgumentError
from tests.models import Spec, Table, shard
from tests.tracker.flows_cases import _Parts

_NUM_BATCHES = 12


class _Batches:
    """Loader of batches in which batch ``k`` looks up row ``k``."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while self.next < _NUM_BATCHES:
            self.next += 1
            ids = torch.tensor([self.next - 1])
            yield KeyedJaggedTensor(keys=["table"], values=ids, lengths=torch.tensor([1]))

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.next = state["next"]


def pipeline(rank: int, world_size: int, name: str) -> list[int] | None:
    """Compare the position with the rows that each step changed. Return the numbers of batches ahead, by step.

    After 4 steps, the position is restored, which the old pipeline notices and a new one continues. Returns None if
    this TorchRec does not have a pipeline with this name.
    """
    kind = getattr(train_pipelines, name, None)
    if kind is None:
        return None
    spec = Spec([Table("table", _NUM_BATCHES, "row")])
    model = shard(spec)
    parts = _Parts(model, spec)
    optimizer = torch.optim.SGD(parts.dense.parameters(), lr=0.1)
    data = DataPosition(_Batches(), event_time=lambda batch: float(batch.values()[0]) + 0.5)
    aheads = []
    with ModelDeltaTracker(model) as tracker:
        tracker.attach_data(data)

        def train(steps: range) -> None:
            batches, trainer = iter(data), kind(parts, optimizer, torch.device("cpu"))
            for step in steps:
                trainer.progress(batches)
                assert tracker.progress.num_unstepped > 0
                tracker.step()
                assert tracker.progress.num_unstepped == 0
                (delta,) = tracker.get_delta().values()
                assert delta.global_ids.tolist() == [step]
                loader = {"next": step + 1}
                assert data.state_dict() == {"batches": step + 1, "event_time": step + 0.5, "loader": loader}
                data.check()
                aheads.append(data.num_ahead)
            if steps.stop == _NUM_BATCHES:
                with pytest.raises(StopIteration):
                    trainer.progress(batches)
                return
            saved = data.state_dict()
            data.load_state_dict(saved)
            assert data.state_dict() == saved
            with pytest.raises(InvalidArgumentError, match="iterator of a DataPosition"):
                trainer.progress(batches)
            tracker.get_delta()

        train(range(4))
        train(range(4, _NUM_BATCHES))
    return aheads
