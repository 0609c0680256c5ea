"""Averaging, pruning and quantization of torch, timm and diffusers: their writes are published, or refused by name."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import UnsupportedModelError
from delta_tracker.sharding import named_writers

_TABLES = ("sparse", "bag", "dense")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(24, 4, sparse=True)
        self.bag = nn.EmbeddingBag(24, 4, sparse=True)
        self.dense = nn.Embedding(24, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.norm(self.sparse(ids).sum(1) + self.bag(ids) + self.dense(ids).sum(1))
        return found


def _train(model: nn.Module, first: int) -> None:
    model.train()
    ids = torch.arange(first, first + 6).reshape(2, 3)
    (model(ids) * torch.arange(4.0)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


class _Published:
    """A model whose tables are published, and served by a predictor."""

    def __init__(self, model: nn.Module, url: str, prefix: str = "") -> None:
        self.model, self.prefix = model, prefix
        self.tracker = ModelDeltaTracker(model, ["stream", "audit"])
        self.publisher = Publisher(self.tracker, url, "stream")
        self.publisher.snapshot()
        self.served = {f"{prefix}{name}": torch.zeros(24, 4) for name in _TABLES}
        self.predictor = Predictor(self.served, url)
        self.check()
        self.tracker.get_delta("audit")

    def check(self) -> None:
        self.publisher.publish()
        self.predictor.sync()
        for name, served in self.served.items():
            weight = self.model.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            assert torch.equal(served, weight), f"{name}: {int((served != weight).any(1).sum())} rows differ"


class _DiffusersEMA:
    """The writes of diffusers' ``EMAModel``."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shadow = [each.clone().detach() for each in parameters]
        self.stored: list[Tensor] = []

    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        self.stored = [each.detach().cpu().clone() for each in parameters]

    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        for average, each in zip(self.shadow, parameters, strict=True):
            each.data.copy_(average.to(each.device).data)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        for stored, each in zip(self.stored, parameters, strict=True):
            each.data.copy_(stored.data)


def _diffusers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return diffusers' class, or one that writes as it does, under the same name."""
    try:
        from diffusers.training_utils import EMAModel  # type: ignore[import-not-found]  # noqa: PLC0415  optional
    except ModuleNotFoundError:
        module = ModuleType("diffusers.training_utils")
        EMAModel = module.EMAModel = type("EMAModel", (_DiffusersEMA,), dict(vars(_DiffusersEMA)))  # type: ignore[attr-defined]  # noqa: N806
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(named_writers, "_CALLS", named_writers._Calls())
    return EMAModel


@pytest.mark.parametrize("is_imported_first", [True, False], ids=["imported before the tracker", "imported after it"])
def test_the_copies_of_diffusers_are_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_imported_first: bool
) -> None:
    model = _Model()
    kind = _diffusers(monkeypatch) if is_imported_first else None
    published = _Published(model, f"file://{tmp_path}")
    average = (kind or _diffusers(monkeypatch))(model.parameters())
    _train(model, 3)
    published.check()
    average.store(model.parameters())
    average.copy_to(model.parameters())
    published.check()
    average.restore(model.parameters())
    published.check()
    assert all(len(ids) == 24 for name, ids in published.tracker.get_delta_ids("audit").items() if name != "dense")
    _train(model, 9)
    assert all(len(ids) == 6 for ids in published.tracker.get_delta_ids("audit").values())


def test_a_copy_in_a_hook_of_a_step_is_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = _Model()
    average = _diffusers(monkeypatch)(model.parameters())
    published = _Published(model, f"file://{tmp_path}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: average.copy_to(model.parameters()))
    _train(model, 9)
    published.check()
    model(torch.arange(6).reshape(2, 3)).square().sum().backward()
    optimizer.step()  # the hook also writes the rows of the first step
    published.check()


def test_a_write_through_data_is_published_after_mark_changed(tmp_path: Path) -> None:
    model = _Model()
    published = _Published(model, f"file://{tmp_path}")
    for each in model.parameters():
        each.data.mul_(2)
    for fqn in published.tracker.tables:
        published.tracker.mark_changed(fqn)
    published.check()


def _timm_v2(average: nn.Module, model: nn.Module) -> None:
    """Write as timm's ``ModelEma`` and ``ModelEmaV2`` do."""
    with torch.no_grad():
        for mean, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.5 * mean + 0.5 * now)


