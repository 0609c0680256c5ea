"""Compaction: readers of merged versions end up equal to readers of the versions themselves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.errors import CorruptPartError, InvalidArgumentError, MalformedError
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Link, Merged, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import calls, fails, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import Clock, History, Reader, State, apply, assert_equal, clocked
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE

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


def step(name: str, history: History, readers: list[Reader], chance: random.Random, clock: Clock) -> None:
    """Run one step of a schedule."""
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
@pytest.mark.sweep("short")
@settings(max_examples=60 if SWEEPS_ARE_WHOLE else 15, deadline=None)
def test_every_reader_equals_a_reader_of_the_versions(steps: list[str], seed: int) -> None:
    clock = Clock()
    chance = random.Random(seed)
    with clock.of_the_log():
        history = History(clocked(clock), seed)
        readers = [Reader(history)]
        readers[0].sync()
        for name in steps:
            step(name, history, readers, chance, clock)
            newcomer = Reader(history, chance.random())
            newcomer.sync()
            assert newcomer.resyncs == 0
            assert newcomer.held.version == history.version
        for reader in readers:
            reader.sync()
            assert reader.held.version == history.version


def catch_up(history: History) -> Reader:
    reader = Reader(history)
    reader.sync()
    assert (reader.held.version, reader.resyncs) == (history.version, 0)
    return reader


def test_a_merged_delta_extends_the_previous_one_and_copies_its_last_version() -> None:
    history = History(Storage("memory://"), 1)
    for _ in range(3):
        history.delta()
    first = compact(history.log, fold=1e9)
    assert (first.kind, first.parent, first.merges) == ("delta", history.log.read(1).link, history.log.read(4).link)
    assert compact(history.log, fold=1e9) is None
    history.delta()
    assert compact(history.log, fold=1e9) is None
    history.delta()
    second = compact(history.log, fold=1e9)
    last = history.log.read(6)
    assert (second.version, second.parent, second.merges) == (6, first.parent, last.link)
    for name in ("stream", "generation", "writer", "snapshot", "cut", "pending_rows", "tables"):
        assert getattr(second, name) == getattr(last, name)
    assert second.batches == (history.log.read(2).batches[0], last.batches[1])
    assert history.log.longest_merged(1) == second
    assert catch_up(history).held.version == 6


def test_claims_are_skipped_and_changed_tables_end_a_run() -> None:
    history = History(Storage("memory://"), 1)
    while len(history.log.merged()) < 2:
        history.claim()
        history.delta()
        history.delta()
        compact(history.log, fold=1e9)
        for merged in history.log.merged():
            held = {str(history.log.read(version).tables) for version in range(merged.first, merged.last + 1)}
            assert len(held - {"{}"}) == 1
    catch_up(history)
    history.claim()
    manifest = compact(history.log, fold=1e9)
    assert manifest is None or manifest.tables


def test_a_snapshot_follows_once_the_deltas_are_large_enough() -> None:
    storage = Storage("memory://")
    writer = Writer(storage, num_rows=100)
    snapshot = writer.snapshot()
    for _ in range(12):  # repeated changes of the same rows stay a small delta
        writer.delta(list(range(20)))
    first = compact(storage, fold=0.5)
    assert (first.kind, first.num_rows) == ("delta", 20)
    writer.delta(list(range(20, 50)))
    writer.delta(list(range(50, 55)))
    second = compact(storage, fold=0.5)
    assert (second.kind, second.parent, second.snapshot) == ("snapshot", None, second.version)
    blocks = [[part.blocks for part in manifest.parts] for manifest in (second, snapshot)]
    assert blocks[0] == blocks[1]
    assert StreamLog(storage).newest_snapshot() == second
    assert compact(storage) is None


def test_a_merged_delta_of_sufficient_size_is_folded() -> None:
    storage = Storage("memory://")
    writer = Writer(storage, num_rows=100)
    writer.snapshot()
    for first in (0, 40):
        writer.delta(list(range(first, first + 40)))
    assert compact(storage, fold=2).kind == "delta"
    assert compact(storage, fold=0.5).kind == "snapshot"


def test_versions_that_do_not_fit_are_left_to_a_later_call() -> None:
    storage = Storage("memory://")
    writer = Writer(storage, num_rows=100)
    writer.snapshot()
    for _ in range(7):
        writer.delta(list(range(10)))
    big = writer.delta(list(range(90)))
    for _ in range(3):
        writer.delta(list(range(10)))
    size = StreamLog(storage).read(2).num_bytes + 80
    merged = []
    while (manifest := compact(storage, fold=1e9, max_bytes=3 * size)) is not None:
        merged.append(manifest)
    assert [Merged.of(each) for each in merged] == [
        Merged(4, 2, "delta"),
        Merged(6, 2, "delta"),
        Merged(8, 2, "delta"),
        Merged(12, 10, "delta"),
    ]
    assert big.version == 9
    assert compact(storage, fold=0.01, max_bytes=3 * size).kind == "snapshot"


def _encoded(history_writer: Writer, ids: list[int], columns: tuple[int, int], encoding: Encoding) -> BlockRows:
    block = Block(FQN, (0, 20), columns, len(ids), "gaps" if encoding.is_quantized else "list", encoding)
    values = history_writer.table[ids, slice(*columns)]
    return BlockRows.of(block, torch.tensor(ids), encode_rows(values, encoding))


def test_deltas_of_other_tables_are_not_folded_into_a_snapshot() -> None:
    history = History(Storage("memory://"), 1)
    history.fqns = ["a", "b"] if history.fqns == ["a"] else ["a"]
    history.delta(3)
    history.delta(3)
    assert compact(history.log, fold=1e-9).kind == "delta"
    catch_up(history)


def test_stored_bytes_stay_where_nothing_of_another_shape_overlaps_them() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.table = torch.randn(20, 4)
    writer.snapshot()
    writer.write(
        "delta", [_encoded(writer, [1, 2], (0, 2), Encoding.INT8), _encoded(writer, [3], (2, 4), Encoding.F16)]
    )
    writer.write("delta", [_encoded(writer, [2, 4], (0, 2), Encoding.INT8)])
    merged = compact(storage, fold=1e9)
    assert [(block.columns, block.encoding, block.num_rows) for block in merged.parts[0].blocks] == [
        ((0, 2), Encoding.INT8, 3),
        ((2, 4), Encoding.F16, 1),
    ]
    writer.write("delta", [_encoded(writer, [5], (0, 4), Encoding.INT8)])
    writer.write("delta", [_encoded(writer, [6], (0, 4), Encoding.INT8)])
    merged = compact(storage, fold=1e9)
    assert [(block.columns, block.encoding, block.num_rows) for block in merged.parts[0].blocks] == [
        ((0, 2), Encoding.F32, 5),
        ((2, 4), Encoding.F32, 3),
    ]


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.F32])
@pytest.mark.parametrize("columns", [(0, 2), (2, 4), (0, 4)])
def test_rows_that_do_not_fit_the_snapshots_blocks_are_in_separate_blocks(encoding, columns: tuple[int, int]) -> None:
    storage = Storage("memory://")
    writer = Writer(storage, encoding=encoding)
    writer.table = torch.randn(20, 4)
    writer.snapshot()
    for row in (3, 7):
        writer.table[row] = torch.randn(4)
        writer.write("delta", [_encoded(writer, [row], columns, encoding)])
    expected: dict = {}
    for version in range(1, 4):
        expected = apply(expected, storage, StreamLog(storage).read(version))
    for fold in (1e-9, 1e-9):  # a snapshot of a snapshot, with rows outside its blocks
        merged = compact(storage, fold=fold)
        found = apply({}, storage, merged)
        assert_equal(found, expected)
        fits = encoding is Encoding.F32 or columns == (0, 4)
        assert [block.ids for part in merged.parts for block in part.blocks] == ["all"] + ["gaps"] * (not fits)
        for row in (7, 8):
            writer.table[row] = torch.randn(4)
            expected = apply(expected, storage, writer.write("delta", [_encoded(writer, [row], columns, encoding)]))


def test_of_two_racing_compactions_one_wins_and_the_other_deletes_its_parts() -> None:
    storage = Storage("memory://")
    history = History(storage, 2)
    history.delta(3)
    history.delta(3)
    won = []
    rival = calls(nth(1, on("create")), before=lambda _: won.append(compact(storage, fold=1e9)))
    assert [compact(WrappedStorage(storage, rival), fold=1e9)] == won
    named = {part.name for version in range(4) for part in history.log.read(version).parts}
    assert set(storage.names("parts")) == named | {part.name for part in won[0].parts}
    catch_up(history)


def test_an_interrupt_leaves_orphans_only() -> None:
    storage = WrappedStorage(Storage("memory://"), fails(on("create", name="merged/"), KeyboardInterrupt))
    history = History(storage, 2)
    history.delta(3)
    history.delta(3)
    with pytest.raises(KeyboardInterrupt):
        compact(storage)
    assert history.log.merged() == []
    catch_up(history)


def test_a_damaged_part_is_reported_and_one_removed_by_retention_is_not() -> None:
    storage = Storage("memory://")
    history = History(storage, 2)
    history.delta(3)
    history.delta(3)
    part = history.log.read(3).parts[0]
    storage.delete(part.name)
    with pytest.raises(CorruptPartError, match=part.name):
        compact(storage)

    class Retained(StreamLog):
        def read(self, version):
            manifest = super().read(version)
            if version == 3 and manifest is not None:
                storage.delete(entry_name(3))
            return manifest

    history.delta(3)
    assert compact(Retained(storage)) is None


def test_inconsistent_entries_are_refused() -> None:
    storage = Storage("memory://")
    history = History(storage, 2)
    history.delta(3)
    history.delta(3)
    entry = history.log.read(3)
    storage.delete(entry_name(3))
    storage.create(entry_name(3), replace(entry, parent=Link(2, "0" * 32)).to_json())
    with pytest.raises(MalformedError, match="instead of"):
        compact(storage)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fold", 0), ("fold", "x"), ("fold", float("nan")), ("max_bytes", 0), ("min_versions", 1), ("max_bytes", 1.5)],
)
def test_invalid_bounds_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        compact(Storage("memory://"), **{name: value})


@pytest.mark.parametrize("fold", [1e9, 1e-9], ids=["delta", "snapshot"])
def test_whole_blocks_of_a_delta_are_merged_before_its_listed_rows(fold: float) -> None:
    """This library writes no such deltas, but the format permits them."""
    writer = Writer(Storage("memory://"))
    base = writer.snapshot()
    writer.delta([1, 9])
    writer.change(list(range(20)))
    whole = [each.within((5, 12), (0, 4)) for each in writer.blocks(None)]
    writer.change([6, 11])
    writer.write("delta", [*writer.blocks([6, 11]), *whole])
    writer.delta([8])
    merged = compact(writer.storage, fold=fold)
    assert merged is not None
    found: State = {}
    for entry in [base, merged] if merged.kind == "delta" else [merged]:
        found = apply(found, writer.storage, entry)
    read: State = {}
    for version in range(1, 5):
        read = apply(read, writer.storage, StreamLog(writer.storage).read(version))
    assert torch.equal(found[FQN], read[FQN])
    assert torch.equal(found[FQN][5:12], writer.table[5:12])
