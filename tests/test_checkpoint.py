"""The tracker's state in a checkpoint: random schedules against a slow reference, and real models."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker.types import TrackingMode
from tests.ranks import RankPool
from tests.resharding import World, random_blocks, run_events

_CASES = "tests.cases.checkpointing"
_EVERYTHING = {"rows", "unknown", "aged", "joined", "sealed", "open", "rolled back"}


@pytest.mark.parametrize(
    ("mode", "is_fused", "keeps_all", "seen"),
    [
        (TrackingMode.EMBEDDING, True, False, _EVERYTHING),
        (TrackingMode.EMBEDDING, True, True, _EVERYTHING),
        (TrackingMode.EMBEDDING, False, False, _EVERYTHING - {"unknown", "open"}),
        (TrackingMode.EMBEDDING, False, True, _EVERYTHING - {"unknown", "open"}),
        (TrackingMode.MOMENTUM_DIFF, True, False, _EVERYTHING),
        (TrackingMode.ID_ONLY, True, False, _EVERYTHING - {"unknown"}),
        (TrackingMode.ID_ONLY, False, False, _EVERYTHING - {"unknown", "open"}),
    ],
    ids=str,
)
def test_a_restored_log_goes_on_where_the_saved_one_stood(
    mode: TrackingMode, is_fused: bool, keeps_all: bool, seen: set[str]
) -> None:
    counts = dict.fromkeys(_EVERYTHING, 0)
    for seed in range(20):
        draw = random.Random(seed)
        edges = tuple(sorted({0, draw.randrange(7), 6})) if mode is TrackingMode.MOMENTUM_DIFF else None
        world = World(random_blocks(draw, edges), mode, is_fused=is_fused, keeps_all=keeps_all)
        for _ in run_events(world, draw, 60, lambda draw=draw, edges=edges: random_blocks(draw, edges)):
            pass
        world.finish()
        counts = {key: counts[key] + world.counts[key] for key in counts}
    assert {key for key, count in counts.items() if count} == seen, counts


def _load(path: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    return [torch.load(path / f"{kind}-{rank}of{world_size}.pt") for rank in range(world_size)]


def _compare(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> dict[str, int]:
    """Each loaded rank has pending what any saved block under its own has, with that block's values and ages."""
    counts = dict.fromkeys(("rows", "aged", "states"), 0)
    tables = [fqn for fqn in saved[0] if fqn != "num_batches"]
    for (rank, here), fqn, name in itertools.product(enumerate(loaded), tables, ("a", "b", "c")):
        assert here["num_batches"] == saved[0]["num_batches"]
        mine = here[fqn]
        sources = [part[fqn] for part in saved]
        if sources[0]["replicated"]:
            sources = [sources[rank if mine["replicated"] and rank < len(saved) else 0]]
        columns = _columns(mine)
        expected: dict[int, tuple[int, dict[int, float]]] = {}
        for source in sources:
            shared = set(_columns(source)) & set(columns)
            if name not in source or not shared:
                continue
            rows = source[name]
            for place, row in enumerate(rows["ids"].tolist()):
                if not mine["rows"][0] <= row < mine["rows"][1]:
                    continue
                age, values = expected.setdefault(row, (0, {}))
                if rows["states"] is not None:
                    assert rows["known"][place]
                    states = rows["states"][place].tolist()
                    held = (
                        _columns(source) if len(states) == len(_columns(source)) else [c for c, _ in source["columns"]]
                    )
                    values.update(
                        {column: state for column, state in zip(held, states, strict=True) if column in shared}
                    )
                expected[row] = max(age, int(rows["ages"][place])), values
        found = mine.get(name, {"ids": torch.empty(0), "states": None, "ages": torch.empty(0)})
        assert found["ids"].tolist() == sorted(expected), (fqn, name, rank)
        for place, row in enumerate(sorted(expected)):
            age, values = expected[row]
            assert found["ages"][place] == age
            counts["rows"] += 1
            counts["aged"] += age > 0
            if found["states"] is not None:
                states = found["states"][place].tolist()
                weights = mine["weights"][row - mine["rows"][0]].tolist()
                held = columns if len(states) == len(columns) else [first for first, _ in mine["columns"]]
                assert states == [values.get(column, weights[columns.index(column)]) for column in held]
                counts["states"] += 1
    return counts


