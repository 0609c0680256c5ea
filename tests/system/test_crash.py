"""Trainers that are killed at random and resumed at another world size, from the newest or an older checkpoint."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.promise("equal", "atomic", "restored")
@pytest.mark.timeout(600)
def test_every_predictor_equals_the_trainer_at_every_quiet_point() -> None:
    seeds = 10 if SWEEPS_ARE_WHOLE else 2
    done = forked.run("tests.system.crash", "--seeds", str(seeds), timeout_seconds=580)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["checkpoints"] > 2 * seeds
    assert seen["repairs"] > seeds, "most lives go on from a checkpoint with a delta"
