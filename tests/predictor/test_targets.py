"""Targets in plain models: found by name, checked before anything is written, written bit for bit."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from delta_tracker.errors import InvalidArgumentError, TableMismatchError
from delta_tracker.predictor.targets import check_targets, find_targets
from delta_tracker.row_target import Region, RowTarget, TensorTarget, write_rows
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import TableSpec

_ROOT = Path(__file__).parent.parent.parent


def _manifest(*names: str, num_rows: int = 20, dim: int = 4, dtype: torch.dtype = torch.float32) -> Manifest:
    tables = {name: TableSpec(name, num_rows, dim, dtype) for name in names}
    return Manifest(stream="", generation=0, writer="", version=0, kind="delta", created=0.0, tables=tables)


class _Sink(RowTarget):
    def __init__(self, rows: tuple[int, int] = (0, 20), columns: tuple[tuple[int, int], ...] = ((0, 4),)) -> None:
        self.num_rows, self.dim, self.dtype = 20, 4, torch.float32
        self.rows, self.columns = rows, columns

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("bag", [False, True])
def test_unsharded_collections_are_found_by_their_names(bag: bool) -> None:
    kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if bag else (EmbeddingCollection, EmbeddingConfig)
    tables = [config(name=name, num_embeddings=20, embedding_dim=4, feature_names=[name]) for name in ("a", "b")]
    model = nn.ModuleDict({"ec": kind(tables=tables), "over": nn.Linear(4, 2)})
    targets = find_targets(model)
    holder = "embedding_bags" if bag else "embeddings"
    assert set(targets) == {f"ec.{holder}.a", f"ec.{holder}.b", "over"}
    target = targets[f"ec.{holder}.b"]
    check_targets(_manifest(f"ec.{holder}.a", f"ec.{holder}.b"), targets)
    target.write(torch.tensor([2, 7]), torch.full((2, 4), 3.0), (0, 4))
    weight = getattr(model["ec"], holder)["b"].weight
    assert weight[[2, 7]].eq(3).all()
    assert weight.eq(3).sum() == 8


def test_a_compiled_model_has_its_own_names() -> None:
    inner = nn.ModuleDict({"user": nn.Embedding(20, 4), "item": torch.compile(nn.EmbeddingBag(20, 4), backend="eager")})
    targets = find_targets(torch.compile(inner, backend="eager"))
    assert set(targets) == {"user", "item"}
    targets["item"].write(slice(3, 4), torch.ones(1, 4), (0, 4))
    assert inner["item"].weight[3].eq(1).all()


def test_names_map_the_stream_to_the_model() -> None:
    tables = {name: torch.zeros(20, 4) for name in ("a", "b", "c")}
    targets = find_targets(tables, {"a": "b", "b": "a", "other": "c"})
    assert set(targets) == {"a", "b", "other"}
    targets["a"].write(slice(0, 20), torch.ones(20, 4), (0, 4))
    assert tables["b"].all()
    assert not tables["a"].any()
    for names in ({"a": "x"}, {"a": "b", "x": "b"}):
        with pytest.raises(InvalidArgumentError, match="names="):
            find_targets(tables, names)


def test_a_mapping_may_hold_targets() -> None:
    sink = _Sink()
    targets = find_targets({"a": sink, "b.weight": torch.zeros(20, 4)})
    assert targets["a"] is sink
    check_targets(_manifest("a", "b"), targets)
    with pytest.raises(InvalidArgumentError, match="RowTarget"):
        find_targets({"a": object()})


@pytest.mark.parametrize(("rows", "columns"), [((0, 21), ((0, 4),)), ((5, 3), ((0, 4),)), ((0, 20), ((2, 5),))])
def test_a_target_outside_its_table_is_refused(rows: tuple[int, int], columns: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="inside the table"):
        check_targets(_manifest("a"), {"a": _Sink(rows, columns)})


@pytest.mark.parametrize(
    ("manifest", "found"),
    [
        (_manifest("a", num_rows=21), "20 x 4 float32"),
        (_manifest("a", dim=5), "20 x 4 float32"),
        (_manifest("a", dtype=torch.float16), "20 x 4 float32"),
        (_manifest("b"), "missing"),
    ],
)
def test_another_table_is_refused(manifest: Manifest, found: str) -> None:
    for target in (TensorTarget.of(torch.zeros(20, 4)), _Sink()):
        with pytest.raises(TableMismatchError) as caught:
            check_targets(manifest, {"a": target})
        assert caught.value.found == found


def test_regions_of_one_table_may_lie_side_by_side_in_memory_but_not_overlap_another() -> None:
    memory = torch.zeros(3, 20, 4)
    regions = [Region((0, 10), (0, 4), memory[0, :10]), Region((10, 20), (0, 4), memory[0, 10:])]
    good = {"a": TensorTarget(20, 4, torch.float32, regions), "b": TensorTarget.of(memory[1])}
    check_targets(_manifest("a", "b"), good)
    with pytest.raises(TableMismatchError, match="tied"):
        check_targets(_manifest("a", "b"), good | {"b": TensorTarget.of(memory.view(-1, 4)[15:35])})


@pytest.mark.parametrize("ids", [slice(3, 4), torch.tensor([3])], ids=["slice", "list"])
def test_an_autograd_graph_notices_a_write(ids: Tensor | slice) -> None:
    table = nn.Embedding(20, 4)
    loss = table.weight.square().sum()
    (target,) = find_targets(table).values()
    target.write(ids, torch.ones(1, 4), (0, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@settings(deadline=None)
@given(st.data())
def test_rows_are_written_bit_for_bit_whatever_the_layout(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float64]))
    width = dtype.itemsize
    num_rows, dim, margin = (data.draw(st.integers(low, 9)) for low in (1, 1, 0))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def noise(rows: int, columns: int, offset: int) -> Tensor:
        """Random bits, NaN payloads too, anywhere in memory, whose own start may be odd."""
        start = width * data.draw(st.integers(0, 3))
        num_bytes = start + width * (offset + rows * columns + 1)
        items = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).numpy()
        return torch.from_numpy(items[start:]).view(dtype)[offset:-1].view(rows, columns)

    memory = noise(num_rows + 2, dim + margin, data.draw(st.integers(0, 3)))
    first = data.draw(st.integers(0, 5))
    ids = sorted(data.draw(st.sets(st.integers(0, num_rows + 12))))
    values = noise(len(ids), dim + margin, data.draw(st.integers(0, 3)))[:, :dim]
    if data.draw(st.booleans()):
        values = values.t().contiguous().t()
    if data.draw(st.booleans()):
        memory = memory.t().contiguous().t()
    expected = [[memory[row, column].clone() for column in range(dim + margin)] for row in range(num_rows + 2)]
    rows = (first, first + num_rows)
    write_rows(memory[1 : num_rows + 1, :dim], rows, torch.tensor(ids, dtype=torch.int64), values)
    for number, row in enumerate(ids):
        if rows[0] <= row < rows[1]:
            for column in range(dim):
                expected[row - first + 1][column] = values[number, column]
    for row, cells in enumerate(expected):
        for column, cell in enumerate(cells):
            assert torch.equal(memory[row, column].view(1).view(torch.uint8), cell.view(1).view(torch.uint8))


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 6))
def test_slices_are_cut_to_the_region(start: int, length: int, first: int) -> None:
    memory = torch.zeros(6, 2)
    ids = slice(start, start + length)
    values = torch.arange(start, start + length).view(-1, 1).expand(-1, 2) + 1.0
    write_rows(memory, (first, first + 6), ids, values)
    expected = [row + 1 if start <= row < start + length else 0 for row in range(first, first + 6)]
    assert memory[:, 0].tolist() == expected


def test_a_model_of_torch_modules_needs_neither_torchrec_nor_fbgemm() -> None:
    program = """