def _columns(block: dict[str, Any]) -> list[int]:
    return [column for start, stop in block["columns"] for column in range(start, stop)]


def _weights(parts: list[dict[str, Any]], fqn: str) -> torch.Tensor:
    """The whole table."""
    sizes = [
        max(max(part[fqn]["rows"]) for part in parts),
        max(max(_columns(part[fqn]), default=0) for part in parts) + 1,
    ]
    table = torch.zeros(sizes)
    for part in parts:
        table[slice(*part[fqn]["rows"]), _columns(part[fqn])] = part[fqn]["weights"]
    return table


def _tables(*shardings: str, **kwargs: Any) -> dict[str, Any]:
    rows = (17, 10, 9, 12)
    tables = [{"name": f"t{i}", "rows": rows[i], "sharding": each} for i, each in enumerate(shardings)]
    return {"tables": tables, **kwargs}


_PLANS = {
    "row to column": (_tables("row", "row"), _tables("column:0,1", "column:1,0")),
    "column to row": (_tables("column:0,1", "column:0,0"), _tables("row", "row")),
    "table to row": (_tables("table:1", "table:0"), _tables("row", "row")),
    "mixed": (_tables("row", "table:0", "column:0,1"), _tables("column:1,0", "column:0,1", "table:1")),
    "same": (_tables("row", "table:0", "column:0,1"), _tables("row", "table:0", "column:0,1")),
    "dense": (
        _tables("data", "data", "row", "column:0,1", kernel="dense", bag=True),
        _tables("data", "row", "data", "row", kernel="dense", bag=True),
    ),
}
_PLANS["bags"] = tuple({**plan, "bag": True} for plan in _PLANS["mixed"])


@pytest.mark.parametrize(
    ("plans", "mode", "how"),
    [
        ("row to column", "embedding", "sync"),
        ("column to row", "embedding", "async"),
        ("table to row", "momentum_diff", "sync"),
        ("table to row", "momentum_last", "sync"),
        ("mixed", "id_only", "async"),
        ("bags", "embedding", "sync"),
        ("same", "rowwise_adagrad", "sync"),
        ("same", "embedding", "async"),
        ("dense", "embedding", "sync"),
    ],
)
def test_a_checkpoint_is_restored_under_another_plan(
    two_ranks: RankPool, tmp_path: Path, plans: str, mode: str, how: str
) -> None:
    before, after = _PLANS[plans]
    pending = two_ranks.run(f"{_CASES}:saving", path=str(tmp_path), spec=before, mode=mode, how=how)
    assert all(all(counts) for counts in zip(*pending, strict=True))
    two_ranks.run(f"{_CASES}:loading", path=str(tmp_path), spec=after, mode=mode)
    saved, loaded = _load(tmp_path, "saved", 2), _load(tmp_path, "loaded", 2)
    counts = _compare(saved, loaded)
    assert counts["rows"] > 20
    assert (counts["aged"] > 0) == (mode != "id_only")
    assert (counts["states"] > 0) == (mode in ("embedding", "momentum_diff", "rowwise_adagrad"))
    for fqn in set(saved[0]) - {"num_batches"}:
        assert torch.equal(_weights(saved, fqn), _weights(loaded, fqn))


