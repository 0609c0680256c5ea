"""Random trainers with a fault on one rank; ``python -m tests.system.random_trainers`` runs more of them."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.servers import installed
from tests.sweeps import SWEEPS_ARE_WHOLE

# Seeds on one and two ranks with few tables: an exception, an interrupt, a full disk, a hook, and a store that fails.
_SHORT = (49, 26, 58, 12, 11)
_FAULTS = ("exception", "interrupt", "disk", "s3", "hook", "store")


@pytest.mark.sweep("long")
@pytest.mark.promise("lossless", "minimal", "equal", "restored", "contained")
@pytest.mark.timeout(1200)
def test_random_trainers_lose_nothing() -> None:
    if SWEEPS_ARE_WHOLE:
        installed("weed")
    arguments = ["--seeds", "40"] if SWEEPS_ARE_WHOLE else ["--seed", *map(str, _SHORT)]
    done = forked.run("tests.system.random_trainers", *arguments, timeout_seconds=1180)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["published"] > 2 * seen["seeds"]
    assert seen["checked"] > 10 * seen["seeds"], "versions that were compared with the mirror"
    assert seen["rows read"] > 50 * seen["seeds"]
    if SWEEPS_ARE_WHOLE:
        covered = [*(f"fault {kind}" for kind in _FAULTS), "write", "load", "top_k", "abort"]
        covered += [f"{how} on {ranks}" for how in ("loaded", "restored") for ranks in (1, 2, 4)]
        assert [name for name in covered if not seen.get(name)] == []
        assert seen.get("ranks lost", 0) < seen["seeds"] // 4
