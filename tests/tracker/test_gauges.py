"""Metrics of trackers."""

from __future__ import annotations

from tests.ranks import RankPool


def test_a_collection_waits_only_briefly_for_a_long_read(one_rank: RankPool) -> None:
    (answer,) = one_rank.run("tests.tracker.gauges_cases:figures_during_a_read")
    assert answer == {"left out": 4, "errors": 0}


def test_a_tracker_reports_its_metrics(two_ranks: RankPool) -> None:
    answers = two_ranks.run("tests.tracker.gauges_cases:figures_of_a_tracker")
    looked_up = {
        name: sum(answer["looked up"][name] for answer in answers) for name in ("row", "first", "second", "last")
    }
    counted = {name: sum(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]}
    assert counted == {
        "row": looked_up["row"],
        "first": looked_up["first"] + looked_up["second"],
        "last": looked_up["last"],
        "shared": looked_up["row"],
    }
    assert all(answer["faults"] >= 4 for answer in answers)


def test_uncounted_lookups_are_not_reported_as_zero(one_rank: RankPool) -> None:
    assert one_rank.run("tests.tracker.gauges_cases:compared_lookups") == [[False, True]]


def test_two_trackers_have_separate_metrics(one_rank: RankPool) -> None:
    one_rank.run("tests.tracker.gauges_cases:two_trackers")
