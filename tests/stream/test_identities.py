"""Raw ids of rows: written, read, overlaid, merged, and refused where they break a rule of the format."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format.block_rows import BlockRows, Overlay
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, Manifest
from delta_tracker.stream.format.object_reader import MEMORY_BYTES, Ranged
from delta_tracker.stream.format.part_reader import Contents, PartReader, read_parts
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, StateSpec, TableStates
from tests.stream.streams import FQN, Writer

_ROWS = 20
# Raw ids below 500 own rows of the first ten, the others rows of the last ten. Rows 9 and 19 have no owner.
IDENTITY = Identity(1000, (Bucket((0, 10), 9), Bucket((10, 20), 19)))
_STATES = TableStates("EXACT_ROWWISE_ADAGRAD", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))


class _Trainer:
    """A table whose rows are assigned to raw ids; the value of a row is a function of its owner and the version."""

    def __init__(self, encoding: Encoding | None = None, *, states: TableStates | None = None, seed: int = 0) -> None:
        self.writer = Writer(Storage("memory://"), _ROWS, 4, encoding=encoding, states=states, identity=IDENTITY)
        self._random = random.Random(seed)
        self.writer.change(list(range(_ROWS)))

    def move(self, count: int = 4) -> list[int]:
        """Assign random rows to other raw ids, and return the rows that changed, some of them with their owner."""
        owners = self.writer.owners
        changed = set(self._random.sample(range(_ROWS), 2))
        for _ in range(count):
            row = self._random.choice([each for each in range(_ROWS) if each % 10 != 9])
            first = 500 * (row // 10)
            raw_id = self._random.choice([*range(first, first + 15), NO_OWNER])
            changed |= {row, *owners.eq(raw_id).nonzero().flatten().tolist()} if raw_id != NO_OWNER else {row}
            owners[owners == raw_id] = NO_OWNER
            owners[row] = raw_id
        self.writer.change(sorted(changed))
        return sorted(changed)

    def delta(self) -> Manifest:
        return self.writer.write("delta", self.writer.blocks(self.move()))

    def check(self, manifest: Manifest, *, owners: Tensor | None = None, table: Tensor | None = None) -> None:
        """Check that a snapshot's values, states and owners are those of the table."""
        found = _owners(Contents(self.writer.storage, manifest))
        assert torch.equal(found, self.writer.owners if owners is None else owners)
        values = torch.zeros_like(self.writer.table)
        contents = Contents(self.writer.storage, manifest)
        for rows in (*contents.whole, *contents.listed):
            values[slice(*rows.block.rows) if rows.ids is None else rows.ids] = rows.read(0, rows.block.num_rows)
        assert torch.equal(values, self.writer.table if table is None else table)


def _owners(contents: Contents, owners: Tensor | None = None) -> Tensor:
    """Return the owners after a version, given those before it."""
    found = torch.full((_ROWS,), NO_OWNER) if owners is None else owners.clone()
    for fqn, ids, each in contents.owners():
        assert fqn == FQN
        found[ids] = each
    return found


@pytest.mark.parametrize("mode", ["memory", "pieces", "ranges"])
@pytest.mark.parametrize("states", [None, _STATES], ids=["values", "states"])
@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT8])
def test_owners_are_read_as_they_were_written(mode: str, states: TableStates | None, encoding: Encoding) -> None:
    trainer = _Trainer(None if states else encoding, states=states)
    storage, log = trainer.writer.storage, StreamLog(trainer.writer.storage)
    trainer.move()
    for publish, ids in ((trainer.writer.snapshot, None), (lambda: trainer.writer.delta([2, 5, 12]), [2, 5, 12])):
        manifest = publish()
        read = log.read(manifest.version)
        assert read == manifest
        assert (read.format, read.identities) == (STATES_FORMAT, {FQN: IDENTITY})
        (part,) = read.parts
        source = Ranged(storage, part) if mode == "ranges" else None
        blocks = [0] if mode == "ranges" else None
        memory_bytes = MEMORY_BYTES if mode == "memory" else 0
        reader = PartReader(storage, part, read, memory_bytes=memory_bytes, source=source, blocks=blocks)
        (rows,) = reader.with_states()
        expected = trainer.writer.owners if ids is None else trainer.writer.owners[ids]
        for view in (rows, *reader.rows, rows.loaded(), rows.decoded(torch.float32)):
            assert view.owners is not None
            assert view.owners(0, len(expected)).flatten().tolist() == expected.tolist()
            assert view.owners(1, 3).shape == (2, 1)
        assert rows.num_bytes == len(expected) * (rows.block.row_bytes + 8 * (1 + (ids is not None)) + 4 * bool(states))


