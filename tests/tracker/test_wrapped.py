"""Collections inside other modules of TorchRec, and batches of unusual shapes, are tracked exactly."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool


@pytest.mark.promise("lossless")
@pytest.mark.parametrize(
    "kind", ["feature processors", "pec", "repeated ids removed", "uneven batches", "variable batch"]
)
def test_reported_rows_are_those_that_changed(two_ranks: RankPool, kind: str) -> None:
    found = two_ranks.run("tests.tracker.wrapped_cases:exact", kind=kind)
    if found == [None, None]:
        pytest.skip("this release of torchrec has no such module")
    assert sum(found) > 0
