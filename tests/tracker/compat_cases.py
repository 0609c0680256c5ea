"""One program on TorchRec's own tracker and on ``delta_tracker.compat``; each case runs on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torchrec.distributed.model_tracker import model_delta_tracker, types
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import compat
from tests.models import Spec, Table, batch, shard

_THEIRS = SimpleNamespace(**{**vars(types), **vars(model_delta_tracker)})
_SPEC = Spec([Table("t", 17, "row"), Table("u", 9, "row")])
_T, _U = "ec.embeddings.t", "ec.embeddings.u"


def _program(names: Any, mode: str, rank: int) -> list[dict[str, Any]]:
    """Train, and read with two consumers; only ``names`` differs."""
    model = shard(_SPEC)
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
        # In some batches, no id of u is on rank 1.
        model(batch(_SPEC, generator) if number % 2 else _first_rows()).backward()
        for consumer in ("a", "b") if number % 2 else ("a",):
            rows = tracker.get_unique(consumer)
            found.append({fqn: [_plain(each.ids), _plain(each.states)] for fqn, each in rows.items()})
        tracker.step()
    assert sorted(tracker.fqn_to_feature_names()) == sorted(tracker.table_to_fqn.values()) == [_T, _U]
    return found


def _first_rows() -> KeyedJaggedTensor:
    values, lengths = torch.tensor([0, 16, 0, 2]), torch.tensor([2, 2])
    return KeyedJaggedTensor(keys=["t", "u"], values=values, lengths=lengths)


def _plain(tensor: torch.Tensor | None) -> list[Any] | None:
    return None if tensor is None else [list(tensor.shape), str(tensor.dtype), tensor.tolist()]


def same_program(rank: int, world_size: int) -> dict[str, Any]:
    found = {mode: [_program(names, mode, rank) for names in (_THEIRS, compat)] for mode in ("ID_ONLY", "EMBEDDING")}
    empty = sum(ids[0] == [0] for runs in found.values() for rows in runs[1] for ids, _ in rows.values())
    return {**{mode: theirs == ours for mode, (theirs, ours) in found.items()}, "empty": empty}


def latest_states(rank: int, world_size: int, optimizer: str, kind: str) -> dict[str, Any]:
    """Compare the optimizer's states after a batch."""
    spec = Spec([Table("t", 17, kind), Table("u", 9, kind)], optimizer=optimizer)
    model = shard(spec)
    tracker = compat.ModelDeltaTrackerTrec(model)
    model(batch(spec, torch.Generator().manual_seed(rank), max_length=9)).backward()
    latest = tracker.get_latest()
    assert all(each.sum() > 0 for each in latest.values())
    try:
        theirs = model_delta_tracker.ModelDeltaTrackerTrec(model).get_latest()
    except (AssertionError, IndexError):  # several column ranges on a rank, and optimizers without states
        theirs = None
    else:
        assert {fqn: _plain(each) for fqn, each in latest.items()} == {
            fqn: _plain(each) for fqn, each in theirs.items()
        }
    return {"shapes": {fqn: list(each.shape) for fqn, each in latest.items()}, "compared": theirs is not None}
