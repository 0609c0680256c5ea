"""A predictor applies versions to tables on the device, in every dtype and encoding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from delta_tracker import Encoding, ModelTarget, Predictor, Storage
from delta_tracker.stream.format.codec import decode_rows, encode_rows
from tests.gpu.devices import IS_TINY, OF_MODULES
from tests.stream.streams import FQN, Writer

_NUM_ROWS = 200 if IS_TINY else 100_000


class _Model(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.ec = nn.ModuleDict({"embeddings": nn.ModuleDict({"t": table})})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("encoding", [None, Encoding.INT8, Encoding.INT4])
def test_tables_equal_those_of_the_trainer(dtype: torch.dtype, encoding: Encoding | None, tmp_path) -> None:
    storage = Storage(f"file://{tmp_path}")
    writer = Writer(storage, _NUM_ROWS, 8, dtype, encoding)
    writer.dense["bias"] = torch.zeros(3)
    writer.snapshot()
    tensor = torch.full((_NUM_ROWS, 8), -1, dtype=dtype, device=OF_MODULES)
    modules = [_Model(kind(_NUM_ROWS, 8, device=OF_MODULES, dtype=dtype)) for kind in (nn.Embedding, nn.EmbeddingBag)]
    bias = torch.ones(3, device=OF_MODULES)
    predictors = [Predictor(ModelTarget({FQN: tensor}, dense=False), storage)]
    for model in modules:
        model.bias = nn.Parameter(bias.clone())
        predictors.append(Predictor(model, storage))
    for number in range(3):
        writer.dense["bias"] = torch.full((3,), float(number))
        writer.delta(torch.randperm(_NUM_ROWS)[: _NUM_ROWS // 3].sort().values.tolist())
        for predictor in predictors:
            predictor.sync()
    expected = decode_rows(encode_rows(writer.table, writer.encoding), writer.encoding, 8, dtype)
    tables = [tensor, *(model.ec["embeddings"]["t"].weight.detach() for model in modules)]
    for table in tables:
        assert torch.equal(table.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert all(torch.equal(model.bias.detach().cpu(), writer.dense["bias"]) for model in modules)
