"""Compiled models: a predictor writes to the constants of a package of AOTInductor."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, Storage
from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.integrations import aot_inductor
from delta_tracker.integrations.aot_inductor import CompiledModel, compile_package
from delta_tracker.row_target import RowTarget
from tests.stream.streams import FQN, Writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is:DeprecationWarning"),  # of torch's quantization
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
]
compiles = pytest.mark.sweep("short", only=True)  # 10 s per model

INPUTS = (torch.tensor([1, 2, 3]), torch.tensor([0, 2]), torch.tensor([4, 5]))


class Model(nn.Module):
    """Two tables, one of which is zero, a linear layer whose bias is small, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(20, 4, mode="sum")
        self.item = nn.Embedding(50, 4)
        nn.init.zeros_(self.item.weight)
        self.dense = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("offset", torch.arange(4.0), persistent=False)

    def forward(self, users: Tensor, offsets: Tensor, items: Tensor) -> Tensor:
        """Return four scores for each bag."""
        return self.dense(torch.cat([self.user(users, offsets), self.item(items)], 1)) * self.scale + self.offset


def exported(model: nn.Module, inputs: tuple[Tensor, ...] = INPUTS) -> Any:
    with torch.no_grad():
        return torch.export.export(model.eval(), inputs)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_package(exported(Model()), tmp_path_factory.mktemp("compiled") / "model.pt2")


def test_the_module_of_an_exported_program_follows_a_stream() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    served = exported(nn.EmbeddingBag(20, 4, mode="sum"), INPUTS[:2]).module()
    predictor = Predictor(ModelTarget(served, names={FQN: "weight"}, dense=False), writer.storage)
    for row in range(3):
        writer.delta([row])
        predictor.sync()
        assert torch.equal(
            served(*INPUTS[:2]), nn.functional.embedding_bag(*INPUTS[:1], writer.table, INPUTS[1], mode="sum")
        )


class _Chunks(RowTarget):
    """Table that keeps a copy of a dense tensor at each write of rows."""

    def __init__(self, table: Tensor, dense: Tensor) -> None:
        self.num_rows, self.dim = table.shape
        self.dtype, self.rows, self.columns = table.dtype, (0, self.num_rows), ((0, self.dim),)
        self._table, self._dense = table, dense
        self.found: list[Tensor] = []

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        self.found.append(self._dense.clone())
        self._table[ids, slice(*columns)] = values


def test_dense_tensors_of_a_mapping_change_after_the_last_row() -> None:
    """``CompiledModel.tensors`` is such a mapping."""
    writer = Writer(Storage("memory://"))
    bias = torch.zeros(3)
    chunks = _Chunks(torch.zeros(20, 4), bias)
    predictor = Predictor(ModelTarget({FQN: chunks, "bias": bias}, chunk_rows=2), writer.storage)
    for number in range(3):
        writer.dense["bias"] = torch.full((3,), number + 1.0)
        _ = writer.delta([0, 3, 5, 7, 9]) if number else writer.snapshot()
        predictor.sync()
        assert torch.equal(bias, writer.dense["bias"])
        assert len(chunks.found) >= 3
        assert all((found == number).all() for found in chunks.found), "the tensor of the version before"
        chunks.found.clear()


@compiles
def test_a_compiled_collection_of_torchrec_follows_a_stream(tmp_path: Path) -> None:
    torchrec = pytest.importorskip("torchrec")

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"user": 20, "item": 30}
            self.bags = torchrec.EmbeddingBagCollection(
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=name, num_embeddings=num_rows, embedding_dim=4, feature_names=[name]
                    )
                    for name, num_rows in sizes.items()
                ]
            )
            self.over = nn.Linear(8, 3)

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            features = torchrec.KeyedJaggedTensor(["user", "item"], values, lengths=lengths)
            scores: Tensor = self.over(self.bags(features).values())
            return scores

    inputs = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 1, 1, 1])
    trained, url = Ranker(), (tmp_path / "stream").as_uri()
    with torch.no_grad():
        package = compile_package(torch.export.export(Ranker().eval(), inputs, strict=False), tmp_path / "m.pt2")
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(trained)
    publisher = Publisher(tracker, url, dense=trained.over)
    served = CompiledModel(package)
    predictor = Predictor(served.tensors, url)
    for number in range(3):
        optimizer.zero_grad()
        trained(*inputs).square().sum().backward()
        optimizer.step()
        tracker.step()
        manifest = publisher.publish()
        assert manifest.kind == ("delta" if number else "snapshot")
        assert predictor.sync() == manifest.version
        for name, tensor in trained.state_dict().items():
            assert torch.equal(served.tensors[name], tensor), name
        with torch.no_grad():
            torch.testing.assert_close(served(*inputs), trained(*inputs))
    publisher.close()


@compiles
def test_a_compiled_model_follows_a_stream(package: str) -> None:
    model, served = Model().eval(), CompiledModel(package, num_runners=2)
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor = Predictor(ModelTarget(served.tensors, names={FQN: "user"}, dense=False), writer.storage)
    predictor.sync()
    for name, tensor in model.state_dict().items():
        if name != "user.weight":
            served.tensors[name].copy_(tensor)
    for row in range(4):
        writer.delta([row])
        predictor.sync()
        with torch.no_grad():
            model.user.weight.copy_(writer.table)
            model.dense.bias.add_(1)
            served.tensors["dense.bias"].add_(1)
            served.tensors["scale"].mul_(2)
            model.scale.mul_(2)
            assert torch.equal(served(*INPUTS), model(*INPUTS))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
