"""A stream of format 2 with every kind of its objects: ``python -m tests.stream.states_stream DIRECTORY``.

The frozen stream in ``golden/format-2`` was written by it. Contents are drawn with a seed, and the clock and the random
names are replaced: the same code writes the same bytes.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format.block_rows import BlockRows, Overlay
from delta_tracker.stream.format.codec import decode_rows, encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, DenseSpec, Kind, Manifest, Part
from delta_tracker.stream.format.object_reader import Ranged
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, StateSpec, TableSpec, TableStates
from tests.stream.golden.make import ITEM, USER, without_chance

RAW, HASHED = "mcec.embeddings.raw", "mcec.embeddings.hashed"  # tables with raw ids
TABLES = {
    USER: TableSpec(USER, 12, 4, torch.float32),
    ITEM: TableSpec(ITEM, 600, 2, torch.float16),
    RAW: TableSpec(RAW, 20, 4, torch.float32),
    HASHED: TableSpec(HASHED, 5, 2, torch.float16),
}
_ENCODINGS = {RAW: Encoding.INT8}
IDENTITIES = {
    RAW: Identity(1000, (Bucket((0, 12), 11), Bucket((12, 20), 19))),
    HASHED: Identity(0, (Bucket((0, 2), None), Bucket((2, 5), None))),
}
_OTHER_IDENTITIES = IDENTITIES | {RAW: Identity(600, (Bucket((0, 20), 19),))}  # of a later trainer on one rank
STATES = {
    USER: TableStates(
        "EXACT_ROWWISE_ADAGRAD",
        ((0, 3), (3, 4)),
        (StateSpec("sum", torch.float32, "range"), StateSpec("exp_avg", torch.bfloat16, "columns")),
    ),
    ITEM: TableStates("EXACT_SGD", ((0, 2),), ()),
    HASHED: TableStates("EXACT_ADAGRAD", ((0, 2),), (StateSpec("sum", torch.float32, "columns"),)),
}
TREE = {
    "library": {"kernels": {USER: {"iter": 3, "lr": 0.1}}, "batches": 2**70},
    "training": {"optimizer": {"state": {0: {"x": torch.arange(6.0).view(2, 3)}}, "groups": [{"nan": float("nan")}]}},
    "rank": {"tuple": (None, True, b"bytes", "text"), "array": np.arange(5, dtype=np.int16), -1: torch.ones(2).bool()},
    "data": {"half": torch.ones(3, dtype=torch.bfloat16), "complex": torch.ones(2, dtype=torch.complex64)},
}


class _Maker:
    """A trainer's tables with their states and raw ids, and the rows that it writes.

    Attributes:
        state: tables by name, states by ``table/state``, raw ids by ``table/owners``, and dense tensors, as a reader
            has them after the next commit.
    """

    def __init__(self, storage: Storage, expected: Path | None) -> None:
        self._storage = storage
        self._expected = expected
        self._draw = random.Random(0)
        self.state = {fqn: torch.zeros(each.num_rows, each.dim, dtype=each.dtype) for fqn, each in TABLES.items()}
        for fqn, states in STATES.items():
            for each in states.states:
                width = TABLES[fqn].dim if each.width == "columns" else len(states.columns)
                self.state[f"{fqn}/{each.name}"] = torch.zeros(TABLES[fqn].num_rows, width, dtype=each.dtype)
        self.claim(STATES, IDENTITIES)
        self.owners = {fqn: torch.full((TABLES[fqn].num_rows,), NO_OWNER) for fqn in IDENTITIES}
        self._before = {fqn: owners.clone() for fqn, owners in self.owners.items()}

    def claim(self, states: Mapping[str, TableStates], identities: Mapping[str, Identity]) -> None:
        """Begin with another publisher, whose tables have these states and buckets."""
        self._claim = StreamLog(self._storage).claim()
        self._states, self._identities = states, identities

    def owned(self, fqn: str, rows: tuple[int, int], ids: Sequence[int] | None = None) -> BlockRows:
        """Return rows of a table with raw ids, with the owners of now."""
        return self.rows(fqn, (0, TABLES[fqn].dim), rows, ids)

    def admit(self, fqn: str, rows: Sequence[int]) -> None:
        """Assign other raw ids, or none, to rows. No raw id is ever given to two rows."""
        for row in rows:
            buckets = self._identities[fqn].buckets
            bucket = next(number for number, each in enumerate(buckets) if row < each.rows[1])
            unique = 100 * row + 2 * self._draw.randrange(50) + bucket  # less than 2,000, and even in the first bucket
            choices = [NO_OWNER, unique + 10**12, unique - 4000]
            if fqn == RAW:
                choices.append(500 * bucket + unique % 100)
            is_default = row == buckets[bucket].default
            owner = NO_OWNER if is_default else self._draw.choice(choices)
            self.owners[fqn][row] = NO_OWNER if owner in self.owners[fqn] else owner

    def rows(self, fqn: str, columns: tuple[int, int], rows: tuple[int, int], ids: Sequence[int] | None) -> BlockRows:
        count = rows[1] - rows[0] if ids is None else len(ids)
        encoding = _ENCODINGS.get(fqn, Encoding.of(TABLES[fqn].dtype))
        form = "all" if ids is None else self._draw.choice(["list", "gaps"])
        block = Block(fqn, rows, columns, count, form, encoding)
        listed = None if ids is None else torch.tensor(ids, dtype=torch.int64)
        width = block.num_columns
        specs = self._states[fqn].states if fqn in self._states else ()
        held = [self._values(count, 1 if each.width == "range" else width).to(each.dtype) for each in specs]
        states = tuple(BlockRows.of(block, listed, each).read for each in held)
        owners = None
        at: slice | list[int] = slice(*rows) if ids is None else list(ids)
        if fqn in IDENTITIES:
            owners = BlockRows.of(block, listed, self.owners[fqn][at, None].clone()).read
        stored = encode_rows(self._values(count, width), encoding)
        self.state[fqn][at, slice(*columns)] = decode_rows(stored, encoding, width, TABLES[fqn].dtype)
        for each, values in zip(specs, held, strict=True):
            number = self._states[fqn].columns.index(columns)
            of_state = slice(*columns) if each.width == "columns" else slice(number, number + 1)
            self.state[f"{fqn}/{each.name}"][at, of_state] = values
        return replace(BlockRows.of(block, listed, stored), states=states, owners=owners)

    def _values(self, count: int, width: int) -> Tensor:
        return torch.tensor([self._draw.randrange(-64, 64) / 8 for _ in range(count * width)]).view(count, width)

    def part(self, rank: int, rows: Sequence[BlockRows], dense: dict[str, Tensor] | None = None) -> Part:
        names = [self._name(author) for author in (f"r{rank}", f"r{rank}s")]
        return put_part(self._storage, names[0], rows, dense, states_name=names[1])

    def commit(self, kind: Kind, parts: Sequence[Part], dense: dict[str, Tensor]) -> Manifest:
        data = pack(TREE, "state")
        training = tuple(
            put_training(self._storage, self._name(f"r{rank}t"), [memoryview(data)], len(data))
            for rank in range(2 if self._states else 0)
        )
        entry = self._claim.commit(
            Manifest(
                stream="", generation=0, writer="", version=0, kind=kind, created=0.0, format=STATES_FORMAT,
                tables=TABLES, states=self._states, identities=self._identities, owner_changes=self._owner_changes(),
                parts=tuple(parts), training=training, event_time=12.5 if self._states else None,
                dense={name: DenseSpec(each.dtype, tuple(each.shape)) for name, each in dense.items()},
            )
        )  # fmt: skip
        self.state |= dense | {f"{fqn}/owners": owners.clone() for fqn, owners in self.owners.items()}
        if self._expected is not None:
            safetensors.torch.save_file(self.state, self._expected / f"{entry.version}.safetensors")
        return entry

    def _owner_changes(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of rows that got and lost raw ids since the last call."""
        changes = {}
        for fqn, owners in self.owners.items():
            changed = owners != self._before[fqn]
            admitted, evicted = (int((changed & (each != NO_OWNER)).sum()) for each in (owners, self._before[fqn]))
            self._before[fqn] = owners.clone()
            changes[fqn] = admitted, evicted
        return changes

    def _name(self, author: str) -> str:
        return part_name(self._claim.head.version + 1, self._claim.head.generation, author)


