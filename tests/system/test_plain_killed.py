"""A trainer of plain torch that is killed leaves whole versions, and continues from its checkpoint."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.system.plain_trainer import build, train

_ROOT = Path(__file__).parent.parent.parent


@pytest.mark.sweep("long")
@pytest.mark.promise("atomic", "equal", "restored")
def test_a_killed_trainer_leaves_whole_versions_and_continues(tmp_path: Path) -> None:
    url, folder = f"file://{tmp_path}/stream", tmp_path / "checkpoints"
    folder.mkdir()
    served, _ = build()
    predictor = Predictor(served, url)
    draw, begun = random.Random(7), set()
    for life in range(8 if SWEEPS_ARE_WHOLE else 2):
        command = [sys.executable, "-m", "tests.system.plain_trainer", url, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as trainer:
            assert trainer.stdout is not None
            begun.add(int(trainer.stdout.readline()))
            lines = 4 + draw.randrange(12)
            while lines > 0 or not (tmp_path / "stream" / "log" / f"{1:020d}.json").exists():
                assert trainer.stdout.readline()
                lines -= 1
            trainer.kill()
        predictor.sync()
        assert predictor.manifest is not None
        model, optimizers = build()
        for batch in range(predictor.manifest.batches[1]):
            train(model, optimizers, batch)
        assert predictor.manifest.pending_rows == 0
        equal = [torch.equal(mine, its) for mine, its in zip(served.parameters(), model.parameters(), strict=True)]
        assert equal == [True, True], life
    assert len(begun) > 1, "no life began at a checkpoint"
