"""A trainer of plain torch that is killed leaves whole versions, and continues from its checkpoint."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from tests import forked
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.system.plain_trainer import build, train


@pytest.mark.sweep("long")
@pytest.mark.promise("atomic", "equal", "restored")
def test_a_killed_trainer_leaves_whole_versions_and_continues(tmp_path: Path) -> None:
    url, folder = f"file://{tmp_path}/stream", tmp_path / "checkpoints"
    folder.mkdir()
    first_delta = tmp_path / "stream" / "log" / f"{1:020d}.json"
    served, _ = build()
    predictor = Predictor(served, url)
    draw, begun = random.Random(7), set()
    for life in range(8 if SWEEPS_ARE_WHOLE else 2):
        output, errors = tmp_path / f"output-{life}", tmp_path / f"errors-{life}"
        trainer = forked.Program("tests.system.plain_trainer", url, str(folder), output=output, errors=errors)
        try:
            num_lines = 5 + draw.randrange(12)
            while output.read_text().count("\n") < num_lines or not first_delta.exists():
                assert trainer.poll() is None, errors.read_text()
                time.sleep(0.001)
        finally:
            trainer.kill()
        trainer.wait(60)
        begun.add(int(output.read_text().partition("\n")[0]))
        predictor.sync()
        assert predictor.manifest is not None
        model, optimizers = build()
        for batch in range(predictor.manifest.batches[1]):
            train(model, optimizers, batch)
        assert predictor.manifest.pending_rows == 0
        equal = [torch.equal(mine, its) for mine, its in zip(served.parameters(), model.parameters(), strict=True)]
        assert equal == [True, True], life
    assert len(begun) > 1, "no life began at a checkpoint"
