"""A hook that fails loses no row: every allocation and every call of an engine in every hook fails."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import MissingExtraError
from delta_tracker.tracker.row_sets.numba import NumbaRows, load_loops
from delta_tracker.tracker.row_sets.torch import TorchRows
from tests.ranks import RankPool
from tests.sharding.hook_faults import READS, EngineError, Faults, Training, fail_at_every_point
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.sharding.hook_faults_cases"
_ROWS = 64


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    """A process of its own: an exception at the end of a ``with`` statement may leave the state of its thread."""
    pool = RankPool(1)
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def _alone() -> None:
    """Delete the trackers of earlier tests: their hooks see the steps of all optimizers, and would fail instead."""
    gc.collect()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run small operators in one thread: others take longer to wake up than the operators take."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def _stride(number: int, whole: int = 1) -> int:
    return whole if SWEEPS_ARE_WHOLE else number


def _places(half: bool) -> tuple[str, ...]:
    """Return where the consumer reads. In the short form, two tests have half of the places each."""
    return READS if SWEEPS_ARE_WHOLE else READS[int(half) :: 2]


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
    _check(fail_at_every_point(_Plain(mode, engine), _places(engine == "torch"), _stride(23)))


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
    whens = _places(engine == "torch")
    _check(one_rank.run(f"{_CASES}:fused", bag=bag, whens=whens, stride=_stride(29, 3), **arguments)[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("kind", ["fused", "evicting"])
def test_every_line(one_rank: RankPool, kind: str) -> None:
    _check(one_rank.run(f"{_CASES}:lines", kind=kind, stride=_stride(37, 2), mode="EMBEDDING", engine="numba")[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize(("sharding", "kernel"), [("row", "dense"), ("data", "fused")], ids=["dense", "data parallel"])
def test_lookups_of_compared_tables(one_rank: RankPool, sharding: str, kernel: str, engine: str) -> None:
    arguments = {"mode": "EMBEDDING", "record": "lookups", "engine": engine}
    _check(one_rank.run(f"{_CASES}:compared", sharding=sharding, kernel=kernel, stride=_stride(13), **arguments)[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_loads(one_rank: RankPool, mode: str) -> None:
    _check(one_rank.run(f"{_CASES}:loaded", bag=False, stride=_stride(1), mode=mode, engine="numba")[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_evictions(one_rank: RankPool, mode: str) -> None:
    _check(one_rank.run(f"{_CASES}:evicting", whens=_places(mode == "ID_ONLY"), stride=_stride(29, 2), mode=mode)[0])


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "contained")
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_replicas(two_ranks: RankPool, mode: str) -> None:
    _check(two_ranks.run(f"{_CASES}:synced", stride=_stride(29, 2), mode=mode)[0])


@pytest.mark.promise("lossless", "contained")
def test_rows_are_not_lost_if_memory_is_missing_during_a_step() -> None:
    training = _Plain("ID_ONLY", "torch")
    with Faults(0, for_ever=True):
        training.step(0)
    assert training.tracker.num_hook_errors > 0
    assert training.tracker.get_delta_ids()["a"].tolist() == list(range(_ROWS))
    assert training.tracker.get_delta().num_rows == 0


@pytest.mark.promise("lossless", "contained")
def test_a_stream_is_complete_if_memory_is_missing_during_a_step_and_a_publish(tmp_path: Path) -> None:
    training, serving = _Plain("ID_ONLY", "numba"), _Plain("ID_ONLY", "numba")
    serving.tracker.detach()
    served = serving.model
    with closing(Publisher(training.tracker, tmp_path.as_uri())) as publisher:
        predictor = Predictor(served, tmp_path.as_uri())
        for number in range(4):
            with Faults(10 * number, for_ever=True):
                training.step(number)
                with pytest.raises(MemoryError):
                    publisher.publish()
            publisher.publish()
            predictor.sync()
            for name, table in training.model.items():
                assert torch.equal(table.weight, served[name].weight)  # type: ignore[arg-type]


@pytest.mark.promise("refused")
def test_a_missing_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_loops.cache_clear()
    monkeypatch.setitem(sys.modules, "delta_tracker.tracker.row_sets.numba_loops", None)  # its import then fails
    model = nn.ModuleDict({"a": nn.Embedding(_ROWS, 4, sparse=True)})
    with pytest.raises(MissingExtraError, match=r"\[numba\]'"):
        ModelDeltaTracker(model, engine="numba")
    assert ModelDeltaTracker(model).store["a"].engine is TorchRows


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("name", ["mark", "mark_new", "scan", "mark_all"])
@pytest.mark.parametrize("mode", ["ID_ONLY", "EMBEDDING"])
def test_an_engine_that_fails_is_replaced(mode: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: object) -> None:
        calls.append(name)
        raise EngineError("does not compile")

    training = _Plain(mode, "numba")
    training.step(0)
    training.copy.read()
    training.step(1)
    # Whether an engine raised an error is seen by the module in which it was raised.
    in_engine = FunctionType(fail.__code__, {**globals(), "__name__": NumbaRows.__module__}, closure=fail.__closure__)
    monkeypatch.setattr(NumbaRows, name, in_engine)
    training.tracker.mark_changed("b") if name == "mark_all" else training.step(2)
    training.copy.read()
    training.step(3)
    counts = training.copy.read()
    assert counts["b"] <= training.most_rows
    used = {store.engine for store in training.tracker.store.values()}
    assert (TorchRows in used) == bool(calls)
