"""Publisher on real ranks, with a predictor that follows through a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.publisher.random_faults import KINDS, run_seed
from tests.ranks import RankFailureError, RankPool

_CASES = "tests.publisher.publishing_cases"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/stream"


@pytest.mark.promise("equal")
@pytest.mark.parametrize("spec", [{}, {"bag": True}, {"dtype": "FP16"}, {"kernel": "fused_uvm_caching"}], ids=str)
def test_the_predictor_equals_the_trainer_after_every_version(
    two_ranks: RankPool, url: str, spec: dict[str, Any]
) -> None:
    for answer in two_ranks.run(f"{_CASES}:equal", url=url, spec=spec):
        assert answer["kinds"] == ["snapshot", "delta", "delta", "snapshot", "delta", "delta"]
        assert answer["version"] == 7
        assert answer["batches"] == [11, 12]
        assert answer["rows"] > 0
        assert answer["attempt"].startswith("InvalidArgumentError: publisher='closed'")


def test_one_rank_publishes_too(one_rank: RankPool, url: str) -> None:
    one_rank.run(f"{_CASES}:equal", url=url, spec={})


@pytest.mark.advice("RankFailedError: declared_states decode_message")
@pytest.mark.promise("lossless")
@pytest.mark.parametrize(("broken_rank", "operation"), [(0, "put"), (1, "put"), (0, "create")])
def test_a_failing_rank_loses_nothing(two_ranks: RankPool, url: str, broken_rank: int, operation: str) -> None:
    answers = two_ranks.run(f"{_CASES}:failing_rank", url=url, broken_rank=broken_rank, operation=operation)
    for rank, messages in enumerate(answers):
        for message in messages:
            if rank == broken_rank:
                assert message.startswith("StorageError: the store file://")
            else:
                assert message.startswith(f"RankFailedError: the version was not published: rank {broken_rank} failed")
            assert "No space left on device" in message


def test_a_consumer_that_is_dropped_after_the_vote_needs_another_call(two_ranks: RankPool, url: str) -> None:
    for message in two_ranks.run(f"{_CASES}:dropped_since_the_vote", url=url):
        assert message.endswith("Publish again: the next version is a snapshot.")


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_a_rank_that_fails_before_its_vote_does_not_keep_the_others_waiting(
    two_ranks: RankPool, url: str, broken_rank: int
) -> None:
    answers = two_ranks.run(f"{_CASES}:unable_to_vote", url=url, broken_rank=broken_rank)
    assert all(message.startswith("StorageError") for message in answers[broken_rank])
    assert all(message.startswith("RankFailedError") for message in answers[1 - broken_rank])


@pytest.mark.promise("lossless")
def test_after_an_entry_that_the_store_altered_a_snapshot_follows(two_ranks: RankPool, url: str) -> None:
    (own,), (other,) = two_ranks.run(f"{_CASES}:altered_entry", url=url)
    assert own.startswith("AlteredEntryError: ")
    assert other.startswith("RankFailedError: the version was not published: rank 0 failed with AlteredEntryError")


@pytest.mark.advice("LostEntryError: decode_message")
@pytest.mark.parametrize("call", ["publish", "snapshot", "step"])
def test_after_the_newest_entry_was_deleted_all_ranks_continue_with_a_snapshot(
    two_ranks: RankPool, url: str, call: str
) -> None:
    for messages in two_ranks.run(f"{_CASES}:lost_entry", url=url, call=call):
        assert len(messages) == (call == "step")
        for message in messages:
            assert message.startswith("LostEntryError: the store file://")
            assert "the newest entry, was deleted" in message


def test_a_version_of_unknown_outcome_is_not_reported_as_unpublished(two_ranks: RankPool, url: str) -> None:
    (own_log, own), (other_log, other) = two_ranks.run(f"{_CASES}:unknown_outcome", url=url)
    assert own.startswith("UnknownOutcomeError: ")
    assert other.startswith("RankFailedError: whether the version was published is unknown: rank 0 failed with Unknown")
    assert own_log.startswith("whether version 2 was published is unknown: ")
    assert other_log.startswith("whether version 2 was published is unknown: ")


@pytest.mark.promise("fenced")
def test_a_second_publisher_fences_the_first(two_ranks: RankPool, url: str) -> None:
    for messages in two_ranks.run(f"{_CASES}:fenced", url=url):
        for message in messages:
            assert message.startswith("FencedError: publisher of generation 1 is fenced: generation 2")


@pytest.mark.parametrize("case", ["forgotten_errors", "lost_rank_again"])
def test_an_error_that_is_raised_again_keeps_no_traceback(two_ranks: RankPool, url: str, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}", url=url)


def test_each_of_two_outages_is_logged_once(two_ranks: RankPool, url: str) -> None:
    for messages in two_ranks.run(f"{_CASES}:logged_once", url=url):
        assert [message.partition(":")[0] for message in messages] == [
            "version 2 was not published",
            "publishing recovered at version 2",
            "version 3 was not published",
            "publishing recovered at version 3",
        ]


def test_a_store_that_a_rank_cannot_use_is_refused_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    answers = two_ranks.run(f"{_CASES}:unwritable", url=f"file://{tmp_path}")
    for rank, (everywhere, on_one, consumer) in enumerate(answers):
        assert everywhere.startswith("StorageError: the store file://")
        failed = "RankFailedError: the version was not published: rank 1"
        assert on_one.startswith("StorageError" if rank == 1 else failed)
        assert "Pass one of the known consumers" in consumer
    assert not (tmp_path / "fine" / "log").exists()


@pytest.mark.promise("atomic")
def test_a_kill_between_parts_and_commit_leaves_the_stream_as_it_was(two_ranks: RankPool, url: str) -> None:
    doomed = RankPool(2)
    with pytest.raises(RankFailureError, match="rank 0 died"):
        doomed.run(f"{_CASES}:killed_before_commit", url=url)
    log = StreamLog(Storage(url))
    assert log.versions() == [0, 1]
    named = {part.name for version in log.versions() for part in log.read(version).parts}
    assert len(named) == 2
    assert len(set(log.storage.names("parts")) - named) == 2, "the parts of the version that never was"
    for answer in two_ranks.run(f"{_CASES}:equal", url=url, spec={}):
        assert answer["version"] == 9  # a new claim, then seven versions, each equal


@pytest.mark.promise("refused")
def test_calls_that_would_lose_rows_are_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    url, other = f"file://{tmp_path}/stream", f"file://{tmp_path}/other"
    for rank, said in enumerate(two_ranks.run(f"{_CASES}:refused", url=url, other=other)):
        for call in ("read", "clear", "remove", "second"):
            assert said[call].startswith("ReservedConsumerError: consumer 'stream' is reserved by Publisher"), call
        for call in ("stores", "memory"):
            assert "all ranks the same store" in said[call]
        assert "Publish from the training thread" in said["thread"]
        assert said["detached"].startswith("DetachedError")
        assert "rank 1 failed with the tables" in said["tables"]
        assert said["stores"].startswith("InvalidArgumentError" if rank else "RankFailedError")


@pytest.mark.promise("equal")
def test_pending_rows_are_counted_and_sent_later(two_ranks: RankPool, url: str) -> None:
    for pending in two_ranks.run(f"{_CASES}:top_k_and_snapshots", url=url):
        assert pending[0] == pending[-1] == 0
        assert all(count > 0 for count in pending[1:-1])


def test_a_dropped_consumer_gets_a_snapshot(two_ranks: RankPool, url: str) -> None:
    for kinds in two_ranks.run(f"{_CASES}:given_up", url=url):
        assert kinds == ["snapshot", "snapshot", "delta", "delta"]


def test_tables_of_ordinary_optimizers_are_published_once(two_ranks: RankPool, url: str) -> None:
    two_ranks.run(f"{_CASES}:replicated", url=url)


def test_an_interrupt_does_not_free_the_memory_of_the_current_version(one_rank: RankPool, url: str) -> None:
    assert one_rank.run(f"{_CASES}:interrupted", url=url) == [4]


def test_a_fork_of_a_publisher_is_refused(one_rank: RankPool, url: str) -> None:
    (said,) = one_rank.run(f"{_CASES}:forked", url=url)
    assert "Publish in the process that built it" in said


def test_ranks_that_call_different_methods_publish_nothing(two_ranks: RankPool, url: str) -> None:
    for (message,) in two_ranks.run(f"{_CASES}:mixed_calls", url=url):
        assert message.startswith("RankFailedError: ")
        assert "rank 1 failed with the phase stepping where rank 0 has the phase publishing" in message


@pytest.mark.promise("lossless")
def test_a_rank_that_fails_between_two_collectives_stays_in_step(two_ranks: RankPool, url: str) -> None:
    first, second = two_ranks.run(f"{_CASES}:fails_between_collectives", url=url)
    assert second == ["MemoryError: once"]
    assert len(first) == 1
    assert "rank 1 failed with MemoryError: once" in first[0]


@pytest.mark.promise("lossless")
def test_an_interrupted_cut_of_a_snapshot_loses_nothing(one_rank: RankPool, url: str) -> None:
    one_rank.run(f"{_CASES}:interrupted_cut", url=url)


@pytest.mark.promise("lossless")
def test_all_ranks_report_dense_tensors_that_cannot_be_published(two_ranks: RankPool, url: str) -> None:
    first, second = two_ranks.run(f"{_CASES}:unsupported_dense", url=url)
    assert all(message.startswith("InvalidArgumentError: dense='weight' cannot be used") for message in first)
    assert all(message.startswith("InvalidArgumentError: top_k='score' cannot be used") for message in second)


@pytest.mark.promise("lossless")
def test_a_rank_that_is_interrupted_before_it_selects_rows_lets_the_others_go_on(two_ranks: RankPool, url: str) -> None:
    assert two_ranks.run(f"{_CASES}:interrupted_score", url=url) == ["nothing was raised"] * 2


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("then", ["publish", "close"])
def test_a_share_that_was_not_sent_is_sent_by_the_next_call(two_ranks: RankPool, url: str, then: str) -> None:
    messages = two_ranks.run(f"{_CASES}:interrupted_message", url=url, then=then, is_later=False)
    assert messages == ["nothing was raised"] * 2


@pytest.mark.promise("lossless")
@pytest.mark.advice("RankFailedError: VersionStateMachine._start")
def test_a_version_without_the_rows_of_a_rank_fails_on_all(two_ranks: RankPool, url: str) -> None:
    for message in two_ranks.run(f"{_CASES}:interrupted_message", url=url, then="close", is_later=True):
        assert "rank 1 failed with an interrupt" in message


@pytest.mark.promise("lossless")
def test_ranks_agree_on_a_repair_after_an_interrupt(two_ranks: RankPool, url: str) -> None:
    first, second = two_ranks.run(f"{_CASES}:interrupted_repair", url=url)
    assert first == second
    repaired, selected = first
    assert repaired == 0
    assert selected > 0


@pytest.mark.parametrize("top_k", [None, 2])
def test_an_interrupt_ends_the_wait_for_another_rank(two_ranks: RankPool, url: str, top_k: int | None) -> None:
    first, second = two_ranks.run(f"{_CASES}:interrupted_among_ranks", url=url, top_k=top_k)
    assert first == ["interrupted", "nothing was raised"]
    assert second == ["nothing was raised"]


def test_a_version_takes_one_step_after_its_votes(two_ranks: RankPool, url: str) -> None:
    for versions in two_ranks.run(f"{_CASES}:counted_steps", url=url):
        assert versions[0] == 1, "voted"
        assert versions[1] == 2, "cut, and committed without another call"
        assert versions[2:8] == [2, 3, 3, 4, 4, 5]


@pytest.mark.promise("lossless")
def test_a_rank_that_is_interrupted_at_the_start_of_a_step_stays_in_step(two_ranks: RankPool, url: str) -> None:
    first, second = two_ranks.run(f"{_CASES}:interrupted_step", url=url)
    assert first == second
    assert first[-1] > first[0]


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("during", ["nothing", "a copy", "a delta"])
def test_a_publisher_that_is_deleted_frees_its_consumer_and_threads(two_ranks: RankPool, url: str, during: str) -> None:
    two_ranks.run(f"{_CASES}:dropped", url=url, during=during)


@pytest.mark.sweep("long", only=True)
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("kind", KINDS)
def test_random_faults_of_a_rank_lose_no_row(two_ranks: RankPool, kind: str) -> None:
    for seed in range(3):
        _, _, problems = run_seed(two_ranks, seed, (kind,))
        assert not problems
