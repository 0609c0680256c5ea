"""One program on TorchRec's own tracker and on ``delta_tracker.compat``; each runs on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torchrec.distributed.model_tracker import model_delta_tracker, types

from delta_tracker import compat
from tests.models import Spec, Table, batch, shard

_THEIRS = SimpleNamespace(**{**vars(types), **vars(model_delta_tracker)})


def _program(names: Any, mode: str, rank: int) -> list[dict[str, Any]]:
    """Train, and read with two consumers; only ``names`` differs."""
    spec = Spec([Table("t", 17, "row"), Table("u", 9, "row")])
    model = shard(spec)
    config = names.DeltaTrackerConfig(tracking_mode=names.TrackingMode[mode], consumers=["a", "b"])
    tracker = names.ModelDeltaTrackerTrec(
        model,
        consumers=config.consumers,
        delete_on_read=config.delete_on_read,
        auto_compact=config.auto_compact,
        mode=config.tracking_mode,
        fqns_to_skip=config.fqns_to_skip,
    )
    assert isinstance(tracker, names.ModelDeltaTracker)
    generator, found = torch.Generator().manual_seed(rank), []
    for number in range(6):
        model(batch(spec, generator)).backward()
        for consumer in ("a", "b") if number % 2 else ("a",):
            rows = tracker.get_unique(consumer)
            assert all(mode == "ID_ONLY" or each.states is not None for each in rows.values())
            assert all(mode != "ID_ONLY" or each.states is None for each in rows.values())
            found.append({fqn: _plain(each) for fqn, each in rows.items() if len(each.ids)})
        tracker.step()
    if names is compat:  # TorchRec's read raises an error if there is nothing to read
        assert tracker.get_unique_ids("a") == {}
    assert sorted(tracker.fqn_to_feature_names()) == ["ec.embeddings.t", "ec.embeddings.u"]
    return found


def _plain(rows: Any) -> list[Any]:
    order = rows.ids.argsort()
    states = None if rows.states is None else rows.states[order].tolist()
    return [rows.ids[order].tolist(), states]


def same_program(rank: int, world_size: int) -> dict[str, bool]:
    return {mode: _program(_THEIRS, mode, rank) == _program(compat, mode, rank) for mode in ("ID_ONLY", "EMBEDDING")}
