"""One program on TorchRec's own tracker and on ``delta_tracker.compat``; each case runs on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker import model_delta_tracker, types
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import DataPosition, Publisher, Recovery, compat
from delta_tracker.errors import InvalidArgumentError, UncopyableError, UnfinishedStepError
from tests.models import Spec, Table, batch, shard
from tests.sharding.copies_cases import COPIES, groups_are_shared

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


def methods_of_dmp(rank: int, world_size: int) -> None:
    """The methods of ``DistributedModelParallel`` create, keep and step our tracker until the patch is removed."""
    original = DistributedModelParallel.__dict__["_init_delta_tracker"]
    model = shard(_SPEC)
    with compat.patch_torchrec():
        assert model.get_delta_tracker() is None
        tracker = model.init_torchrec_delta_tracker(compat.DeltaTrackerConfig(consumers=["a", "b"]))
        assert type(tracker) is compat.ModelDeltaTrackerTrec
        assert tracker is model.get_delta_tracker() is model.model_trackers[compat.Trackers.DELTA_TRACKER.name]
        assert tracker is model.init_torchrec_delta_tracker(compat.DeltaTrackerConfig())
        theirs = shard(_SPEC).init_torchrec_delta_tracker(types.DeltaTrackerConfig(types.TrackingMode.EMBEDDING))
        assert (type(theirs), theirs.mode) == (compat.ModelDeltaTrackerTrec, compat.TrackingMode.EMBEDDING)
    generator = torch.Generator().manual_seed(rank)
    other = compat.init_torchrec_delta_tracker(model, compat.DeltaTrackerConfig())  # which the model does not know
    for number in range(1, 4):
        model(batch(_SPEC, generator)).backward()
        assert (tracker.curr_batch_idx, other.curr_batch_idx) == (number, 0)
    assert tracker.get_delta("a").batches == (0, 3)
    model(batch(_SPEC, generator)).backward()
    tracker.step()
    delta, expected = tracker.get_delta("b"), other.get_unique_ids()
    assert delta.batches == (0, 5)  # the last batch counts twice, and has its rows once
    assert {fqn: rows.ids.tolist() for fqn, rows in delta.items()} == {
        fqn: ids.tolist() for fqn, ids in expected.items()
    }
    assert DistributedModelParallel.__dict__["_init_delta_tracker"] is original
    assert type(shard(_SPEC).init_torchrec_delta_tracker(types.DeltaTrackerConfig())) is _THEIRS.ModelDeltaTrackerTrec


def publisher_and_data(rank: int, world_size: int, url: str) -> None:
    """A publisher of states needs a step after each update. A position in the data needs one step for each batch."""
    model, generator = shard(_SPEC), torch.Generator().manual_seed(rank)
    config = compat.DeltaTrackerConfig(consumers=["a"])
    with compat.patch_torchrec():
        tracker = model.init_torchrec_delta_tracker(config)
    position = DataPosition(_Batches(generator))
    tracker.attach_data(position)
    data = iter(position)
    with Publisher(tracker, f"{url}/model", recovery=Recovery()) as publisher:
        model(next(data)).backward()
        position.check()
        with pytest.raises(UnfinishedStepError, match=r"tracker.step\(\), publisher.step\(\)"):
            publisher.publish()
        tracker.step()
        with pytest.raises(InvalidArgumentError, match="steps without a batch"):
            publisher.publish()
    other, position = compat.init_torchrec_delta_tracker(model, config), DataPosition(_Batches(generator))
    other.attach_data(position)
    data = iter(position)
    with Publisher(other, f"{url}/program", recovery=Recovery()) as publisher:
        for number in (1, 2):
            model(next(data)).backward()
            other.step()
            assert publisher.publish().batches[1] == number


class _Batches:
    """Batches without end."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while True:
            yield batch(_SPEC, self._generator)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


def patches_in_any_order(rank: int, world_size: int) -> None:
    """Each patch can be removed, in any order and twice, and the last one leaves TorchRec's method."""
    original = DistributedModelParallel.__dict__["_init_delta_tracker"]

    def kind() -> type:
        return type(shard(_SPEC).init_torchrec_delta_tracker(types.DeltaTrackerConfig()))

    first, second = compat.patch_torchrec(), compat.patch_torchrec()
    first.remove()
    assert kind() is compat.ModelDeltaTrackerTrec
    second.remove()
    second.remove()
    assert kind() is _THEIRS.ModelDeltaTrackerTrec
    third = compat.patch_torchrec()
    assert kind() is compat.ModelDeltaTrackerTrec
    third.remove()
    assert kind() is _THEIRS.ModelDeltaTrackerTrec
    DistributedModelParallel._init_delta_tracker = original


def a_copy_of_the_model(rank: int, world_size: int) -> None:
    """A model with a tracker is copied without it, as the error says."""
    model = shard(_SPEC)
    with compat.patch_torchrec():
        tracker = model.init_torchrec_delta_tracker(compat.DeltaTrackerConfig())
    with groups_are_shared():
        with pytest.raises(UncopyableError, match="take it out of model_trackers meanwhile"):
            COPIES["deepcopy"](model)
        held = model.model_trackers.pop("DELTA_TRACKER")
        copied = COPIES["deepcopy"](model)
        model.model_trackers["DELTA_TRACKER"] = held
    assert copied.get_delta_tracker() is None
    assert model.get_delta_tracker() is tracker
    model(batch(_SPEC, torch.Generator().manual_seed(rank))).backward()
    assert tracker.curr_batch_idx == 1
