"""The history of a stream is kept in few bins without loss."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.cli.history import History
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Manifest, Part
from delta_tracker.types import TableSpec
from tests.stream.streams import FQN


@given(st.lists(st.tuples(st.sampled_from(["delta", "delta", "snapshot", "claim"]), st.integers(0, 99)), max_size=120))
@settings(deadline=None)
def test_bins_are_few_and_lose_nothing(entries: list[tuple[str, int]]) -> None:
    history, created = History(max_bins=4), 1e9
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
    assert sum(each.tables[FQN].rows for each in bins if each.tables) == history.totals[FQN].rows == expected["rows"]
    for before, after in pairwise(bins):
        assert before.last < after.first
        assert before.count >= after.count
    versions = [version for version, (kind, _) in enumerate(entries) if kind != "claim"]
    times = [1e9 + sum(rows for _, rows in entries[: version + 1]) for version in versions]
    assert sum(each.gap_seconds for each in bins) == (times[-1] - times[0] if times else 0)
    assert max((each.max_gap for each in bins), default=0) == max(np.diff(times), default=0)
