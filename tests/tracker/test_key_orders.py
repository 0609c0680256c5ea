"""A checkpoint of DCP is loaded exactly under any keys, or the keys are refused with the order that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.tracker.key_orders_cases"
_EXACT = "nothing was raised"


# The short form leaves out what the others contain: a fused model on one rank, and states without old values.
_KINDS = [(1, "sparse"), (1, "dense"), (2, "fused"), (2, "unfused"), *([(1, "fused")] if SWEEPS_ARE_WHOLE else [])]


@pytest.mark.sweep("short")
@pytest.mark.advice("InvalidArgumentError: _refuse_later_model")
@pytest.mark.parametrize("form", ["module", "application", "dict"])
@pytest.mark.parametrize(("world_size", "kind"), _KINDS)
@pytest.mark.parametrize("mode", ["embedding", *(["id_only"] if SWEEPS_ARE_WHOLE else [])])
def test_a_model_is_loaded_before_its_tracker_or_refused(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, form: str, world_size: int, kind: str, mode: str
) -> None:
    ranks = one_rank if world_size == 1 else two_ranks
    for messages in ranks.run(f"{_CASES}:orders", path=str(tmp_path), form=form, kind=kind, mode=mode):
        assert messages["model"] == messages["a.model"] == _EXACT
        if form == "dict":
            assert messages["z"] == _EXACT
        else:
            assert "it would load the model under 'z' after its tracker under 'tracker'" in messages["z"]
            assert "Load 'z' in a call of dcp.load() before that of 'tracker'" in messages["z"]


def test_other_objects_are_loaded_after_a_tracker(one_rank: RankPool, tmp_path: Path) -> None:
    assert one_rank.run(f"{_CASES}:others", path=str(tmp_path)) == [_EXACT]