def test_a_model_of_torch_compile_follows_a_stream() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    model = nn.ModuleDict({"user": nn.EmbeddingBag(20, 4, mode="sum")})
    served = torch.compile(model["user"], backend="eager")
    predictor = Predictor(ModelTarget(served, names={FQN: "weight"}, dense=False), writer.storage)
    for row in range(3):
        writer.delta([row])
        predictor.sync()
        expected = nn.functional.embedding_bag(*INPUTS[:1], writer.table, INPUTS[1], mode="sum")
        assert torch.equal(served(*INPUTS[:2]), expected)


@pytest.mark.advice("UnsupportedModelError: _check")
@compiles
def test_a_folded_constant_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(aot_inductor._OWN_OPTIONS, "always_keep_tensor_constants")
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=r"'dense\.bias'|'scale'"):
        compile_package(exported(model), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    monkeypatch.undo()  # without the option that folds
    compile_package(exported(model), tmp_path / "model.pt2")


@compiles
def test_tensors_that_the_examples_do_not_reach_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(20, 4, mode="sum")

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.table(ids, offsets)

    unused = exported(Unused(), (torch.tensor([], dtype=torch.int64), torch.tensor([0])))
    random_state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "delta_tracker"):
        compile_package(unused, tmp_path / "m.pt2")
    assert "table.weight" in caplog.text
    assert torch.equal(torch.get_rng_state(), random_state), "the caller's random numbers"


@pytest.mark.advice("InvalidArgumentError: _tensors")
@compiles
def test_models_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    plain = exported(nn.Embedding(5, 4), (torch.tensor([1]),))
    path = tmp_path / "model.pt2"
    with pytest.raises(InvalidArgumentError, match=r"\.pt2"):
        compile_package(plain, tmp_path / "model.so")
    for option in ("freezing", "always_keep_tensor_constants", "aot_inductor.metadata"):
        with pytest.raises(InvalidArgumentError, match=option):
            compile_package(plain, path, options={option: True})

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids))

    with pytest.raises(InvalidArgumentError, match="shares memory"):
        compile_package(exported(Tied(), (torch.tensor([1]),)), path)
    normed = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4))
    with pytest.raises(InvalidArgumentError, match="running_mean"):
        compile_package(torch.export.export(normed.train(), (torch.tensor([1, 2]),)), path)
    assert list(tmp_path.iterdir()) == []
    compile_package(exported(normed.eval(), (torch.tensor([1, 2]),)), path)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{}",
        '{"format":2,"tensors":{}}',
        '{"format":1,"tensors":{"a":["F32",[-1]]}}',
        '{"format":1,"tensors":{"a":["X",[1]]}}',
        '{"format":1,"tensors":{"a":["F32",[1000000000,1000000000]]}}',
    ],
)
def test_the_metadata_of_a_package_is_checked(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    class Other:
        def get_metadata(self) -> dict[str, str]:
            return {} if text is None else {"delta_tracker": text}

    monkeypatch.setattr(aot_inductor, "_loaded", lambda *_: Other())
    with pytest.raises(InvalidArgumentError, match=r"[Cc]ompile it"):
        CompiledModel("model.pt2")
    with pytest.raises(InvalidArgumentError, match="num_runners"):
        CompiledModel("model.pt2", num_runners=0)


@compiles
def test_a_compiled_server_that_is_killed_has_the_trainers_tensors(package: str, tmp_path: Path) -> None:
    """Kill servers at random moments while versions are published; the next one equals the trainer."""
    chance, url = random.Random(7), (tmp_path / "stream").as_uri()
    torch.manual_seed(7)
    trained = Model()
    trained.user = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    tables = torch.optim.SparseAdam([trained.user.weight], lr=0.1)
    others = torch.optim.Adam([*trained.item.parameters(), *trained.dense.parameters()], lr=0.1)
    tracker = ModelDeltaTracker(trained)
    publisher = Publisher(tracker, url, dense=trained)
    program = [sys.executable, "-W", "ignore", "-m", "tests.integrations.compiled_server", package, url]
    for number in range(3):
        server = subprocess.Popen([*program, "unused"], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent.parent)
        assert server.stdout is not None
        assert server.stdout.readline() == b"follows\n"
        end = time.monotonic() + chance.uniform(0.0, 0.3)
        while time.monotonic() < end:
            for optimizer in (tables, others):
                optimizer.zero_grad()
            trained(*INPUTS).square().sum().backward()
            for optimizer in (tables, others):
                optimizer.step()
            trained.scale.mul_(0.9)
            tracker.step()
            version = publisher.publish()
        server.kill()
        server.communicate()
        out = tmp_path / f"{number}.pt"
        subprocess.run([*program, str(out), "--once"], check=True, timeout=240, cwd=Path(__file__).parent.parent.parent)
        held = torch.load(out)
        assert held["version"] == version.version
        for name, tensor in trained.state_dict().items():
            assert torch.equal(held["tensors"][name], tensor), name
        reference = CompiledModel(package)  # the same package, with the trainer's tensors
        for name, tensor in trained.state_dict().items():
            reference.tensors[name].copy_(tensor)
        assert torch.equal(held["output"], reference(*INPUTS))
        with torch.no_grad():
            torch.testing.assert_close(held["output"], trained(*INPUTS))
    publisher.close()