def test_owners_are_a_tensor_of_the_part() -> None:
    trainer = _Trainer(states=_STATES)
    trainer.writer.owners[[3, 11]] = torch.tensor([42, -(1 << 63) + 999])
    (part,) = trainer.writer.snapshot().parts
    tensors = safetensors.torch.load(trainer.writer.storage.read(part.name, max_bytes=1 << 20).tobytes())
    assert sorted(tensors) == ["0.owners", "0.values", "digests"]
    assert torch.equal(tensors["0.owners"], trainer.writer.owners)
    assert part.states is not None
    states = safetensors.torch.load(trainer.writer.storage.read(part.states.name, max_bytes=1 << 20).tobytes())
    assert sorted(states) == ["0.states.0", "digests"]


def test_rows_keep_their_owners_when_they_are_selected() -> None:
    trainer = _Trainer()
    trainer.move(30)
    owners = trainer.writer.owners.tolist()
    for ids in (None, [1, 4, 8, 11, 12, 17]):
        rows = trainer.writer.rows(ids)
        held = list(range(_ROWS)) if ids is None else ids
        for view, expected in (
            (rows.within((4, 12), (0, 4)), [each for each in held if 4 <= each < 12]),
            (rows.take(torch.tensor([0, 2, 5])), [held[place] for place in (0, 2, 5)]),
        ):
            assert view.owners is not None
            assert view.owners(0, view.block.num_rows).flatten().tolist() == [owners[each] for each in expected]


def test_owners_and_values_are_from_the_same_rows_after_an_overlay() -> None:
    draw = random.Random(0)
    for _ in range(20):
        blocks = []
        for is_whole in (True, False):
            ids = list(range(_ROWS)) if is_whole else sorted(draw.sample(range(_ROWS), draw.randrange(1, _ROWS)))
            block = Block(FQN, (0, _ROWS), (0, 4), len(ids), "all" if is_whole else "list", Encoding.F32)
            values = torch.rand(len(ids), 4)
            owners = (values[:, :1] * 1e6).long()
            listed = None if is_whole else torch.tensor(ids)
            rows = BlockRows.of(block, listed, values)
            blocks.append(replace(rows, owners=BlockRows.of(block, listed, owners).read))
        whole = Overlay(blocks[1:]).over(blocks[0])
        assert whole.owners is not None
        for begin in range(0, _ROWS, 7):
            end = min(begin + 7, _ROWS)
            assert torch.equal(whole.owners(begin, end), (whole.read(begin, end)[:, :1] * 1e6).long())


def test_a_listed_owner_replaces_that_in_a_whole_block() -> None:
    """Raw id 7 moves from row 2 to row 5 after row 2 was copied, so the whole block has it twice."""
    trainer = _Trainer()
    writer = trainer.writer
    writer.owners[[2, 5]] = 7
    whole = writer.rows(None)
    writer.owners[2] = 8
    listed = writer.rows([2])
    manifest = writer.write("snapshot", [whole, listed])
    contents = Contents(writer.storage, manifest)
    assert not [rows for rows in contents.listed if rows.block.num_rows]
    trainer.check(manifest)


