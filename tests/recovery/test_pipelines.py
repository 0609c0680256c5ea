"""A job with TorchRec's pipeline continues bit for bit after a restore."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankPool


def test_a_pipeline_skips_and_repeats_no_batch(two_ranks: RankPool, tmp_path: Path) -> None:
    ids = two_ranks.run("tests.recovery.pipeline_cases:resumed", url=tmp_path.as_uri())
    assert ids[0] != ids[1]
