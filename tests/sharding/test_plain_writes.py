"""Rare ways to write to tables without sharding: every changed row is sent, or the table is refused."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn
from torch.multiprocessing.reductions import StorageWeakRef

from delta_tracker import Cadence, Encoding, ModelDeltaTracker, Predictor, Publisher, Recovery, Storage, restore
from delta_tracker.errors import InvalidArgumentError, ModelMismatchError, UnsupportedModelError
from delta_tracker.publisher.cadence import CadenceProgress
from delta_tracker.sharding import step_hook
from delta_tracker.sharding.step_hook import StepHook
from delta_tracker.stream.reading.runtime import REAL

_ROWS = 400


def _model(**options: Any) -> nn.ModuleDict:
    torch.manual_seed(5)
    return nn.ModuleDict({"u": nn.Embedding(_ROWS, 4, **{"sparse": True, **options})})


def _weight(model: nn.Module) -> Tensor:
    weight: Tensor = model["u"].weight.detach()  # type: ignore[index, union-attr]
    return weight


def _backward(model: nn.Module, *ids: int) -> Tensor:
    loss: Tensor = model["u"](torch.tensor(ids)).sum()  # type: ignore[index, operator]
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _lost(model: nn.Module, tracker: ModelDeltaTracker, before: Tensor) -> list[int]:
    """Return the rows that differ from ``before`` and are not in the next delta."""
    differs = (_weight(model).view(torch.int32) != before.view(torch.int32)).any(1).nonzero()[:, 0].tolist()
    assert differs, "nothing was written"
    return sorted(set(differs) - set(tracker.get_delta_ids()["u"].tolist()))


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_that_is_cast_and_cast_back_is_sent(dtype: torch.dtype) -> None:
    """The new memory may get the address of the old one."""
    model = _model()
    tracker = ModelDeltaTracker(model)
    for _ in range(20):
        before = _weight(model).clone()
        model["u"].to(dtype).to(torch.float32)
        tracker.step()
        if not torch.equal(_weight(model), before):
            assert _lost(model, tracker, before) == []
        with torch.no_grad():
            model["u"].weight.uniform_()
        tracker.get_delta()


def test_the_memory_of_a_replaced_weight_is_freed() -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    former = StorageWeakRef(_weight(model).untyped_storage())  # type: ignore[no-untyped-call]
    model.half()
    assert former.expired()  # type: ignore[no-untyped-call]
    tracker.detach()


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_module_with_other_gradients_is_tracked_in_another_way_after_reattach(is_sparse: bool) -> None:
    model = _model(sparse=not is_sparse)
    tracker = ModelDeltaTracker(model)
    model["u"] = nn.Embedding(_ROWS, 4, sparse=is_sparse)
    tracker.reattach()
    assert tracker.get_delta_ids()["u"].tolist() == list(range(_ROWS))
    before = _weight(model).clone()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1) if is_sparse else torch.optim.Adam(model.parameters(), fused=True)
    )
    _backward(model, 4)
    optimizer.step()
    tracker.step()
    assert _lost(model, tracker, before) == []
    assert tracker.memory().copy_bytes == (0 if is_sparse else before.nbytes)


@pytest.mark.promise("refused")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_module_that_was_replaced_is_in_no_checkpoint(is_sparse: bool) -> None:
    model = _model(sparse=is_sparse)
    tracker = ModelDeltaTracker(model)
    model["u"] = nn.Embedding(_ROWS, 4, sparse=is_sparse)
    with pytest.raises(UnsupportedModelError, match="its module was replaced"):
        tracker.state_dict()


def _zero_grad(optimizer: torch.optim.Optimizer, *_: object) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_a_hook_after_a_closure_may_change_the_gradient(name: str) -> None:
    model = _model()
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(_zero_grad)
    optimizer.step(lambda: _backward(model, 3, 4))
    assert _lost(model, tracker, before) == []


@pytest.mark.promise("lossless")
def test_a_fused_optimizer_of_another_parameter_in_the_same_memory_is_noticed() -> None:
    model = _model()
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    alias = nn.Parameter(model["u"].weight)  # type: ignore[arg-type]
    alias.grad = torch.ones_like(alias)
    torch.optim.Adam([alias], fused=True).step()
    assert _lost(model, tracker, before) == []


@pytest.mark.promise("lossless")
def test_a_momentum_that_is_loaded_in_a_hook_is_noticed() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _backward(model, 1, 2)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    optimizer.zero_grad()
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    _backward(model, 7)
    optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.load_state_dict(saved))
    optimizer.step()
    assert tracker.progress.num_unstepped == 1
    assert _lost(model, tracker, before) == []


@pytest.mark.promise("lossless")
def test_a_write_of_another_thread_at_the_end_of_a_step_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model, 1)
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    *_, hook = step_hook._STEPS._hooks.values()
    versions, calls = StepHook._versions, []

    def write() -> None:
        with torch.no_grad():
            model["u"].weight[200] += 1  # type: ignore[index, union-attr, operator]

    def interleaved(called: StepHook) -> dict[str, int]:
        found = versions(called)
        calls.extend([1] if called is hook else [])
        if called is hook and len(calls) == 2:  # after the step, before its write is acknowledged
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        return found

    monkeypatch.setattr(StepHook, "_versions", interleaved)
    optimizer.step()
    assert _lost(model, tracker, before) == []


def _train(model: nn.ModuleDict) -> None:
    _backward(model, 3)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_rows_that_another_process_trains_in_shared_memory_are_sent(is_sparse: bool) -> None:
    model = _model(sparse=is_sparse)
    model.share_memory()
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    process = multiprocessing.get_context("fork").Process(target=_train, args=(model,))
    process.start()
    process.join()
    assert _lost(model, tracker, before) == []


@pytest.mark.promise("lossless")
def test_an_optimizer_that_failed_and_is_gone_does_not_stop_publishing() -> None:
    model, storage = _model(), Storage("memory://")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, storage, recovery=Recovery(training_state={"optimizer": optimizer})) as publisher:
        publisher.snapshot()
        failing = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)  # cannot add sparse and dense tensors
        _backward(model, 1, 2)
        with pytest.raises(RuntimeError, match="sparse"):
            failing.step()
        del failing
        gc.collect()
        for _ in range(2):
            optimizer.zero_grad()
            _backward(model, 5)
            optimizer.step()
            tracker.step()
            publisher.publish()
        assert publisher.publish().num_rows == 0
    served = _model()
    Predictor(served, storage).sync()
    assert torch.equal(_weight(served), _weight(model))


def test_an_optimizer_without_a_hash_is_tracked() -> None:
    class Unhashable(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

    model = _model()
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    _backward(model, 1)
    Unhashable(model.parameters(), lr=0.1).step()
    assert _lost(model, tracker, before) == []


def test_a_gradient_that_a_hook_clears_is_reported_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    tracker, before = ModelDeltaTracker(model), _weight(model).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(_zero_grad)
    _backward(model, 1)
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert "all rows count as changed after a gradient that changed during a step" in caplog.text
    assert _lost(model, tracker, before) == []


@pytest.mark.parametrize("call", [ModelDeltaTracker.step, ModelDeltaTracker.num_pending])
def test_a_weight_that_is_parametrized_later_stops_no_training(call: Callable[[ModelDeltaTracker], object]) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    nn.utils.parametrizations.weight_norm(model["u"])  # type: ignore[arg-type]
    call(tracker)
    with pytest.raises(UnsupportedModelError, match="its weight is now missing"):
        tracker.get_delta()


@pytest.mark.promise("refused")
def test_a_table_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = _model()
    with pytest.raises(UnsupportedModelError, match="an inference tensor"):
        ModelDeltaTracker(model)


def test_a_frozen_table_is_restored_without_an_optimizer() -> None:
    def build() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        model = _model(sparse=False)
        model["f"] = nn.Embedding.from_pretrained(torch.randn(20, 4))
        return model, torch.optim.Adam(model["u"].parameters())

    (model, optimizer), (resumed, other) = build(), build()
    storage, tracker = Storage("memory://"), ModelDeltaTracker(model)
    with Publisher(tracker, storage, recovery=Recovery(training_state={"optimizer": optimizer})) as publisher:
        publisher.snapshot()
        _backward(model, 3)
        optimizer.step()
        tracker.step()
        publisher.publish()
    restore(resumed, storage, recovery=Recovery(training_state={"optimizer": other}))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


@pytest.mark.promise("refused")
def test_tied_weights_of_a_predictor_are_refused_with_what_the_trainer_must_do() -> None:
    model = _model()
    model["b"] = nn.Embedding(_ROWS, 4, sparse=True)
    model["b"].weight = model["u"].weight
    storage = Storage("memory://")
    with Publisher(ModelDeltaTracker(model), storage) as publisher:
        publisher.snapshot()
    served = copy.deepcopy(model)
    with pytest.raises(ModelMismatchError, match="fqns_to_skip"):
        Predictor(served, storage).sync()
    other = Storage("memory://")
    with Publisher(ModelDeltaTracker(model, fqns_to_skip=["b"]), other) as publisher:
        publisher.snapshot()
    Predictor(served, other).sync()
    assert torch.equal(_weight(served), _weight(model))


def _train_all(model: nn.ModuleDict) -> None:
    for module in model.values():
        module(torch.tensor([4])).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_table_that_left_the_model_is_not_published_after_reattach(
    tmp_path: Path, is_renamed: bool, is_sparse: bool
) -> None:
    model = nn.ModuleDict({name: nn.Embedding(_ROWS, 4, sparse=is_sparse) for name in ("u", "v")})
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, tmp_path, encoding={"v": "f32"}) as publisher:
        publisher.snapshot()
        _train_all(model)
        module = model.pop("v")
        if is_renamed:
            model["w"] = module
        tracker.reattach()
        assert {*tracker.tables} == {*tracker.shards} == {*tracker.num_pending()} == {*model}
        assert {*tracker.progress.num_recorded} == {*model}
        served = nn.ModuleDict({name: nn.Embedding(_ROWS, 4) for name in model})
        predictor = Predictor(served, tmp_path)
        for _ in range(2):
            _train_all(model)
            assert publisher.publish().version == predictor.sync()
            assert all(torch.equal(served[name].weight, model[name].weight) for name in model)
    with pytest.raises(InvalidArgumentError, match="Pass one of the tracked tables"):
        tracker.mark_changed("v")
    ModelDeltaTracker(model).load_state_dict(tracker.state_dict())


def test_a_publisher_takes_the_dtype_that_a_table_has_after_reattach(tmp_path: Path) -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, tmp_path) as publisher:
        publisher.snapshot()
        model.half()
        tracker.reattach()
        (part,) = publisher.publish().parts
    assert [block.encoding for block in part.blocks] == [Encoding.F16]


@pytest.mark.parametrize("bounds", [{"rows": 3}, {"num_bytes": 3 * 4 * 4}])
def test_a_bound_on_rows_holds_after_a_table_has_left_the_model(tmp_path: Path, bounds: dict[str, int]) -> None:
    model = nn.ModuleDict({name: nn.Embedding(_ROWS, 4, sparse=True) for name in ("u", "v")})
    tracker = ModelDeltaTracker(model)
    tracker.mark_changed("v")
    pace = CadenceProgress(Cadence(**bounds), tracker, "default", num_batches=1, runtime=REAL)
    tracker.get_delta()
    pace.restart()
    del model["v"]
    tracker.reattach()
    tracker.mark_changed("u", torch.tensor([1, 2]))
    assert not pace.is_due(is_clock=True)
    tracker.mark_changed("u", torch.tensor([3]))
    assert pace.is_due(is_clock=True)


def test_a_reattach_that_is_refused_names_what_works() -> None:
    model = nn.ModuleDict({name: nn.Embedding(_ROWS, 4, sparse=True) for name in ("u", "v")})
    tracker = ModelDeltaTracker(model)
    nn.utils.parametrize.register_parametrization(model["v"], "weight", nn.Identity())
    with pytest.raises(UnsupportedModelError, match="Undo the change of the model, or detach the tracker"):
        tracker.reattach()
    tracker.detach()
    assert list(ModelDeltaTracker(model, fqns_to_skip=["v"]).tables) == ["u"]
    nn.utils.parametrize.remove_parametrizations(model["v"], "weight")
    tracker.reattach()
    assert list(tracker.tables) == ["u", "v"]
