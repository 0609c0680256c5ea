"""Trainers that are killed and continue from their stream; ``python -m tests.system.resume`` runs more of them."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.promise("equal", "atomic", "resumed")
@pytest.mark.timeout(600)
def test_a_killed_trainer_continues_bit_for_bit() -> None:
    seeds = 5 if SWEEPS_ARE_WHOLE else 1
    arguments = ["--seeds", str(seeds), "--steps", "6", "--actions", "8", "--short"]
    done = forked.run("tests.system.resume", *arguments, timeout_seconds=580)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["seeds"] == seeds
    if SWEEPS_ARE_WHOLE:
        kinds = ("SGD", "Adagrad", "RowWiseAdagrad", "none", "data", "dense", "grid", "1 ranks", "2 ranks", "4 ranks")
        assert [name for name in kinds if not seen.get(name)] == []
    assert "empty" not in seen, "a trainer was killed before its first version"
    assert seen["batches"] > seeds
