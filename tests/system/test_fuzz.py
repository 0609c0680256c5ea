"""A short run of the fuzzer, in a process whose memory is capped; ``python -m tests.stream.fuzz_stream`` runs long."""

from __future__ import annotations

import re

import pytest

from tests import forked


@pytest.mark.promise("unpickled")
def test_mutated_manifests_and_parts_are_refused_or_right() -> None:
    run = forked.run("tests.stream.fuzz_stream", "--mutations", "1500", "--seed", "1", timeout_seconds=240)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = re.findall(r"^ *(\d+) (.+)$", run.stdout, flags=re.MULTILINE)
    found = {outcome: int(count) for count, outcome in counts}
    for outcome in ("manifest refused", "manifest right, parts right", "part refused", "part right", "sync refused"):
        assert found[outcome] > 10, run.stdout
    for kind in ("part", "states", "training state"):
        assert found[f"{kind} of format 2 refused"] > 10, run.stdout
        assert found[f"{kind} of format 2 right"] > 2, run.stdout
    assert found["recovery refused"] > 10, run.stdout
    assert found["recovery right"] > 0, run.stdout
    assert found["sync right"] > 0
