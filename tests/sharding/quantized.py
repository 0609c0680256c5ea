"""TorchRec's quantized inference modules for the tests: made from float tables, sharded over this process or not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.fused_params import (
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.shard import _shard_modules
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.inference.modules import quantize_inference_model
from torchrec.quant.embedding_modules import (
    quant_prep_customize_row_alignment,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.models import with_kernel

KINDS = {
    "int8": torch.qint8,
    "int4": torch.quint4x2,
    "int2": torch.quint2x4,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class _Model(nn.Module):
    def __init__(self, ec: nn.Module) -> None:
        super().__init__()
        self.ec = ec

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ec(features)


def quantize(
    tables: Mapping[str, Tensor],
    kind: str,
    *,
    bag: bool = False,
    alignment: int = 16,
    split: bool = False,
    kinds: Mapping[str, str] | None = None,
    attributes: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A model whose ``ec`` is the quantized collection of float tables, ``[rows, columns]`` by name.

    ``kinds`` are those of single tables; ``attributes`` are set on the collection before.
    """
    collection, config = (EmbeddingBagCollection, EmbeddingBagConfig) if bag else (EmbeddingCollection, EmbeddingConfig)
    ec = collection(
        tables=[
            config(name=name, num_embeddings=len(table), embedding_dim=table.shape[1], feature_names=[name])
            for name, table in tables.items()
        ],
        device=torch.device(device),
    )
    model = _Model(ec)
    for name, table in tables.items():
        (ec.embedding_bags if bag else ec.embeddings)[name].weight = nn.Parameter(table.to(device, copy=True))
    for name, value in (attributes or {}).items():
        setattr(ec, name, value)
    quant_prep_customize_row_alignment(model, [collection], alignment)
    if split:
        quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [collection])
    per_table = {name: KINDS[each] for name, each in (kinds or {}).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        return quantize_inference_model(model, quantization_dtype=KINDS[kind], per_table_weight_dtype=per_table)


def shard_quantized(
    model: nn.Module, sharding: str, *, kernel: str = "quant", device: torch.device | str = "cpu"
) -> nn.Module:
    """The quantized model over two shards in this process: "table", "row" or "column".

    On a GPU it is over one shard, "table", because torchrec puts the second shard on a second GPU.

    It has the model's rows if that splits scale and bias; otherwise torchrec shards it by tables only, without rows.
    """
    set_propogate_device(True)
    bag = hasattr(model.ec, "embedding_bags")
    names = list(model.ec.embedding_bags if bag else model.ec.embeddings)
    split = getattr(model.ec, "__quant_state_dict_split_scale_bias")
    fused_params = {FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: split, FUSED_PARAM_REGISTER_TBE_BOOL: True}
    sharder = (QuantEmbeddingBagCollectionSharder if bag else QuantEmbeddingCollectionSharder)(
        fused_params=fused_params
    )
    device = torch.device(device)
    world_size = 2 if device.type == "cpu" else 1
    generator = {
        "table": table_wise(rank=world_size - 1, device=device.type),
        "row": row_wise(),
        "column": column_wise(ranks=[0, 1]),
    }[sharding]
    plan = construct_module_sharding_plan(
        model.ec,
        {name: with_kernel(generator, kernel) for name in names},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type=device.type,
    )
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".tbes." not in name}
    sharded = _shard_modules(
        module=model,
        device=device,
        plan=ShardingPlan({"ec": plan}),
        env=ShardingEnv.from_local(world_size, 0),
        sharders=[sharder],
    )
    if split:
        keys = sharded.load_state_dict(state, strict=False)
        assert not keys.unexpected_keys
        assert all(".tbes." in name for name in keys.missing_keys)
    return sharded


def memory(model: nn.Module) -> list[Tensor]:
    """Return every byte of the quantized tables in order."""
    kernels = model.ec.tbes_configs() if hasattr(model.ec, "tbes_configs") else model.ec._emb_modules
    return [kernel.weights_host for kernel in kernels]
