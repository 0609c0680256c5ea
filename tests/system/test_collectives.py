"""The watch over collectives sees every kind of them, in every thread."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool


def test_no_collective_of_a_thread_is_missed(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("tests.system.collectives_cases:watched"):
        assert answer["missed"] == []
        assert answer["worker on its own group"] == ""
        assert "of gloo" in answer["worker on the default group"]
        assert "['MainThread', 'worker_0'] use group" in answer["worker on a shared group"]


def test_no_thread_but_the_publishers_starts_a_collective(two_ranks: RankPool, tmp_path: Path) -> None:
    for threads in two_ranks.run("tests.system.collectives_cases:whole_library", root=str(tmp_path)):
        own = {group: names for group, names in threads.items() if "messages" in group}
        assert list(own.values()) == [["publisher-ranks_0"]]
        others = {name for group, names in threads.items() if group not in own for name in names}
        assert others == {"MainThread"}
        assert len(threads) >= 5
