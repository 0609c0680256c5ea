"""Ranges in torch's profiler."""

from __future__ import annotations

from tests.ranks import RankPool

_CASES = "tests.tracker.seed_cases"


def test_recording_compaction_and_reads_are_ranges_of_the_profiler(two_ranks: RankPool) -> None:
    for found in two_ranks.run(f"{_CASES}:profiled"):
        assert found["delta_tracker: record"] >= 2
        assert found["delta_tracker: compact"] == 2, "one by hand, one after the read"
        assert found["delta_tracker: read"] == 1
