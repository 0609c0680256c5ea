"""Counters whose state belongs to each rank, and counters that are not those that were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool

_CASES = "tests.tracker.rank_states_cases"


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_has_its_own_states_again(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    pool = {1: one_rank, 2: two_ranks}[world_size]
    answers = pool.run(f"{_CASES}:rank_states", path=str(tmp_path))
    for saved, loaded, again in answers:
        assert loaded == saved
        assert again == saved
    sums = [saved[0]["sum.sum_value"] for saved, _, _ in answers]
    assert sums == [3.0, 36.0][:world_size]
    assert {saved[1]["sum"] for saved, _, _ in answers} == {sum(sums)}


def test_states_that_cannot_be_merged_need_the_number_of_ranks_that_saved(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    saved = two_ranks.run(f"{_CASES}:saved_for_elsewhere", path=str(tmp_path))
    (answer,) = one_rank.run(f"{_CASES}:loaded_elsewhere", path=str(tmp_path))
    expected = [{**each, "cat": sorted(each["cat"])} for each in saved]
    assert expected == [{**answer["totals"], "cat": sorted(answer["totals"]["cat"])}] * 2
    assert answer["refused"].startswith("StateMismatchError")
    assert "world size 2, where 1 is expected" in answer["refused"]
    for state in ("'average' (state 'seen': dim_zero_mean)", "'product' (state 'seen': product)", "'pieces'"):
        assert state in answer["refused"]


def test_gathered_states_stay_with_their_ranks(two_ranks: RankPool) -> None:
    for before, after in two_ranks.run(f"{_CASES}:gathered"):
        assert after == before


def test_a_counter_that_was_not_saved_is_refused_and_nothing_is_loaded(one_rank: RankPool) -> None:
    (messages,) = one_rank.run(f"{_CASES}:unlike_counters")
    assert messages.pop("load") == "OverflowError: 13"
    assert {name: message.split(":")[0] for name, message in messages.items()} == dict.fromkeys(
        messages, "StateMismatchError"
    )
    assert "counter 'counter': class 'SumMetric', where 'MaxMetric'" in messages["class"]
    assert "[5, 2, 2]" in messages["number of thresholds"]
    assert "[7, 2, 2]" in messages["number of thresholds"]


def test_a_counter_of_the_same_kind_is_loaded_in_another_process_and_after_updates(one_rank: RankPool) -> None:
    (found,) = one_rank.run(f"{_CASES}:alike_counters")
    assert found == {name: [7.0, 7.0] for name in ("partial", "object", "changed buffer")}


def test_a_list_that_is_longer_in_the_header_than_in_the_part_is_refused_at_once(one_rank: RankPool) -> None:
    (messages,) = one_rank.run(f"{_CASES}:damaged_length")
    for message, length in zip(messages, (10**5, 10**10), strict=True):
        assert message.startswith("CheckpointError"), message
        assert f"its list 'seen' has {length} tensors, but it has 3 fields" in message, message


def test_what_holds_metrics_is_refused_with_the_way_to_save_it(one_rank: RankPool) -> None:
    (messages,) = one_rank.run(f"{_CASES}:collections_of_metrics")
    for name, message in messages.items():
        assert message.startswith("InvalidArgumentError"), name
        assert "register each metric" in message.lower(), name
    assert "compute_groups=False" in messages["collection"]
