"""Compaction: merged versions leave every reader where the versions themselves would."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.stream.compaction import compact
from delta_tracker.stream.retention import Retention, retain
from tests.histories import Clock, ClockedStorage, History, Reader

_STEPS = ["delta"] * 6 + [
    "claim",
    "snapshot",
    "fuzzy",
    "compact",
    "compact",
    "retain",
    "wait",
    "read",
    "read",
    "reader",
]


def step(name: str, history: History, readers: list[Reader], chance: random.Random) -> None:
    """One step of a schedule."""
    clock = history.storage.clock
    if name in ("delta", "claim", "snapshot"):
        getattr(history, name)()
    elif name == "fuzzy":
        history.snapshot(is_fuzzy=True)
    elif name == "compact":
        max_bytes = chance.choice([1 << 30, 1 << 30, 3000, 1000])
        fold = chance.choice([0.2, 0.5, 1.0, 1e9])
        compact(history.storage, fold=fold, max_bytes=max_bytes, min_versions=chance.choice([2, 3]), now=clock)
    elif name == "retain":
        bound = chance.choice([{"versions": chance.randrange(1, 6)}, {"seconds": 100}, {"num_bytes": 3000}, {}])
        retain(history.storage, Retention(grace_seconds=chance.choice([0, 600]), **bound), clock)
    elif name == "wait":
        clock.seconds += chance.choice([1, 100, 700, 5000])
    elif name == "reader":
        readers.append(Reader(history, chance.random()))
        readers[-1].sync(chance.randrange(1, 4))
    elif readers:
        chance.choice(readers).sync(chance.randrange(1, 4))


@given(steps=st.lists(st.sampled_from(_STEPS), min_size=5, max_size=40), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_every_reader_ends_where_the_versions_end(steps: list[str], seed: int) -> None:
    clock = Clock()
    chance = random.Random(seed)
    with clock.of_the_log():
        history = History(ClockedStorage(clock), seed)
        readers = [Reader(history)]
        readers[0].sync()
        for name in steps:
            step(name, history, readers, chance)
            newcomer = Reader(history, chance.random())
            newcomer.sync()
            assert newcomer.resyncs == 0
            assert newcomer.held.version == history.version
        for reader in readers:
            reader.sync()
            assert reader.held.version == history.version
