"""Cases for the seed interface, which has the names of TorchRec's tracker, on a real sharded model."""

from __future__ import annotations

import logging
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from delta_tracker import DeltaStore, ModelDeltaTracker, TrackingMode
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker import tracker as module
from tests.models import Spec, Table, batch, shard

_SPEC = Spec([Table("t", 30, "table:0"), Table("u", 30, "row", features=("u", "t"))])
_T, _U = "ec.embeddings.t", "ec.embeddings.u"


def what_is_tracked(rank: int, world_size: int) -> None:
    """Check modules, features, modes, and what is logged for them."""
    model = shard(_SPEC)
    with mock.patch.object(module, "_logger", mock.Mock(spec=logging.Logger)) as logger:
        tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    with tracker:
        assert dict(tracker.tracked_modules) == tracker.get_tracked_modules() != {}
        assert all(isinstance(each, module.SUPPORTED_MODULES) for each in tracker.tracked_modules.values())
        assert tracker.feature_to_fqn == {"t": _T, "u": _U}
        assert list(tracker.store) == [_T, _U]
        assert all(tracker.store[fqn].num_rows == shard.num_rows for fqn, shard in tracker.shards.items())
        lines = [call.args[0] % call.args[1:] for call in logger.info.call_args_list]
        assert lines[1] == f"tracking table: fqn={_U} shape=30 x 8 float32 mode=embedding features=['u', 't']", lines
        assert set(module.UPDATE_MODE_MAP) == set(TrackingMode)
        store = DeltaStore(module.UPDATE_MODE_MAP[tracker.mode])
        before = tracker.read_rows(_U)
        if len(before):
            store.append(0, _U, torch.tensor([1]), before[[1]])
            tracker.mark_changed(_U, torch.tensor([1]))
            assert store.get_delta()[_U].ids.tolist() == tracker.get_delta_ids()[_U].tolist()


def batches_and_compaction(rank: int, world_size: int) -> None:
    """Batches are counted by step(), per consumer up to its last committed read, and for compaction."""
    model, generator = shard(_SPEC), torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, ["a", "b"], delete_on_read=False) as tracker:

        def train() -> None:
            model(batch(_SPEC, generator)).backward()
            tracker.step()

        train()
        assert (tracker.curr_batch_idx, tracker.curr_compact_index) == (1, 0)
        assert tracker.per_consumer_batch_idx == {"a": 0, "b": 0}
        tracker.get_delta("a")
        train()
        tracker.get_delta("a", commit=False)
        assert tracker.per_consumer_batch_idx == {"a": 1, "b": 0}
        assert tracker.curr_compact_index == 1
        expected = tracker.num_pending("a"), tracker.num_pending("b")
        tracker.compact(0, 1)
        assert tracker.curr_compact_index == 1, "that batch has been compacted"
        tracker.compact(1, 2)
        assert tracker.curr_compact_index == 2
        assert (tracker.num_pending("a"), tracker.num_pending("b")) == expected, "nothing is lost"
        train()
        tracker.compact()
        assert tracker.curr_compact_index == 3
        assert tracker.get_delta("a", commit=False).batches == (1, 3)
        for start, end in ((0, 0), (2, 1), (-1, 1), (0, 5)):
            with pytest.raises(InvalidArgumentError, match="start_idx"):
                tracker.compact(start, end)


def profiled(rank: int, world_size: int) -> dict[str, int]:
    """Return how often each range occurs in a profile of two batches, a compaction and a read."""
    model, generator = shard(_SPEC), torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for _ in range(2):
                model(batch(_SPEC, generator)).backward()
                tracker.step()
            tracker.compact()
            tracker.get_delta()
        return Counter(event.name for event in recorded.events() if event.name.startswith("delta_tracker"))
