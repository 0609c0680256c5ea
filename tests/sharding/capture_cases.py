"""Cases that train while torch reports that a CUDA graph is captured. The capture is simulated; the model is real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from delta_tracker import ModelDeltaTracker, TrackingMode
from tests.models import Spec, Table, batch, kernels_of, shard

_SPEC = Spec([Table("a", 20, "table:0"), Table("b", 30, "table:0")], bag=True)


class Ops(TorchDispatchMode):
    """Counts the operations, each of which a capture would put into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def capture() -> Iterator[None]:
    with patch.multiple(torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True):
        yield


def _replay(model: Any) -> None:
    """Write a row of each table without a hook or a new version of the weights, as the replay of a graph does."""
    (kernel,) = kernels_of(model.module.ec)
    for weight in kernel.split_embedding_weights():
        weight.data[7] += 1


def captured_step(rank: int, world_size: int, mode: str) -> None:
    """Replays of a captured step call no hook: every read returns all rows, with unknown old states."""
    model = shard(_SPEC)
    features = batch(_SPEC, torch.Generator().manual_seed(0))
    model(features).backward()
    with Ops() as alone:
        model(features).backward()
    with ModelDeltaTracker(model, engine="torch", mode=TrackingMode[mode], auto_compact=True) as tracker:
        model(features).backward()
        tracker.step()
        delta = tracker.get_delta(commit=False)
        assert all(0 < len(rows) < tracker.tables[fqn].num_rows for fqn, rows in delta.items())
        model(features).backward()
        tracker.abort(delta)  # now the next output distribution compacts the log
        with capture(), Ops() as tracked:
            model(features).backward()
            tracker.step()
        assert tracked.num_ops == alone.num_ops, "the graph would repeat the tracker's operations"
        for number in range(3):
            _replay(model)
            delta = tracker.get_delta(commit=False)
            assert {fqn: len(rows) for fqn, rows in delta.items()} == tracker.num_pending()
            for fqn, rows in delta.items():
                assert len(rows) == tracker.tables[fqn].num_rows
                assert number == 0 or rows.known is None or not rows.known.any(), "only before the capture"
            tracker.commit(delta)
        assert tracker.num_hook_errors == 0


def captured_lookup(rank: int, world_size: int) -> None:
    """A capture of a lookup without a backward pass is reported only if lookups are recorded."""
    model = shard(_SPEC)
    features = batch(_SPEC, torch.Generator().manual_seed(0))
    for record in ("updates", "lookups"):
        with ModelDeltaTracker(model, record=record) as tracker:
            with capture(), torch.no_grad():
                model(features)
            for _ in range(2):
                delta = tracker.get_delta()
                for fqn, rows in delta.items():
                    assert len(rows) == (tracker.tables[fqn].num_rows if record == "lookups" else 0)
            assert tracker.num_hook_errors == 0
