"""A warm publish and a warm sync stay short; ``benchmarks/count_calls.py`` defines what counts."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool

_BOUNDS = {"publish": 300, "sync": 220}


def test_a_warm_version_takes_few_calls(one_rank: RankPool, tmp_path: Path) -> None:
    (calls,) = one_rank.run("tests.system.calls_cases:counted", root=str(tmp_path))
    assert {name: calls[name] for name, bound in _BOUNDS.items() if calls[name] > bound} == {}


def test_a_publish_does_nothing_with_old_states(one_rank: RankPool, tmp_path: Path) -> None:
    (calls,) = one_rank.run("tests.system.calls_cases:counted_with_states", root=str(tmp_path))
    assert calls["embedding"] <= calls["id_only"]
