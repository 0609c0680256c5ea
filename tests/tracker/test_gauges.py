"""What a tracker counts and shows."""

from __future__ import annotations

from tests.ranks import RankPool


def test_a_collection_during_a_long_read_waits_for_it_a_moment_only(one_rank: RankPool) -> None:
    (answer,) = one_rank.run("tests.tracker.gauges_cases:figures_during_a_read")
    assert answer == {"left out": 4, "errors": 0}


def test_a_tracker_tells_what_it_sees_and_holds(two_ranks: RankPool) -> None:
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


def test_lookups_that_nobody_counts_are_not_told_as_zero(one_rank: RankPool) -> None:
    assert one_rank.run("tests.tracker.gauges_cases:compared_lookups") == [[False, True]]


def test_two_trackers_show_two_sets_of_figures(one_rank: RankPool) -> None:
    one_rank.run("tests.tracker.gauges_cases:two_trackers")