@pytest.mark.parametrize(
    ("ids", "owners", "reason"),
    [
        (None, {9: 3}, "the default row 9 has the raw id 3"),
        (None, {3: 600}, "row 3 has the raw id 600, which belongs to another bucket"),
        (None, {12: 3}, "row 12 has the raw id 3, which belongs to another bucket"),
        ([3, 19], {19: 600}, "the default row 19 has the raw id 600"),
        ([3, 12], {3: 600}, "row 3 has the raw id 600"),
        ([3, 5], {3: 7, 5: 7}, "the raw id 7 has two rows"),
    ],
)
def test_owners_that_break_a_rule_are_refused(ids: list[int] | None, owners: dict[int, int], reason: str) -> None:
    writer = _Trainer().writer
    for row, owner in owners.items():
        writer.owners[row] = owner
    manifest = writer.write("snapshot" if ids is None else "delta", writer.blocks(ids))
    for memory_bytes in (MEMORY_BYTES, 0):
        with pytest.raises(CorruptPartError, match=reason):
            read_parts(writer.storage, manifest, memory_bytes=memory_bytes)


def test_owners_must_be_there_exactly_if_the_table_has_raw_ids() -> None:
    writer = _Trainer().writer
    for has_owners in (True, False):
        rows = [each if has_owners else replace(each, owners=None) for each in writer.blocks([1])]
        manifest = writer.write("delta", rows)
        stated = manifest if not has_owners else replace(manifest, identities={})
        with pytest.raises(CorruptPartError, match="it has the tensors"):
            read_parts(writer.storage, stated)


def test_format_1_has_no_owners() -> None:
    writer = _Trainer().writer
    with pytest.raises(AssertionError, match="format 1 has no owners"):
        put_part(writer.storage, "parts/x.safetensors", writer.blocks(None), states_name=None)


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT8])
@pytest.mark.parametrize("kind", ["delta", "snapshot"])
@pytest.mark.parametrize("states", [None, _STATES], ids=["values", "states"])
def test_a_compaction_keeps_the_owners_with_their_rows(
    encoding: Encoding, kind: str, states: TableStates | None
) -> None:
    if states is not None and encoding is not Encoding.F32:
        return
    for seed in range(5):
        trainer = _Trainer(encoding, states=states, seed=seed)
        trainer.move(30)
        base = trainer.writer.snapshot()
        before = trainer.writer.owners.clone()
        claims = [trainer.delta() for _ in range(5)]
        merged = compact(trainer.writer.storage, fold=1e9 if kind == "delta" else 1e-9)
        assert merged is not None
        assert (merged.kind, merged.schema, merged.owner_changes) == (kind, claims[-1].schema, {})
        listed = _merged_rows(trainer, [base, *claims])
        if kind == "snapshot":
            trainer.check(merged, table=listed)
        else:
            assert torch.equal(_owners(Contents(trainer.writer.storage, merged), before), trainer.writer.owners)
        assert {block.columns for part in merged.parts for block in part.blocks} == {(0, 4)}
        assert {block.encoding for part in merged.parts for block in part.blocks} == {encoding}


def _merged_rows(trainer: _Trainer, manifests: Iterable[Manifest]) -> Tensor:
    """Return the decoded table after all versions."""
    found = torch.zeros_like(trainer.writer.table)
    for manifest in manifests:
        contents = Contents(trainer.writer.storage, manifest)
        for rows in (*contents.whole, *contents.listed):
            found[slice(*rows.block.rows) if rows.ids is None else rows.ids] = rows.read(0, rows.block.num_rows)
    return found


@pytest.mark.parametrize("change", ["identity", "encoding"])
def test_versions_with_other_identities_or_encodings_are_not_merged(change: str) -> None:
    trainer = _Trainer(Encoding.INT8)
    writer = trainer.writer
    writer.snapshot()
    trainer.delta()
    trainer.delta()
    if change == "identity":
        writer.identity = replace(IDENTITY, hash_size=1001)
    else:
        writer.encoding = Encoding.F32
    for _ in range(3):
        trainer.delta()
    merged = compact(writer.storage, fold=1e9)
    assert merged is not None
    assert merged.version == 3
    merged = compact(writer.storage, fold=1e-9)
    assert merged is not None
    assert (merged.kind, merged.version) == ("snapshot", 3)
    merged = compact(writer.storage, fold=1e-9)
    assert merged is not None
    assert (merged.kind, merged.version, merged.parent) == ("delta", 6, StreamLog(writer.storage).read(3).link)
