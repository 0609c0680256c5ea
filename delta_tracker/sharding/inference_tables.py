"""Row targets for the tables of a serving model that TorchRec has sharded or quantized.

A row that is quantized to integers consists of a scale and a bias of two bytes each, one code for each column, and
padding. The scale and bias are computed from the whole row. If a row is split into several column shards, every shard
has the same scale and bias. This is also true if torchrec shards a table after quantizing it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
    unpadded_row_size_in_bytes,
)
from torch import Tensor, nn
from torchrec.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from torchrec.distributed.quant_embedding_kernel import IntNBitTableBatchedEmbeddingBagsCodegenWithLength
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.row_target import Region, RowTarget, TensorTarget
from delta_tracker.sharding.discover import discover
from delta_tracker.sharding.row_cache import cached_table
from delta_tracker.sharding.torchrec_api import Torchrec, holder_of, tbe_of

QUANTIZED: dict[type[nn.Module], str] = {EmbeddingCollection: "embeddings", EmbeddingBagCollection: "embedding_bags"}
"""Mapping from the class of a quantized collection to the name of the attribute that contains its tables."""
QUANTIZED_SHARDS: dict[type[nn.Module], str] = {
    ShardedQuantEmbeddingCollection: "embeddings",
    ShardedQuantEmbeddingBagCollection: "embedding_bags",
}
"""Like :data:`QUANTIZED`, for sharded quantized collections. All shards of such a collection are in this process."""
# Classes of the kernels that store rows contiguously.
_KERNELS = IntNBitTableBatchedEmbeddingBagsCodegen, IntNBitTableBatchedEmbeddingBagsCodegenWithLength
_SCALE_BIAS_BYTES = 4
_FLOATS = {"fp16": torch.float16, "fp32": torch.float32}
_BITS = {"int8": 8, "int4": 4, "int2": 2}
# dtypes that the quantizer accepts; others are converted to float32 first.
_QUANTIZED_FROM = (torch.float32, torch.float16)


def model_tables(model: nn.Module) -> Iterator[tuple[str, RowTarget | Tensor]]:
    """Yield ``(name, target)`` for sharded and quantized tables, and ``(name, tensor)`` for other tensors of a model.

    A name is a key of the model's ``state_dict`` without the names of wrapper modules. Names of targets have no suffix
    ``.weight``. Raises InvalidArgumentError if the kernel, data type or geometry of a sharded table is not supported.
    """
    torchrec = Torchrec()
    for fqn, module in walk_names(model, torchrec):
        prefix = f"{fqn}." if fqn else ""
        if torchrec.holder(module):
            tables = _sharded(module)
        elif holder := holder_of(module, QUANTIZED_SHARDS):
            tables = _quantized(module, holder, _sharded_blocks(module))
        elif holder := holder_of(module, QUANTIZED):
            tables = _quantized(module, holder, _unsharded_blocks(module))
        else:
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                yield prefix + name, tensor
            continue
        for name, target in tables:
            yield prefix + name, target


def walk_names(model: nn.Module, torchrec: Torchrec) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(FQN, module)`` for each FQN of each module in ``model``. Submodules of collections are left out."""
    kinds = (*torchrec.collections, *QUANTIZED_SHARDS, *QUANTIZED)
    return torchrec.walk(model, lambda module: isinstance(module, kinds), None)


def _sharded(module: nn.Module) -> Iterator[tuple[str, RowTarget]]:
    try:
        shards = discover(module).shards
    except UnsupportedModelError as error:
        (name, reason), *_ = error.parts.items()
        raise InvalidArgumentError("model", name, f"Change its data type or its sharding plan: {reason}") from error
    # The caches are not flushed, which would write to rows that lookups read. Rows are written to the caches too.
    kernels = {kernel for shard in shards.values() for kernel, _ in shard.holders}
    views = {kernel: kernel.module.split_embedding_weights() for kernel in kernels}
    for fqn, shard in shards.items():
        spec, table = shard.spec, shard.spec.table
        rows = spec.row_offset, spec.row_offset + spec.num_rows
        regions = []
        for columns, (kernel, slot) in zip(spec.columns, shard.holders, strict=True):
            cached = cached_table(tbe_of(kernel.module), slot) if kernel.is_fused else None
            regions.append(Region(rows, columns, views[kernel][slot], cached))
        yield fqn, TensorTarget(table.num_rows, table.dim, table.dtype, regions)