def make(root: Path, expected: Path | None = None) -> None:
    """Write the stream: a snapshot with newer rows, two deltas, two merged entries, and versions without states.

    Args:
        root: directory of the stream.
        expected: directory for the tensors after each version; None to write none.
    """
    if expected is not None:
        expected.mkdir(parents=True, exist_ok=True)
    with without_chance():
        storage = Storage(root.absolute().as_uri(), create=True)
        maker = _Maker(storage, expected)
        dense = {"w": torch.arange(6.0).view(2, 3), "mask": torch.tensor([True, False])}
        for fqn, spec in TABLES.items():
            if fqn in IDENTITIES:
                maker.admit(fqn, range(spec.num_rows))
        first = [maker.rows(USER, columns, (0, 7), None) for columns in ((0, 3), (3, 4))]
        second = [maker.rows(USER, columns, (7, 12), None) for columns in ((0, 3), (3, 4))]
        newer = maker.rows(USER, (0, 3), (7, 12), [8, 11])
        # A raw id moves from row 5 to row 2 after row 5 was copied: the whole block has it twice.
        maker.owners[RAW][5] = 42
        maker.owners[RAW][2] = 42
        first += [maker.owned(RAW, (0, 12)), maker.owned(HASHED, (0, 2))]
        maker.owners[RAW][5] = NO_OWNER
        first.append(maker.owned(RAW, (0, 12), [2, 5]))
        second += [maker.owned(RAW, (12, 20)), maker.owned(HASHED, (2, 5))]
        parts = [maker.part(0, first, dense), maker.part(1, [*second, maker.rows(ITEM, (0, 2), (0, 600), None), newer])]
        maker.commit("snapshot", parts, dense)
        maker.admit(RAW, [1, 3, 12, 19])
        rows = [maker.rows(USER, (0, 3), (0, 12), [0, 5, 11]), maker.owned(RAW, (0, 20), [1, 3, 11, 12, 19])]
        maker.commit("delta", [maker.part(0, rows)], {})
        maker.owners[RAW][[2, 7]] = torch.tensor([43, 42])  # 42 moves on
        maker.admit(HASHED, [0, 3])
        rows = [
            maker.rows(ITEM, (0, 2), (0, 600), [1, 300, 599]),
            maker.owned(HASHED, (0, 2), [0]),
            maker.rows(USER, (3, 4), (0, 7), [2]),
            maker.owned(HASHED, (2, 5)),
            maker.owned(HASHED, (2, 5), [3]),
            maker.owned(RAW, (0, 20), [2, 7]),
        ]
        maker.commit("delta", [maker.part(0, rows[:2]), maker.part(1, rows[2:])], {})
        for fold in (100.0, 0.001):
            assert compact(storage, fold=fold, now=lambda: 100.0) is not None
        maker.claim({}, _OTHER_IDENTITIES)
        maker.owners[RAW][11], maker.owners[RAW][19] = 7, NO_OWNER
        spans = {fqn: ((0, spec.dim), (0, spec.num_rows)) for fqn, spec in TABLES.items()}
        maker.commit("snapshot", [maker.part(0, [maker.rows(fqn, *span, None) for fqn, span in spans.items()])], {})
        maker.owners[RAW][[4, 18]] = torch.tensor([599, -(1 << 63)])
        maker.commit("delta", [maker.part(0, [maker.owned(RAW, (0, 20), [4, 18])])], {})


