"""The seed interface, which has the names of TorchRec's tracker."""

from __future__ import annotations

import pytest

from delta_tracker.tracker import tracker
from tests.ranks import RankPool

_CASES = "tests.tracker.seed_cases"


@pytest.mark.parametrize("case", ["what_is_tracked", "batches_and_compaction"])
def test_the_seed_interface(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


def test_a_name_that_the_module_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NOTHING'"):
        tracker.NOTHING  # noqa: B018