@dataclass(frozen=True, slots=True)
class _Block:
    """Block of a table in one slot of a quantized kernel. ``row`` and ``column`` are its first row and column."""

    table: str
    kernel: Any
    slot: int
    row: int = 0
    column: int = 0


def _unsharded_blocks(module: Any) -> Iterator[_Block]:  # noqa: ANN401  a torchrec module
    for kernel, configs in zip(module._emb_modules, module._key_to_tables.values(), strict=True):  # noqa: SLF001
        for slot, config in enumerate(configs):
            yield _Block(config.name, kernel, slot)


def _sharded_blocks(module: Any) -> Iterator[_Block]:  # noqa: ANN401  a torchrec module
    for kernel, config in module.tbes_configs().items():
        for slot, table in enumerate(config.embedding_tables):
            row, column = table.local_metadata.shard_offsets
            yield _Block(table.name, kernel, slot, row, column)


def _quantized(module: Any, holder: str, blocks: Iterable[_Block]) -> Iterator[tuple[str, RowTarget]]:  # noqa: ANN401
    by_table: dict[str, list[_Block]] = {}
    for block in blocks:
        by_table.setdefault(block.table, []).append(block)
    configs = module.embedding_configs() if holder == "embeddings" else module.embedding_bag_configs()
    for config in configs:
        held = by_table.get(config.name, [])
        obstacle = next((found for block in held if (found := _obstacle(block))), "")
        packed = [] if obstacle else [_packed(block) for block in held]
        yield (
            f"{holder}.{config.name}",
            QuantizedTarget(config.num_embeddings, config.embedding_dim, packed, obstacle=obstacle),
        )


