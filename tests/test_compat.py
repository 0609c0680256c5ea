"""A program for TorchRec's tracker runs after one import is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from delta_tracker import compat
from delta_tracker.errors import InvalidArgumentError
from tests.ranks import RankPool


def test_a_program_reads_the_same_rows(two_ranks: RankPool) -> None:
    for answers in two_ranks.run("tests.tracker.compat_cases:same_program"):
        assert answers == {"ID_ONLY": True, "EMBEDDING": True}


def test_a_fraction_of_the_rows_is_those_that_moved_most() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 1, sparse=True, mode="sum"))
    config = compat.DeltaTrackerConfig(compat.TrackingMode.EMBEDDING)
    tracker = compat.init_torchrec_delta_tracker(model, config)
    model(torch.tensor([[1, 2, 2, 2, 3, 3, 4]])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    tracker.step()
    rows = tracker.get_unique(top_percentage=0.5)["0"]
    assert rows.ids.tolist() == [2, 3]
    assert rows.states is not None
    assert rows.states.shape == (2, 1)
    assert tracker.get_unique_ids()["0"].tolist() == [1, 4]
    with pytest.raises(InvalidArgumentError, match=r"per_table_percentage=.*top_k=TopK"):
        tracker.get_unique(per_table_percentage={"0": (0.5, "l2")})
    with pytest.raises(InvalidArgumentError, match="fraction=7"):
        tracker.get_unique(top_percentage=7)


def test_the_names_of_torchrec_are_there() -> None:
    assert compat.ModelDeltaTracker is compat.ModelDeltaTrackerTrec
    assert {each.name for each in compat.UpdateMode} == {"NONE", "FIRST", "LAST"}
    with pytest.raises(AttributeError, match="NOTHING"):
        compat.NOTHING  # noqa: B018
