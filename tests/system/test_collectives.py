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


def test_no_thread_starts_a_collective_on_the_group_of_another(two_ranks: RankPool, tmp_path: Path) -> None:
    for threads in two_ranks.run("tests.system.collectives_cases:whole_library", root=str(tmp_path)):
        own = {group.split("/")[1]: names for group, names in threads.items() if group.startswith("delta_tracker/")}
        workers = own.pop("publisher's workers")
        assert workers == ["publisher-exchange_0"]
        assert own.keys() == {"parts", "publisher"}, "one group for the votes of a publisher, one for checkpoints"
        others = {name for group, names in threads.items() for name in names if "workers" not in group}
        assert others == {"MainThread"}
        assert len(threads) >= 3
