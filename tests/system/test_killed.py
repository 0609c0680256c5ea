"""SIGKILL at every step of an apply, a resync and a rollback: a predictor restarted from its files is correct.

``make test`` kills at every fourth step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.storage.storage import Storage
from tests import forked
from tests.predictor.serving import assert_holds, empty_model
from tests.stream.histories import History
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.system import killed_cases as killed


def _keep(directory: Path, model: dict[str, torch.Tensor], predictor: Predictor) -> None:
    directory.mkdir()
    for name in killed.SHAPES:
        (directory / name).write_bytes(model[name].view(-1).view(torch.uint8).numpy().tobytes())
    (directory / "place.json").write_text(json.dumps(predictor.state_dict()))


@pytest.mark.sweep("short")
@pytest.mark.promise("atomic")
@pytest.mark.timeout(900)  # on a busy machine
def test_a_predictor_killed_at_any_step_ends_with_the_right_tables(tmp_path: Path) -> None:
    history = History(Storage(f"file://{tmp_path}/stream", create=True, fsync=False), 1)
    model = empty_model()
    predictor = Predictor(model, history.storage)
    predictor.sync()
    _keep(tmp_path / "begin", model, predictor)
    history.delta(3)
    gap = history.version + 1
    history.delta()
    history.snapshot(is_fuzzy=True)
    history.delta(4)
    history.delta(3)
    assert gap + 2 == killed.ROLLED_BACK_TO
    (tmp_path / "stream" / entry_name(gap)).unlink()
    assert predictor.sync() == history.version
    assert_holds(model, history, history.version)
    _keep(tmp_path / "expected", model, predictor)
    every = "1" if SWEEPS_ARE_WHOLE else "4"
    done = forked.run("tests.system.killed_cases", str(tmp_path), every, timeout_seconds=850)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kinds = {"before a read", "before a listing", "before a chunk", "within a chunk"}
    kinds |= {"before dense tensors", "after dense tensors"}
    kinds |= {"before the place is written", "before the place is renamed", "after the place is renamed"}
    for scenario in killed.SCENARIOS:
        assert kinds <= found[scenario].keys()
        assert found[scenario]["within a chunk"] >= 5
    assert found["rollback"]["after the place is removed"] == 1
    shutil.rmtree(tmp_path / "kept")
