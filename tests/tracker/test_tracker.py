"""ModelDeltaTracker on real sharded models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.tracker.tracking_cases"


@pytest.mark.promise("lossless", "minimal")
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"bag": True},
        {"dtype": "FP16"},
        {"kernel": "fused_uvm"},
        {"kernel": "fused_uvm_caching"},
        {"kernel": "fused_uvm_caching", "bag": True},
    ],
    ids=str,
)
def test_a_delta_is_exactly_what_changed(two_ranks: RankPool, spec: dict[str, Any]) -> None:
    totals = two_ranks.run(f"{_CASES}:exact", spec=spec)
    assert all(total["changed"] == total["read"] > 0 for total in totals)


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless", "minimal")
@pytest.mark.parametrize("bag", [False, True], ids=["ec", "ebc"])
@pytest.mark.parametrize("seed", range(4) if SWEEPS_ARE_WHOLE else [0, 3])  # each mode once
def test_no_update_is_lost_in_any_order(two_ranks: RankPool, seed: int, bag: bool) -> None:
    for counts in two_ranks.run(f"{_CASES}:schedule", seed=seed, num_events=60, bag=bag):
        assert counts["reads between"] > 0
        assert counts["backwards"] > 0


@pytest.mark.promise("lossless")
def test_schedules_include_reads_inside_a_backward(one_rank: RankPool) -> None:
    (counts,) = one_rank.run(f"{_CASES}:schedule", seed=11, num_events=200, bag=False)
    assert counts["reads inside"] > 5


@pytest.mark.promise("minimal")
@pytest.mark.parametrize("case", ["passes_that_update_nothing", "out_of_range_ids", "detach_in_flight", "rewound"])
def test_case(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


def test_all_ranks_report_a_tracker_that_is_detached_on_one(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(f"{_CASES}:detached_on_one")
    assert first.startswith("RankFailedError: the ranks do not agree: rank 1 failed with DetachedError")
    assert second.startswith("DetachedError: ")


def test_a_tracker_that_is_deleted_leaves_no_hooks_and_no_log(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:dropped")


def test_a_tracker_that_detaches_leaves_the_memory_of_others_alone(two_ranks: RankPool) -> None:
    two_ranks.stop()  # autograd nodes with hooks of earlier tests may keep their trackers alive
    two_ranks.run(f"{_CASES}:detach_beside_another")


@pytest.mark.promise("contained")
def test_an_error_in_a_hook_does_not_reach_training(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{_CASES}:failing_hook")[0] == 2


@pytest.mark.promise("contained", "minimal")
@pytest.mark.parametrize("fails", ["end_write", "leave"])
def test_an_error_while_a_batch_is_closed_does_not_leave_it_open(one_rank: RankPool, fails: str) -> None:
    assert one_rank.run(f"{_CASES}:failing_end", fails=fails) == [[[0, 1, 2, 3, 4], [2], [0]]]


@pytest.mark.promise("refused")
def test_bad_input_is_refused_by_name(two_ranks: RankPool) -> None:
    expected = {
        "no module": ("UnsupportedModelError", "'1' (_OtherEmbedding)"),
        "unsharded": ("UnsupportedModelError", "'ec.embeddings.t'"),
        "consumers": ("InvalidArgumentError", "['a', 'a']"),
        "no consumers": ("InvalidArgumentError", "consumers=[]"),
        "mode": ("InvalidArgumentError", "'ID_ONLY', 'EMBEDDING'"),
        "skip": ("InvalidArgumentError", "fqns_to_skip='ec'"),
        "unknown consumer": ("InvalidArgumentError", "known consumers: 'a', 'b'"),
        "no consumer": ("InvalidArgumentError", "known consumers: 'a', 'b'"),
        "table": ("InvalidArgumentError", "'ec.embeddings.t', 'ec.embeddings.u'"),
        "rewind": ("InvalidArgumentError", "delete_on_read=False"),
        "detached": ("DetachedError", "Call reattach()"),
    }
    for messages in two_ranks.run(f"{_CASES}:refused"):
        for name, (kind, words) in expected.items():
            assert messages[name].startswith(f"{kind}: "), (name, messages[name])
            assert words in messages[name], (name, messages[name])
