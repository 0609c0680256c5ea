"""Restores of a version into a job whose model or optimizer was changed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker import ModelDeltaTracker, Publisher, Recovery, Standby, Storage, restore
from delta_tracker.errors import InvalidArgumentError, RestoreMismatchError
from tests.ranks import RankPool
from tests.recovery.restore_cases import same
from tests.recovery.test_restore import _COPIED, cells, load, spec

_EC = "ec.embedding_bags."
_OLD = spec(2, _COPIED)


def _with(name: str, **changes: Any) -> dict[str, Any]:
    """Return the model with a changed table."""
    return {**_OLD, "tables": [{**each, **changes} if each["name"] == name else each for each in _OLD["tables"]]}


_ADDED = {"name": "new", "rows": 5, "sharding": "row"}
_NEW_COPY = {"name": "new", "rows": 5, "sharding": "data"}
# What was changed, the new model, words of the differences, and the tables whose rows are restored without states.
_CHANGES: dict[str, tuple[dict[str, Any], Sequence[str], Sequence[str]]] = {
    "a table has more rows": (_with("row", rows=20), ["17 x 8", "rows from 17 on keep their values"], []),
    "a table has fewer rows": (_with("row", rows=12), ["12 x 8", "rows from 12 on are left out"], []),
    "a table is wider": (_with("table", dim=16), [f"{_EC}table' is 10 x 8 float32 in the stream"], []),
    "a table was added": (spec(2, _COPIED, _ADDED), [f"'{_EC}new' is missing in the version"], []),
    "a table was removed": (
        {**_OLD, "tables": [each for each in _OLD["tables"] if each["name"] != "stacked"]},
        [f"{_EC}stacked' is 11 x 8 float32 in the stream but missing in the model: it is left out"],
        [],
    ),
    "a table without fused optimizer has more rows": (
        _with("copied", rows=9),
        ["rows from 7 on keep their values", f"the states of '{_EC}copied' are not restored"],
        ["copied"],
    ),
    "a table without fused optimizer was added": (
        spec(2, _COPIED, _NEW_COPY),
        [f"'{_EC}new' is missing in the version"],
        [],
    ),
    "another optimizer": (
        {**_OLD, "optimizer": "Adagrad"},
        [f"the optimizer of '{_EC}row' is EXACT_ROWWISE_ADAGRAD in the version but EXACT_ADAGRAD in this job"],
        ["row", "table", "column", "stacked"],
    ),
}


@pytest.fixture(scope="module")
def stream(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("changed")
    two_ranks.run("tests.recovery.restore_cases:published", path=str(path), spec=_OLD)
    return path


@pytest.mark.parametrize("what", _CHANGES)
def test_rows_that_exist_in_both_are_restored(two_ranks: RankPool, stream: Path, tmp_path: Path, what: str) -> None:
    made, words, stateless = _CHANGES[what]
    shutil.copytree(stream, tmp_path, dirs_exist_ok=True)
    answers = two_ranks.run("tests.recovery.model_change_cases:changed", path=str(tmp_path), spec=made)
    saved = cells(load(tmp_path, "saved", 2))
    dims = {each["name"]: each.get("dim", 8) for each in made["tables"]}
    for held, former in zip(load(tmp_path, "after", 2), load(tmp_path, "before", 2), strict=True):
        after, before = cells([held]), cells([former])
        for key in [key for key in after if " " in key]:  # the others are the numbers of kernels
            name = key.partition(" ")[0].removeprefix(_EC)
            expected = before[key]
            if key in saved and dims[name] == 8:
                expected = [saved[key][0], *expected[1:]] if name in stateless else saved[key]
            assert same(after[key], expected), key
        assert any(same(after[key], saved[key]) for key in saved.keys() & after.keys())
    for rank, answer in enumerate(answers):
        for text in words:
            assert any(text in each for each in answer["differences"]), (text, answer["differences"])
        assert "on_model_change='continue'" in answer["refusal"]
        assert answer["kind"] == "snapshot"
        for fqn, (first, end) in (
            (fqn, table["rows"]) for fqn, table in load(tmp_path, "after", 2)[rank]["tables"].items()
        ):
            if any(f"{fqn!r} is" in each and "restored" not in each for each in answer["differences"]):
                assert {each[fqn] for each in answer["pending"].values()} == {end - first}, "no consumer had these rows"
        saved_states, former, states = (
            load(tmp_path, each, 2)[rank]["moments"] for each in ("saved", "before", "after")
        )
        for name, each in states.items():
            is_kept = name not in saved_states or name.removeprefix(_EC) in stateless
            assert same(each, (former if is_kept else saved_states)[name]), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_optimizer_may_have_another_order_of_its_parameters(
    two_ranks: RankPool, four_ranks: RankPool, stream: Path, tmp_path: Path, world_size: int
) -> None:
    shutil.copytree(stream, tmp_path, dirs_exist_ok=True)
    pool, made = {2: two_ranks, 4: four_ranks}[world_size], spec(world_size, _COPIED, is_moved=world_size == 4)
    pool.run("tests.recovery.model_change_cases:reordered", path=str(tmp_path), spec=made)
    saved = load(tmp_path, "saved", 2)[0]["moments"]
    assert len(saved) > 2
    for held in load(tmp_path, "reordered", world_size):
        assert same(held["moments"], saved)


def test_a_rule_must_be_one_of_two(tmp_path: Path) -> None:
    for call in (restore, Standby):
        with pytest.raises(InvalidArgumentError, match=r"Pass one of \('stop', 'continue'\)"):
            call(torch.nn.EmbeddingBag(2, 2), tmp_path.as_uri(), on_model_change="skip")  # type: ignore[operator]


class _Job:
    """A model of some tables of width 2, with a publisher once it has published."""

    def __init__(self, **sizes: int) -> None:
        self.model = torch.nn.ModuleDict({name: torch.nn.Embedding(size, 2) for name, size in sizes.items()})
        self.tracker = ModelDeltaTracker(self.model)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.5)
        self.recovery = Recovery(training_state={"optimizer": self.optimizer}, heartbeat_seconds=None)
        self.publisher: Publisher | None = None

    def publish(self, url: Any, row: int = 0) -> str:
        """Train a row of each table, and publish it. Return the kind of the version."""
        self.optimizer.zero_grad()
        torch.stack([table(torch.tensor([row])).sum() for table in self.model.values()]).sum().backward()
        self.optimizer.step()
        self.tracker.step()
        self.publisher = self.publisher or Publisher(self.tracker, url, recovery=self.recovery)
        return self.publisher.publish().kind

    def standby(self, storage: Storage, **options: Any) -> Standby:
        return Standby(self.model, storage, tracker=self.tracker, recovery=self.recovery, look_seconds=0.0, **options)

    def rows(self, name: str) -> torch.Tensor:
        return self.model[name].weight.detach().clone()


def test_a_standby_of_a_changed_model_takes_over_with_what_both_have() -> None:
    storage, former, job = Storage("memory://"), _Job(a=6, b=6), _Job(a=9, c=4)
    before = {name: job.rows(name) for name in ("a", "c")}
    former.publish(storage)
    with pytest.raises(RestoreMismatchError, match="or pass on_model_change='continue'"):
        job.standby(storage).sync()
    standby = job.standby(storage, on_model_change="continue")
    standby.sync()
    former.publish(storage, row=3)
    taken = standby.take_over(force=True)
    assert job.rows("a")[:6].equal(former.rows("a"))
    assert job.rows("a")[6:].equal(before["a"][6:])
    assert job.rows("c").equal(before["c"])
    assert {each.split("'")[1] for each in taken.restored.differences} == {"a", "b", "c"}
    assert [job.publish(taken.recovery), job.publish(taken.recovery)] == ["snapshot", "delta"]


def test_a_standby_follows_a_trainer_that_becomes_like_it() -> None:
    storage, former, changed, job = Storage("memory://"), _Job(a=6, b=6), _Job(a=9, c=4), _Job(a=9, c=4)
    former.publish(storage)
    standby = job.standby(storage, on_model_change="continue")
    standby.sync()
    former.publish(storage, row=3)  # not applied before the change
    restore(changed.model, storage, tracker=changed.tracker, recovery=changed.recovery, on_model_change="continue")
    assert [changed.publish(storage), changed.publish(storage, row=2)] == ["snapshot", "delta"]
    taken = standby.take_over(force=True)
    assert taken.restored.differences == ()
    assert all(job.rows(name).equal(changed.rows(name)) for name in ("a", "c"))
    assert job.publish(taken.recovery) == "delta"