import sys
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None  # an import of them raises
from torch import nn
from delta_tracker.predictor.targets import find_targets
assert set(find_targets(nn.ModuleDict({"user": nn.Embedding(20, 4)}))) == {"user"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=_ROOT)


def test_unsharded_collections_need_no_fbgemm_of_ours() -> None:
    program = """
import sys
import warnings
warnings.simplefilter("ignore")
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig
ec = EmbeddingCollection(tables=[EmbeddingConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["t"])])
from delta_tracker.predictor.targets import find_targets
assert set(find_targets(ec)) == {"embeddings.t"}
assert not [name for name in sys.modules if name.startswith("delta_tracker.sharding.inference_tables")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=_ROOT)


@pytest.mark.parametrize("dim", [64, 60], ids=["whole rows", "columns of rows"])
def test_a_write_copies_no_table(dim: int) -> None:
    memory = torch.zeros(10_000, 64)
    ids = torch.tensor([3, 9_999])
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        write_rows(memory[:, :dim], (0, len(memory)), ids, torch.ones(2, dim))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < memory.nbytes // 10
    assert memory.sum() == 2 * dim
    assert bool((memory[ids, :dim] == 1).all())


def test_whoever_is_told_of_a_write_may_write_to_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))

    def written() -> None:
        parameter.fill_(1)

    target = TensorTarget(4, 2, torch.float32, [Region((0, 4), (0, 2), torch.zeros(4, 2))], written=written)
    target.write(torch.tensor([1]), torch.ones(1, 2), (0, 2))
    assert bool((parameter == 1).all())
