"""The callback under a real Lightning trainer of two processes."""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta_tracker import ModelDeltaTracker, RankCounters
from delta_tracker.errors import DetachedError, InvalidArgumentError
from tests.integrations.lightning_programs import AVERAGES, Program, programs
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.tracker.checkpoint_files import compare, load, same_weights
from tests.tracker.rank_states_cases import KINDS

_CASES = "tests.integrations.lightning_cases"
_ORDERS = "tests.integrations.lightning_orders"

pytest.importorskip("pytorch_lightning", exc_type=ModuleNotFoundError)


@pytest.mark.advice("DetachedError: TrackerCallback.tracker")
def test_a_trainer_goes_on_where_another_one_stopped(two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "url": f"file://{tmp_path}/stream"}
    for seen in two_ranks.run(f"{_CASES}:fit", num_batches=3, checkpoint=None, **arguments):
        assert seen["loaded"] == {"batches": 0, "restored": "None"}
        assert seen["saved"] == {"batches": 3, "restored": "None"}
        assert seen["version"] == 2  # the claim, one by cadence, one at the end
        assert seen["errors"] == 0
    (checkpoint,) = tmp_path.glob("*.ckpt")
    saved = load(tmp_path, "saved", 2)
    for seen in two_ranks.run(f"{_CASES}:fit", num_batches=6, checkpoint=str(checkpoint), **arguments):
        assert seen["loaded"] == {"batches": 3, "restored": "LoadOutcome.STATE"}
        assert seen["saved"]["batches"] == 6
        assert seen["version"] == 6  # the end of the first fit publishes, too
    loaded = load(tmp_path, "loaded", 2)
    assert compare(saved, loaded)["states"] > 10
    assert same_weights(saved, loaded)


def test_a_checkpoint_without_its_state_makes_every_row_pending(two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "url": f"file://{tmp_path}/stream"}
    two_ranks.run(f"{_CASES}:fit", num_batches=3, checkpoint=None, **arguments)
    (file,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=False)
    del checkpoint["delta_tracker"]
    torch.save(checkpoint, file)
    for seen in two_ranks.run(f"{_CASES}:fit", num_batches=6, checkpoint=str(file), **arguments):
        assert seen["loaded"] == {"batches": 0, "restored": "LoadOutcome.NOTHING"}


@pytest.mark.parametrize("every_rank", [False, True], ids=["rank 0 saves", "every rank saves"])
def test_each_rank_continues_with_its_own_states(two_ranks: RankPool, tmp_path: Path, every_rank: bool) -> None:
    _check_states(two_ranks.run(f"{_CASES}:fit_counting", folder=str(tmp_path), every_rank=every_rank))


@pytest.mark.sweep("short", only=True)
def test_states_of_one_and_of_three_ranks(one_rank: RankPool, tmp_path: Path) -> None:
    three_ranks = RankPool(3)
    try:
        for pool, every_rank in itertools.product((one_rank, three_ranks), (False, True)):
            folder = tmp_path / f"{pool.world_size} {every_rank}"
            _check_states(pool.run(f"{_CASES}:fit_counting", folder=str(folder), every_rank=every_rank))
        answers = three_ranks.run("tests.tracker.rank_states_cases:rank_states", path=str(tmp_path / "dcp"))
    finally:
        three_ranks.stop()
    assert all(saved == loaded == again for saved, loaded, again in answers)
    sums = [saved[0]["sum.sum_value"] for saved, _, _ in answers]
    assert sums == [3.0, 36.0, 90.0]
    assert {loaded[1]["sum"] for _, loaded, _ in answers} == {sum(sums)}


def _check_states(answers: list[Any]) -> None:
    """Check what :func:`tests.integrations.lightning_cases.fit_counting` returned on each rank."""
    for (_, saved, (first, _)), (loaded, _, (second, restored)) in answers:
        assert loaded == saved
        # Claims, one version each, and one at the end of the first fit. A single rank also acts on each step at once.
        versions = (2, 6) if len(answers) == 1 else (1, 4)
        assert (first, second, restored) == (*versions, "LoadOutcome.STATE")
    own = [saved[0]["sum.sum_value"] for (_, saved, _), _ in answers]
    assert own == [6.0, 39.0, 93.0][: len(answers)]
    assert {loaded[1]["sum"] for _, (loaded, _, _) in answers} == {sum(own)}


