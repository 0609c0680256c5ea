"""The fault sweep: each storage operation of a claim, a snapshot and a delta is killed, failed and overtaken.

The failures of a restore are swept, too. Runs one point in forty, and one in 48 of the kills;
``make test-long-sweeps`` runs all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.promise("atomic", "fenced")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["kills", "failures", "races"])
def test_every_operation(tmp_path: Path, mode: str) -> None:
    every = "1" if SWEEPS_ARE_WHOLE else "48" if mode == "kills" else "40"
    run = forked.run("tests.system.fault_sweep", mode, str(tmp_path), "--every", every, timeout_seconds=590)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    # A claim looks for the tables of a mirror, probes the store, looks for a pointer, lists the log to find the head,
    # creates its entry, looks for others above and below it before it lists the log again, and is read back. A second
    # one reads the entry of the newest version, to name what differs in the model. A snapshot writes two parts, the
    # copied rows and the rows changed during the copy. It checks its parent before and after it creates its entry, and
    # looks for four later entries.
    expected = {"claim": 32, "second claim": 40, "snapshot": 20, "second snapshot": 20, "delta": 17}
    # With states, a version has two more objects: the states of its rows, and the training state of the rank.
    expected["states"] = 49
    if mode == "kills":
        # Retention looks for pins twice, announces its deletions, and waits four times until names are on disk.
        # The pointer takes two listings, a look at the one before, and a write.
        expected |= {"compaction": 37, "fold": 44, "retention": 66, "pointer": 8}
    if mode == "failures":
        expected["restore"] = 56  # of them six for the sizes of objects
    assert counts == expected
