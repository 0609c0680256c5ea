"""Models of other projects' tests are compared with a copy of their rows: `python -m tests.comparing`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

_TEST = """
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


@pytest.mark.parametrize("hides", [False, True])
def test_a_row_that_no_hook_reports_is_named(tmp_path: Path, hides: bool) -> None:
    path = tmp_path / "test_training.py"
    path.write_text(_TEST.replace("HIDES", str(hides)))
    run = forked.run("tests.comparing", "-", str(path), timeout_seconds=200)
    assert '"models": 1, "tables": 1, "reads": 4' in run.stdout, run.stdout + run.stderr
    assert run.returncode == int(hides), run.stdout
    assert ("rows [7] are missing" in run.stdout) == hides
