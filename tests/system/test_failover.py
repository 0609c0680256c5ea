"""Trainers that fail while a standby follows them; ``python -m tests.system.failover`` runs more of them."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.promise("equal", "fenced", "resumed")
@pytest.mark.timeout(1800)
def test_a_standby_continues_the_only_history() -> None:
    arguments = ["--seeds", "5"] if SWEEPS_ARE_WHOLE else ["--first", "2", "--seeds", "1", "--short"]
    done = forked.run("tests.system.failover", *arguments, timeout_seconds=1790)
    assert done.returncode == 0, done.stderr[-3000:]
    *seeds, _ = [json.loads(line) for line in done.stdout.splitlines()]
    seen = seeds[-1]
    assert seen["recovery compared"] > seen["seeds"]
    assert seen["losses"] > seen["seeds"]
