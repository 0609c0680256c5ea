"""The history of a stream is kept in few bins without loss."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.cli.history import MAX_BINS, History
from delta_tracker.cli.predictors import Skews
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Manifest, Part
from delta_tracker.types import TableSpec
from tests.stream.streams import FQN


@given(st.lists(st.tuples(st.sampled_from(["delta", "delta", "snapshot", "claim"]), st.integers(0, 99)), max_size=120))
@settings(deadline=None)
def test_bins_are_few_and_lose_nothing(entries: list[tuple[str, int]]) -> None:
    history, created = History(MAX_BINS // 8 * len(entries)), 1e9  # an eighth of the entries in each bin
    spec = TableSpec(FQN, 100, 2, torch.float32)
    expected = Counter[str]()
    for version, (kind, rows) in enumerate(entries):
        created += rows
        block = Block(FQN, (0, 100), (0, 2), 100 if kind == "snapshot" else rows, "list", Encoding.F32)
        parts = () if kind == "claim" else (Part("parts/a.safetensors", 10 * rows, "", (block,), ()),)
        history.add(
            Manifest(
                stream="", generation=1, writer="", version=version, kind=kind, created=created, cut=created - 1,
                tables={FQN: spec}, parts=parts, dense={"d": DenseSpec(torch.float32, (3,))},
            )
        )  # fmt: skip
        expected[kind] += 1
        expected["bytes"] += 10 * rows * (kind == "delta")
        expected["rows"] += rows * (kind == "delta")
    bins = history.bins
    assert len(bins) <= 8
    assert sum(each.deltas for each in bins) == expected["delta"]
    assert sum(each.snapshots for each in bins) == expected["snapshot"]
    assert sum(each.delta_bytes for each in bins) == expected["bytes"]
    assert sum(each.tables[FQN].rows for each in bins if each.tables) == expected["rows"]
    for before, after in pairwise(bins):
        assert before.last < after.first
        assert before.deltas + before.snapshots == -(-len(entries) // 8) >= after.deltas + after.snapshots
    versions = [version for version, (kind, _) in enumerate(entries) if kind != "claim"]
    times = [1e9 + sum(rows for _, rows in entries[: version + 1]) for version in versions]
    assert sum(each.gap_seconds for each in bins) == (times[-1] - times[0] if times else 0)
    assert max((each.max_gap for each in bins), default=0) == max(np.diff(times), default=0)


@given(
    st.lists(st.tuples(st.floats(-7200, 7200), st.lists(st.floats(0.0, 300.0), min_size=1, max_size=9)), max_size=6),
    st.sampled_from([0.001, 1.0]),
)
@settings(deadline=None)
def test_the_axis_never_runs_backwards(publishers: list[tuple[float, list[float]]], resolution: float) -> None:
    """Each publisher has a clock that differs from the store's; modification times are truncated."""
    skews, true, expected = Skews(), 1e9, []
    history = History(sum(len(pauses) for _, pauses in publishers))
    for generation, (skew, pauses) in enumerate(publishers):
        for pause in pauses:
            true += pause
            expected.append(true)
            manifest = Manifest(
                stream="", generation=generation, writer=f"{generation}", version=len(expected) - 1, kind="delta",
                created=true + skew, modified=true // resolution * resolution,
            )  # fmt: skip
            history.add(manifest)
            skews.add(manifest)
    found = [time for each in history.bins for time in (each.begin, each.end)]
    assert found == sorted(found)
    for time, right in zip(found[::2], expected, strict=True):
        assert abs(time - right) <= 61.1
    assert all(each.max_gap >= 0 and each.gap_seconds >= 0 for each in history.bins)
    assert len(skews.problems()) >= sum(abs(skew) > 61 for skew, _ in publishers)


def test_a_clock_that_is_set_makes_no_gap() -> None:
    history = History(8)
    for version, skew in enumerate([0, 0, 3600, 3600, 3600, 0, 0, 0]):
        true = 1e9 + 10 * version
        history.add(
            Manifest(
                stream="", generation=1, writer="a", version=version, kind="delta", created=true + skew, modified=true
            )
        )
    assert [each.begin for each in history.bins] == [1e9 + 10 * version for version in range(8)]
    assert [each.max_gap for each in history.bins] == [0.0] + [10.0] * 7


def test_a_clock_that_is_set_back_a_little_does_not_turn_the_axis() -> None:
    history = History(3)
    for version, skew in enumerate([0, -30, -30]):
        true = 1e9 + 10 * version
        history.add(
            Manifest(
                stream="", generation=1, writer="a", version=version, kind="delta", created=true + skew, modified=true
            )
        )
    assert [each.begin for each in history.bins] == [1e9, 1e9, 1e9 + 10]
    assert [each.gap_seconds for each in history.bins] == [0.0, 0.0, 10.0]


def test_a_copy_keeps_the_time_between_versions() -> None:
    """Copies of objects have new modification times."""
    history = History(5)
    for version in range(5):
        history.add(
            Manifest(
                stream="",
                generation=1,
                writer="a",
                version=version,
                kind="delta",
                created=1e9 + 7 * version,
                modified=2e9,
            )
        )
    assert [each.max_gap for each in history.bins] == [0.0, 7.0, 7.0, 7.0, 7.0]
