"""A hook that fails loses no row: every allocation and every call of an engine in every hook fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import MissingExtraError
from delta_tracker.tracker.row_sets import numba
from tests.ranks import RankPool
from tests.sharding.hook_faults import Training, fail_at_every_point
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.sharding.hook_faults_cases"
_ROWS = 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run small operators in one thread: others take longer to wake up than the operators take."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def _stride(number: int) -> int:
    return 1 if SWEEPS_ARE_WHOLE else number


def _check(found: dict[str, int]) -> None:
    assert found["errors"] >= found["failed"] > 0


class _Plain(Training):
    """Training of sparse tables of plain modules."""

    def __init__(self, mode: str, engine: str) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {"a": nn.Embedding(_ROWS, 4, sparse=True), "b": nn.EmbeddingBag(_ROWS, 4, sparse=True)}
        )
        super().__init__(ModelDeltaTracker(self.model, mode=mode, engine=engine))
        weights = [table.weight for table in self.model.values()]
        self.optimizers = [torch.optim.Adagrad(weights[:1], lr=0.1), torch.optim.SGD(weights[1:], lr=0.1)]
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self.writing)
            optimizer.register_step_post_hook(self.written)

    def step(self, number: int) -> None:
        ids = torch.arange(8).view(2, 4) * 5 + number
        loss = self.model["a"](ids % _ROWS).sum() + self.model["b"](ids % _ROWS).sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_plain_tables(mode: str, engine: str) -> None:
    _check(fail_at_every_point(_Plain(mode, engine), stride=_stride(5)))


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize(
    ("mode", "record"), [("ID_ONLY", "updates"), ("EMBEDDING", "updates"), ("EMBEDDING", "lookups")]
)
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
def test_fused_tables(one_rank: RankPool, bag: bool, mode: str, record: str, engine: str) -> None:
    if not SWEEPS_ARE_WHOLE and bag != (engine == "torch"):
        pytest.skip("the sweeps run this test")
    arguments = {"mode": mode, "record": record, "engine": engine}
    _check(one_rank.run(f"{_CASES}:fused", bag=bag, stride=_stride(7), **arguments)[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize(("sharding", "kernel"), [("row", "dense"), ("data", "fused")], ids=["dense", "data parallel"])
def test_lookups_of_compared_tables(one_rank: RankPool, sharding: str, kernel: str, engine: str) -> None:
    arguments = {"mode": "EMBEDDING", "record": "lookups", "engine": engine}
    _check(one_rank.run(f"{_CASES}:compared", sharding=sharding, kernel=kernel, stride=_stride(5), **arguments)[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_loads(one_rank: RankPool, mode: str) -> None:
    _check(one_rank.run(f"{_CASES}:loaded", bag=False, stride=_stride(1), mode=mode, engine="numba")[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_evictions(one_rank: RankPool, mode: str) -> None:
    _check(one_rank.run(f"{_CASES}:evicting", stride=_stride(13), mode=mode)[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_replicas(two_ranks: RankPool, mode: str) -> None:
    _check(two_ranks.run(f"{_CASES}:synced", stride=_stride(13), mode=mode)[0])