def _timm_v3(average: nn.Module, model: nn.Module) -> None:
    """Write as timm's ``ModelEmaV3`` does."""
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        torch._foreach_lerp_([mean for mean, _ in pairs[:1]], [now for _, now in pairs[:1]], weight=0.5)
        for mean, now in pairs[1:]:
            mean.lerp_(now, weight=0.5)


@pytest.mark.parametrize("update", [_timm_v2, _timm_v3])
def test_averages_of_timm_are_published(tmp_path: Path, update: Callable[[nn.Module, nn.Module], None]) -> None:
    model = _Model()
    average = copy.deepcopy(model).eval()
    published = _Published(average, f"file://{tmp_path}/average")
    trained = _Published(model, f"file://{tmp_path}/trained")
    for first in (0, 9):
        _train(model, first)
        update(average, model)
        published.check()
        trained.check()
    assert {len(ids) for ids in trained.tracker.get_delta_ids("audit").values()} == {12}  # it is only read


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"multi_avg_fn": get_swa_multi_avg_fn()}, {"use_buffers": True}],
    ids=["mean", "ema", "swa", "buffers"],
)
def test_averages_of_torch_are_published(tmp_path: Path, options: dict[str, Any]) -> None:
    model = _Model()
    average = AveragedModel(model, **options)
    published = _Published(average, f"file://{tmp_path}/average", "module.")
    trained = _Published(model, f"file://{tmp_path}/trained")
    for first in (0, 9, 15):
        _train(model, first)
        average.update_parameters(model)
        published.check()
        trained.check()
    update_bn([torch.arange(24).reshape(8, 3)], average)
    published.check()
    assert {len(ids) for ids in trained.tracker.get_delta_ids("audit").values()} == {18}  # it is only read


def test_a_vector_that_becomes_the_parameters_is_published(tmp_path: Path) -> None:
    model = _Model()
    published = _Published(model, f"file://{tmp_path}")
    vector_to_parameters(torch.cat([each.detach().flatten() + 1 for each in model.parameters()]), model.parameters())
    published.check()


def test_a_pruned_table_is_refused_until_the_mask_is_removed(tmp_path: Path) -> None:
    model = _Model()
    published = _Published(model, f"file://{tmp_path}")
    prune.random_unstructured(model.sparse, "weight", 0.5)
    with pytest.raises(UnsupportedModelError, match="'sparse'"):
        published.publisher.publish()
    _train(model, 3)
    prune.remove(model.sparse, "weight")
    published.check()
    _train(model, 9)
    published.check()


def _dynamic(model: nn.Module) -> None:
    config = {nn.EmbeddingBag: quantization.float_qparams_weight_only_qconfig}
    quantization.quantize_dynamic(model, config, inplace=True)


def _for_training(model: _Model) -> None:
    model.train()
    model.sparse.qconfig = quantization.default_embedding_qat_qconfig  # type: ignore[assignment]
    mapping = {nn.Embedding: torch.ao.nn.qat.Embedding}
    quantization.prepare_qat(model, mapping, inplace=True)


_REPLACED: dict[str, tuple[str, Callable[[_Model], object]]] = {
    "prune": ("sparse", lambda model: prune.random_unstructured(model.sparse, "weight", 0.5)),
    "weight_norm": ("sparse", lambda model: parametrizations.weight_norm(model.sparse)),
    "spectral_norm": ("sparse", lambda model: parametrizations.spectral_norm(model.sparse)),
    "parametrize": ("sparse", lambda model: register_parametrization(model.sparse, "weight", nn.Identity())),
    "old weight_norm": ("sparse", lambda model: nn.utils.weight_norm(model.sparse)),
    "old spectral_norm": ("sparse", lambda model: nn.utils.spectral_norm(model.sparse)),
    "quantize_dynamic": ("bag", _dynamic),
    "prepare_qat": ("sparse", _for_training),
}


@pytest.mark.filterwarnings("ignore")  # most of these are deprecated
@pytest.mark.parametrize("name", _REPLACED)
def test_what_replaces_a_weight_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model = _Model()
    published = _Published(model, f"file://{tmp_path}")
    table, replace = _REPLACED[name]
    replace(model)
    for read in (published.publisher.publish, lambda: published.tracker.get_delta("audit")):
        with pytest.raises(UnsupportedModelError, match=f"'{table}'"):
            read()
    published.publisher.close()