def test_four_ranks_to_one_to_three(one_rank: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    plans = [
        _tables("row", "table:3", "column:2,0"),
        _tables("table:0", "row", "column:0,0"),
        _tables("row", "row", "row"),
    ]
    four_ranks.run(f"{_CASES}:saving", path=str(first), spec=plans[0], mode="embedding")
    one_rank.run(f"{_CASES}:loading", path=str(first), spec=plans[1], mode="embedding", again=str(second))
    assert _compare(_load(first, "saved", 4), _load(first, "loaded", 1))["states"] > 20
    three_ranks = RankPool(3)
    try:
        three_ranks.run(f"{_CASES}:loading", path=str(second), spec=plans[2], mode="embedding")
    finally:
        three_ranks.stop()
    assert _compare(_load(second, "saved", 1), _load(second, "loaded", 3))["states"] > 20


def test_what_does_not_fit_is_refused_by_name(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = {
        "version": ("UnknownFormatError", "format version 99, this release reads 1"),
        "mode": ("StateMismatchError", "mode id_only, where embedding is expected"),
        "consumer": ("StateMismatchError", "consumers ['a', 'b', 'd'], where ['a', 'b', 'c'] is expected"),
        "table": ("StateMismatchError", "'ec.embeddings.other': 17 x 8 float32"),
        "shape": (
            "StateMismatchError",
            "tables ('ec.embeddings.t0': 18 x 8 float32), where ('ec.embeddings.t0': 17 x 8",
        ),
        "dtype": ("StateMismatchError", "'ec.embeddings.t0': 17 x 8 float16"),
        "one rank's consumers": ("StateMismatchError", "consumers ['a', 'b', "),
        "part": ("PartialStateError", "parts missing of ranks: "),
        "no header": ("MalformedStateError", "no header"),
        "a tensor": ("MalformedStateError", "/ids' of the saved tracker state is malformed: the tensor is missing"),
        "a length": ("MalformedStateError", "the tensor is torch.int32 of shape"),
        "an id": ("MalformedStateError", "are not rows of its shard"),
        "not JSON": ("MalformedStateError", "its header cannot be read"),
        "another rank": ("MalformedStateError", "its header says that it is"),
        "a negative count": ("MalformedStateError", "-1 is no count"),
        "fewer tables": (
            "StateMismatchError",
            "tables ('ec.embeddings.t1': 10 x 8 float32), where ('ec.embeddings.t1': nothing)",
        ),
        "counters": ("StateMismatchError", "counters [], where ['sum'] is expected"),
        "note": ("InvalidArgumentError", "Pass dicts"),
        "noted consumer": ("UnknownConsumerError", "'x'"),
        "strategy": ("InvalidArgumentError", "('local', 'gather')"),
    }
    for rank, messages in enumerate(two_ranks.run(f"{_CASES}:damaged", path=str(tmp_path))):
        for name, (kind, words) in expected.items():
            assert messages[name].startswith(f"{kind}: "), (name, messages[name])
            assert words in messages[name], (name, messages[name])
        assert f"missing of ranks: {rank}." in messages["part"]
        assert sorted(messages) == sorted(expected)


def test_sums_over_column_ranges_are_not_cut_anew(two_ranks: RankPool) -> None:
    for message in two_ranks.run(f"{_CASES}:column_ranges"):
        assert message.startswith("StateMismatchError")
        assert "in table 'ec.embeddings.t0' one old state for each of the column ranges ((" in message


def test_a_checkpoint_without_state_means_that_everything_changed(two_ranks: RankPool, tmp_path: Path) -> None:
    for answer in two_ranks.run(f"{_CASES}:legacy", path=str(tmp_path)):
        assert answer["restored"] == "NOTHING"
        assert min(answer["rows"]) > 10
        assert len(answer["logs"]) == 1
        assert "every row counts as changed" in answer["logs"][0]


def test_a_consumer_that_was_given_up_stays_so(two_ranks: RankPool) -> None:
    (first, second) = two_ranks.run(f"{_CASES}:behind")
    fine, lost = "nothing was raised", "NeedsSnapshotError"
    kinds = [[[message.split(":")[0] for message in plan] for plan in rank] for rank in (first, second)]
    assert kinds == [[[fine] * 3, [lost, fine, lost]], [[lost, fine, lost], [fine] * 3]]
    assert "a former run's bound" in first[1][0]


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
    sums = [answer["sum"] for answer in answers]
    assert sums[1:] == {1: [], 2: [20], 4: [20, 0, 0]}[world_size] or how == "gather"
    assert how != "gather" or sums == [30, *[0] * (world_size - 1)]
    assert _compare(_load(tmp_path, "saved", 2), _load(tmp_path, "loaded", world_size))["rows"] > 10


def test_a_counter_that_cannot_be_restored_is_refused(one_rank: RankPool) -> None:
    (messages,) = one_rank.run(f"{_CASES}:refused_counters")
    assert "Its state 'seen' must be reduced by sum, max, min or cat: of a mean nobody knows" in messages["mean"]
    assert "state_dict, merge and load_state_dict" in messages["object"]
    assert "Pass a name without slash beside ['total']" in messages["twice"]
    assert "without slash" in messages["slash"]
    assert "tensors and what JSON can hold" in messages["JSON"]
