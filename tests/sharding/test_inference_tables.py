"""Quantized targets equal torchrec's quantization of the trainer's table byte for byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.quant.embedding_modules import (
    MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT as _NUM_ROWS_LEFT,
)

from delta_tracker import Predictor
from delta_tracker.errors import ModelMismatchError, PartialRowsError
from delta_tracker.predictor.placement import placements
from delta_tracker.predictor.served_model import check_targets, find_targets
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.sharding.quantized import KINDS, memory, quantize, shard_quantized
from tests.stream.streams import FQN, Writer

_WITH_SCALE = ("int8", "int4", "int2")
# What torchrec can build on a CPU: sharded by columns in bags only; rows and columns only where scale and bias are
# split off, which it cannot do for fp16 and fp32.
_BUILDS = [
    *((kind, bag, None, split) for kind in KINDS for bag in (False, True) for split in (False, True)),
    *((kind, bag, "row", True) for kind in _WITH_SCALE for bag in (False, True)),
    *((kind, bag, "table", True) for kind in _WITH_SCALE for bag in (False, True)),
    *((kind, True, "column", True) for kind in _WITH_SCALE),
]


def _build(tables: dict[str, Tensor], kind: str, bag: bool, sharding: str | None, split: bool, **kwargs: Any) -> Any:
    model = quantize(tables, kind, bag=bag, split=split, **kwargs)
    return model if sharding is None else shard_quantized(model, sharding)


def _prefix(bag: bool) -> str:
    return "ec.embedding_bags." if bag else "ec.embeddings."


def _apply(model: nn.Module, rows: list[BlockRows], chunk_rows: int = 4) -> None:
    for placement in placements(rows, find_targets(model)):
        for chunk in placement.chunks(chunk_rows):
            chunk.write()


def _delta(fqn: str, table: Tensor, ids: list[int], columns: list[tuple[int, int]]) -> list[BlockRows]:
    held = torch.tensor(ids, dtype=torch.int64)
    return [_block(fqn, table, held, each) for each in columns]


def _snapshot(fqn: str, table: Tensor) -> BlockRows:
    return _block(fqn, table, None, (0, table.shape[1]))


def _block(fqn: str, table: Tensor, ids: Tensor | None, columns: tuple[int, int]) -> BlockRows:
    values = (table if ids is None else table[ids])[:, columns[0] : columns[1]]
    block = Block(
        fqn, (0, len(table)), columns, len(values), "all" if ids is None else "list", Encoding.of(table.dtype)
    )
    return BlockRows.of(block, ids, values)


def _equal(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(held, wanted) for held, wanted in zip(memory(model), memory(other), strict=True))


@pytest.mark.parametrize(("kind", "bag", "sharding", "split"), _BUILDS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_deltas_give_the_bytes_of_quantizing_anew(
    data: Any, kind: str, bag: bool, sharding: str | None, split: bool
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    alignment = data.draw(st.sampled_from([1, 16]))
    tables = {
        name: torch.randn(rows, 16, generator=generator).to(dtype) for name, rows in (("t", 11), ("u", 5), ("v", 2))
    }
    model = _build(tables, kind, bag, sharding, split, alignment=alignment)
    for _ in range(data.draw(st.integers(1, 3))):
        rows = []
        for name, table in tables.items():
            ids = sorted(data.draw(st.sets(st.integers(0, len(table) - 1))))
            scale = 10.0 ** data.draw(st.integers(-6, 4))
            table[ids] = (torch.randn(len(ids), 16, generator=generator) * scale).to(dtype)
            cuts = sorted({0, 16, *data.draw(st.sets(st.integers(1, 15), max_size=2))})
            rows += _delta(_prefix(bag) + name, table, ids, list(itertools.pairwise(cuts)))
        _apply(model, data.draw(st.permutations(rows)), data.draw(st.integers(1, 5)))
    assert _equal(model, _build(tables, kind, bag, sharding, split, alignment=alignment))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bag", [False, True])
def test_tables_that_are_sharded_whole_without_their_rows(kind: str, bag: bool) -> None:
    tables = {"t": torch.randn(11, 16), "u": torch.randn(5, 16)}
    model = shard_quantized(quantize(tables, kind, bag=bag), "table")
    _apply(model, [_snapshot(_prefix(bag) + name, table) for name, table in tables.items()])
    (held,) = memory(model)
    (wanted,) = memory(quantize(tables, kind, bag=bag, alignment=1))  # what the shards have
    assert torch.equal(held, wanted)


@pytest.mark.parametrize("sharding", ["table", "row", "column"])
def test_lookups_of_a_sharded_model_equal_those_of_the_quantized_one(sharding: str) -> None:
    tables = {"t": torch.randn(11, 16), "u": torch.randn(5, 16)}
    model = shard_quantized(
        quantize({name: -table for name, table in tables.items()}, "int8", bag=True, split=True), sharding
    )
    _apply(model, [_snapshot(_prefix(True) + name, table) for name, table in tables.items()])
    features = KeyedJaggedTensor(
        keys=["t", "u"], values=torch.tensor([10, 3, 0, 4, 1]), lengths=torch.tensor([2, 1, 1, 1])
    )
    assert torch.equal(model(features).values(), quantize(tables, "int8", bag=True)(features).values())


def test_wider_rows_of_bfloat16_are_quantized_from_float() -> None:
    table = torch.randn(11, 16).bfloat16()
    for kind in KINDS:
        model = quantize({"t": torch.zeros(11, 16)}, kind)
        targets = find_targets(model)
        spec = TableSpec("ec.embeddings.t", 11, 16, torch.bfloat16)
        tables = {spec.fqn: spec}
        check_targets(
            Manifest(stream="", generation=0, writer="", version=0, kind="delta", created=0.0, tables=tables), targets
        )
        _apply(model, [_snapshot(spec.fqn, table)])
        assert _equal(model, quantize({"t": table.float()}, kind))


@pytest.mark.parametrize("bag", [False, True])
def test_each_table_may_have_its_own_kind(bag: bool) -> None:
    kinds = {"b": "int4", "c": "fp16"}
    zeros = {name: torch.zeros(7, 8) for name in "abc"}
    tables = {name: torch.randn(7, 8) for name in "abc"}
    model = quantize(zeros, "int8", bag=bag, kinds=kinds)
    _apply(model, [_snapshot(_prefix(bag) + name, table) for name, table in tables.items()])
    assert _equal(model, quantize(tables, "int8", bag=bag, kinds=kinds))


def test_a_predictor_follows_with_a_quantized_table(tmp_path: Any) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True), num_rows=20, dim=8)
    model = quantize({"t": torch.zeros(20, 8)}, "int8")
    predictor = Predictor(model, writer.storage)
    writer.table.normal_()
    writer.snapshot()
    for ids in ([0], [3, 19], list(range(20)), []):
        writer.delta(ids)
        predictor.sync()
        assert _equal(model, quantize({"t": writer.table}, "int8"))


def test_a_part_of_a_rows_columns_is_refused_and_changes_nothing(tmp_path: Any) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True), num_rows=20, dim=8)
    model = quantize({"t": torch.zeros(20, 8)}, "int8")
    predictor = Predictor(model, writer.storage)
    writer.table.normal_()
    writer.snapshot()
    good = predictor.sync()
    before = [each.clone() for each in memory(model)]
    changed = _delta(FQN, writer.table + 1, [1, 2, 5], [(0, 4)]) + _delta(FQN, writer.table + 1, [2, 5], [(4, 8)])
    writer.write("delta", changed)
    with pytest.raises(PartialRowsError) as caught:
        predictor.sync()
    assert (caught.value.num_rows, caught.value.found, caught.value.needed) == (1, ((0, 4),), (0, 8))
    assert predictor.version == good
    assert all(torch.equal(held, old) for held, old in zip(memory(model), before, strict=True))


def _break(kernel: Any, how: str) -> None:
    if how == "pruned":
        kernel.index_remappings_array = torch.zeros(20, dtype=torch.int32)
    elif how == "fp8":
        name, rows, dim, kind, place_ = kernel.embedding_specs[0]
        kernel.embedding_specs[0] = (name, rows, dim, type(kind).FP8, place_)
    elif how == "scale":
        kernel.scale_bias_size_in_bytes = 8
    elif how == "memory":
        kernel.weight_initialized = False
    elif how == "columns":
        name, rows, _, kind, place_ = kernel.embedding_specs[0]
        kernel.embedding_specs[0] = (name, rows, 7, kind, place_)
    else:
        kernel.__class__ = type("KVEmbeddingInference", (type(kernel),), {})


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("pruned", "pruned"),
        ("fp8", "fp8"),
        ("scale", "8 bytes of scale"),
        ("memory", "without memory"),
        ("columns", "7 columns"),
        ("hashed", "KVEmbeddingInference"),
    ],
)
def test_rows_without_a_place_are_refused_before_any_is_written(how: str, found: str) -> None:
    model = quantize({"t": torch.zeros(20, 8)}, "int8")
    _break(model.ec._emb_modules[0], how)
    spec = TableSpec("ec.embeddings.t", 20, 8, torch.float32)
    manifest = Manifest(
        stream="", generation=0, writer="", version=0, kind="delta", created=0.0, tables={spec.fqn: spec}
    )
    with pytest.raises(ModelMismatchError, match=found):
        check_targets(manifest, find_targets(model))


def test_scale_and_bias_may_stand_last() -> None:
    table = torch.randn(20, 8)
    model = quantize({"t": torch.zeros(20, 8)}, "int8")
    (kernel,) = model.ec._emb_modules
    kernel.reverse_qparam = True
    _apply(model, [_snapshot("ec.embeddings.t", table)])
    (wanted,) = quantize({"t": table}, "int8").ec._emb_modules
    ((codes, scale_bias),) = kernel.split_embedding_weights()
    ((wanted_codes, wanted_scale_bias),) = wanted.split_embedding_weights()
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scale_bias, wanted_scale_bias)


def test_cached_rows_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM has no caches on the CPU: the kernel gets one of two rows, with row 7 in the second one."""
    model = quantize({"t": torch.zeros(20, 8)}, "int8")
    (kernel,) = model.ec._emb_modules
    name, rows, dim, kind, _ = kernel.embedding_specs[0]
    kernel.embedding_specs[0] = (name, rows, dim, kind, EmbeddingLocation.MANAGED_CACHING)
    kernel.lxu_cache_weights = torch.zeros(2, 32, dtype=torch.uint8)
    kernel.total_cache_hash_size = 20
    kernel.reset_cache_states = lambda: pytest.fail("the cache was emptied")
    monkeypatch.setattr(torch.ops.fbgemm, "lxu_cache_lookup", lambda ids, state, _: (ids == 7).int() * 2 - 1)
    table = torch.randn(20, 8)
    _apply(model, [_snapshot("ec.embeddings.t", table)], chunk_rows=3)
    assert _equal(model, quantize({"t": table}, "int8"))
    rows = kernel.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)[0][0]
    assert torch.equal(kernel.lxu_cache_weights[1, : rows.shape[1]], rows[7])
    assert not kernel.lxu_cache_weights[0].any()


def test_post_pruning_rows_are_those_that_are_left() -> None:
    table = torch.randn(20, 8)
    model = quantize({"t": torch.zeros(20, 8)}, "int8", bag=True, attributes={_NUM_ROWS_LEFT: {"t": 12}})
    target = find_targets(model)["ec.embedding_bags.t"]
    assert (target.num_rows, target.rows) == (20, (0, 12))
    _apply(model, [_snapshot("ec.embedding_bags.t", table)])
    assert _equal(model, quantize({"t": table}, "int8", bag=True, attributes={_NUM_ROWS_LEFT: {"t": 12}}))


def test_rows_with_gaps_in_memory_are_quantized_like_others() -> None:
    wide = torch.randn(20, 12)
    table = wide[:, 2:10]  # fbgemm's quantizer would read the gaps
    for kind in KINDS:
        model = quantize({"t": torch.zeros(20, 8)}, kind)
        _apply(model, [_snapshot("ec.embeddings.t", table)])
        assert _equal(model, quantize({"t": table.contiguous()}, kind))
