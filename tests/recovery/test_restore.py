"""Restores of real models, at the same and at other numbers of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from tests.recovery.restore_cases import same
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.recovery.restore_cases"


def spec(world_size: int, *extra: dict[str, Any], is_moved: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Return a model. With ``is_moved``, row-wise and table-wise sharding are exchanged."""
    last = world_size - 1
    plans = [f"table:{last}", "row"] if is_moved else ["row", f"table:{last}"]
    tables = [
        {"name": "row", "rows": 17, "sharding": plans[0]},
        {"name": "table", "rows": 10, "sharding": plans[1]},
        {"name": "column", "rows": 9, "sharding": f"column:0,{last}"},
        {"name": "stacked", "rows": 11, "sharding": "column:0,0"},
    ]
    return {"tables": [*tables, *extra], **kwargs}


def load(path: Path, what: str, world_size: int) -> list[dict[str, Any]]:
    return [torch.load(path / f"{what}-{rank}of{world_size}.pt", weights_only=False) for rank in range(world_size)]


def cells(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows and states of all tables by FQN, row and column range, and the numbers of their kernels."""
    found: dict[str, Any] = {}
    for held in ranks:
        for fqn, table in held["tables"].items():
            for number, columns in enumerate(table["columns"]):
                for place, row in enumerate(range(*table["rows"])):
                    cell = [table["weights"][number][place], *(each[place] for each in table["states"][number])]
                    assert same(found.setdefault(f"{fqn} {row} {columns}", cell), cell)
                assert same(found.setdefault(fqn, table["scalars"]), table["scalars"])
    return found


_COPIED = {"name": "copied", "rows": 7, "sharding": "data"}
_ROW_WISE = {"tables": [{"name": "row", "rows": 17, "sharding": "row"}, _COPIED]}
_PLAIN = {"name": "plain", "rows": 8, "sharding": "row", "kernel": "dense"}


@pytest.fixture(scope="module")
def stream(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish three versions from two ranks, with row-wise Adagrad and a replicated table."""
    path = tmp_path_factory.mktemp("restore")
    two_ranks.run(f"{_CASES}:published", path=str(path), spec=spec(2, _COPIED))
    return path


@pytest.fixture(scope="module")
def row_wise_stream(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish three versions of the model ``_ROW_WISE`` from two ranks, for tests that need no other sharding."""
    path = tmp_path_factory.mktemp("row-wise")
    two_ranks.run(f"{_CASES}:published", path=str(path), spec=_ROW_WISE)
    return path


def check_continued(path: Path, answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert (answer["version"], answer["num_batches"], answer["world_size"]) == (3, 7, 2)
        assert (answer["event_time"], answer["rank_states"]) == (10.0, {})
        assert not any(answer["pending"]["main"].values())
        assert answer["notes"]["main"]["version"] == 3
    assert same(load(path, "saved", 2), load(path, "restored", 2))
    continued, resumed = load(path, "continued", 2), load(path, "resumed", 2)
    assert same([each["losses"] for each in continued], [each["losses"] for each in resumed])
    assert same(continued, resumed)


@pytest.mark.promise("resumed")
def test_a_job_continues_bit_for_bit(two_ranks: RankPool, stream: Path) -> None:
    answers = two_ranks.run(f"{_CASES}:restored", path=str(stream), spec=spec(2, _COPIED), ignore=[])
    check_continued(stream, answers)


@pytest.mark.sweep("long")
@pytest.mark.promise("resumed")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"] if SWEEPS_ARE_WHOLE else ["SGD"])
def test_other_optimizers_continue_bit_for_bit(two_ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    made = spec(2, *([_COPIED, _PLAIN] if optimizer == "SGD" else []), optimizer=optimizer)
    two_ranks.run(f"{_CASES}:published", path=str(tmp_path), spec=made)
    check_continued(tmp_path, two_ranks.run(f"{_CASES}:restored", path=str(tmp_path), spec=made, ignore=[]))


@pytest.mark.promise("resumed")
@pytest.mark.parametrize(("saved_by", "world_size"), [(2, 1), (2, 4), (1, 4)])
def test_the_state_is_equal_at_another_number_of_ranks(
    one_rank: RankPool, four_ranks: RankPool, stream: Path, tmp_path: Path, saved_by: int, world_size: int
) -> None:
    path, pool = stream, {1: one_rank, 4: four_ranks}[world_size]
    if saved_by == 1:
        path = tmp_path
        one_rank.run(f"{_CASES}:published", path=str(path), spec=spec(1, _COPIED))
    made, reshards = spec(world_size, _COPIED, is_moved=True), world_size == 4
    ignore = ["random"] if reshards else ["random", "data"]
    answers = pool.run(f"{_CASES}:restored", path=str(path), spec=made, ignore=ignore, reshards=reshards)
    positions = [{"batches": 7, "event_time": 10.0 + rank, "loader": {"count": 7}} for rank in range(2)]
    for answer in answers:
        assert answer["world_size"] == saved_by
        assert sorted(answer["rank_states"]) == sorted(ignore)
        assert answer["rank_states"]["random"] == saved_by
        assert reshards or answer["rank_states"]["data"] == positions
    before, after = load(path, "saved", saved_by), load(path, "restored", world_size)
    assert same(cells(before), cells(after))
    for held in after:
        assert same(held["dense"], before[0]["dense"])
        assert same(held["states"]["optimizer"], before[0]["states"]["optimizer"])
        assert held["batches"] == 7
        assert not reshards or held["states"]["data"]["loader"] == {"count": 7 * saved_by}


def test_a_table_that_is_not_restored_is_sent_again(two_ranks: RankPool, stream: Path) -> None:
    made, fqn = spec(2, _COPIED), "ec.embedding_bags.table"
    answers = two_ranks.run(f"{_CASES}:restored", path=str(stream), spec=made, ignore=[fqn], num_batches=0)
    for rank, answer in enumerate(answers):
        assert {name: count for name, count in answer["pending"]["main"].items() if count} == (
            {fqn: 10} if rank else {}
        )


@pytest.mark.parametrize("version", [None, 2])
def test_a_publisher_continues_without_a_snapshot(
    two_ranks: RankPool, stream: Path, tmp_path: Path, version: int | None
) -> None:
    shutil.copytree(stream / "stream", tmp_path / "stream")
    answers = two_ranks.run(f"{_CASES}:continued", path=str(tmp_path), spec=spec(2, _COPIED), version=version)
    for first, second, num_batches in answers:
        if version is None:
            assert first == ["delta", 0], "the writes of the restore are not published"
        else:
            assert first[0] == "delta", "it takes the rows of the later version back"
            assert 0 < first[1] < 90
        assert second[0] == "delta"
        assert 0 < second[1] < 90
        assert num_batches == (8 if version is None else 6)


def test_other_consumers_miss_no_row(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(f"{_CASES}:consumers", path=str(tmp_path), spec=spec(2))


def test_each_rank_reads_its_share(two_ranks: RankPool, tmp_path: Path) -> None:
    made = {"tables": [{"name": "row", "rows": 1000, "sharding": "row"}]}
    for found in two_ranks.run(f"{_CASES}:shared_reads", path=str(tmp_path), spec=made):
        assert found["objects"] >= 4
        assert 36 * 500 <= found["read"] <= found["all"] / 2 + 3 * 1024 * found["objects"]


def test_an_older_version_is_restored(two_ranks: RankPool, stream: Path) -> None:
    made = spec(2, _COPIED)
    answers = two_ranks.run(f"{_CASES}:restored", path=str(stream), spec=made, ignore=[], version=2, num_batches=2)
    assert [(answer["version"], answer["num_batches"]) for answer in answers] == [(2, 5)] * 2
    # Two batches later, the job is at the state of the last version.
    resumed = load(stream, "resumed", 2)
    for each in resumed:
        del each["losses"]
    assert same(load(stream, "saved", 2), resumed)


@pytest.mark.parametrize("where", ["fit", "write", "load"])
def test_an_interrupted_restore_leaves_a_model_that_says_so(
    two_ranks: RankPool, row_wise_stream: Path, where: str
) -> None:
    first, second = two_ranks.run(f"{_CASES}:interrupted", path=str(row_wise_stream), spec=_ROW_WISE, where=where)
    failed = "RankFailedError: the restore failed: rank 0 failed with "
    rejected = "a rejected state of training_state['scheduler']: " if where == "load" else ""
    assert first[0].startswith(f"{failed}{rejected}StorageError: " if rejected else "StorageError: ")
    assert second[0].startswith(f"{failed}{rejected}StorageError: ")
    for messages in (first, second):
        expected = "nothing was raised" if where == "fit" else "IncompleteModelError: the model is incomplete"
        assert all(message.startswith(expected) for message in messages[1:]), messages


def test_an_interrupt_on_one_rank_ends_the_restore_on_all(two_ranks: RankPool, row_wise_stream: Path) -> None:
    case = f"{_CASES}:interrupted_by_the_user"
    first, second = two_ranks.run(case, path=str(row_wise_stream), spec=_ROW_WISE, timeout_seconds=60)
    assert (first[0], second[0].partition(":")[0]) == ("interrupted", "RankLostError")
    assert all(each[1].startswith("IncompleteModelError") for each in (first, second))


@pytest.mark.promise("refused")
def test_what_does_not_fit_is_refused_and_changes_nothing(two_ranks: RankPool, stream: Path) -> None:
    made = spec(2, _COPIED)
    other = {**made, "tables": [{**each, "rows": 18} if each["name"] == "row" else each for each in made["tables"]]}
    rows = [{**each, "sharding": "row"} if each["name"] == "column" else each for each in made["tables"]]
    specs = {
        "table": other,
        "columns": {**made, "tables": rows},
        "optimizer": {**made, "optimizer": "Adagrad"},
        "no optimizer": made,
        "version": made,
        "ignore": made,
        "reserved": made,
        "update": made,
        "library": made,
    }
    expected = {
        "table": "table 'ec.embedding_bags.row' is 17 x 8 float32 in the version but 18 x 8 float32",
        "columns": "the column ranges of 'ec.embedding_bags.column'",
        "optimizer": "is EXACT_ROWWISE_ADAGRAD in the version but EXACT_ADAGRAD",
        "no optimizer": "training_state['optimizer'] is there in the version but missing",
        "version": "version",
        "ignore": "rank 1 failed with ignore=[] where rank 0 has ignore=['random']",
        "reserved": "ReservedConsumerError",
        "update": "InvalidArgumentError: model='the step before the backward pass of ",
        "library": "its library.consumers is invalid: Object missing required field `version`",
        "cold": "model='DistributedDataParallel without two trained batches' cannot be used. Train two batches before",
        "replicas": "UnsupportedModelError: ",
    }
    for messages in two_ranks.run(f"{_CASES}:refused", path=str(stream), specs=specs):
        for what, words in expected.items():
            assert words in messages[what], (what, messages[what])


@pytest.mark.promise("refused")
def test_wrong_objects_are_refused_and_the_position_is_attached(two_ranks: RankPool, row_wise_stream: Path) -> None:
    expected = {
        "optimizer": "keys that differ in param_groups[0] of training_state['optimizer'] is ['amsgrad', 'betas',",
        "swapped": "the state of training_state['optimizer'], a StepLR, is ['param_groups', 'state'] in the version",
        "empty": "NotRecoverableError: file://",
        "publisher": "is reserved by Publisher. Close the publisher, load or restore, and build a new",
        "data": "Pass the DataPosition of tracker.attach_data().",
    }
    for messages in two_ranks.run(f"{_CASES}:misuse", path=str(row_wise_stream), spec=_ROW_WISE):
        for what, words in expected.items():
            assert words in messages[what], (what, messages[what])
        assert "has nothing to restore: the stream is empty. Check the URL, or start without" in messages["empty"]
