"""Publishers that leave out rows whose stored bytes did not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delta_tracker.stream.format.encoding import Encoding
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples

_CASES = "tests.publisher.stored_rows_cases"
_NUM_ROWS = 17 + 10 + 6 + 9 + 11 + 17  # of Spec.every_sharding
_NUM_BLOCKS = _NUM_ROWS + 9 + 11  # two column ranges


@pytest.mark.sweep("long")
def test_predictors_equal_those_of_a_publisher_that_sends_all_rows(two_ranks: RankPool, tmp_path: Path) -> None:
    seeds = [*range(200 if SWEEPS_ARE_WHOLE else num_examples(2))]
    found = two_ranks.run(f"{_CASES}:random_runs", root=str(tmp_path), seeds=seeds, timeout_seconds=600)
    assert all(num_unchanged > 0 for num_unchanged in found)


@pytest.mark.sweep("long", only=True)
@pytest.mark.parametrize("world_size", [1, 4])
def test_predictors_equal_at_other_numbers_of_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, world_size: int
) -> None:
    pool: RankPool = request.getfixturevalue({1: "one_rank", 4: "four_ranks"}[world_size])
    pool.run(f"{_CASES}:random_runs", root=str(tmp_path), seeds=[*range(1000, 1030)], timeout_seconds=600)


@pytest.mark.sweep("long")
@pytest.mark.parametrize(
    ("encoding", "choice"),
    [(None, "bytes"), ("INT8", "digest"), ("F16", "digest"), ("BF16", "bytes"), ("INT4", "bytes")]
    if SWEEPS_ARE_WHOLE
    else [(None, "digest"), ("INT8", "bytes")],
)
def test_only_rows_whose_stored_bytes_changed_are_sent(
    two_ranks: RankPool, tmp_path: Path, encoding: str | None, choice: str
) -> None:
    found = two_ranks.run(f"{_CASES}:counts", root=str(tmp_path), encoding=encoding, choice=choice)
    # A snapshot; twice no change, then a change of one row per shard, none, the rows of a version that failed, none.
    # After an attach nothing is known. All rows are sent of the table whose columns are on both ranks.
    few, changed = 18, 26
    expected = [_NUM_BLOCKS, few, few, changed, few, changed, few, _NUM_BLOCKS, few]
    assert [each["sent"] for each in found] == [expected] * 2
    assert sum(each["unchanged"][1] for each in found) == _NUM_ROWS - 9
    assert all(each["counted"] == each["unchanged"] for each in found), "the metric of each rank"
    stored = Encoding.F32 if encoding is None else Encoding(encoding)
    num_bytes = [stored.width(columns) * stored.dtype.itemsize for columns in (8, 4)]
    wide, stacked = [16 + 1] * 2 if choice == "digest" else [num_bytes[0] + 1, 2 * num_bytes[1] + 1]
    assert [each["bytes"] for each in found] == [[28 * wide + 11 * stacked], [22 * wide]]


def test_a_version_has_all_columns_of_a_row(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(f"{_CASES}:whole_rows", root=str(tmp_path)) == [[36, 20, 20]] * 2


@pytest.mark.parametrize("choice", ["bytes", "digest"])
def test_a_row_is_sent_if_only_its_states_changed(two_ranks: RankPool, tmp_path: Path, choice: str) -> None:
    first, second = two_ranks.run(f"{_CASES}:states", root=str(tmp_path), choice=choice)
    assert first == second
    assert first[4] - first[1] == 1


def test_rows_that_another_consumer_read_between_versions_are_pending_after_a_restore(
    one_rank: RankPool, tmp_path: Path
) -> None:
    ((sent, pending),) = one_rank.run(f"{_CASES}:read_between", root=str(tmp_path))
    assert (sent, pending) == (1, [2])


@pytest.mark.parametrize("choice", ["bytes", "digest"])
def test_a_row_is_sent_if_only_its_raw_id_changed(two_ranks: RankPool, tmp_path: Path, choice: str) -> None:
    for unchanged, sent in two_ranks.run(f"{_CASES}:raw_ids", root=str(tmp_path), choice=choice):
        assert unchanged > 50
        assert sent < 20


def test_a_predictor_equals_every_replica(two_ranks: RankPool, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_replicas": 2, "skip_unchanged": "digest"}
    case = "tests.sharding.replicas_cases:follow"
    answers = two_ranks.run(case, url=tmp_path.as_uri(), **arguments)
    assert answers[0] == answers[1]


def test_invalid_choices_and_choices_that_differ_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    for invalid, differing in two_ranks.run(f"{_CASES}:refused", root=str(tmp_path)):
        assert invalid == 'InvalidArgumentError: skip_unchanged=\'md5\' cannot be used. Pass "bytes", "digest" or None.'
        assert "skip_unchanged='bytes' where rank 0 has states=None and skip_unchanged='digest'" in differing
