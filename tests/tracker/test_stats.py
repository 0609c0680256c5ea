"""The value that says how a tracker is."""

from __future__ import annotations

import torch

from delta_tracker import ModelDeltaTracker


def test_it_has_the_pending_rows_of_each_consumer_and_changes_nothing() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.EmbeddingBag(50, 4, sparse=True) for name in ("user", "item")})
    with ModelDeltaTracker(model, consumers=["serving", "audit"]) as tracker:
        tracker.mark_changed("user", torch.tensor([1, 2, 3]))
        tracker.step()
        tracker.get_delta("audit")
        tracker.mark_changed("item", torch.tensor([4]))
        for _ in range(2):
            stats = tracker.stats()
            assert (stats.num_pending("serving"), stats.num_pending("audit")) == (4, 1)
            assert (stats.pending_ratio("serving"), stats.lags["serving"].pending["user"]) == (0.04, 3)
            assert (stats.lags["serving"].batches, stats.lags["audit"].batches, stats.num_batches) == (1, 0, 1)
            assert stats.memory == tracker.memory()
        first, *lines = repr(stats).splitlines()
        assert "2 tables, 100 rows on this rank, 1 batch" in first
        assert [line.split()[:2] for line in lines] == [["serving", "4"], ["audit", "1"]]


def test_rows_that_were_written_outside_a_step_are_counted() -> None:
    model = torch.nn.ModuleDict({"user": torch.nn.EmbeddingBag(50, 4, sparse=True)})
    with ModelDeltaTracker(model) as tracker, torch.no_grad():
        model["user"].weight.add_(1)
        assert tracker.stats().num_pending("default") == tracker.num_pending()["user"] == 50
