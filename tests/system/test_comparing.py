"""Models and kernels of other projects' tests are compared with a copy of their rows: `python -m tests.comparing`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

_MODEL = """
import torch
from torch import distributed as dist
from tests.models import Spec, Table, batch, kernels_of, shard

def test_training():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec = Spec([Table("t", 8, "row")], bag=True)
    model = shard(spec)
    for _ in range(3):
        model(batch(spec, torch.Generator().manual_seed(0))).backward()
        if HIDES:
            with torch.no_grad():
                kernels_of(model.module.ec)[0].split_embedding_weights()[0].data[7] += 1
    dist.destroy_process_group()
"""

_KERNEL = """
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

def test_training():
    table = (8, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = SplitTableBatchedEmbeddingBagsCodegen([table, table], feature_table_map=[0, 1, 1], learning_rate=0.1)
    for weight in kernel.split_embedding_weights():
        weight.fill_(1.0)
    for _ in range(3):
        kernel(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 4])).sum().backward()
        if HIDES:
            kernel.split_embedding_weights()[1].data[7] += 1
"""


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(("text", "tables"), [(_MODEL, 1), (_KERNEL, 2)], ids=["model", "kernel"])
def test_a_row_that_no_hook_reports_is_named(tmp_path: Path, text: str, tables: int, hides: bool) -> None:
    path = tmp_path / "test_training.py"
    path.write_text(text.replace("HIDES", str(hides)))
    run = forked.run("tests.comparing", "-", str(path), timeout_seconds=200)
    assert f'"models": 1, "tables": {tables}, "reads": 4' in run.stdout, run.stdout + run.stderr
    assert run.returncode == int(hides), run.stdout
    assert ("rows [7] are missing" in run.stdout) == hides
