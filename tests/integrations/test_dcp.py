"""Checkpoints of DCP as the guide writes them, on a rank without any shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASE = "tests.integrations.dcp_cases:without_a_shard"


def test_a_rank_without_a_shard_saves_and_loads_its_part(two_ranks: RankPool, tmp_path: Path) -> None:
    answers = two_ranks.run(_CASE, path=str(tmp_path), is_flat=True, has_empty=False)
    assert [answer[:2] for answer in answers] == [["", True]] * 2
    assert [answer[2] > 0 for answer in answers] == [False, True]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"is_flat": False, "has_empty": False}, "optimizer.param_groups"),
        ({"is_flat": True, "has_empty": True}, "fused"),
    ],
)
def test_the_guide_names_what_torch_cannot_load_there(
    two_ranks: RankPool, tmp_path: Path, options: dict[str, bool], key: str
) -> None:
    for error, _, _ in two_ranks.run(_CASE, path=str(tmp_path), **options):
        assert f"Missing key in checkpoint state_dict: {key}" in error