def test_each_rank_encodes_its_state_once_for_a_checkpoint(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(f"{_CASES}:packed_once")
    assert first == [1, ["rank0of2", "rank1of2"]]
    assert second == [1, ["rank1of2"]]


def test_ranks_that_disagree_are_refused_before_training(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank, messages in enumerate(two_ranks.run(f"{_CASES}:disagreements", folder=str(tmp_path))):
        assert messages["counters"].startswith("RankFailedError"), messages
        assert "'one'" in messages["counters"], messages
        assert "'other'" in messages["counters"], messages
        assert messages["lacking"].startswith("RankFailedError"), messages
        assert "failed with tracker state of a checkpoint: " in messages["lacking"], messages
        for name, kind in (("build", "InvalidArgumentError"), ("damaged", "CheckpointError")):
            assert messages[name].startswith(kind if rank else "RankFailedError"), messages
            assert kind in messages[name], messages


@pytest.mark.parametrize("failing", ["build", "load", "publish"])
def test_a_fit_after_a_failed_one_marks_every_row(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    from delta_tracker.integrations import lightning  # noqa: PLC0415  optional

    saved, loaded, failures = {"header": torch.zeros(1)}, list[object](), [failing]
    closed, marked = list[object](), list[str]()
    attached = set[object]()

    def attempt(name: str) -> None:
        if name in failures:
            failures.remove(name)
            raise ValueError(name)

    class Tracker:
        checkpoint = SimpleNamespace(description=dict)
        tables = ("t",)

        def __init__(self) -> None:
            attempt("build")
            attached.add(self)

        def detach(self) -> None:
            attached.discard(self)

        def load_state_dict(self, state: object) -> None:
            attempt("load")
            loaded.append(state)

        mark_changed = staticmethod(marked.append)

    def fit(checkpoint: dict[str, object] | None) -> None:
        callback.setup(trainer, module, "fit")
        if checkpoint is not None:
            callback.on_load_checkpoint(trainer, module, checkpoint)
        callback.on_fit_start(trainer, module)
        callback.on_train_start(trainer, module)

    monkeypatch.setattr(lightning.RankGroup, "close", lambda group: closed.append(id(group)))
    callback = lightning.TrackerCallback(lambda _: Tracker(), lambda _: attempt("publish"))
    trainer, module = Namespace(callbacks=[object(), callback]), torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=failing):
        fit({"delta_tracker": saved})
    assert trainer.callbacks[0] is callback
    assert len(trainer.callbacks) == 2
    if failing == "publish":
        assert callback.tracker in attached  # other callbacks may save a checkpoint
    else:
        assert not attached
        with pytest.raises(DetachedError):
            callback.tracker  # noqa: B018
        checkpoint: dict[str, object] = {}
        callback.on_save_checkpoint(trainer, module, checkpoint)
        assert checkpoint["delta_tracker"] is saved
    del loaded[:]
    fit(None)  # the model may be another one by now
    assert (loaded, marked) == ([], ["t"])
    assert len(attached) == 1
    fit({"delta_tracker": saved})
    assert (loaded, marked) == ([saved], ["t"])
    assert len(closed) == 3


def test_the_last_rows_are_published_and_saved_after_fit(one_rank: RankPool, tmp_path: Path) -> None:
    (saved,) = one_rank.run("tests.integrations.lightning_cases:fit_and_save", folder=str(tmp_path))
    assert saved == {"published": [1, 3], "after": "DetachedError", "pending": [3], "resumed": [3]}


def test_a_fit_after_an_error_releases_the_first_tracker(one_rank: RankPool, tmp_path: Path) -> None:
    (seen,) = one_rank.run(f"{_CASES}:fit_after_an_error", folder=str(tmp_path))
    assert seen[0] == "nothing was raised"
    assert seen[1].startswith("DetachedError")
    assert seen[2].startswith("InvalidArgumentError")


def test_plain_modules_under_ddp(two_ranks: RankPool, tmp_path: Path) -> None:
    for error in two_ranks.run(f"{_CASES}:fit_plain", folder=str(tmp_path)):
        assert error.startswith("UnsupportedModelError: the model has parts that cannot be tracked: 'bag' (")
        assert "pass the wrapper" in error


@pytest.mark.sweep("long")
@pytest.mark.parametrize("world_size", [1, 2])
def test_any_order_of_callbacks(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    pool = {1: one_rank, 2: two_ranks}[world_size]
    count = {1: 10, 2: 6}[world_size] * (4 if SWEEPS_ARE_WHOLE else 1)
    chosen = programs(world_size, count)
    for errors in pool.run(f"{_ORDERS}:perform", folder=str(tmp_path), programs=chosen, timeout_seconds=280):
        assert errors == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_callbacks_that_average_or_prune(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    pool = {1: one_rank, 2: two_ranks}[world_size]
    chosen = [
        asdict(Program(order, name, None, None, "again", every_rank=False))
        for name, order in zip(AVERAGES[1:], ("TCSWA", "ATCSW", "SWCAT", "TACSW"), strict=True)
    ]
    for errors in pool.run(f"{_ORDERS}:perform", folder=str(tmp_path), programs=chosen):
        assert errors == []


@pytest.mark.parametrize("search", ["lr start", "lr 0"])
def test_rows_that_are_read_during_a_search_are_read_again(one_rank: RankPool, tmp_path: Path, search: str) -> None:
    program = asdict(Program("TCSWA", "none", search, None, None, every_rank=False))
    assert one_rank.run(f"{_ORDERS}:perform", folder=str(tmp_path), programs=[program]) == [[]]


def test_a_table_that_lightning_prunes_is_refused_by_name(one_rank: RankPool, tmp_path: Path) -> None:
    (error,) = one_rank.run(f"{_ORDERS}:pruned_table", folder=str(tmp_path))
    assert error.startswith("UnsupportedModelError: the model has a table that can no longer be tracked: 'rows' (")


def test_checkpoints_of_other_weights(one_rank: RankPool, tmp_path: Path) -> None:
    (seen,) = one_rank.run(f"{_ORDERS}:weights_of_other_checkpoints", folder=str(tmp_path))
    assert seen == {"second": "STATE", "first again": "STATE", "written": "STATE"}


def test_checkpoints_of_averaged_weights(one_rank: RankPool, tmp_path: Path) -> None:
    (seen,) = one_rank.run(f"{_ORDERS}:averaged_checkpoints", folder=str(tmp_path))
    assert seen == {"with": "STATE", "without": "STATE", "pending": {"rows": 40, "bags": 40}}


def test_a_strategy_that_restores_the_model_after_the_start_of_fit(one_rank: RankPool, tmp_path: Path) -> None:
    assert one_rank.run(f"{_ORDERS}:late_checkpoint", folder=str(tmp_path)) == ["STATE"]


def test_a_checkpoint_is_loaded_without_a_trainer(one_rank: RankPool, tmp_path: Path) -> None:
    (seen,) = one_rank.run(f"{_ORDERS}:checkpoint_without_a_trainer", folder=str(tmp_path))
    restored, pending, changed, counters, num_batches = seen
    assert (restored, counters, num_batches) == ("LoadOutcome.STATE", [24.0, 24.0], 24)
    assert pending == changed
    assert 0 < pending["rows"] < 40


@pytest.mark.advice("InvalidArgumentError: _check_only_one")
def test_a_second_callback_of_a_trainer_is_refused() -> None:
    from delta_tracker.integrations.lightning import CountersCallback, TrackerCallback  # noqa: PLC0415  optional

    counters = RankCounters({"clicks": KINDS["sum"]()})
    for make in (lambda: TrackerCallback(ModelDeltaTracker), lambda: CountersCallback(counters)):
        callbacks = [make(), make()]
        with pytest.raises(InvalidArgumentError, match=r"cannot be used\. Pass one"):
            callbacks[0].setup(Namespace(callbacks=callbacks), torch.nn.Linear(1, 1), "fit")  # type: ignore[attr-defined]
        callbacks[0].setup(Namespace(callbacks=callbacks[:1]), torch.nn.Linear(1, 1), "fit")  # type: ignore[attr-defined]