def apply(storage: Storage, manifest: Manifest, state: dict[str, Tensor]) -> None:
    """Apply the rows, states and raw ids of a version in ranges, as a restore does, to float32 and int64 tensors.

    Args:
        storage: store of the stream.
        manifest: manifest of the version, whose tables have the sizes of ``TABLES``.
        state: tables by name, states by ``table/state`` and raw ids by ``table/owners``, as in the second reader.
            Missing ones are added.
    """
    rows: list[BlockRows] = []
    for part in manifest.parts:
        reader = PartReader(storage, part, manifest, source=Ranged(storage, part))
        rows += reader.with_states(None if part.states is None else Ranged(storage, part.states))
    for fqn, table in manifest.tables.items():
        state.setdefault(fqn, torch.zeros(table.num_rows, table.dim))
    for fqn, identity in manifest.identities.items():
        state.setdefault(f"{fqn}/owners", torch.full((identity.num_rows,), NO_OWNER))
    for fqn, found in manifest.states.items():
        num_rows, dim = manifest.tables[fqn].num_rows, manifest.tables[fqn].dim
        for spec in found.states:
            width = dim if spec.width == "columns" else len(found.columns)
            state.setdefault(f"{fqn}/{spec.name}", torch.zeros(num_rows, width))
    listed = [each for each in rows if each.ids is not None]
    overlay = Overlay(listed)
    for each in (*(overlay.over(each) for each in rows if each.ids is None), *listed):
        block = each.block
        at = torch.arange(*block.rows) if each.ids is None else each.ids
        decoded = each.decoded(manifest.tables[block.table].dtype)
        state[block.table][at, slice(*block.columns)] = decoded.read(0, block.num_rows).float()
        if each.owners is not None:
            state[f"{block.table}/owners"][at] = each.owners(0, block.num_rows)[:, 0]
        if not each.states:
            continue
        found = manifest.states[block.table]
        number = found.columns.index(block.columns)
        for spec, read in zip(found.states, each.states, strict=True):
            columns = slice(*block.columns) if spec.width == "columns" else slice(number, number + 1)
            state[f"{block.table}/{spec.name}"][at, columns] = read(0, block.num_rows).float()


def same_tree(found: object, expected: object) -> bool:
    """Return True if two decoded trees are equal bit by bit.

    Args:
        found: a tree of the second reader, with an array for each tensor.
        expected: a tree of the library, with tensors.
    """
    if isinstance(expected, Tensor):
        expected = (expected.float() if expected.dtype == torch.bfloat16 else expected).numpy()
    if type(found) is not type(expected):
        return False
    if isinstance(found, dict) and isinstance(expected, dict):
        return list(found) == list(expected) and all(same_tree(found[key], expected[key]) for key in expected)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same_tree, found, expected))
    return _bits(found) == _bits(expected)


def _bits(value: object) -> object:
    """Return a value that is equal for equal bits, also for NaN."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return struct.pack("d", value) if isinstance(value, float) else value


if __name__ == "__main__":
    make(Path(sys.argv[1]) / "stream", Path(sys.argv[1]) / "expected")
