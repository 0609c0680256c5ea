"""The README's promises for models without sharding that ``test_plain_tables.py`` does not check."""

from __future__ import annotations

import gc
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from delta_tracker import ModelDeltaTracker, Publisher, TrackingMode
from delta_tracker.errors import FencedError, InvalidArgumentError, NeedsSnapshotError, StateMismatchError
from delta_tracker.sharding.step_hook import StepHook
from tests.system.plain_trainer import COLUMNS, ROWS, build, train


def _weights(model: nn.ModuleDict) -> dict[str, Tensor]:
    return {name: each.weight.detach().clone() for name, each in model.items()}  # type: ignore[misc, operator]


def _is_equal(left: nn.ModuleDict, right: nn.ModuleDict) -> bool:
    return all(torch.equal(each, _weights(right)[name]) for name, each in _weights(left).items())


@pytest.mark.promise("fenced")
def test_a_second_publisher_fences_the_first(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    (first, steps), (second, _) = build(), build()
    tracker = ModelDeltaTracker(first)
    with closing(Publisher(tracker, url)) as old, closing(Publisher(ModelDeltaTracker(second), url)):
        names = sorted(path.name for path in (tmp_path / "log").iterdir())
        train(first, steps, 1)
        tracker.step()
        with pytest.raises(FencedError, match="generation 2"):
            old.publish()
        assert sorted(path.name for path in (tmp_path / "log").iterdir()) == names
        assert sum(tracker.num_pending().values()) > 0


@pytest.mark.promise("independent")
def test_a_slow_consumer_is_dropped_and_the_others_are_exact() -> None:
    model, optimizers = build()
    tracker = ModelDeltaTracker(model, ["fast", "slow"], mode=TrackingMode.EMBEDDING, max_bytes=8_000)
    fast, _ = build()
    for batch in range(60):
        train(model, optimizers, batch)
        tracker.step()
        for name, rows in tracker.get_delta("fast", with_values=True).items():
            with torch.no_grad():
                fast[name].weight[rows.ids] = rows.values  # type: ignore[index, operator]
        assert _is_equal(fast, model)
    with pytest.raises(NeedsSnapshotError, match="consumer 'slow' needs a snapshot"):
        tracker.get_delta("slow")
    tracker.clear("slow")
    train(model, optimizers, 60)
    tracker.step()
    assert tracker.get_delta("slow")["user"].ids.tolist() == tracker.get_delta("fast")["user"].ids.tolist()


@pytest.mark.promise("contained")
def test_an_error_in_a_hook_does_not_reach_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("boom")

    model, optimizers = build()
    tracker, reference = ModelDeltaTracker(model), build()
    with monkeypatch.context() as patch:
        patch.setattr(StepHook, "_written", broken)
        train(model, optimizers, 1)
    train(*reference, 1)
    tracker.step()
    assert _is_equal(model, reference[0])
    assert tracker.num_hook_errors > 0
    delta = tracker.get_delta()
    assert delta["user"].ids.tolist() == list(range(ROWS))
    assert len(delta["item"].ids) == len(torch.unique((torch.arange(20) * 8) % ROWS % (ROWS // 2)))
    train(model, optimizers, 2)
    tracker.step()
    assert tracker.get_delta()["user"].ids.tolist() == sorted(set(((torch.arange(20) * 9) % ROWS).tolist()))


@pytest.mark.promise("contained")
def test_a_tracker_that_is_deleted_during_a_step_does_not_disturb_it() -> None:
    model, optimizers = build()
    other, _ = build()
    dropped = [ModelDeltaTracker(other)]

    def delete(*_: object) -> None:
        dropped.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(delete)
    kept = ModelDeltaTracker(model)
    train(model, optimizers, 1)
    handle.remove()
    kept.step()
    assert kept.get_delta()["user"].ids.tolist() == sorted(set(((torch.arange(20) * 8) % ROWS).tolist()))


@pytest.mark.promise("refused")
def test_bad_input_is_refused_whole(tmp_path: Path) -> None:
    model, optimizers = build()
    tracker = ModelDeltaTracker(model)
    train(model, optimizers, 1)
    tracker.step()
    pending = tracker.num_pending()
    with pytest.raises(InvalidArgumentError, match=r"ids=\[-1, 300\].*at least 0 and less than 300"):
        tracker.mark_changed("user", torch.tensor([3, -1, 300]))
    with pytest.raises(InvalidArgumentError, match=r"fqn='users'.*\['item', 'user'\]"):
        tracker.read_rows("users")
    other = nn.ModuleDict({"user": nn.Embedding(ROWS + 1, COLUMNS)})
    with pytest.raises(StateMismatchError, match="'user': 301 x 8"):
        tracker.load_state_dict(ModelDeltaTracker(other).state_dict())
    with pytest.raises(InvalidArgumentError, match="encoding='users'"):
        Publisher(tracker, f"file://{tmp_path}", encoding={"users": "INT8"})  # type: ignore[dict-item]
    assert tracker.num_pending() == pending
    assert not list(tmp_path.iterdir())


@pytest.mark.promise("unpickled")
def test_a_checkpoint_has_no_pickled_bytes() -> None:
    model, optimizers = build()
    tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    train(model, optimizers, 1)
    state = tracker.state_dict()
    assert all(type(each) is Tensor for each in state.values())
    (header,) = [each for name, each in state.items() if name.endswith("/header")]
    assert json.loads(header.numpy().tobytes())["version"] == 1
