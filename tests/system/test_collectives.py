"""The watch detects every kind of collective in every thread."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool


def test_no_collective_of_a_thread_is_missed(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("tests.system.collectives_cases:watched"):
        assert answer["missed"] == []
        assert answer["worker on its own group"] == ""
        assert "of gloo" in answer["worker on the default group"]
        assert "['MainThread', 'worker_0'] use group" in answer["worker on a shared group"]


def test_no_background_thread_starts_a_collective(two_ranks: RankPool, tmp_path: Path) -> None:
    for threads in two_ranks.run("tests.system.collectives_cases:whole_library", root=str(tmp_path)):
        assert {name for names in threads.values() for name in names} == {"MainThread"}
        own = sorted(group.split("/")[1] for group in threads if group.startswith("delta_tracker/"))
        assert own == ["parts", "publisher"], "one group for a publisher, one for checkpoints on rank 0"
        assert len(threads) >= 3
