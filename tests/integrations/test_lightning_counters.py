"""Counters of each rank in the checkpoints of a real Lightning trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.integrations.lightning_counters_cases"

pytest.importorskip("pytorch_lightning", exc_type=ModuleNotFoundError)


@pytest.mark.parametrize("every_rank", [False, True], ids=["rank 0 saves", "every rank saves"])
def test_each_rank_continues_with_its_own_states(two_ranks: RankPool, tmp_path: Path, every_rank: bool) -> None:
    arguments = {"path": str(tmp_path / "checkpoint"), "every_rank": every_rank}
    saved = two_ranks.run(f"{_CASES}:save", **arguments)
    assert [own for own, _ in saved] == [[12.0, 6.0], [24.0, 12.0]]
    assert two_ranks.run(f"{_CASES}:resume", **arguments) == [[each, each] for each in saved]


def test_the_totals_are_the_same_at_another_number_of_ranks(
    one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    for before, after in ((two_ranks, one_rank), (one_rank, four_ranks), (four_ranks, two_ranks)):
        path = str(tmp_path / f"{before.world_size}")
        saved = before.run(f"{_CASES}:save", path=path, every_rank=False)
        for answers in after.run(f"{_CASES}:resume", path=path, every_rank=False):
            assert [totals for _, totals in answers] == [saved[0][1]] * 2


@pytest.mark.advice("CheckpointError: CountersCallback._checked")
def test_checkpoints_that_do_not_fit_are_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank, messages in enumerate(two_ranks.run(f"{_CASES}:refusals", folder=str(tmp_path))):
        assert messages["none"].startswith("CheckpointError"), messages
        assert "is_required=False" in messages["none"]
        assert messages["other"].startswith("StateMismatchError"), messages
        assert "['clicks'], where ['clicks', 'views'] is expected" in messages["other"]
        assert messages["damaged"].startswith("CheckpointError" if rank else "RankFailedError"), messages
        assert "its header cannot be read" in messages["damaged"]
        assert messages["no counters"].startswith("InvalidArgumentError"), messages
        own, totals = messages["allowed"]
        assert own[0] == 77.0
        assert totals[0] == 154.0
