"""Standbys of real models: following, takeovers, and their faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.recovery.test_restore import spec
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.recovery.standby_cases"
_COPIED = {"name": "copied", "rows": 7, "sharding": "data"}
_PLAIN = {"name": "plain", "rows": 8, "sharding": "row", "kernel": "dense"}
# For tests of who writes when: a batch on one table takes less time than one on every sharding.
_ROW_WISE = {"tables": [{"name": "row", "rows": 17, "sharding": "row"}]}


@pytest.mark.sweep("long")
@pytest.mark.promise("resumed")
@pytest.mark.parametrize("optimizer", ["", "SGD", "Adagrad"] if SWEEPS_ARE_WHOLE else [""])
def test_a_standby_equals_the_trainer_at_each_version_and_continues(
    two_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    made = spec(2, _COPIED)
    if optimizer:
        made = spec(2, *([_COPIED, _PLAIN] if optimizer == "SGD" else []), optimizer=optimizer)
    for messages in two_ranks.run(f"{_CASES}:followed", path=str(tmp_path), spec=made, num_versions=7):
        trained, built, live, over = messages
        for message in (trained, built):
            assert message.startswith("IncompleteModelError: the model follows a stream at version 7. Call"), message
        assert live.startswith("LivePublisherError")
        assert "this job has taken over" in over


@pytest.mark.sweep("long")
@pytest.mark.parametrize("seed", range(40 if SWEEPS_ARE_WHOLE else 1))
def test_random_orders_of_following_and_publishing(two_ranks: RankPool, tmp_path: Path, seed: int) -> None:
    two_ranks.run(f"{_CASES}:scattered", path=str(tmp_path), spec=spec(2), seed=seed, num_turns=14)


def test_a_version_committed_during_the_decision_prevents_the_claim(two_ranks: RankPool, tmp_path: Path) -> None:
    for (message,) in two_ranks.run(f"{_CASES}:overtaken", path=str(tmp_path), spec=_ROW_WISE):
        assert message.startswith("LivePublisherError")


@pytest.mark.promise("fenced")
def test_a_heartbeat_while_the_standby_catches_up_prevents_the_claim(two_ranks: RankPool, tmp_path: Path) -> None:
    for message in two_ranks.run(f"{_CASES}:revived", path=str(tmp_path), spec=_ROW_WISE):
        assert message.startswith("LivePublisherError")


@pytest.mark.promise("resumed")
def test_a_restore_between_two_calls_of_a_standby_is_noticed(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(f"{_CASES}:restored_between", path=str(tmp_path), spec=_ROW_WISE)


def test_a_store_that_is_missing_after_a_failed_takeover_is_not_an_empty_stream(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for message in two_ranks.run(f"{_CASES}:unmounted", path=str(tmp_path), spec=_ROW_WISE):
        assert "StorageError: the store file://" in message
        assert "its directory was unmounted" in message


@pytest.mark.advice(
    "RankFailedError: Standby._claim",
    "StorageError: _claim_newest PublisherObserver._store_time",
)
def test_a_failure_after_the_claim_keeps_it_and_a_retry_completes(two_ranks: RankPool, tmp_path: Path) -> None:
    steps = [("store", 1), ("fit", 0), ("rows", 1), ("older rows", 0), ("write", 1), ("load", 0), ("serving", 0)]
    found = two_ranks.run(f"{_CASES}:failed", path=str(tmp_path), spec=spec(2), steps=steps)
    for rank, (*messages, count) in enumerate(found):
        for (where, where_rank), message in zip(steps, messages, strict=True):
            assert message.startswith("TakeoverFailedError: the takeover of file://"), message
            assert ("StorageError" if where_rank == rank else f"rank {where_rank} failed with") in message, where
        assert count == str(len(steps)), "an alert needs each failure"


@pytest.mark.promise("fenced")
def test_a_suspended_standby_does_not_fence_the_job_that_has_taken_over(two_ranks: RankPool, tmp_path: Path) -> None:
    for fenced, live in two_ranks.run(f"{_CASES}:suspended", path=str(tmp_path), spec=_ROW_WISE):
        assert fenced.startswith("TakeoverFailedError")
        assert "FencedError" in fenced
        assert live.startswith("LivePublisherError")


@pytest.mark.sweep("long")
@pytest.mark.parametrize("later", ["", "publish", "snapshot"] if SWEEPS_ARE_WHOLE else ["publish"])
def test_the_serving_stream_continues_after_a_takeover(two_ranks: RankPool, tmp_path: Path, later: str) -> None:
    expected = ["snapshot" if later == "snapshot" else "delta", 0]
    assert two_ranks.run(f"{_CASES}:served", path=str(tmp_path), spec=spec(2), later=later) == [expected] * 2


def test_follow_ends_by_a_request_by_silence_or_without_a_stream(two_ranks: RankPool, tmp_path: Path) -> None:
    for empty, silent in two_ranks.run(f"{_CASES}:followed_until", path=str(tmp_path), spec=_ROW_WISE):
        assert empty.startswith("NotRecoverableError: ")
        assert "has nothing to restore: the stream is empty. Check the URL, or start without restore" in empty
        assert "has nothing to restore: the stream has only a claim. Check the URL" in silent


def test_a_standby_repeats_and_waits_by_the_clock_that_it_is_given(one_rank: RankPool, tmp_path: Path) -> None:
    (attempts,) = one_rank.run(f"{_CASES}:followed_by_a_clock", path=str(tmp_path), spec=_ROW_WISE)
    assert attempts == [0.0, 0.125, 0.375, 0.875, 1.75, 3.375], "after 0.1, 0.2, 0.4, 0.8 and 1.6 s, at the next look"


@pytest.mark.promise("fenced")
def test_one_request_lets_one_standby_take_over(two_ranks: RankPool, tmp_path: Path) -> None:
    for (fenced,) in two_ranks.run(f"{_CASES}:asked_once", path=str(tmp_path), spec=_ROW_WISE):
        assert fenced.startswith("FencedError")


def test_a_standby_that_cannot_apply_a_version_does_not_fence_the_trainer(two_ranks: RankPool, tmp_path: Path) -> None:
    for part, entry, failed in two_ranks.run(f"{_CASES}:stuck", path=str(tmp_path), spec=_ROW_WISE):
        assert part.startswith("TakeoverFailedError: the standby of file://"), part
        assert "is at version 1 and cannot apply version 2: rank " in part
        assert "CorruptPartError" in part
        assert "MalformedError" in entry
        assert failed.startswith("TakeoverFailedError")
        assert "call restore(...) with an older version" in failed


def test_other_serving_streams_than_those_of_the_trainer_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    for *messages, called, followed, unmounted, swapped in two_ranks.run(
        f"{_CASES}:misplaced", path=str(tmp_path), spec=_ROW_WISE
    ):
        for left_out in (called, followed):
            assert left_out.startswith("InvalidArgumentError: serving=[] cannot be used. Pass the urls of all streams")
        assert "its directory was unmounted" in unmounted
        assert swapped.startswith("InvalidArgumentError: url=<recovery stream file://"), swapped
        assert all(message.startswith("InvalidArgumentError: serving=") for message in messages), messages
        missing, *_, recovery, twice = messages
        assert "Check the url, and that its directory is mounted: there is no stream" in missing
        assert ["this is stream" in message for message in messages[2:4]] == [True, True]
        assert "Pass each stream once, without the recovery stream" in recovery
        assert "Pass each stream once" in twice


def test_a_version_that_was_believed_to_have_failed_is_part_of_the_history(two_ranks: RankPool, tmp_path: Path) -> None:
    found = two_ranks.run(f"{_CASES}:believed_failed", path=str(tmp_path), spec=_ROW_WISE)
    assert [{message.partition(":")[0] for message in messages} for messages in found] == [
        {"UnknownOutcomeError"},
        {"RankFailedError"},
    ]


def test_different_calls_and_invalid_seconds_raise_typed_errors(two_ranks: RankPool, tmp_path: Path) -> None:
    for calls, others, silences, *invalid in two_ranks.run(f"{_CASES}:misused", path=str(tmp_path), spec=_ROW_WISE):
        assert calls.startswith("RankFailedError")
        assert "take_over(force=False, silence=30.0) where rank 0 has follow(silence=30.0)" in calls
        assert "follow(silence=None) where rank 0 has sync()" in others
        assert "silence=40.0) where rank 0 has" in silences
        for message in invalid[:-2]:
            assert message.startswith("InvalidArgumentError: silence=")
        for message in invalid[-2:]:  # rank 0 reads the heartbeats
            assert "Pass at least 15: the publisher leaves a heartbeat every 5 s" in message


@pytest.mark.promise("fenced")
def test_a_training_loop_with_step_ends_when_its_publisher_is_fenced(two_ranks: RankPool, tmp_path: Path) -> None:
    (num_batches, logged), other = two_ranks.run(f"{_CASES}:stopped", path=str(tmp_path), spec=_ROW_WISE)
    assert num_batches < 1000
    assert other == [num_batches, logged]
    assert [message.partition(":")[0] for message in logged] == ["version 2 was not published"]


def test_a_publisher_leaves_heartbeats_while_another_rank_writes(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(f"{_CASES}:beating", path=str(tmp_path), spec=_ROW_WISE) == [1, 1]


def test_a_system_that_has_no_more_threads_still_gets_heartbeats(one_rank: RankPool, tmp_path: Path) -> None:
    assert one_rank.run(f"{_CASES}:beating_without_threads", path=str(tmp_path), spec=_ROW_WISE) == [True]


@pytest.mark.parametrize("where", ["rows", "serving"])
def test_rows_of_a_version_that_is_not_in_the_log_any_more_do_not_stay(
    one_rank: RankPool, tmp_path: Path, where: str
) -> None:
    one_rank.run(f"{_CASES}:replaced", path=str(tmp_path), spec=spec(1), where=where)


@pytest.mark.advice("OlderCopyError: check_is_newer")
def test_a_standby_does_not_follow_an_older_copy_of_the_log(one_rank: RankPool, tmp_path: Path) -> None:
    (messages,) = one_rank.run(f"{_CASES}:rolled_back", path=str(tmp_path), spec=spec(1))
    assert [message.partition(":")[0] for message in messages] == [
        "nothing was raised",
        *["OlderCopyError"] * 2,
        "StorageError",
        "TakeoverFailedError",
    ]


def test_a_standby_of_a_promoted_mirror_follows_the_new_stream(one_rank: RankPool, tmp_path: Path) -> None:
    (message,) = one_rank.run(f"{_CASES}:promoted", path=str(tmp_path), spec=_ROW_WISE)
    assert message.startswith("StreamReplacedError")


def test_a_damaged_merged_version_does_not_hide_those_that_it_replaces(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(f"{_CASES}:begun", path=str(tmp_path), spec=_ROW_WISE)


@pytest.mark.sweep("long")
def test_managed_collisions_follow(two_ranks: RankPool, tmp_path: Path) -> None:
    case = "tests.recovery.collision_cases:followed"
    two_ranks.run(case, path=str(tmp_path), num_versions=30 if SWEEPS_ARE_WHOLE else 6)


def test_a_missing_or_damaged_version_is_passed_by_a_snapshot(one_rank: RankPool, tmp_path: Path) -> None:
    (messages,) = one_rank.run(f"{_CASES}:disturbed", path=str(tmp_path), spec=spec(1))
    assert [message.partition(":")[0] for message in messages] == [
        *["CorruptPartError"] * 2,
        *["MissingVersionError"] * 2,
        "RestoreMismatchError",
    ]
    assert "table 'ec.embedding_bags.row' is 18 x 8 float32 in the version but 17 x 8" in messages[-1]
