"""The callback under a real Lightning trainer of two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import RankPool
from tests.tracker.checkpoint_files import compare, load, same_weights

pytest.importorskip("pytorch_lightning", exc_type=ModuleNotFoundError)


def test_a_trainer_goes_on_where_another_one_stopped(two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "url": f"file://{tmp_path}/stream"}
    for seen in two_ranks.run("tests.integrations.lightning_cases:fit", num_batches=3, checkpoint=None, **arguments):
        assert seen["loaded"] == {"batches": 0, "restored": "None"}
        assert seen["saved"] == {"batches": 3, "restored": "None"}
        assert seen["version"] == 2  # the claim, one by cadence, one at the end
        assert seen["errors"] == 0
    (checkpoint,) = tmp_path.glob("*.ckpt")
    saved = load(tmp_path, "saved", 2)
    for seen in two_ranks.run(
        "tests.integrations.lightning_cases:fit", num_batches=6, checkpoint=str(checkpoint), **arguments
    ):
        assert seen["loaded"] == {"batches": 3, "restored": "Restored.STATE"}
        assert seen["saved"]["batches"] == 6
        assert seen["version"] == 5
    loaded = load(tmp_path, "loaded", 2)
    assert compare(saved, loaded)["states"] > 10
    assert same_weights(saved, loaded)


def test_a_checkpoint_without_its_state_makes_every_row_pending(two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "url": f"file://{tmp_path}/stream"}
    two_ranks.run("tests.integrations.lightning_cases:fit", num_batches=3, checkpoint=None, **arguments)
    (file,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=False)
    del checkpoint["delta_tracker"]
    torch.save(checkpoint, file)
    for seen in two_ranks.run(
        "tests.integrations.lightning_cases:fit", num_batches=6, checkpoint=str(file), **arguments
    ):
        assert seen["loaded"] == {"batches": 0, "restored": "Restored.NOTHING"}


def test_without_lightning_the_error_names_the_extra() -> None:
    program = """
import sys
sys.modules["pytorch_lightning"] = None
try:
    import delta_tracker.integrations.lightning
except Exception as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("MissingExtraError the package 'pytorch_lightning' is not installed")
    assert "delta_tracker[lightning]" in run.stdout
