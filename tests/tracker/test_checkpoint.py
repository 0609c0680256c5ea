"""Tracker state in checkpoints: random schedules against a slow reference, and real models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reshard import JOURNEYS, Journey, Leg, markdown
from delta_tracker.tracker.modes import CAPTURES
from delta_tracker.types import TrackingMode
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE
from tests.tracker.checkpoint_files import compare, load
from tests.tracker.checkpointing_cases import spec_of
from tests.tracker.resharding import World, random_blocks, run_events

_CASES = "tests.tracker.checkpointing_cases"
_EVERYTHING = {"rows", "unknown", "aged", "joined", "uncommitted", "in progress", "rolled back"}


@pytest.mark.sweep("short")
@pytest.mark.promise("restored")
@pytest.mark.parametrize(
    ("mode", "is_fused", "keeps_all", "seen"),
    [
        (TrackingMode.EMBEDDING, True, False, _EVERYTHING),
        (TrackingMode.EMBEDDING, True, True, _EVERYTHING),
        (TrackingMode.EMBEDDING, False, False, _EVERYTHING - {"in progress"}),
        (TrackingMode.EMBEDDING, False, True, _EVERYTHING - {"in progress"}),
        (TrackingMode.MOMENTUM_DIFF, True, False, _EVERYTHING),
        (TrackingMode.ID_ONLY, True, False, _EVERYTHING - {"unknown"}),
        (TrackingMode.ID_ONLY, False, False, _EVERYTHING - {"unknown", "in progress"}),
    ],
    ids=str,
)
def test_a_restored_log_continues_from_the_saved_one(
    mode: TrackingMode, is_fused: bool, keeps_all: bool, seen: set[str]
) -> None:
    counts = dict.fromkeys(_EVERYTHING, 0)
    for seed in range(20 if SWEEPS_ARE_WHOLE else 2):
        draw = random.Random(seed)
        edges = tuple(sorted({0, draw.randrange(7), 6})) if mode is TrackingMode.MOMENTUM_DIFF else None
        world = World(random_blocks(draw, edges), mode, is_fused=is_fused, keeps_all=keeps_all)
        run_events(world, draw, 60, partial(random_blocks, draw, edges))
        world.finish()
        counts = {key: counts[key] + world.counts[key] for key in counts}
    found = {key for key, count in counts.items() if count}
    assert found == seen if SWEEPS_ARE_WHOLE else "rows" in found <= seen, counts


_RUN: list[tuple[Journey, list[Leg]]] = []


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.stop()


@pytest.mark.promise("restored")
@pytest.mark.parametrize("journey", JOURNEYS, ids=str)
def test_a_checkpoint_is_restored_under_another_plan(
    one_rank: RankPool,
    two_ranks: RankPool,
    three_ranks: RankPool,
    four_ranks: RankPool,
    tmp_path: Path,
    journey: Journey,
) -> None:
    legs = journey.run({1: one_rank, 2: two_ranks, 3: three_ranks, 4: four_ranks}, tmp_path)
    _RUN.append((journey, legs))
    for leg in legs:
        assert leg.rows > 20
        assert (leg.aged > 0) == (journey.mode is not TrackingMode.ID_ONLY)
        assert (leg.states > 0) == CAPTURES[journey.mode].keeps_old
        assert (leg.messages, leg.num_bytes) == (0, 0)
        assert leg.plan_bytes < 20_000


def test_the_committed_table_is_of_this_run() -> None:
    if len(_RUN) < len(JOURNEYS):
        pytest.skip("only after all journeys were run")
    committed = (Path(__file__).parent.parent.parent / "benchmarks" / "results" / "reshard.md").read_text()
    assert f"<!-- reshard -->\n{markdown(_RUN).strip()}\n<!-- /reshard -->" in committed


@pytest.mark.promise("refused")
def test_a_state_that_does_not_fit_is_refused_by_name(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = {
        "version": ("StateMismatchError", "format version 99, where 1 is expected"),
        "mode": ("StateMismatchError", "mode id_only, where embedding is expected"),
        "consumer": ("StateMismatchError", "consumers ['a', 'b', 'd'], where ['a', 'b', 'c'] is expected"),
        "table": ("StateMismatchError", "'ec.embeddings.other': 17 x 8 float32"),
        "shape": (
            "StateMismatchError",
            "tables ('ec.embeddings.t0': 18 x 8 float32), where ('ec.embeddings.t0': 17 x 8",
        ),
        "dtype": ("StateMismatchError", "'ec.embeddings.t0': 17 x 8 float16"),
        "one rank's consumers": ("StateMismatchError", "consumers ['a', 'b', "),
        "part": ("CheckpointError", "missing parts of ranks: "),
        "no header": ("CheckpointError", "no header"),
        "a tensor": (
            "CheckpointError",
            "/rows/ec.embeddings.t0' of the saved state is malformed: the tensor is missing",
        ),
        "a length": ("CheckpointError", "the tensor is torch.uint8 of shape"),
        "a value": ("CheckpointError", "its values are not the saved ones"),
        "an id": ("CheckpointError", "are not rows of its shard"),
        "not JSON": ("CheckpointError", "its header cannot be read"),
        "a short list": ("CheckpointError", "its header cannot be read"),
        "a list": ("CheckpointError", "its header cannot be read"),
        "another rank": ("CheckpointError", "its header says that it is"),
        "a negative count": ("CheckpointError", "at `$.num_batches`"),
        "fewer tables": (
            "StateMismatchError",
            "tables ('ec.embeddings.t1': 10 x 8 float32), where ('ec.embeddings.t1': nothing)",
        ),
        "counters": ("StateMismatchError", "counters [], where ['sum'] is expected"),
        "note": ("InvalidArgumentError", "Pass dicts"),
        "noted consumer": ("InvalidArgumentError", "'x'"),
        "strategy": ("InvalidArgumentError", "('local', 'gather', 'gather_or_local')"),
    }
    for rank, messages in enumerate(two_ranks.run(f"{_CASES}:damaged", path=str(tmp_path))):
        for name, (kind, words) in expected.items():
            assert messages[name].startswith(f"{kind}: "), (name, messages[name])
            assert words in messages[name], (name, messages[name])
        assert f"missing parts of ranks: {rank}." in messages["part"]
        assert sorted(messages) == sorted(expected)


def test_sums_over_column_ranges_are_not_split_at_other_columns(two_ranks: RankPool) -> None:
    for message in two_ranks.run(f"{_CASES}:column_ranges"):
        assert message.startswith("StateMismatchError")
        assert "old states of table 'ec.embeddings.t0' for the column ranges ((" in message


@pytest.mark.promise("restored")
@pytest.mark.parametrize(
    ("spec", "num_rows"), [(spec_of("row", "data", bag=True, kernel="dense"), (19, 18)), (spec_of("table:0"), (17, 0))]
)
def test_a_checkpoint_without_state_makes_every_row_pending(
    two_ranks: RankPool, tmp_path: Path, spec: dict[str, Any], num_rows: tuple[int, int]
) -> None:
    for rank, answer in enumerate(two_ranks.run(f"{_CASES}:legacy", path=str(tmp_path), spec=spec)):
        assert answer["restored"] == "NOTHING"
        assert "delta_tracker.restored_nothing" in answer["events"]
        assert answer["rows"] == [num_rows[rank]] * 3
        assert len(answer["logs"]) == 1
        assert "every row counts as changed" in answer["logs"][0]


def test_a_state_that_one_rank_cannot_load_is_refused_by_all(two_ranks: RankPool, tmp_path: Path) -> None:
    for messages in two_ranks.run(f"{_CASES}:one_rank_cannot", path=str(tmp_path)):
        assert len(set(messages)) == 1
        assert messages[0].startswith("CheckpointError: part 'rank1of2/rows/ec.embeddings.t0'"), messages


def test_a_dropped_consumer_stays_dropped(two_ranks: RankPool) -> None:
    (first, second) = two_ranks.run(f"{_CASES}:behind")
    fine, lost = "nothing was raised", "NeedsSnapshotError"
    kinds = [[[message.split(":")[0] for message in plan] for plan in rank] for rank in (first, second)]
    assert kinds == [[[fine] * 3, [lost, fine, lost]], [[lost, fine, lost], [fine] * 3]]
    assert "max_bytes of an earlier run" in first[1][0]


@pytest.mark.parametrize("how", ["dcp", "files", "gather"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_restored_totals_are_the_true_totals(
    one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, how: str, world_size: int
) -> None:
    strategy = "gather" if how == "gather" else "local"
    keys = two_ranks.run(f"{_CASES}:counting", path=str(tmp_path), strategy=strategy, held=[[10.0], [5.0, 15.0]])
    assert not set(keys[0]) & set(keys[1])
    pool = {1: one_rank, 2: two_ranks, 4: four_ranks}[world_size]
    answers = pool.run(f"{_CASES}:counted", path=str(tmp_path), how=how)
    assert sum(answer["sum"] for answer in answers) == 30
    assert sum(answer["updates"] for answer in answers) == 3
    assert [sum(answer["mean"][place] for answer in answers) for place in (0, 1)] == [30, 3]
    assert max(answer["max"] for answer in answers) == 15
    assert min(answer["min"] for answer in answers) == 5
    assert sorted(value for answer in answers for value in answer["cat"]) == [5, 10, 15]
    assert [sum(cell) for cell in zip(*(answer["confusion"] for answer in answers), strict=True)] == [0, 0, 3, 0]
    assert sum(answer["own"][0] for answer in answers) == 30
    assert sorted(name for answer in answers for name in answer["own"][1]) == ["10.0", "15.0", "5.0"]
    assert sum(answer["samples"] for answer in answers) == 30, "the monitor's counter"
    sums = [answer["sum"] for answer in answers]
    assert sums == {1: [30], 2: [10, 20], 4: [10, 20, 0, 0]}[world_size]
    assert compare(load(tmp_path, "saved", 2), load(tmp_path, "loaded", world_size))["rows"] > 10


def test_a_counter_that_cannot_be_restored_is_refused(one_rank: RankPool) -> None:
    (messages,) = one_rank.run(f"{_CASES}:refused_counters")
    assert "state_dict, merge and load_state_dict" in messages["object"]
    assert "without slash, not in ['total']" in messages["twice"]
    assert "without slash" in messages["slash"]
    assert "only tensors and JSON values" in messages["JSON"]
    assert "each metric that it contains" in messages["two"]
    assert "'counters/strange/names'" in messages["dtype"]


def test_a_name_that_none_of_several_trackers_has_is_refused(one_rank: RankPool, tmp_path: Path) -> None:
    (message,) = one_rank.run(f"{_CASES}:two_trackers", path=str(tmp_path))
    assert "Pass one of the trackers in the checkpoint: ['left', 'right']" in message


def test_a_publisher_that_resumes_misses_no_row_that_was_read_before_it(one_rank: RankPool, tmp_path: Path) -> None:
    assert one_rank.run(f"{_CASES}:read_before_publishing", path=str(tmp_path)) == [["delta", "snapshot", "snapshot"]]


def test_rows_that_a_stream_restored_are_not_pending(two_ranks: RankPool) -> None:
    for messages in two_ranks.run(f"{_CASES}:from_stream"):
        assert [message.partition(":")[0] for message in messages] == [
            "InvalidArgumentError",
            "InvalidArgumentError",
            "InvalidArgumentError",
            "InvalidArgumentError",
            "ReservedConsumerError",
        ]
