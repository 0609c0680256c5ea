"""A stream of format 2 with every kind of its objects. It is made anew, because the format is a draft."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from delta_tracker.state_tree import pack
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, DenseSpec, Kind, Manifest, Part
from delta_tracker.stream.format.overlay import Overlay
from delta_tracker.stream.format.part_reader import PartReader, Ranged
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableSpec, TableStates
from tests.stream.golden.make import ITEM, USER, without_chance

TABLES = {USER: TableSpec(USER, 12, 4, torch.float32), ITEM: TableSpec(ITEM, 600, 2, torch.float16)}
STATES = {
    USER: TableStates(
        "EXACT_ROWWISE_ADAGRAD",
        ((0, 3), (3, 4)),
        (StateSpec("sum", torch.float32, "range"), StateSpec("exp_avg", torch.bfloat16, "columns")),
    ),
    ITEM: TableStates("EXACT_SGD", ((0, 2),), ()),
}
TREE = {
    "library": {"kernels": {USER: {"iter": 3, "lr": 0.1}}, "batches": 2**70},
    "training": {"optimizer": {"state": {0: {"x": torch.arange(6.0).view(2, 3)}}, "groups": [{"nan": float("nan")}]}},
    "rank": {"tuple": (None, True, b"bytes", "text"), "array": np.arange(5, dtype=np.int16), -1: torch.ones(2).bool()},
    "data": {"half": torch.ones(3, dtype=torch.bfloat16), "complex": torch.ones(2, dtype=torch.complex64)},
}


class _Maker:
    """Tables with states, and the rows that are written."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._claim = StreamLog(storage).claim()
        self._draw = random.Random(0)
        self.dense: dict[str, Tensor] = {}

    def rows(self, fqn: str, columns: tuple[int, int], rows: tuple[int, int], ids: Sequence[int] | None) -> BlockRows:
        count = rows[1] - rows[0] if ids is None else len(ids)
        encoding = Encoding.of(TABLES[fqn].dtype)
        form = "all" if ids is None else self._draw.choice(["list", "gaps"])
        block = Block(fqn, rows, columns, count, form, encoding)
        listed = None if ids is None else torch.tensor(ids, dtype=torch.int64)
        width = block.num_columns
        held = [
            self._values(count, 1 if each.width == "range" else width).to(each.dtype) for each in STATES[fqn].states
        ]
        states = tuple(BlockRows.of(block, listed, each).read for each in held)
        return replace(BlockRows.of(block, listed, self._values(count, width).to(encoding.dtype)), states=states)

    def _values(self, count: int, width: int) -> Tensor:
        return torch.tensor([self._draw.randrange(-64, 64) / 8 for _ in range(count * width)]).view(count, width)

    def part(self, rank: int, rows: Sequence[BlockRows], dense: dict[str, Tensor] | None = None) -> Part:
        names = [self._name(author) for author in (f"r{rank}", f"r{rank}s")]
        return put_part(self._storage, names[0], rows, dense, states_name=names[1])

    def commit(self, kind: Kind, parts: Sequence[Part], dense: dict[str, Tensor]) -> Manifest:
        data = pack(TREE, "state")
        training = tuple(
            put_training(self._storage, self._name(f"r{rank}t"), [memoryview(data)], len(data)) for rank in range(2)
        )
        return self._claim.commit(
            Manifest(
                stream="", generation=0, writer="", version=0, kind=kind, created=0.0, format=STATES_FORMAT,
                tables=TABLES, states=STATES, parts=tuple(parts), training=training, event_time=12.5,
                dense={name: DenseSpec(each.dtype, tuple(each.shape)) for name, each in dense.items()},
            )
        )  # fmt: skip

    def _name(self, author: str) -> str:
        return part_name(self._claim.head.version + 1, self._claim.head.generation, author)


def make(root: Path) -> None:
    """Write the stream below ``root``: a claim, a snapshot with newer rows, and two deltas."""
    with without_chance():
        maker = _Maker(Storage(f"file://{root}", create=True))
        dense = {"w": torch.arange(6.0).view(2, 3), "mask": torch.tensor([True, False])}
        first = [maker.rows(USER, columns, (0, 7), None) for columns in ((0, 3), (3, 4))]
        second = [maker.rows(USER, columns, (7, 12), None) for columns in ((0, 3), (3, 4))]
        newer = maker.rows(USER, (0, 3), (7, 12), [8, 11])
        parts = [maker.part(0, first, dense), maker.part(1, [*second, maker.rows(ITEM, (0, 2), (0, 600), None), newer])]
        maker.commit("snapshot", parts, dense)
        maker.commit("delta", [maker.part(0, [maker.rows(USER, (0, 3), (0, 12), [0, 5, 11])])], {})
        rows = [maker.rows(ITEM, (0, 2), (0, 600), [1, 300, 599]), maker.rows(USER, (3, 4), (0, 7), [2])]
        maker.commit("delta", [maker.part(0, rows[:1]), maker.part(1, rows[1:])], {})


def apply(storage: Storage, manifest: Manifest, state: dict[str, Tensor]) -> None:
    """Apply the rows and states of a version in ranges, as a restore does, to float32 tensors.

    Args:
        storage: store of the stream.
        manifest: manifest of the version, whose tables have the sizes of ``TABLES``.
        state: tables by name, and states by ``table/state``, as in the second reader. Missing ones are added.
    """
    rows: list[BlockRows] = []
    for part in manifest.parts:
        reader = PartReader(storage, part, manifest, source=Ranged(storage, part))
        rows += reader.with_states(None if part.states is None else Ranged(storage, part.states))
    for fqn, table in manifest.tables.items():
        state.setdefault(fqn, torch.zeros(table.num_rows, table.dim))
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
