"""Targets in plain models are found by name and checked before the first write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.predictor.served_model import check_targets, find_targets, renamed
from delta_tracker.row_target import Region, RowTarget, TensorTarget
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.types import TableSpec


def _manifest(*names: str, num_rows: int = 20, dim: int = 4, dtype: torch.dtype = torch.float32) -> Manifest:
    tables = {name: TableSpec(name, num_rows, dim, dtype) for name in names}
    return Manifest(stream="", generation=0, writer="", version=0, kind="delta", created=0.0, tables=tables)


class _Sink(RowTarget):
    def __init__(self, rows: tuple[int, int] = (0, 20), columns: tuple[tuple[int, int], ...] = ((0, 4),)) -> None:
        self.num_rows, self.dim, self.dtype = 20, 4, torch.float32
        self.rows, self.columns = rows, columns

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        raise NotImplementedError


def test_a_compiled_model_has_its_own_names() -> None:
    inner = nn.ModuleDict({"user": nn.Embedding(20, 4), "item": torch.compile(nn.EmbeddingBag(20, 4), backend="eager")})
    targets = find_targets(torch.compile(inner, backend="eager"))
    assert set(targets) == {"user", "item"}
    targets["item"].write(slice(3, 4), torch.ones(1, 4), (0, 4))
    assert inner["item"].weight[3].eq(1).all()


def test_names_map_the_stream_to_the_model() -> None:
    tables = {name: torch.zeros(20, 4) for name in ("a", "b", "c")}
    targets = renamed(find_targets(tables), {"a": "b", "b": "a", "other": "c", "dense": "bias"})
    assert set(targets) == {"a", "b", "other"}
    targets["a"].write(slice(0, 20), torch.ones(20, 4), (0, 4))
    assert tables["b"].all()
    assert not tables["a"].any()
    with pytest.raises(InvalidArgumentError, match="names="):
        renamed(find_targets(tables), {"a": "b", "x": "b"})


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
        with pytest.raises(ModelMismatchError) as caught:
            check_targets(manifest, {"a": target})
        assert caught.value.found == found


def test_regions_of_one_table_may_lie_side_by_side_in_memory_but_not_overlap_another() -> None:
    memory = torch.zeros(3, 20, 4)
    regions = [Region((0, 10), (0, 4), memory[0, :10]), Region((10, 20), (0, 4), memory[0, 10:])]
    good = {"a": TensorTarget(20, 4, torch.float32, regions), "b": TensorTarget.of(memory[1])}
    check_targets(_manifest("a", "b"), good)
    with pytest.raises(ModelMismatchError, match="tied"):
        check_targets(_manifest("a", "b"), good | {"b": TensorTarget.of(memory.view(-1, 4)[15:35])})


@pytest.mark.parametrize("ids", [slice(3, 4), torch.tensor([3])], ids=["slice", "list"])
def test_an_autograd_graph_notices_a_write(ids: Tensor | slice) -> None:
    table = nn.Embedding(20, 4)
    loss = table.weight.square().sum()
    (target,) = find_targets(table).values()
    target.write(ids, torch.ones(1, 4), (0, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
