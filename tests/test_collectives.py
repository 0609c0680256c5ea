"""The watch over collectives sees every kind of them, in every thread."""

from __future__ import annotations

from tests.ranks import RankPool


def test_no_collective_of_a_thread_is_missed(two_ranks: RankPool) -> None:
    for answer in two_ranks.run("tests.cases.collectives:watched"):
        assert answer["missed"] == []
        assert answer["worker on its own group"] == ""
        assert "of gloo" in answer["worker on the default group"]
        assert "['MainThread', 'worker_0'] use group" in answer["worker on a shared group"]