def _obstacle(block: _Block) -> str:
    """Return the reason why the rows of a block cannot be written, or an empty string if they can be written."""
    kernel = block.kernel
    if type(kernel) not in _KERNELS:
        return f"in a {type(kernel).__name__}, which does not store rows contiguously"
    _, _, dim, kind, _ = kernel.embedding_specs[block.slot]
    if kind.value not in {*_FLOATS, *_BITS} or kernel.scale_bias_size_in_bytes != _SCALE_BIAS_BYTES:
        return f"quantized to {kind.value} with {kernel.scale_bias_size_in_bytes} bytes of scale and bias"
    if not kernel.weight_initialized:
        return "without memory, because its weights are not initialized"
    if (
        kernel.index_remapping_hash_table_cpu is not None
        or kernel.index_remapping_hash_table.numel()
        or kernel.index_remappings_array.numel()
    ):
        return "pruned, so that its ids are remapped"
    if dim * _BITS.get(kind.value, 16) % 16:
        return f"quantized to {kind.value} with {dim} columns, whose codes do not fill a multiple of two bytes"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Block of a quantized table, and the layout of the block's rows in memory.

    Args:
        region: the block. Its ``memory`` is ``[rows, bytes]`` uint8, including the padding of the rows.
        kind: data type of the table: ``fp32``, ``fp16``, ``int8``, ``int4`` or ``int2``.
        row_bytes: size of a row in bytes, without padding.
        is_scale_last: True if the scale and bias are stored after the codes, False if they are stored before the codes.
    """

    region: Region
    kind: str
    row_bytes: int
    is_scale_last: bool


def _packed(block: _Block) -> Packed:
    kernel = block.kernel
    _, num_rows, dim, kind, _ = kernel.embedding_specs[block.slot]
    memory = kernel.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)[block.slot][0]
    cached = cached_table(kernel, block.slot)
    region = Region((block.row, block.row + num_rows), (block.column, block.column + dim), memory, cached)
    return Packed(region, kind.value, unpadded_row_size_in_bytes(dim, kind), kernel.reverse_qparam)


class QuantizedTarget(TensorTarget):
    """Row target of a quantized table. It quantizes rows of the trainer's dtype and writes them to the table.

    Rows are quantized on the CPU. The result is byte-identical to torchrec's. The trainer's table may be float32,
    float16 or bfloat16. bfloat16 rows are first converted to float32, because torchrec cannot quantize bfloat16.

    Args:
        num_rows: number of rows of the whole table.
        dim: number of columns of the whole table.
        packed: blocks of the table in this process.
        obstacle: reason why rows cannot be written; empty if there is none.
    """

    remedy = (
        "Serve it in FP32, FP16, INT8, INT4 or INT2 with codes that fill a multiple of two bytes, with initialized "
        "weights and whole rows, and without pruning"
    )

    def __init__(self, num_rows: int, dim: int, packed: Iterable[Packed], *, obstacle: str = "") -> None:
        self._packed = tuple(packed)
        super().__init__(num_rows, dim, None, [each.region for each in self._packed], obstacle=obstacle)
        self.needs_whole_rows = True
        ranges = self.columns
        if ranges and not obstacle and ([0, *(end for _, end in ranges)] != [*(first for first, _ in ranges), dim]):
            self._obstacle = f"limited to the columns {ranges}, but quantization needs whole rows"
        self.columns = ((0, dim),) if ranges else ()
        # Blocks with the same layout share one result of prepare(). Values: block, first byte of its row in the result.
        self._layouts: dict[tuple[object, ...], tuple[Packed, int]] = {}
        self._row_bytes = 0
        for each in self._packed:
            key = _layout(each)
            if key not in self._layouts:
                self._layouts[key] = each, self._row_bytes
                self._row_bytes += each.region.memory.shape[1]

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:
        """Quantize whole rows, ``[N, dim]`` on the CPU.

        Returns ``[N, bytes]`` uint8, which :meth:`write` accepts. If the blocks have several layouts, a row of the
        result contains the quantized row once for each layout.
        """
        if values.dtype not in _QUANTIZED_FROM:
            values = values.float()
        values = values.contiguous()  # the quantizer ignores strides
        is_copied = any(device.type == "cuda" for device in self.devices)
        rows = torch.zeros(len(values), self._row_bytes, dtype=torch.uint8, pin_memory=is_copied, device="cpu")
        quantized: dict[str, Tensor] = {}
        for each, at in self._layouts.values():
            if each.kind not in quantized:
                quantized[each.kind] = _quantize(values, each.kind)
            _pack(rows[:, at : at + each.row_bytes], quantized[each.kind], each)
        return super().prepare(rows, columns)

    @torch.no_grad()
    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:  # noqa: ARG002
        """Write the result of :meth:`prepare` to the rows ``ids`` and to copies of the rows in the kernels' caches."""
        for each in self._packed:
            _, at = self._layouts[_layout(each)]
            each.region.write(ids, values[:, at : at + each.region.memory.shape[1]])


def _layout(block: Packed) -> tuple[object, ...]:
    return block.region.columns, block.kind, block.row_bytes, block.region.memory.shape[1], block.is_scale_last


def _quantize(values: Tensor, kind: str) -> Tensor:
    """Quantize whole rows. Return ``[N, bytes]`` uint8: the codes, followed by scale and bias for integer kinds.

    The bytes equal the result of torchrec's ``quantize_state_dict``. ``kind`` is the ``kind`` of a :class:`Packed`.
    """
    if kind in _FLOATS:
        return values.to(_FLOATS[kind]).view(torch.uint8)
    quantized: Tensor = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(values, _BITS[kind])
    return quantized


def _pack(rows: Tensor, quantized: Tensor, block: Packed) -> None:
    """Write the codes, scale and bias of a block's columns to the packed rows of the block.

    ``rows`` is ``[N, row_bytes]`` uint8. ``quantized`` is a result of :func:`_quantize` with all columns.
    """
    bits = _BITS.get(block.kind) or 8 * _FLOATS[block.kind].itemsize
    first, end = (edge * bits // 8 for edge in block.region.columns)
    codes = quantized[:, first:end]
    if block.kind in _FLOATS:
        rows.copy_(codes)
        return
    scale_bias = quantized[:, -_SCALE_BIAS_BYTES:]
    num_codes = end - first
    if block.is_scale_last:
        rows[:, :num_codes] = codes
        rows[:, num_codes:] = scale_bias
    else:
        rows[:, :_SCALE_BIAS_BYTES] = scale_bias
        rows[:, _SCALE_BIAS_BYTES:] = codes
